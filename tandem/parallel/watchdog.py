"""Where every rank is, so that the others can name a missing one and say where it was.

Once a second a thread looks at what its rank's main thread is doing and writes a note to the ranks'
store: our running function, the collective it is in, since when. Nothing is wrapped or counted. A
hung rank writes notes as any other; a stopped one does not. A rank whose collective fails reads all
notes and reports which ranks were missing.

It is imported without torch: the command line uses its errors.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import RankError
from tandem.parallel.asking import Asking, NoAnswerError
from tandem.text import named_line

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

INTERVAL_SECONDS = 1.0
"""Between two notes of a rank."""
_STORE_SECONDS = 5.0
_NAMED_AT_MOST = 4
_PACKAGE = str(Path(__file__).resolve().parents[1])
_TORCH = os.sep + os.path.join("torch", "")
_DISTRIBUTED = os.sep + os.path.join("torch", "distributed", "")
_COLLECTIVES = os.path.join("distributed", "distributed_c10d.py")
# Thin wrappers around collectives: their caller is more useful.
_THIN = (os.path.join(_PACKAGE, "parallel", ""), os.path.join(_PACKAGE, "launch", ""))
_phase = ""


@dataclass(frozen=True, slots=True)
class Note:
    """What a rank was last seen doing.

    beat: grows with every note, unless the rank is stopped or dead.
    state: running, lost (its collective failed), failed (by itself) or done.
    place: our innermost call, as `file:line (function)`; collective: "" outside of one.
    since: when it came there; written: when this was noted; both seconds since the epoch.
    """

    rank: int
    beat: int = 0
    state: str = "running"
    phase: str = ""
    place: str = ""
    collective: str = ""
    since: float = 0.0
    written: float = 0.0
    line: str = ""

    def where(self) -> str:
        """The place in words."""
        words = [f"{self.collective}, called at" if self.collective else "", self.place]
        words += [f"in {self.phase}" if self.phase else ""]
        return " ".join(word for word in words if word) or "nothing of ours"


def note(phase: str) -> None:
    """Record what this rank starts, like `ppo step 12`; shown if it goes missing."""
    global _phase
    _phase = phase


@contextmanager
def watching(rank: int, size: int, *, interval: float = INTERVAL_SECONDS) -> Iterator[None]:
    """Write notes while the body runs, to the store that the environment names.

    Args:
        interval: seconds between two notes.
    Raises:
        RankError: a collective failed in the body; says for which rank this one waited.
    """
    if size == 1:
        yield
        return
    watch = Watch(_store_of_the_ranks(), rank, size, interval=interval)
    try:
        yield
    except Exception as error:
        if not is_collective_failure(error):
            watch.end("failed", named_line(error))
            raise
        raise RankError(watch.explain(error)) from error
    except BaseException:
        watch.end("failed", "it was stopped")
        raise
    watch.end("done")


class Watch:
    """One rank's notes, and conclusions from those of all ranks."""

    def __init__(
        self, store: Store, rank: int, size: int, *, interval: float = INTERVAL_SECONDS
    ) -> None:
        """Starts at once. No other thread may use `store`."""
        self._store = store
        self._size = size
        self._interval = interval
        self._ask = Asking(_STORE_SECONDS)
        self._note = Note(rank, since=time.time())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="tandem-watch", daemon=True)
        self._thread.start()

    def end(self, state: str, line: str = "") -> None:
        """Write the last note: done, or failed with this line."""
        self._silence()
        last = replace(self._note, state=state, line=line)
        with suppress(NoAnswerError):
            self._ask(lambda: self._post(last))

    def explain(self, error: BaseException) -> str:
        """Which ranks were missing in the collective that failed with `error`, in one line. Waits
        two intervals, to see which ranks have stopped writing."""
        self._silence()
        place, collective = _place(_calls(traceback.walk_tb(error.__traceback__))[::-1])
        mine = replace(self._note, state="lost", place=place, collective=collective)
        try:
            self._ask(lambda: self._post(mine))
            before = self._ask(lambda: read_notes(self._store, self._size))
            time.sleep(2 * self._interval)
            after = self._ask(lambda: read_notes(self._store, self._size))
        except RuntimeError:
            return (
                f"rank {mine.rank} waited in {mine.where()}, and the process that all ranks met "
                "at does not answer: its node is gone or stopped, or the link to it is down"
            )
        missing = blame(before, after, mine)
        if not missing:
            return f"rank {mine.rank} lost the others in {mine.where()}: {named_line(error)}"
        named = "; ".join(missing[:_NAMED_AT_MOST])
        more = f"; and {len(missing) - _NAMED_AT_MOST} more" if missing[_NAMED_AT_MOST:] else ""
        return f"rank {mine.rank} waited in {mine.where()} for {named}{more}"

    def _follow(self) -> None:
        main = threading.main_thread().ident
        while True:
            frame = sys._current_frames().get(main or 0)
            place, collective = _place(_calls(traceback.walk_stack(frame)))
            moved = (place, collective) != (self._note.place, self._note.collective)
            since = time.time() if moved else self._note.since
            seen = replace(
                self._note, phase=_phase, place=place, collective=collective, since=since
            )
            if not self._post(seen) or self._stop.wait(self._interval):
                return

    def _post(self, seen: Note) -> bool:
        self._note = replace(seen, beat=self._note.beat + 1, written=time.time())
        try:
            self._store.set(f"note-{seen.rank}", json.dumps(asdict(self._note)))
        except RuntimeError:  # the store is gone, and with it all readers
            return False
        return True

    def _silence(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2 * _STORE_SECONDS)


def read_notes(store: Store, size: int) -> list[Note | None]:
    """Every rank's last note; None if there is none yet.

    Raises:
        RuntimeError: the store does not answer.
    """
    keys = [f"note-{rank}" for rank in range(size)]
    return [Note(**json.loads(store.get(key))) if store.check([key]) else None for key in keys]


def blame(
    before: Sequence[Note | None], after: Sequence[Note | None], mine: Note | None = None
) -> list[str]:
    """Which ranks the others wait for: those that failed, else the silent ones, else late ones,
    else those that waited in another collective.

    Args:
        before, after: notes of all ranks, read at least two intervals apart.
        mine: the note of the rank that waited and asks; None if the launcher asks.
    Returns:
        per rank a phrase that starts with its name.
    """
    failed, silent, late, elsewhere = [], [], [], []
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        if mine is not None and rank == mine.rank:
            continue
        if new is None:
            silent.append(f"rank {rank}, which never began")
        elif new.state == "failed":
            failed.append(f"rank {rank}, which failed: {new.line}")
        elif new.state == "done":
            late.append(f"rank {rank}, which had finished")
        elif new.state == "running" and old is not None and old.beat == new.beat:
            seconds = max(0.0, time.time() - new.written)
            silent.append(
                f"rank {rank}, which has not responded for {seconds:.0f} s and was last in "
                f"{new.where()}"
            )
        elif new.state == "running" and (mine is None or new.collective != mine.collective):
            seconds = max(0.0, new.written - new.since)
            late.append(f"rank {rank}, which for {seconds:.0f} s is in {new.where()}")
        elif new.state == "lost" and mine is not None and not _meet(new, mine):
            elsewhere.append(f"rank {rank}, which waited in {new.where()}")
    return failed or silent or late or elsewhere


def _meet(one: Note, other: Note) -> bool:
    """Whether two ranks wait in the same call."""
    return (one.collective, one.place) == (other.collective, other.place)


def is_collective_failure(error: BaseException) -> bool:
    """Whether an exception is of a broken exchange between ranks, not of this rank's own work."""
    if type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError"):
        return True
    if not isinstance(error, RuntimeError):
        return False
    words = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")
    if any(word in str(error).lower() for word in words):
        return True
    calls = _calls(traceback.walk_tb(error.__traceback__))
    return type(error) is RuntimeError and bool(calls) and _DISTRIBUTED in calls[-1][0]


def _calls(walk: Iterable[tuple[Any, int]]) -> list[tuple[str, int, str]]:
    """(file, line, function) of each frame."""
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walk]


def _place(calls: Sequence[tuple[str, int, str]]) -> tuple[str, str]:
    """Our innermost call, and torch.distributed's function, from frames innermost first."""
    distributed = [name for file, _, name in calls if _DISTRIBUTED in file]
    public = [n for file, _, n in calls if file.endswith(_COLLECTIVES) and not n.startswith("_")]
    collective = next(iter(public or distributed), "")
    ours = [call for call in calls if call[0].startswith(_PACKAGE + os.sep)]
    stages = [call for call in ours if not call[0].startswith(_THIN)]
    library = sysconfig.get_path("stdlib")
    foreign = (library, "<", *_THIN)
    others = [call for call in calls if _TORCH not in call[0] and not call[0].startswith(foreign)]
    chosen = next(iter(stages or others or ours), None)
    if chosen is None:
        return "", collective
    file, line, name = chosen
    is_ours = file.startswith(_PACKAGE)
    file = os.path.relpath(file, os.path.dirname(_PACKAGE)) if is_ours else os.path.basename(file)
    return f"{file}:{line} ({name})", collective


def _store_of_the_ranks() -> Store:
    """A new connection to the store that the launcher's environment names."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=_STORE_SECONDS),
    )
    return PrefixStore(watch_prefix(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), store)


def watch_prefix(attempt: str) -> str:
    """The prefix of one attempt's notes in the store."""
    return f"tandem/watch/{attempt}"
