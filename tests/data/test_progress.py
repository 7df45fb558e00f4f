"""What is said of long work, and when."""

from __future__ import annotations

import io
import os

import pytest
from rich.cells import cell_len

from tandem.data.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def told(out: io.StringIO, seconds: float, rows: int = 3200) -> str:
    clock = Clock()
    with Progress(out, clock) as progress:
        progress.begin("reading a.jsonl")
        for _ in progress.over(range(rows), rows):
            clock.now += seconds
        clock.now += seconds * 100
        progress.begin("counting tokens")
    return out.getvalue()


def test_short_work_needs_no_word() -> None:
    assert told(io.StringIO(), 1e-5) == ""
    assert told(Terminal(), 1e-5) == ""


def test_long_work_is_told_in_lines() -> None:
    lines = told(io.StringIO(), 0.01).splitlines()
    assert lines[0] == "reading a.jsonl: 112 of 3,200 rows"
    assert [line.split()[2] for line in lines[:-1]] == ["112", "1,120", "2,128", "3,136"]
    assert lines[-1] == "counting tokens ..."


def test_a_terminal_has_one_line_that_is_removed() -> None:
    text = told(Terminal(), 0.01)
    assert "\n" not in text
    assert text.count("reading a.jsonl: ") > 90
    assert text.endswith("counting tokens ...\r\x1b[K")


@pytest.mark.parametrize(
    ("path", "width"), [("a/long/folder/of/answers.jsonl", 40), ("数据" * 9, 20)]
)
def test_in_a_narrow_terminal_it_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, path: str, width: int
) -> None:
    """Of one that breaks, the next one takes back its last row alone. Characters may be wide."""

    class Narrow(Terminal):
        def fileno(self) -> int:
            return 2

    monkeypatch.setattr(os, "get_terminal_size", lambda file: os.terminal_size((width, 24)))
    out, clock = Narrow(), Clock()
    with Progress(out, clock) as progress:
        progress.begin(f"reading {path}")
        for _ in progress.over(range(3200), 3200):
            clock.now += 0.01
    first, *lines = out.getvalue().split("\r\x1b[K")
    assert first == ""
    assert lines.pop() == ""
    assert all(cell_len(line) < width for line in lines)
    assert lines[0][0] == "…"
    assert lines[0].endswith(f"{path[-5:]}: 112 of 3,200 rows"[-width + 3 :])


def test_its_first_word_may_come_later() -> None:
    out, clock = io.StringIO(), Clock()
    with Progress(out, clock, after=5.0) as progress:
        progress.begin("reading a.jsonl")
        for _ in progress.over(range(640)):
            clock.now += 0.01
    assert out.getvalue().splitlines() == ["reading a.jsonl: 512 rows"]
