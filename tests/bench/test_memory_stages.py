"""Peak memory of a stage's own training loop: a run that is really made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import memory_stages
from bench.memory_stages import main
from tandem import cli
from tests.tiny import save_tiny_model


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs here, where it need not import torch first."""

    def ran(command: list[str], **how: Any) -> Any:
        assert command[:3] == [sys.executable, "-m", "tandem"]
        return subprocess.CompletedProcess(command, cli.main(command[3:]), "", "")

    ours = SimpleNamespace(**{**vars(subprocess), "run": ran})
    monkeypatch.setattr(memory_stages, "subprocess", ours)


def test_a_stage_is_trained_and_its_peak_read(tmp_path: Path) -> None:
    model, out = save_tiny_model(tmp_path / "model"), tmp_path / "out.json"
    flags = ["--stages", "sft", "--steps", "1", "--batch", "2", "--words", "15", "--json", str(out)]
    found = main([model, *flags])["stages"]["sft"]
    assert found["train"] > 100 * 2**20, "the libraries alone take more"
    assert found["generate"] == found["score"] == 0
    assert 2 * 30 < found["tokens"] < 2 * 120
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["stages"]["sft"] == found
    assert "commit" in written


def test_a_run_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"sft must train; got exit code \d"):
        main([str(tmp_path / "nothing"), "--stages", "sft"])
