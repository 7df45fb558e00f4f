"""Judges that read fewer tokens than the policy writes, as a GPT-2 with learned positions does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from tandem.models.load import load_tokenizer
from tandem.models.save import save_model
from tandem.models.scalar import new_scalar_model
from tandem.serve.server import describe
from tests.serve.serving import TestClient, ask, serving

POSITIONS = 40
WANTED = {"reward": True, "kl": True, "values": True}


@pytest.fixture(scope="module")
def short_client(
    served_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestClient]:
    """Reward model, critic and the reference of PPO's actor have `POSITIONS`, the actor more."""
    run = tmp_path_factory.mktemp("short") / "run"
    shutil.copytree(served_run, run)
    tokenizer = load_tokenizer(str(served_run / "sft"))
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=POSITIONS, n_embd=16, n_layer=1, n_head=2,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip

    def save(model: PreTrainedModel, place: Path) -> None:
        shutil.rmtree(place)
        save_model(model, tokenizer, place)

    save(new_scalar_model(config, 1), run / "reward")
    save(new_scalar_model(config, 2), run / "ppo" / "critic")
    save(GPT2LMHeadModel(config), run / "sft")
    for manifest in run.rglob("MANIFEST.json"):
        manifest.unlink()
    with serving(run, max_context=200, votes=str(run / "votes.jsonl")) as client:
        yield client


def test_a_longer_answer_has_no_numbers_and_says_why(short_client: TestClient) -> None:
    body = ask(n=2, max_tokens=60, ignore_eos=True, tandem=WANTED)
    answer = short_client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    length = usage["prompt_tokens"] + 60
    assert length > POSITIONS
    for choice in answer.json()["choices"]:
        found = choice["tandem"]
        assert [found[name] for name in WANTED] == [None] * 3
        assert found["why"] == {
            name: f"the {role} reads at most {POSITIONS} tokens; prompt and answer have {length}"
            for name, role in {
                "reward": "reward model", "kl": "reference", "values": "critic",
            }.items()
        }  # fmt: skip


def test_one_that_just_fits_has_them_beside_one_that_does_not(short_client: TestClient) -> None:
    body = ask(max_tokens=1, ignore_eos=True, tandem=WANTED)
    prompt = short_client.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
    for tokens, fits in ((POSITIONS - prompt, True), (POSITIONS - prompt + 1, False)):
        answer = short_client.post("/v1/chat/completions", json=body | {"max_tokens": tokens})
        found = answer.json()["choices"][0]["tandem"]
        assert [found[name] is not None for name in WANTED] == [fits] * 3
        assert ("why" in found) is not fits


def test_score_says_why_too(short_client: TestClient) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "long " * 40}]
    answer = short_client.post("/v1/score", json={"model": "ppo", "messages": turns})
    assert answer.status_code == 200, answer.text
    found = answer.json()["tandem"]
    assert found["reward"] is None
    assert f"at most {POSITIONS} tokens" in found["why"]["reward"]
    assert len(answer.json()["token_logprobs"]) > POSITIONS


def test_the_first_lines_warn_of_them(short_client: TestClient, client: TestClient) -> None:
    lines = [line for line in describe(short_client.service) if line.startswith("warning")]  # type: ignore[attr-defined]
    reads = f"reads at most {POSITIONS} tokens of prompt and answer, "
    assert lines == [
        f"warning: the reward model {reads}ppo writes up to 200: longer ones get no reward",
        f"warning: the critic {reads}ppo writes up to 200: longer ones get no values",
        f"warning: the reference sft {reads}ppo writes up to 200: longer ones get no kl",
        f"warning: the reference sft {reads}ema writes up to 200: longer ones get no kl",
    ]
    assert not any("warning" in line for line in describe(client.service))  # type: ignore[attr-defined]
