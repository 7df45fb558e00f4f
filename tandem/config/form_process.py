"""The process in which a form is tried. It runs by this file's path and imports no package."""

from __future__ import annotations

import json
import resource
import sys
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location

CPU_SECONDS = 2
FAILED = 70
"""Exit status where llguidance raised. 1 is Python's, of a process that could not begin."""
_LIMITS = {
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_AS: 2**30,
    resource.RLIMIT_STACK: 2**20,  # half of the least that a thread has
    resource.RLIMIT_CPU: CPU_SECONDS,
}


def try_form(library: str, limits: str) -> None:
    """Read the grammars on stdin within the limits, and print what is wrong with them.

    Args:
        library: llguidance's extension module: the package around it takes longer than a form.
        limits: llguidance's, by name, as JSON.
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
    try:
        is_error, said = loaded.LLMatcher.validate_grammar_with_warnings(
            grammars, limits=loaded.LLParserLimits(**json.loads(limits))
        )
    except BaseException:  # a panic, or no memory
        sys.exit(FAILED)
    sys.stdout.buffer.write(said[0].encode() if is_error else b"")


if __name__ == "__main__":
    try_form(*sys.argv[1:])
