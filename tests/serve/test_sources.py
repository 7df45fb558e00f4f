"""Which models a path offers: stages, adapters, moved bases, checkpoints of a run that trains."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelInfo

from tandem.checkpoint.saver import Saver
from tandem.checkpoint.state import State
from tandem.config.load import dump_config, load_config
from tandem.config.recorded import places
from tandem.errors import ModelError, TandemError
from tandem.models import source
from tandem.models.load import load_causal_lm, load_tokenizer
from tandem.models.save import save_adapter
from tandem.serve.loading import LoadSettings, load_policy
from tandem.serve.named_model import find_model
from tandem.serve.place import Place
from tandem.serve.server import describe
from tandem.serve.sources import offer_of
from tests.serve.serving import ask, serving

CHAT = "/v1/chat/completions"
ROLES = ("user", "assistant")
CPU = LoadSettings(Place(torch.device("cpu"), torch.float32))


@pytest.fixture
def run(served_run: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(served_run, tmp_path / "run"))


def test_a_run_and_its_folders(run: Path) -> None:
    offer = offer_of(str(run))
    assert list(offer.models) == ["base", "sft", "ppo", "ema"]
    assert offer.preferred == "ppo"
    assert offer.reward_model is not None
    assert offer.critic is not None
    shutil.rmtree(run / "ppo")
    assert (offer_of(str(run)).preferred, offer_of(str(run)).critic) == ("sft", None)
    plain = offer_of(str(run / "sft"))
    assert (list(plain.models), plain.run) == (["sft"], None)


def test_what_a_reward_stage_starts_from_is_no_reward_model_of_the_run(run: Path) -> None:
    config = replace(load_config(run / "config.yaml"), reward_model=str(run / "sft"))
    (run / "config.yaml").write_text(dump_config(config), "utf-8")
    assert offer_of(str(run)).reward_model is not None
    shutil.rmtree(run / "reward")
    assert offer_of(str(run)).reward_model is None


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("rnu", "Did you mean"),
        ("empty", "it is neither"),
        ("a file", "got a file"),
        ("nix", "got no such folder"),
    ],
)
def test_what_offers_no_model_is_told_in_one_line(run: Path, name: str, part: str) -> None:
    (run.parent / "empty").mkdir()
    (run.parent / "a file").write_text("x")
    with pytest.raises(ModelError, match=part) as caught:
        offer_of(str(run.parent / name))
    assert "\n" not in str(caught.value)


def test_a_folder_of_runs_names_one(run: Path) -> None:
    with pytest.raises(ModelError, match="It holds runs: tandem serve"):
        offer_of(str(run.parent))


def test_one_word_is_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    offer = offer_of("gpt2")
    assert offer.models["gpt2"].path == "gpt2"
    assert offer_of("org/name-of-model").preferred == "name-of-model"


def test_a_damaged_stage_is_not_served(run: Path) -> None:
    file = run / "sft" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(TandemError):
        load_policy(offer_of(str(run)).models["sft"], CPU)


def test_an_answer_comes_without_the_numbers_of_judges_that_cannot_be_loaded(
    run: Path, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(offer_of(str(run)).models["base"].path, tmp_path / "base"))
    for folder in (base, run / "reward", run / "ppo" / "critic"):
        (folder / "config.json").write_text("{")
    wanted = {"reward": True, "kl": True, "token_kl": True, "values": True, "seed": True}
    with serving(run, base=str(base)) as client:
        answer = client.post(CHAT, json=ask(model="sft", tandem=wanted))
        score = client.post(
            "/v1/score",
            json={"model": "sft", "messages": [{"role": r, "content": "Hi"} for r in ROLES]},
        )
    assert (answer.status_code, score.status_code) == (200, 200), answer.text + score.text
    for found in (answer.json()["choices"][0]["tandem"], score.json()["tandem"]):
        assert [found[name] for name in ("reward", "kl", "token_kl", "values")] == [None] * 4
        assert found["why"].keys() == {"reward", "kl", "values"}
        for name, judge in (("reward", "reward"), ("kl", "base"), ("values", "critic")):
            assert found["why"][name].startswith(f"model {judge} cannot be loaded: ")


def test_an_adapter_alone_is_served_and_its_base_may_have_moved(run: Path) -> None:
    from tandem.config.lora import LoraConfig
    from tandem.models.lora import add_lora

    offer = offer_of(str(run))
    base = Path(offer.models["base"].path)
    moved = run / base.name
    shutil.copytree(base, moved)
    model = load_causal_lm(str(base))
    add_lora(model, LoraConfig(rank=2), 0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    shutil.rmtree(run / "sft")
    (run / "sft").mkdir()
    save_adapter(model, run / "sft", run.parent / "gone" / base.name)
    load_tokenizer(str(base)).save_pretrained(run / "sft")
    source = offer_of(str(run)).models["sft"]
    assert source.base == str(moved)
    loaded = load_policy(source, CPU)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded.model(ids).logits, model(ids).logits)
    elsewhere = offer_of(str(run), base=str(base))
    assert elsewhere.models["sft"].base == elsewhere.models["base"].path == str(base)


def test_a_run_that_trains_is_served_and_followed(run: Path) -> None:
    shutil.rmtree(run / "ppo")
    checkpoints = run / "checkpoints" / "ppo"
    model = load_causal_lm(str(run / "sft"))
    tensors = {name: value.detach().clone() for name, value in model.named_parameters()}

    def save(step: int, scale: float) -> None:
        changed = {name: scale * value for name, value in tensors.items()}
        saver = Saver(checkpoints, keep=2)
        saver.save(State(step, {"actor": changed}, {"made_from": {}}), {})
        saver.wait()

    save(0, 1.0)
    assert "ppo" not in offer_of(str(run)).models, "a stage continues from none of step 0"
    with pytest.raises(ModelError, match=r"finished ppo stage; got none\. Run the same .* it\.$"):
        find_model(str(run), "ppo")
    save(2, 1.0)
    with serving(run, follow=True) as client:
        assert "ppo" in [model["id"] for model in client.get("/v1/models").json()["data"]]
        body = ask(model="ppo", max_tokens=12)
        first = client.post(CHAT, json=body).json()["choices"]
        sft = client.post(CHAT, json={**body, "model": "sft"}).json()["choices"]
        assert first == sft
        save(4, 3.0)
        followed = client.post(CHAT, json=body).json()["choices"]
        assert followed != first
        service = client.service  # type: ignore[attr-defined]
        assert service._slots["ppo"].loaded.step == 4
        until_retired = service.engine.compute(lambda: None)
        until_retired.result(120)
    with serving(run) as client:
        assert (
            "note:   ppo is not finished: step 4 of 3 answers; the same tandem train command "
            "finishes it"
        ) in describe(client.service)  # type: ignore[attr-defined]
        assert client.post(CHAT, json=body).json()["choices"] == followed
        save(6, 1.0)
        assert client.post(CHAT, json=body).json()["choices"] == followed


def test_a_base_is_found_where_it_was_and_not_offered_where_it_is_gone(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    base = Path(shutil.copytree(offer_of(str(run)).models["base"].path, home / "my-model"))
    monkeypatch.chdir(home)
    config = replace(load_config(run / "config.yaml"), actor_model="my-model")
    (run / "config.yaml").write_text(dump_config(config))
    (run / "environment.json").write_text(json.dumps(places(config)))
    assert offer_of(str(run)).models["base"].path == "my-model"
    monkeypatch.chdir(tmp_path)
    assert offer_of(str(run)).models["base"].path == find_model(str(run), "base") == str(base)
    base.rename(home / "renamed")
    offer = offer_of(str(run))
    assert list(offer.models) == ["sft", "ppo", "ema"]
    assert [offer.models[name].reference for name in offer.models] == ["", "sft", "sft"]
    with serving(run) as client:
        (line,) = [line for line in describe(client.service) if "base model" in line]  # type: ignore[attr-defined]
    assert line == (
        f"warning: the run's base model is not at {base}: it is not offered, and there is no kl to "
        "it (--base MODEL says where it is)"
    )
    with pytest.raises(ModelError, match=f"the base model of {run} must be .* got '{base}'"):
        find_model(str(run), "base")
    with pytest.raises(ModelError, match="--base must be a model's folder or a hub name"):
        offer_of(str(run), base=str(base))
    assert "base" in offer_of(str(run), base=str(home / "renamed")).models
    for stage in ("sft", "ppo"):
        shutil.rmtree(run / stage)
    with pytest.raises(ModelError, match="and no stage is finished"):
        offer_of(str(run))


def test_a_base_of_the_hub_is_offered_if_the_hub_or_its_cache_has_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Hub:
        """Has one model."""

        def model_info(self, name: str, revision: str | None, timeout: float) -> ModelInfo:
            asked.append(name)
            if name != "org/there":
                raise ConnectionError("no such model")
            return ModelInfo(id=name, sha="c0ffee")

    def named(name: str) -> None:
        config = replace(load_config(run / "config.yaml"), actor_model=name)
        (run / "config.yaml").write_text(dump_config(config))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source, "HfApi", Hub)
    monkeypatch.setattr(
        source,
        "try_to_load_from_cache",
        lambda name, *_, **__: "h/config.json" if "kept" in name else None,
    )
    for name in ("org/there", "kept"):
        named(name)
        with serving(run) as client:
            assert client.service.offer.models["base"].path == name  # type: ignore[attr-defined]
    named("nowhere")
    asked.clear()
    with serving(run, follow=True) as client:
        (line,) = [line for line in describe(client.service) if "base model" in line]  # type: ignore[attr-defined]
        assert line == (
            "warning: the run's base model is nowhere, no folder here and not in the hub: it is "
            "not offered, and there is no kl to it (--base MODEL says where it is)"
        )
        found = client.post(CHAT, json=ask(model="sft", tandem={"kl": True}))
        assert found.json()["choices"][0]["tandem"]["why"] == {"kl": "this model has no reference"}
        assert client.post(CHAT, json=ask(model="base")).status_code == 404
    assert asked == ["nowhere"], "not again by each request"
    told = "got nowhere, and there is no such folder, nor does the hub or its cache have it"
    with pytest.raises(ModelError, match=told), serving(run, base="nowhere"):
        pass
    for stage in ("sft", "ppo"):
        shutil.rmtree(run / stage)
    told = (
        "'nowhere', which is not, nor does the hub or its cache have it, and no stage is finished"
    )
    with pytest.raises(ModelError, match=told), serving(run):
        pass
