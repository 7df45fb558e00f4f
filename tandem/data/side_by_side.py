"""Conversations rendered by several processes at once, so that large data sets are ready soon.

Rendering one takes 0.3 to 1 ms of Python and of the tokenizer. Forked processes do it ahead and
send ids and masks; here they are handed out call by call, as if the renderer had been asked, and so
are the data's errors. What was not done ahead, because a call failed otherwise or its process was
lost, the renderer is asked for: nothing is missing.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, Generic, Protocol, TypeVar

from tandem.compact import Marks, TokenIds
from tandem.data.render import IN_MEMORY, Renderer
from tandem.errors import DataError
from tandem.message import Answer, Message
from tandem.process import die_with_parent, fork
from tandem.processor import num_cores
from tandem.stopping import holding_back
from tandem.types import PromptRow, Source, TokenRow

Item = TypeVar("Item")
Made = tuple[bytes, bytes]
"""A row's ids and its mask, packed; or the number of rows that follow, without a mask."""
Done = tuple[list[Made], str | None]
"""The rows that an item asked for, and what the data's error said that ended it, if one did."""

_BLOCK = 64
"""Items that a process does before it turns to its next ones."""
_SECONDS, _BYTES = 0.2, 2**20
"""What is done is sent after this time or size, and at once where an item failed."""
_WORTH = 250
"""Items that are worth a process: it takes 30 ms to begin and to end one."""
_MOST = 16
_PATIENCE = 300.0
"""Seconds without a word after which a process counts as lost: a rendering may take 30."""
_PARALLELISM = "TOKENIZERS_PARALLELISM"
_forking = threading.Lock()


class RendersRows(Protocol):
    """What `Renderer` makes rows with."""

    def prompt(
        self,
        messages: Sequence[Message],
        columns: Mapping[str, Any] | None = None,
        source: Source = IN_MEMORY,
        tools: str = "",
    ) -> PromptRow:
        """As `Renderer.prompt`."""

    def conversation(
        self,
        messages: Sequence[Message],
        answer: Answer,
        source: Source,
        last_turn_only: bool = False,
        tools: str = "",
    ) -> TokenRow:
        """As `Renderer.conversation`."""

    def learned(
        self, messages: Sequence[Message], answer: Answer, source: Source, tools: str = ""
    ) -> tuple[TokenRow, ...]:
        """As `Renderer.learned`."""

    def document(self, text: str, source: Source) -> TokenRow:
        """As `Renderer.document`."""


def num_processes() -> int:
    """Processes for the rows of one rank: the cores that are there, shared by the node's ranks."""
    if sys.platform != "linux":  # macOS ends a forked process that touches its frameworks
        return 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    return max(1, min(_MOST, num_cores() // max(1, int(ranks) if ranks.isdecimal() else 1)))


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
    number = min(len(items), processes or 1)
    if processes is None:
        number = len(items) // _WORTH
        number = min(number, num_processes()) if number > 1 else 1
    if number < 2:
        yield repeat(renderer, len(items))
        return
    with ExitStack() as ending:
        task = _Task(renderer, items, use, number)
        others: list[_Other] = []
        for turn in range(number):
            with suppress(OSError):  # no more processes or files: what it would do is done here
                others.append(_fork(task, turn, others, ending))
        by_turn = {other.turn: other for other in others}
        yield _handed_out(renderer, len(items), number, by_turn)


@dataclass
class _Between(ABC):
    """Stands between those who ask for rows and the renderer."""

    renderer: Renderer

    @abstractmethod
    def _made(self, ask: Callable[[], PromptRow | TokenRow]) -> Made:
        """The row that `ask` would get from the renderer."""

    @abstractmethod
    def _all_made(self, ask: Callable[[], Sequence[TokenRow]]) -> list[Made]:
        """The rows that `ask` would get from the renderer."""

    def prompt(
        self,
        messages: Sequence[Message],
        columns: Mapping[str, Any] | None = None,
        source: Source = IN_MEMORY,
        tools: str = "",
    ) -> PromptRow:
        made = self._made(lambda: self.renderer.prompt(messages, columns, source, tools))
        ids = TokenIds.unpacked(made[0])
        return PromptRow(ids, tuple(messages), dict(columns or {}), source, tools)

    def conversation(
        self,
        messages: Sequence[Message],
        answer: Answer,
        source: Source,
        last_turn_only: bool = False,
        tools: str = "",
    ) -> TokenRow:
        ask = partial(self.renderer.conversation, messages, answer, source, last_turn_only, tools)
        return self._row(ask, source)

    def learned(
        self, messages: Sequence[Message], answer: Answer, source: Source, tools: str = ""
    ) -> tuple[TokenRow, ...]:
        ask = partial(self.renderer.learned, messages, answer, source, tools)
        return tuple(_token_row(made, source) for made in self._all_made(ask))

    def document(self, text: str, source: Source) -> TokenRow:
        return self._row(partial(self.renderer.document, text, source), source)

    def _row(self, ask: Callable[[], TokenRow], source: Source) -> TokenRow:
        return _token_row(self._made(ask), source)


@dataclass
class _HandsOut(_Between):
    """Rows that were made ahead, in the order in which they are asked for; then the error."""

    ahead: Iterator[Made]
    error: str | None

    def _made(self, ask: Callable[[], PromptRow | TokenRow]) -> Made:
        return self._next() or _made_of(ask())

    def _all_made(self, ask: Callable[[], Sequence[TokenRow]]) -> list[Made]:
        if (number := self._next()) is None:
            return [_made_of(row) for row in ask()]
        return [next(self.ahead) for _ in range(TokenIds.unpacked(number[0])[0])]

    def _next(self) -> Made | None:
        """What was made ahead; None if the renderer has to be asked."""
        made = next(self.ahead, None)
        if made is None and self.error is not None:
            raise DataError(self.error)
        return made


@dataclass
class _Listens(_Between):
    """Asks the renderer, and keeps what it made."""

    heard: list[Made]

    def _made(self, ask: Callable[[], PromptRow | TokenRow]) -> Made:
        self.heard.append(_made_of(ask()))
        return self.heard[-1]

    def _all_made(self, ask: Callable[[], Sequence[TokenRow]]) -> list[Made]:
        made = [_made_of(row) for row in ask()]
        self.heard += [(TokenIds([len(made)]).packed, b""), *made]
        return made


def _made_of(row: PromptRow | TokenRow) -> Made:
    marks = row.response_mask if isinstance(row, TokenRow) else ()
    return TokenIds.of(row.token_ids).packed, Marks.of(marks).packed


def _token_row(made: Made, source: Source) -> TokenRow:
    return TokenRow(TokenIds.unpacked(made[0]), Marks.unpacked(made[1]), source)


@dataclass
class _Other:
    """Another process, as this one sees it."""

    turn: int
    process: int
    pipe: int
    done: deque[Done] = field(default_factory=deque)

    def next(self) -> Done | None:
        """What came of its next item; None if it is lost."""
        try:
            if not self.done:
                size = int.from_bytes(self._read(8), "little")
                self.done.extend(pickle.loads(self._read(size)))
            return self.done.popleft()
        except OSError:
            return None

    def _read(self, size: int) -> bytes:
        """
        Raises:
            OSError: it has ended, or says nothing more.
        """
        content = bytearray()
        waiting = select.poll()  # not `select`, which takes no descriptor above 1023
        waiting.register(self.pipe, select.POLLIN)
        while len(content) < size:
            if not waiting.poll(_PATIENCE * 1000):
                raise TimeoutError
            got = os.read(self.pipe, min(size - len(content), 2**20))
            if not got:
                raise ConnectionError
            content += got
        return bytes(content)

    def end(self) -> None:
        """Kill it, if it has not ended."""
        os.close(self.pipe)
        with suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.process, 0)


def _handed_out(
    renderer: Renderer, num_items: int, turns: int, others: dict[int, _Other]
) -> Iterator[RendersRows]:
    for index in range(num_items):
        turn = index // _BLOCK % turns
        done = others[turn].next() if turn in others else None
        if done is None:
            others.pop(turn, None)
            yield renderer
        else:
            yield _HandsOut(renderer, iter(done[0]), done[1])


@dataclass(frozen=True)
class _Task(Generic[Item]):
    """What the processes share: of `turns` of them each does every `turns`-th block."""

    renderer: Renderer
    items: Sequence[Item]
    use: Callable[[Item, RendersRows], object]
    turns: int


def _fork(task: _Task[Item], turn: int, others: Sequence[_Other], ending: ExitStack) -> _Other:
    """A process that does the blocks of a turn; it ends with `ending`, or with this one.

    Raises:
        OSError: the system gives none.
    """
    reading, writing = os.pipe()
    parent, unused = os.getpid(), [reading, *(other.pipe for other in others)]
    # Signals wait until the process is sure to be ended.
    with _forking, holding_back():
        before = os.environ.get(_PARALLELISM)
        os.environ[_PARALLELISM] = "false"  # or the library warns of the fork
        try:
            process = fork(lambda: _be_other(task, turn, parent, writing, unused))
            other = _Other(turn, process, reading)
            ending.callback(other.end)
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(writing)
            if before is None:
                os.environ.pop(_PARALLELISM, None)
            else:
                os.environ[_PARALLELISM] = before
    return other


def _be_other(
    task: _Task[Item], turn: int, parent: int, writing: int, unused: Sequence[int]
) -> None:
    """All that the other process does."""
    die_with_parent(parent)
    gc.disable()
    for descriptor in unused:
        os.close(descriptor)
    mine = [i for i in range(len(task.items)) if i // _BLOCK % task.turns == turn]
    sending: list[Done] = []
    size, since = 0, time.monotonic()
    for index in mine:
        done = _done(task.renderer, task.items[index], task.use)
        sending.append(done)
        size += sum(len(ids) + len(mask) for ids, mask in done[0])
        late = time.monotonic() - since > _SECONDS
        if late or size > _BYTES or done[1] is not None or index == mine[-1]:
            _send(writing, sending)
            sending, size, since = [], 0, time.monotonic()


def _done(renderer: Renderer, item: Item, use: Callable[[Item, RendersRows], object]) -> Done:
    """The rows that `use` asks for, up to a call that fails."""
    listening = _Listens(renderer, [])
    try:
        use(item, listening)
    except DataError as error:
        return listening.heard, str(error)
    except Exception:  # is met again, and raised, where the rows are asked for
        return listening.heard, None
    return listening.heard, None


def _send(pipe: int, done: Sequence[Done]) -> None:
    content = pickle.dumps(done, protocol=5)
    left = memoryview(len(content).to_bytes(8, "little") + content)
    while left:
        left = left[os.write(pipe, left) :]
