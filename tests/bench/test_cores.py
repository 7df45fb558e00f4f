"""How a step would scale to more cores: what is added up, and the command."""

from __future__ import annotations

import ctypes
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import cores
from tandem.ops import native


def test_a_loop_takes_as_long_as_its_slowest_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spent = [(0.0, 0.0, 0.0), (3.0, 1.5, 0.25), (0.0, 0.0, 0.0), (1.0, 0.75, 0.5)]

    def take(out: Any) -> None:
        out[0], out[1], out[2] = spent.pop(0)

    monkeypatch.setattr(native, "kept_library", lambda: tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(tandem_take_measured=take))
    watch = cores.Loops()
    for _ in range(2):
        with watch("train"):
            time.sleep(0.05)  # no CPU seconds
    costs = watch.take()
    # Of the main thread's own seconds here there are next to none.
    assert costs["train"].wall == pytest.approx(1.5 - 0.25 + 0.75 - 0.5, abs=0.04)
    assert costs["total"].wall == costs["train"].wall
    assert watch.outside["train"] == pytest.approx(-0.25 - 0.5, abs=0.04)


@pytest.mark.slow  # builds the C++ operations for it
@pytest.mark.skipif(not native.available(), reason="no C++ operations")
def test_the_command_shows_each_number_of_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (*cores.ENVIRONMENT.items(), ("TANDEM_MARCH", "native")):
        monkeypatch.setenv(name, value)  # put back afterwards
    file = tmp_path / "made.json"
    cores.main(["--cores", "1", "3", "--tiny", "--rounds", "1", "--json", str(file)])
    assert "s with a core each" in capsys.readouterr().out
    rows = json.loads(file.read_text("utf-8"))["rows"]
    assert list(rows) == ["1", "3"]
    for phase in ("generate", "score", "train", "total"):
        assert rows["1"][phase]["wall"] == pytest.approx(rows["1"][phase]["cpu"], rel=0.2)
        assert 0 < rows["3"][phase]["outside"] <= rows["3"][phase]["wall"]
    assert os.environ["TANDEM_MARCH"].endswith("-DTANDEM_MEASURE_LOOPS")
