"""The trial of a form in a process of its own, with system limits.

llguidance counts most of what it does and gives up in time. It does not count how deep it goes,
which ends the process that it runs in, nor the comparison of each pattern or choice with all
others. So a form is first read where this harms nobody.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache

from tandem.config import form_process
from tandem.errors import TandemError
from tandem.text import first_line, visible

_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGTRAP}
"""How a process ends whose stack or memory is at its limit; other signals come from outside."""
_MOST_SECONDS = 60.0
"""Of a process that waits, for a disk say: other forms and the end of a server wait for it."""
_KEPT = 64


class SlowFormError(Exception):
    """A form's trial took longer than was asked for; it may be tried again with more time."""


class _Trial:
    """Attributes: found: what `tried` returns; None before it is known. is_slow: it was ended."""

    found: str | None = None
    is_slow = False


def tried(grammars: str, limits: Mapping[str, object], seconds: float | None = None) -> str:
    """What is wrong with llguidance's grammars, as JSON; "" if they can be followed.

    Args:
        limits: llguidance's, by name.
        seconds: that this may take; None: as long as it must.
    Raises:
        SlowFormError: it took longer than `seconds`.
        TandemError: the process could not begin, or something else ended it.
    """
    given = json.dumps(limits)
    trial = _kept(grammars, given)
    if trial.is_slow and trial.found is None and seconds is not None:
        raise SlowFormError
    if trial.found is None:
        try:
            trial.found = _tried(grammars, given, seconds)
        except SlowFormError:
            trial.is_slow = True
            raise
    return trial.found


@lru_cache(maxsize=_KEPT)
def _kept(grammars: str, limits: str) -> _Trial:
    return _Trial()


def _tried(grammars: str, limits: str, seconds: float | None) -> str:
    from llguidance import _lib

    # By its file: what imports this package here may be a hook, which -S leaves out there.
    command = [sys.executable, "-I", "-S", form_process.__file__, str(_lib.__file__), limits]
    given = grammars.encode("utf-8", "surrogatepass")
    try:
        trial = subprocess.run(
            command, input=given, capture_output=True, check=False, timeout=seconds or _MOST_SECONDS
        )
    except subprocess.TimeoutExpired:
        if seconds is not None:
            raise SlowFormError from None
        raise _untried(f"no end of it in {_MOST_SECONDS:g} s") from None
    except OSError as error:
        raise _untried(first_line(error)) from None
    if trial.returncode == 0:
        return trial.stdout.decode()
    if trial.returncode == -signal.SIGXCPU:
        return f"one that takes more than {form_process.CPU_SECONDS} s to read"
    if trial.returncode == form_process.FAILED or -trial.returncode in _CRASHES:
        return "one that is nested too deep or too large, or a keyword's value of a wrong kind"
    said = trial.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    raise _untried(f"exit status {trial.returncode} {visible(said[:200])}".strip())


def _untried(found: str) -> TandemError:
    return TandemError(
        f"a form must be read in a process of its own, of {sys.executable}, before it is followed; "
        f"got {found}. Ask again, or look for what ends processes here."
    )
