"""A server that follows a run: models that change while requests run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoint.saver import Saver
from tandem.checkpoint.state import State
from tandem.config.load import load_config
from tandem.config.schema import RunConfig
from tandem.errors import ModelError
from tandem.models.load import load_causal_lm
from tandem.serve import service, sources
from tandem.serve.loading import Loaded, load_policy
from tandem.serve.sources import ModelSource
from tests.serve.serving import CHAT, ask, serving


def test_a_request_that_starts_on_a_replaced_model_leaves_none_of_its_memory(
    served_run: Path,
) -> None:
    with serving(served_run, follow=True) as client:
        first = client.post(CHAT, json=ask(model="sft")).json()["choices"]
        served = client.service  # type: ignore[attr-defined]
        for _ in range(2):  # prepared while it was replaced, they start behind
            served.engine.retire(served._slots["sft"].loaded)
            assert client.post(CHAT, json=ask(model="sft")).json()["choices"] == first
            served.engine.compute(lambda: None).result(120)
            assert served.engine.free_blocks() == {}
        assert client.post(CHAT, json=ask(model="sft")).json()["choices"] == first
        served.engine.compute(lambda: None).result(120)
        assert served.engine.free_blocks() == {}


def test_a_configuration_is_read_again_where_it_has_changed(
    served_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(served_run, tmp_path / "run"))
    read: list[Path] = []

    def counted(file: Path) -> RunConfig:
        read.append(file)
        return load_config(file)

    monkeypatch.setattr(sources, "load_config", counted)
    with serving(run, follow=True) as client:
        for _ in range(3):
            client.get("/v1/models")
        assert read == [run / "config.yaml"]
        text = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(f"{text}\n")
        assert len(client.get("/v1/models").json()["data"]) == 5
        assert len(read) == 2


@pytest.mark.parametrize("error", [ModelError("damaged"), FileNotFoundError("gone"), MemoryError()])
def test_the_older_model_answers_while_a_newer_one_cannot_be_loaded(
    served_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    run = Path(shutil.copytree(served_run, tmp_path / "run"))
    tried: list[str] = []

    def fails(source: ModelSource, *_: object) -> Loaded:
        tried.append(source.name)
        raise error

    with serving(run, follow=True) as client:
        first = client.post(CHAT, json=ask(model="sft")).json()["choices"]
        monkeypatch.setattr(service, "load_policy", fails)
        for tries in (1, 2):
            (run / "sft" / "config.json").touch()
            for _ in range(3):  # of which one tries to load it
                assert client.post(CHAT, json=ask(model="sft")).json()["choices"] == first
            assert len(tried) == tries
        monkeypatch.setattr(service, "_RETRY_SECONDS", 0.0)
        (run / "sft" / "config.json").touch()
        for _ in range(2):
            assert client.post(CHAT, json=ask(model="sft")).json()["choices"] == first
        assert len(tried) == 4
        monkeypatch.undo()
        monkeypatch.setattr(service, "load_policy", fails)
        refused = client.post(CHAT, json=ask(model="base"))
        assert refused.status_code == 500
        assert "model base cannot be loaded: " in refused.json()["error"]["message"]


@pytest.mark.parametrize("follow", [False, True])
def test_a_stage_that_finishes_before_its_first_request_is_read_from_its_folder(
    served_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, follow: bool
) -> None:
    run = Path(shutil.copytree(served_run, tmp_path / "run"))
    checkpoints, hidden = run / "checkpoints" / "sft", tmp_path / "hidden"
    (run / "sft").rename(hidden)
    weights = load_causal_lm(str(hidden)).named_parameters()
    saver = Saver(checkpoints, keep=2)
    saver.save(State(2, {"model": {n: w.detach() for n, w in weights}}, {"made_from": {}}), {})
    saver.wait()

    def finishing(source: ModelSource, *args: Any) -> Loaded:
        """As `load_policy`, while the stage finishes."""
        if hidden.exists():
            hidden.rename(run / "sft")
            shutil.rmtree(checkpoints)
        return load_policy(source, *args)

    with serving(run, follow=follow) as client:
        monkeypatch.setattr(service, "load_policy", finishing)
        answers = [client.post(CHAT, json=ask(model="sft")) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
        listed = {model["id"]: model["tandem"] for model in client.get("/v1/models").json()["data"]}
        assert listed["sft"]["finished"]
        served = client.service  # type: ignore[attr-defined]
        assert served._slots["sft"].loaded.source.checkpoints is None
