"""Ctrl-C, however often it comes, ends `tandem serve` with one line."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from tests.tiny import save_tiny_model

SECONDS = 300.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("after", "pauses"),
    [
        ("votes:", (0.05, 0.05)),  # a model is being read
        ("page:", (0.0, 0.01, 0.01)),
        ("page:", (1.0, 0.1, 0.1)),  # it waits for requests
    ],
)
def test_any_number_of_ctrl_cs_is_one_line(model: str, after: str, pauses: Sequence[float]) -> None:
    command = [sys.executable, "-u", "-m", "tandem", "serve", model, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert any(line.startswith(after) for line in process.stdout)
        for pause in pauses:
            time.sleep(pause)
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert errors == "tandem: stopped.\n"
    assert process.returncode == 130
