"""How a rank reports a failure to its launcher: through a pipe, which no full disk closes.

Without a launcher the same call prints the line.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from tandem.config.stages import stage_names
from tandem.errors import RankError, Stopped, TandemError
from tandem.files import existing, way_out
from tandem.process import is_launched
from tandem.stopping import STOPPING, handling, put_off
from tandem.text import visible

FAILURE_PIPE = "TANDEM_FAILURE_PIPE"
"""Names the descriptor that takes a launched rank's failure."""
LOG_FILE = "TANDEM_LOG_FILE"
"""Names the rank's log, where tracebacks go."""
Kind = Literal["error", "crash", "lost", "stopped"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank exited.

    kind: error (the user can fix it), crash (any other exception), lost (a collective broke, so
    another rank is the cause) or stopped (by a signal).
    time: seconds since the epoch. code: the exit code.
    """

    kind: Kind
    line: str
    code: int
    time: float


def complain(line: str, code: int, error: BaseException | None = None) -> int:
    """Show one line to the user, through the launcher if there is one; returns `code`.

    Args:
        error: what was caught; its traceback goes to the rank's log.
    """
    line = visible(line)  # names in it may come from anyone
    if is_launched():
        leave_failure(kind_of(error), line, code, error)
        return code
    size = os.environ.get("WORLD_SIZE", "1")
    is_named = size not in ("", "1") and "RANK" in os.environ
    rank = visible(f"rank {os.environ['RANK']} of {size}: ") if is_named else ""
    print(f"tandem: {rank}{line}", file=sys.stderr)
    return code


def place_of(error: OSError) -> str:
    """What an OSError is about: its file; without one standard output, where that takes nothing, or
    the working folder, where that is gone."""
    if error.filename:
        return str(error.filename)
    try:
        # Python 3.14 forgets what it could not write, so that there must be something to write.
        print(end="" if sys.stdout.isatty() else "\n", flush=True)
    except OSError as found:
        if found.errno == error.errno:
            return "standard output"
    try:
        os.getcwd()
    except OSError:
        return "the working folder"
    return "a file"


def disk_line(error: OSError, args: Sequence[str]) -> str:
    """What an OSError that ended the command `args` is; where a disk is full, with how much is free
    and how the command goes on then."""
    line = f"{place_of(error)}: {error.strerror or error}"
    where = error.filename
    if not isinstance(where, str | bytes) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return line
    free = ""
    with suppress(OSError):  # what lies above it may be closed to us
        free = f" ({shutil.disk_usage(existing(Path(os.fsdecode(where)))).free:,} bytes free)"
    return f"{line}{free}. {way_out(error)}. {going_on(args)}".rstrip()


@contextmanager
def leaving_at_signals() -> Iterator[None]:
    """Within: a stopping signal ends this process at once, with one line and its code.

    Used before a run handles signals: an exception raised while modules are imported may be lost.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        stopped = Stopped(number, "before a step was running")
        code = complain(f"{stopped}. The same command continues.", stopped.exit_code, stopped)
        sys.stderr.flush()
        os._exit(code)

    with handling(leave):
        yield


def going_on(args: Sequence[str], at: str = "") -> str:
    """How a command that was stopped goes on, in a sentence; "" where there is nothing to do.

    Args:
        at: where one that trains does.
    """
    command = args[0] if args else ""
    if command in ("train", *stage_names(), "demo"):
        return f"The same command continues{at}; finished stages are kept."
    if command == "serve":
        return ""
    kept = {
        "sample": "continues",
        "sweep": "continues; finished cases are kept",
        "vote": "continues; votes are kept",
        "chat": "starts over; /save keeps a conversation",
    }
    return f"The same command {kept.get(command, 'starts over')}."


@contextmanager
def raising_stops(going_on: str) -> Iterator[None]:
    """Within: the stopping signals raise `Stopped`, as Ctrl-C by itself raises `KeyboardInterrupt`,
    so that what was started is ended on the way out.

    An import may lose an exception or make another one of it: there the process ends at once.

    Args:
        going_on: how the command continues, for the line that is shown then.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        stopped = Stopped(number, "before it was done")
        if _is_importing(frame):
            code = complain(f"{stopped}. {going_on}", stopped.exit_code, stopped)
            sys.stderr.flush()
            os._exit(code)
        if not put_off(number, frame):
            raise stopped

    with handling(stop, [number for number in STOPPING if number != signal.SIGINT]):
        yield


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def leave_failure(kind: Kind, line: str, code: int, error: BaseException | None = None) -> None:
    """Tell the launcher this rank's failure, and write its traceback to the rank's log."""
    if error is not None and LOG_FILE in os.environ:
        # The log is in the run's folder: on a full disk the line must still be shown.
        with suppress(OSError), open(os.environ[LOG_FILE], "a", encoding="utf-8") as log:
            log.write("".join(traceback.format_exception(error)))
    said = json.dumps(asdict(Failure(kind, line, code, time.time()))) + "\n"
    with suppress(BrokenPipeError):  # the launcher is gone, and this process ends with it
        os.write(int(os.environ[FAILURE_PIPE]), said.encode())


class Reports:
    """The pipe of one rank's failure, as its launcher holds it.

    Attributes:
        write_end: for the rank's process; the launcher closes its own once that has started.
    """

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._said = b""

    def newest(self) -> Failure | None:
        """The rank's failure so far, None if it reported none."""
        with suppress(BlockingIOError):
            while self._read_end >= 0 and (part := os.read(self._read_end, 2**16)):
                self._said += part
        *whole, _ = self._said.split(b"\n")  # a rank may be killed while it reports
        return Failure(**json.loads(whole[-1])) if whole else None

    def close(self) -> None:
        """Read what is there; nothing comes after it."""
        self.newest()
        if self._read_end >= 0:
            os.close(self._read_end)
        self._read_end = -1


def kind_of(error: BaseException | None) -> Kind:
    """What sort of failure an exception is."""
    if isinstance(error, RankError):
        return "lost"
    if isinstance(error, KeyboardInterrupt | Stopped):
        return "stopped"
    if isinstance(error, ConnectionError | TimeoutError):  # temporary OSErrors
        return "crash"
    return "error" if isinstance(error, TandemError | OSError) else "crash"
