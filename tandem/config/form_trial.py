"""The trial of a form in a process of its own, with system limits.

llguidance limits most of its work itself, but neither its recursion, which may overflow the stack
and end the process, nor the comparison of each pattern or choice with all others. So a form is
first read in a process that may fail.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

_CPU_SECONDS = 2
_LIMITS = {
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_AS: 2**30,
    resource.RLIMIT_STACK: 2**20,  # half of the least that a thread has
    resource.RLIMIT_CPU: _CPU_SECONDS,
}
_KEPT = 64
_ROOT = str(Path(__file__).resolve().parents[2])


def tried(grammars: str, limits: Mapping[str, Any]) -> str:
    """What is wrong with llguidance's grammars, as JSON; "" if they can be followed.

    Args:
        limits: llguidance's, by name.
    """
    return _tried(grammars, json.dumps(limits))


@lru_cache(maxsize=_KEPT)
def _tried(grammars: str, limits: str) -> str:
    from llguidance import _lib

    code = (
        f"import sys; sys.path.append({_ROOT!r}); from {__name__} import try_form; "
        f"try_form({_lib.__file__!r}, {limits!r})"
    )
    trial = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        input=grammars.encode("utf-8", "surrogatepass"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if trial.returncode == -signal.SIGXCPU:
        return f"one that takes more than {_CPU_SECONDS} s to read"
    if trial.returncode:
        return "one that is nested too deep or too large, or a keyword's value of a wrong kind"
    return trial.stdout.decode()


def try_form(library: str, limits: str) -> None:
    """Read the grammars on stdin within the limits, and print what is wrong with them.

    Args:
        library: llguidance's extension module: the package around it takes longer than a form.
    """
    grammars = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    for kind, most in _LIMITS.items():
        _, allowed = resource.getrlimit(kind)
        with suppress(ValueError, OSError):  # macOS takes none on memory
            resource.setrlimit(
                kind, (most if allowed == resource.RLIM_INFINITY else min(most, allowed), allowed)
            )
    spec = spec_from_file_location("llguidance._lib", library)
    assert spec is not None
    assert spec.loader is not None
    loaded = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    is_error, said = loaded.LLMatcher.validate_grammar_with_warnings(
        grammars, limits=loaded.LLParserLimits(**json.loads(limits))
    )
    sys.stdout.buffer.write(said[0].encode() if is_error else b"")
