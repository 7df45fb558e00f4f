"""A server that follows a run: models that change while requests run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tandem.config.load import load_config
from tandem.config.schema import RunConfig
from tandem.errors import ModelError
from tandem.serve import service, sources
from tandem.serve.loading import Loaded
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
