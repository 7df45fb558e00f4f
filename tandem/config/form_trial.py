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


def tried(grammars: str, limits: Mapping[str, object]) -> str:
    """What is wrong with llguidance's grammars, as JSON; "" if they can be followed.

    Args:
        limits: llguidance's, by name.
    Raises:
        TandemError: the process could not begin, or something else ended it.
    """
    return _tried(grammars, json.dumps(limits))


@lru_cache(maxsize=_KEPT)
def _tried(grammars: str, limits: str) -> str:
    from llguidance import _lib

    # By its file: what imports this package here may be a hook, which -S leaves out there.
    command = [sys.executable, "-I", "-S", form_process.__file__, str(_lib.__file__), limits]
    given = grammars.encode("utf-8", "surrogatepass")
    try:
        trial = subprocess.run(
            command, input=given, capture_output=True, check=False, timeout=_MOST_SECONDS
        )
    except subprocess.TimeoutExpired:
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
