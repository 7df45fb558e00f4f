"""When a run's report is written: at its end, and where something stops it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.errors import Stopped
from tandem.metrics.report import write_report
from tandem.text import named_line
from tandem.training.callbacks import CallbackStop
from tandem.training.run_folder import Run


def report(run: Run) -> None:
    """Write the report and say where it is; on the first rank."""
    if run.world.is_first:
        run.print_line(f"report: {write_report(run.path)}")


@contextmanager
def report_at_a_stop(run: Run) -> Iterator[None]:
    """Write a report of what there is where a signal, a callback or an error stops the block.

    After an error on several ranks it only says how to: the launcher ends the other ranks after the
    first one that failed, and does not wait for a report.
    """
    try:
        yield
    except (Stopped, CallbackStop):
        _report_or_say_how(run)
        raise
    except Exception:
        if not run.writes:  # its folder is gone
            pass
        elif run.world.size > 1:
            run.print_line(f"report: {_command(run)} writes it")
        else:
            _report_or_say_how(run)
        raise


def _report_or_say_how(run: Run) -> None:
    try:
        report(run)
    except Exception as error:  # nothing that may hide why the run stops
        why = named_line(error).rstrip(".")
        run.print_line(f"report: not written: {why}. {_command(run)} writes it")


def _command(run: Run) -> str:
    return f"tandem report {shlex.quote(str(run.path))}"
