"""How ranks ended: which one is the cause, and the message that says so."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.launch.failure import Failure
from tandem.text import visible

_LAST_BYTES = 4096
_NOTICED_AFTER = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one rank ended, before its launcher stopped it.

    code: exit code, negative for a signal; None if it was still running when the others stopped.
    failure: its report. seen: when its end was noticed, in seconds since the epoch.
    """

    rank: int
    host: str
    log: Path
    log_start: int
    code: int | None
    failure: Failure | None
    seen: float

    @property
    def failed_by_itself(self) -> bool:
        """Whether it failed for a reason of its own."""
        if self.failure is not None:
            return self.failure.kind in ("error", "crash")
        return self.code not in (None, 0)

    @property
    def time(self) -> float:
        """When it failed, as far as known: an end is noticed a little late."""
        return self.seen - _NOTICED_AFTER if self.failure is None else self.failure.time


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to tell the user.

    is_certain: the cause is known, not only who waited for it.
    can_retry: a restart may help; not if the user has something to fix.
    """

    line: str
    code: int
    time: float
    is_certain: bool
    can_retry: bool

    def to_json(self) -> str:
        """For the launchers of other nodes."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Verdict:
        """What another launcher sent."""
        return Verdict(**json.loads(text))


def judge(
    endings: Sequence[Ending], places: Mapping[int, str] | None = None, silent: Sequence[str] = ()
) -> Verdict:
    """The verdict over one node's ranks.

    The first that failed by itself is the cause; those whose collectives broke come after it. An
    error that all ranks share is shown once, without a rank.

    Args:
        places: where ranks without a report were last seen.
        silent: phrases on ranks that stopped writing notes, from `watchdog.blame`.
    """
    # The launcher ends the others by SIGTERM, on a busy machine before it has seen why.
    own = sorted(
        (e for e in endings if e.failed_by_itself),
        key=lambda ending: (ending.code == -signal.SIGTERM, ending.time),
    )
    if own:
        return _blame(own[0], endings, places or {}, silent)
    lost = sorted(
        (e for e in endings if e.failure and e.failure.kind == "lost"), key=lambda e: e.time
    )
    if lost:
        failure = lost[0].failure
        assert failure is not None
        line = f"{failure.line}. Log: {lost[0].log}"
        return Verdict(line, failure.code, failure.time, is_certain=False, can_retry=True)
    stopped = [e for e in endings if e.failure and e.failure.kind == "stopped"]
    return _stopped([e.failure for e in stopped if e.failure], [e.rank for e in stopped])


def _stopped(said: Sequence[Failure], ranks: Sequence[int]) -> Verdict:
    """A signal reached ranks and not the launcher: their line and code."""
    told = next((failure for failure in said if failure.line.startswith("stopped by")), None)
    if told is not None:
        return Verdict(told.line, told.code, told.time, is_certain=False, can_retry=False)
    names = ", ".join(map(str, ranks)) or "unknown"
    return Verdict(f"rank {names} was stopped", 130, 0.0, is_certain=False, can_retry=False)


def _blame(
    first: Ending, endings: Sequence[Ending], places: Mapping[int, str], silent: Sequence[str]
) -> Verdict:
    failure = first.failure
    name = f"rank {first.rank} on {first.host}"
    if failure is not None:
        is_error = failure.kind == "error"
        lines = {e.failure.line for e in endings if e.failure and e.failure.kind == "error"}
        is_shared = is_error and len(lines) == 1 and all(e.failed_by_itself for e in endings)
        line = failure.line if is_shared else f"{name}: {failure.line}"
        if not is_error:
            line += f". Log: {first.log}"
        return Verdict(line, failure.code, first.time, is_certain=True, can_retry=not is_error)
    code = first.code or 1
    if code > 0:
        said = last_line(first.log, first.log_start)
        line = f"{name} left with exit code {code}{f': {said}' if said else ''}"
    else:
        line = f"{name} was killed by {_signal_name(-code)}"
        if -code == signal.SIGKILL:
            line += " (out of memory, or by hand)"
        if first.rank in places:
            line += f"; it was last in {places[first.rank]}"
        # Torch aborts a rank whose GPU collective took too long; a third rank is the cause.
        if -code == signal.SIGABRT and silent:
            line += f", and waited for {'; '.join(silent)}"
    exit_code = 128 - code if code < 0 else code
    return Verdict(f"{line}. Log: {first.log}", exit_code, first.time, True, can_retry=True)


def last_line(log: Path, start: int = 0) -> str:
    """The last line that a rank wrote to its log after byte `start`, made safe to print."""
    try:
        size = log.stat().st_size
        with log.open("rb") as file:
            file.seek(max(start, size - _LAST_BYTES))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:  # no log, so nothing to quote
        return ""
    said = lines[-1].strip() if lines else ""
    return visible(said)[:300]


def _signal_name(number: int) -> str:
    names: Mapping[int, str] = {member.value: member.name for member in signal.Signals}
    return names.get(number, f"signal {number}")
