"""Peak memory of a stage's own training loop: a run that is really made."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import memory_stages
from bench.memory_stages import main
from tandem import cli
from tests.tiny import save_tiny_model


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


def test_a_run_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: one of its own is in the test before."""

    def ran(command: list[str], **how: Any) -> Any:
        return subprocess.CompletedProcess(command, cli.main(command[3:]), "", "")

    monkeypatch.setattr(memory_stages.subprocess, "run", ran)
    with pytest.raises(RuntimeError, match=r"sft must train; got exit code \d"):
        main([str(tmp_path / "nothing"), "--stages", "sft"])
