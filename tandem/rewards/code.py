"""A reward for Python code: it runs against the row's unit tests, in a process of its own.

The process has a new session, an empty folder, limits of memory, time, files and processes, and
where the kernel allows it no network and a process namespace. This guards against accidents and
against answers that are only bad. It is no jail: code that is made to break out can read what the
user can read. Run untrusted models in a container or a virtual machine.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError
from tandem.process import die_with_parent
from tandem.rewards import limits
from tandem.rewards.running_clock import RunningClock

_FENCED = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_MOST_PROCESSES = 16
_POLL_SECONDS = 0.01
_HARNESS = """\
import sys
_token = sys.stdin.readline().strip()
_report = sys.stdout
sys.stdout = sys.stderr = open("/dev/null", "w")
with open("answer.py") as file:
    _program = file.read()
with open("tests.py") as file:
    _tests = file.read()
def _run(token, report, program, tests):
    names = {"__name__": "answer"}
    exec(compile(program, "answer.py", "exec"), names)
    exec(compile(tests, "tests.py", "exec"), names)
    report.write(token)
    report.flush()
_arguments = _token, _report, _program, _tests
del _token, _report, _program, _tests
_run(*_arguments)
"""


def reward(
    prompts: Sequence[str],
    completions: Sequence[str],
    tests: Sequence[Any],
    *,
    seconds: float = 3.0,
    memory_mb: int = 1024,
    **columns: Any,
) -> list[float | None]:
    """1.0 where the completion's code passes all of the row's tests, 0.0 where not.

    Args:
        tests: Python text, or a list of it, such as ["assert add(1, 2) == 3"]; it runs after the
            code, in the same names. A row without tests cannot be judged: None.
        seconds: for code and tests together; keep it below scoring.deadline_seconds.
        memory_mb: that the process may map.
    """
    scores: list[float | None] = []
    for completion, test in zip(completions, tests, strict=True):
        text = "\n".join(map(str, test)) if isinstance(test, list | tuple) else str(test or "")
        if not text.strip():
            scores.append(None)
            continue
        passed = passes(code_of(completion), text, seconds=seconds, memory_mb=memory_mb)
        scores.append(float(passed))
    return scores


def check_limits(*, seconds: float, memory_mb: int) -> None:
    """Check the options of `reward`.

    Raises:
        ConfigError: a limit that no code can keep.
    """
    for name, value in (("seconds", seconds), ("memory_mb", memory_mb)):
        if not 0 < value < math.inf:
            raise ConfigError(
                f"tandem:python_tests?{name} must be a number above 0; got {value:g}. Change it."
            )


reward.check_options = check_limits  # type: ignore[attr-defined]


def code_of(completion: str) -> str:
    """The last fenced code block of a completion; all of it where there is none."""
    blocks = _FENCED.findall(completion)
    return blocks[-1] if blocks else completion


def passes(code: str, tests: str, *, seconds: float, memory_mb: int) -> bool:
    """Whether the code runs and all of the tests after it do."""
    token = secrets.token_hex(16)  # that only the end of the tests can tell
    isolated = limits.can_isolate()
    parent = os.getpid()

    def restrict() -> None:
        die_with_parent(parent)
        limits.limit_program(
            memory_bytes=memory_mb * 2**20,
            seconds=seconds,
            file_bytes=2**24,
            processes=limits.num_running() + _MOST_PROCESSES,
        )
        if isolated and limits.isolate():
            _become_init()

    with tempfile.TemporaryDirectory(prefix="tandem-code-", ignore_cleanup_errors=True) as folder:
        Path(folder, "answer.py").write_text(code, "utf-8", "replace")
        Path(folder, "tests.py").write_text(tests, "utf-8", "replace")
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _HARNESS],
            cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={"PATH": "/usr/bin:/bin", "HOME": folder, "LC_ALL": "C.UTF-8"},
            start_new_session=True, preexec_fn=restrict,
        )  # fmt: skip
        with process:
            try:
                return _told(process, token, seconds)
            finally:
                _end(process)


def _told(process: subprocess.Popen[bytes], token: str, seconds: float) -> bool:
    """Whether the program tells the token and ends well in time."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.write(token.encode() + b"\n")
        process.stdin.close()
    clock = RunningClock()
    while process.poll() is None:
        if clock() > seconds:
            return False
        if limits.num_descendants(process.pid, _MOST_PROCESSES) > _MOST_PROCESSES:
            return False
        time.sleep(_POLL_SECONDS)
    os.set_blocking(process.stdout.fileno(), False)
    return process.returncode == 0 and process.stdout.read(64) == token.encode()


def _end(process: subprocess.Popen[bytes]) -> None:
    limits.kill_group(process.pid)
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)


def _become_init() -> None:
    """Go on in a child, the init of the new process namespace: all in it end with it. This process
    waits and ends as the child does."""
    child = os.fork()
    if child == 0:
        die_with_parent(0)  # the parent is in another namespace, where it has no number here
        return
    os.closerange(0, 1024)  # the pipe too that tells subprocess that the program has started
    status = os.waitpid(child, 0)[1]
    os._exit(0 if status == 0 else 1)
