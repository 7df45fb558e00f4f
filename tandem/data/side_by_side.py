"""Conversations rendered by several processes at once, so that large data sets are ready soon.

Rendering one takes 0.3 to 1 ms of Python and of the tokenizer. Forked processes do it ahead and
send ids and masks; here they are handed out call by call, as if the renderer had been asked. What
was not done ahead, because a call failed or its process was lost, the renderer is asked for: errors
are raised here, and nothing is missing.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import warnings
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import repeat
from typing import Any, BinaryIO, Protocol, TypeVar

from tandem.data.render import IN_MEMORY, Renderer
from tandem.processor import num_cores
from tandem.stopping import STOPPING, holding_back, let_through
from tandem.types import Message, PromptRow, Source, TokenRow

Item = TypeVar("Item")
Made = tuple[bytes, bytes]
"""A row's ids as 8 bytes each, and its mask."""

_BLOCK = 64
"""Items that a process does before it turns to its next ones."""
_WORTH = 250
"""Items that are worth a process: it takes 30 ms to begin and to end one."""
_MOST = 16
_PARALLELISM = "TOKENIZERS_PARALLELISM"


class RendersRows(Protocol):
    """What `Renderer` makes rows with."""

    def prompt(
        self,
        messages: Sequence[Message],
        columns: Mapping[str, Any] | None = None,
        source: Source = IN_MEMORY,
    ) -> PromptRow:
        """As `Renderer.prompt`."""

    def conversation(
        self,
        messages: Sequence[Message],
        answer: str,
        source: Source,
        last_turn_only: bool = False,
    ) -> TokenRow:
        """As `Renderer.conversation`."""

    def document(self, text: str, source: Source) -> TokenRow:
        """As `Renderer.document`."""


def num_processes() -> int:
    """Processes for the rows of one rank: the cores that are there, shared by the node's ranks."""
    if sys.platform != "linux":  # macOS ends a forked process that touches its frameworks
        return 1
    return max(1, min(_MOST, num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


@contextmanager
def side_by_side(
    renderer: Renderer,
    items: Sequence[Item],
    use: Callable[[Item, RendersRows], object],
    processes: int | None = None,
) -> Iterator[Iterator[RendersRows]]:
    """A renderer for each item, in order, that gives `use(item, ...)` what `renderer` would.

    Args:
        use: asks for rows, for the same ones whenever it is called with an item.
        processes: as many as are worth it if None; one renders here.
    """
    wanted = num_processes() if processes is None else processes
    number = min(wanted, len(items) // (_WORTH if processes is None else 1))
    if number < 2:
        yield repeat(renderer, len(items))
        return
    with ExitStack() as ending:
        sending: list[BinaryIO] = []
        for first in range(number):
            process, pipe = _forked(renderer, items, use, first, number, sending)
            sending.append(pipe)
            ending.callback(_end, process, pipe)
        yield _handed_out(renderer, len(items), sending)


@dataclass
class _HandsOut:
    """Rows that were made ahead, in the order in which they are asked for."""

    renderer: Renderer
    made: Iterator[Made]

    def prompt(
        self,
        messages: Sequence[Message],
        columns: Mapping[str, Any] | None = None,
        source: Source = IN_MEMORY,
    ) -> PromptRow:
        made = next(self.made, None)
        if made is None:
            return self.renderer.prompt(messages, columns, source)
        return PromptRow(_ids(made[0]), tuple(messages), dict(columns or {}), source)

    def conversation(
        self,
        messages: Sequence[Message],
        answer: str,
        source: Source,
        last_turn_only: bool = False,
    ) -> TokenRow:
        made = next(self.made, None)
        if made is None:
            return self.renderer.conversation(messages, answer, source, last_turn_only)
        return _row(made, source)

    def document(self, text: str, source: Source) -> TokenRow:
        made = next(self.made, None)
        return self.renderer.document(text, source) if made is None else _row(made, source)


@dataclass
class _Listens:
    """Asks the renderer, and keeps what it made."""

    renderer: Renderer
    made: list[Made]

    def prompt(
        self,
        messages: Sequence[Message],
        columns: Mapping[str, Any] | None = None,
        source: Source = IN_MEMORY,
    ) -> PromptRow:
        row = self.renderer.prompt(messages, columns, source)
        self.made.append((array("q", row.token_ids).tobytes(), b""))
        return row

    def conversation(
        self,
        messages: Sequence[Message],
        answer: str,
        source: Source,
        last_turn_only: bool = False,
    ) -> TokenRow:
        return self._kept(self.renderer.conversation(messages, answer, source, last_turn_only))

    def document(self, text: str, source: Source) -> TokenRow:
        return self._kept(self.renderer.document(text, source))

    def _kept(self, row: TokenRow) -> TokenRow:
        self.made.append((array("q", row.token_ids).tobytes(), bytes(row.response_mask)))
        return row


def _ids(made: bytes) -> tuple[int, ...]:
    return tuple(array("q", made))


def _row(made: Made, source: Source) -> TokenRow:
    return TokenRow(_ids(made[0]), tuple(map(bool, made[1])), source)


def _handed_out(
    renderer: Renderer, num_items: int, sending: Sequence[BinaryIO]
) -> Iterator[RendersRows]:
    lost: set[int] = set()
    for number, start in enumerate(range(0, num_items, _BLOCK)):
        turn, count = number % len(sending), min(_BLOCK, num_items - start)
        block: list[list[Made]] = []
        if turn not in lost:
            try:
                block = pickle.load(sending[turn])
            except (EOFError, OSError, pickle.UnpicklingError):
                lost.add(turn)
        for index in range(count):
            yield _HandsOut(renderer, iter(block[index])) if block else renderer


def _forked(
    renderer: Renderer,
    items: Sequence[Item],
    use: Callable[[Item, RendersRows], object],
    first: int,
    step: int,
    others: Sequence[BinaryIO],
) -> tuple[int, BinaryIO]:
    """A process that does every `step`-th block from `first` on, and where it sends them."""
    reading, writing = os.pipe()
    parent, before = os.getpid(), os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"  # or the library warns of the fork
    try:
        with holding_back(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            process = os.fork()
            if process == 0:
                for number in STOPPING:  # this process ends with the one that reads
                    signal.signal(number, signal.SIG_IGN)
                let_through()
    finally:
        if os.getpid() == parent:
            if before is None:
                del os.environ[_PARALLELISM]
            else:
                os.environ[_PARALLELISM] = before
    if process:
        os.close(writing)
        return process, os.fdopen(reading, "rb")
    try:
        gc.disable()
        for other in (reading, *(pipe.fileno() for pipe in others)):
            os.close(other)
        with os.fdopen(writing, "wb") as sent:
            for start in range(first * _BLOCK, len(items), step * _BLOCK):
                block = [_made(renderer, item, use) for item in items[start : start + _BLOCK]]
                pickle.dump(block, sent, protocol=5)
                sent.flush()
    finally:
        os._exit(0)


def _made(renderer: Renderer, item: Item, use: Callable[[Item, RendersRows], object]) -> list[Made]:
    """The rows that `use` asks for, up to a call that fails."""
    listening = _Listens(renderer, [])
    with suppress(Exception):
        use(item, listening)
    return listening.made


def _end(process: int, pipe: BinaryIO) -> None:
    pipe.close()
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(process, 0)
