"""What is said of long work, and when."""

from __future__ import annotations

import io

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


def test_its_first_word_may_come_later() -> None:
    out, clock = io.StringIO(), Clock()
    with Progress(out, clock, after=5.0) as progress:
        progress.begin("reading a.jsonl")
        for _ in progress.over(range(640)):
            clock.now += 0.01
    assert out.getvalue().splitlines() == ["reading a.jsonl: 512 rows"]
