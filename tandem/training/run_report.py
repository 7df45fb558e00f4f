"""When a run's report is written: at its end, and where something stops it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.errors import Stopped, TandemError
from tandem.metrics.report import write_report
from tandem.training.callbacks import CallbackStop
from tandem.training.run_folder import Run


def report(run: Run) -> None:
    """Write the report and say where it is; on the first rank."""
    if run.world.is_first:
        run.print_line(f"report: {write_report(run.path)}")


@contextmanager
def report_at_a_stop(run: Run) -> Iterator[None]:
    """Write a report of what there is where a signal or a callback stops the block.

    On several ranks it only says how to: one that waits for the report could be waited for, or
    ended by the launcher, as a signal before a step does not reach all of them.
    """
    try:
        yield
    except (Stopped, CallbackStop):
        later = f"tandem report {shlex.quote(str(run.path))}"
        if run.world.size > 1:
            run.print_line(f"report: {later} writes it")
            raise
        try:
            report(run)
        except (TandemError, OSError) as error:  # nothing that the stop should fail for
            run.print_line(f"report: not written: {str(error).rstrip('.')}. {later} writes it")
        raise
