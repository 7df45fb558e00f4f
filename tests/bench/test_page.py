"""The bench of the page: its figures by hand, and the whole command in a real browser."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench import page


def test_late_frames_are_those_over_fifty_milliseconds() -> None:
    found = page.summarized([16.0] * 98 + [50.0, 60.0])
    assert found == {
        "frames": 100, "median ms": 16.0, "99 % ms": 50.0, "longest ms": 60.0, "over 50 ms": 1,
    }  # fmt: skip


@pytest.mark.skipif(
    not (shutil.which("chromium") and find_spec("playwright") and find_spec("starlette")),
    reason="needs chromium, playwright and the extra serve",
)
def test_the_command_scrolls_at_both_widths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "made.json"
    page.main(["--tiny", "--json", str(file)])
    assert "longest ms" in capsys.readouterr().out
    frames = json.loads(file.read_text("utf-8"))["frames"]
    assert len(frames) == len(page.WIDTHS) * len(page.SPEEDS)
    assert all(len(times) == 20 and min(times) > 0 for times in frames.values())
