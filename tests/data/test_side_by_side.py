"""Rows rendered by several processes are those of one, whatever fails there."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tandem.data import side_by_side as module
from tandem.data.render import Renderer
from tandem.data.side_by_side import RendersRows, num_processes, side_by_side
from tandem.errors import DataError
from tandem.types import Message, Source
from tests.data.built_tokenizers import THINKING, byte_level

COUNT = 150
ROOT = Path(__file__).resolve().parents[2]
Use = Callable[[int, RendersRows], Any]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="rows are rendered here elsewhere")


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(byte_level())


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 4)


def use(item: int, renderer: RendersRows) -> Any:
    """Rows of every kind; every 13th item has a turn of half a surrogate pair at its end."""
    source = Source(dataset="d", path="file", line=item)
    turns = [Message("user", f"number {item} " * (item % 5 + 1))]
    rows: list[Any] = [
        renderer.prompt(turns, {"item": item}, source),
        renderer.conversation(turns, f"the answer {item}", source),
        renderer.conversation(turns, "<|im_end|> is text", source, True),
        renderer.document(f"text {item}", source),
    ]
    if item % 13 == 12:
        rows.append(renderer.conversation(turns, "\ud800", source))
    return rows


def rows_of(renderer: Renderer, processes: int, use: Use = use, count: int = COUNT) -> list[Any]:
    """What `use` gives for each item, or the text of its error."""
    found = []
    items = range(count)
    with side_by_side(renderer, items, use, processes) as renderers:
        for item, its_renderer in zip(items, renderers, strict=True):
            try:
                found.append(use(item, its_renderer))
            except DataError as error:
                found.append(str(error))
    return found


def test_several_rows_of_one_conversation_come_from_elsewhere_too() -> None:
    """Some conversations become one row, some two or three, some an error."""
    renderer = Renderer(byte_level(THINKING))

    def learned(item: int, renderer: RendersRows) -> Any:
        source = Source(dataset="d", path="file", line=item)
        turns = [Message("user", f"{item}"), Message("assistant", "so")] * (item % 3)
        end = "\ud800" if item % 13 == 12 else "yes"
        asks = Message("user", "and?")
        return [*renderer.learned([*turns, asks], end, source), renderer.document("a", source)]

    alone = rows_of(renderer, 1, learned)
    assert rows_of(renderer, 3, learned) == alone
    assert {len(rows) for rows in alone if isinstance(rows, list)} == {2, 3, 4}


@pytest.mark.parametrize("processes", [2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 9, COUNT])
def test_rows_and_errors_are_those_of_one_process(
    renderer: Renderer, processes: int, count: int
) -> None:
    alone = rows_of(renderer, 1, count=count)
    assert rows_of(renderer, processes, count=count) == alone
    assert sum(isinstance(row, str) for row in alone) == count // 13


def test_the_work_and_its_errors_come_from_elsewhere(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = os.getpid()
    made: list[str] = []
    conversation = Renderer.conversation

    def noted(self: Renderer, *arguments: Any) -> Any:
        if os.getpid() == here:
            made.append(arguments[1])
        return conversation(self, *arguments)

    monkeypatch.setattr(Renderer, "conversation", noted)
    rows_of(renderer, 2)
    assert not made
    rows_of(renderer, 1)
    assert len(made) == COUNT // 13 + 2 * COUNT


@pytest.mark.parametrize("at", [0, 5, COUNT - 1])
def test_a_process_that_dies_loses_nothing(renderer: Renderer, at: int) -> None:
    here = os.getpid()

    def dies(item: int, renderer: RendersRows) -> Any:
        if item == at and os.getpid() != here:
            os._exit(1)
        return use(item, renderer)

    assert rows_of(renderer, 3, dies) == rows_of(renderer, 1)


def test_an_error_that_is_not_of_the_data_is_raised_here(renderer: Renderer) -> None:
    def fails(item: int, renderer: RendersRows) -> Any:
        if item == 30:
            raise RuntimeError("item 30")
        return use(item, renderer)

    with pytest.raises(RuntimeError, match="item 30"):
        rows_of(renderer, 2, fails)


def test_an_error_is_known_at_once(renderer: Renderer) -> None:
    """What comes after it may take long: each rendering half a minute."""
    here = os.getpid()

    def waits(item: int, renderer: RendersRows) -> Any:
        if item == 1 and os.getpid() != here:
            time.sleep(600)
        raise DataError(f"item {item}")

    with (
        side_by_side(renderer, range(100), waits, 2) as renderers,
        pytest.raises(DataError, match="item 0"),
    ):
        waits(0, next(renderers))


def test_a_process_that_says_nothing_counts_as_lost(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = os.getpid()

    def stops(item: int, renderer: RendersRows) -> Any:
        if item == 6 and os.getpid() != here:
            os.kill(os.getpid(), signal.SIGSTOP)
        return use(item, renderer)

    monkeypatch.setattr(module, "_PATIENCE", 1.0)
    assert rows_of(renderer, 2, stops) == rows_of(renderer, 1)


@pytest.mark.parametrize("given", [0, 1, 2])
@pytest.mark.parametrize("what", ["fork", "pipe"])
def test_where_the_system_gives_fewer_processes_the_rest_is_done_here(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch, what: str, given: int
) -> None:
    alone, make, asked = rows_of(renderer, 1), getattr(os, what), []

    def limited() -> Any:
        asked.append(what)
        if len(asked) > given:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return make()

    monkeypatch.setattr(os, what, limited)
    before = set(os.listdir("/proc/self/fd"))
    assert rows_of(renderer, 3) == alone
    assert len(asked) == 3
    assert set(os.listdir("/proc/self/fd")) == before


def test_they_end_with_the_process_that_began_them() -> None:
    """Though it is killed, while each does something long."""
    command = [sys.executable, "-c", f"from {__name__} import wait_beside; wait_beside()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        assert len(parent.stdout.readline().split()) == 2
        parent.kill()
        # They hold the other end of its output.
        assert parent.stdout.read() == b""


def wait_beside() -> None:
    def waits(item: int, renderer: RendersRows) -> Any:
        time.sleep(600)

    with side_by_side(Renderer(byte_level()), range(100), waits, 2) as renderers:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        print(children, flush=True)
        next(renderers)


def test_callers_in_threads_leave_the_environment_as_it_was(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    alone = rows_of(renderer, 1)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: rows_of(renderer, 2), range(8)))
    assert found == [alone] * 8
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_processes_end_with_the_block(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    fork = os.fork

    def noted() -> int:
        begun.append(fork())
        return begun[-1]

    monkeypatch.setattr(os, "fork", noted)
    parallelism = os.environ.get("TOKENIZERS_PARALLELISM")

    def is_stopped() -> None:
        with side_by_side(renderer, range(10**6), use, 3) as renderers:
            use(0, next(renderers))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        is_stopped()
    assert len(begun) == 3
    for process in begun:
        with pytest.raises(ChildProcessError):
            os.waitpid(process, 0)
    assert os.environ.get("TOKENIZERS_PARALLELISM") == parallelism


def test_few_rows_are_rendered_here(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "num_processes", lambda: 4)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("not worth a process"))
    with side_by_side(renderer, range(2 * module._WORTH - 1), use) as renderers:
        assert next(renderers) is renderer


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "num_cores", lambda: 12)
    for variable in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    assert num_processes() == 12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    assert num_processes() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "24")
    assert num_processes() == 1
    for odd in ("0", "", "-3", "two", "2.0"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", odd)
        assert num_processes() == 12
    monkeypatch.setenv("WORLD_SIZE", "6")  # where nobody says how many of them are here
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert num_processes() == 2
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(module, "num_cores", lambda: 256)
    assert num_processes() == 16
    monkeypatch.setattr(sys, "platform", "darwin")
    assert num_processes() == 1
