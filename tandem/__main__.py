"""`python -m tandem` and the `tandem` command: signals first, then what takes time to import."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from tandem.stopping import handling


def main() -> int:
    """Run the command; returns its exit code."""
    # A machine may take seconds over these imports, and an exception in the middle of them would be
    # a traceback.
    with handling(_leave):
        from tandem.cli import main as command
    return command()


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once, with one line: nothing has begun."""
    name = signal.Signals(number).name
    os.write(2, f"tandem: stopped by {name} before anything was begun.\n".encode())
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
