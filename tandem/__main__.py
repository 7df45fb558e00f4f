"""`python -m tandem` and the `tandem` command: signal handlers first, then slow imports."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from types import FrameType

from tandem.garbage import leave_garbage
from tandem.stopping import handling


def main() -> int:
    """Run the command; returns its exit code."""
    _open_closed_streams()
    _wait_briefly()
    # These imports may take seconds, and Ctrl-C during them would print a traceback.
    with handling(_leave):
        from tandem.cli import main as command
    atexit.register(leave_garbage)
    return command()


def _open_closed_streams() -> None:
    """Put the null device in the place of standard streams that are closed, as services and cron
    may start a command: Python has None for them, and the next file would get their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)  # of a child, too
            setattr(sys, name, stream)


def _wait_briefly() -> None:
    """Have threads that wait for others sleep soon; before torch is loaded, whose OpenMP reads it.

    By itself GNU's looks for 300,000 turns whether there is work. Where another process wants the
    core, a thread that looks has used up its share of it by the time there is some.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit at once, with one line: nothing has started."""
    name = signal.Signals(number).name
    os.write(2, f"tandem: stopped by {name} before anything started.\n".encode())
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
