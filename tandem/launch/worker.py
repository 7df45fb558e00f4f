"""What a launched rank runs: `python -m tandem.launch.worker (-m MODULE | SCRIPT) ARGS`.

It is killed with its launcher, reports failures, and otherwise is the program that it runs.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import sys

from tandem.errors import Stopped
from tandem.launch.failure import LOG_FILE, complain, leaving_at_signals
from tandem.process import LAUNCHER, die_with_parent
from tandem.stopping import let_through
from tandem.text import named_line


def main() -> int:
    """Run the program; returns its exit code."""
    die_with_parent(int(os.environ[LAUNCHER]))
    with leaving_at_signals():
        let_through()
        # A crash in C++ leaves at least the Python calls that led there.
        log = open(os.environ[LOG_FILE], "a", encoding="utf-8")  # noqa: SIM115 as long as we live
        faulthandler.enable(file=log)
    sys.argv = sys.argv[1:]
    try:
        if sys.argv[0] == "-m":
            sys.argv = sys.argv[1:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception as error:
        return complain(named_line(error), 1, error)
    except Stopped as stopped:
        return complain(f"{stopped}.", stopped.exit_code, stopped)
    except KeyboardInterrupt as error:
        return complain("stopped", 130, error)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
