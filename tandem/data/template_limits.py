"""Limits on what a chat template may take: it is a program that came with a model.

Its sandbox keeps it from files and code, but not from running for ever or from making a string of
gigabytes, which one operation can do and no clock can interrupt. So a template first renders a few
conversations in a process of its own, which the system stops at its limits; after that every
rendering has a deadline.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

from tandem.errors import ModelError

_CPU_SECONDS = 10
_MEMORY_BYTES = 2**30
_RENDER_SECONDS = 30.0
_TRIED = 8
"""Turns of the longest conversation that a template is tried on."""


def require_bounded(source: str, name: str) -> None:
    """Try a template where it can do no harm.

    Args:
        name: whose template it is, for the message.
    Raises:
        ModelError: it takes more than 10 s of a processor or 1 GiB.
    """
    if reason := _excess(source):
        raise ModelError(
            f"{name} must render a short conversation within {_CPU_SECONDS} s and "
            f"{_MEMORY_BYTES >> 20} MiB; got {reason}. Give the tokenizer another chat_template."
        )


@lru_cache(maxsize=64)
def _excess(source: str) -> str:
    """What a template ran out of, or "". Its other errors are seen where it is used."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import try_template; "
        f"try_template({_CPU_SECONDS}, {_MEMORY_BYTES})"
    )
    tried = subprocess.run(
        [sys.executable, "-P", "-c", code],
        input=source.encode("utf-8", "surrogatepass"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if tried.returncode == -signal.SIGXCPU:
        return "no end"
    if tried.returncode or tried.stdout != b"bounded":
        return "more memory"
    return ""


def try_template(cpu_seconds: int, memory_bytes: int) -> None:
    """Render conversations of 1 to 8 turns of the template on stdin, within the limits.

    The environment is transformers', but for what no limit depends on.
    """
    from jinja2 import TemplateError, ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """The tag around the assistant's words."""

        tags = {"generation"}  # noqa: RUF012, jinja's own

        def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
            """Its body."""
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(
                ("name:endgeneration",), drop_needle=True
            )
            return body

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    source = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.globals.update(raise_exception=raise_exception, strftime_now=str)
    roles = ("user", "assistant") * _TRIED
    try:
        template = environment.from_string(source)
    except MemoryError:
        raise
    except Exception:
        template = environment.from_string("")
    for system in ([], [{"role": "system", "content": "hello"}]):
        for n in range(1, _TRIED + 1):
            turns = [*system, *({"role": role, "content": "hello"} for role in roles[:n])]
            try:
                template.render(
                    messages=turns,
                    add_generation_prompt=roles[n - 1] == "user",
                    bos_token="<s>",
                    eos_token="</s>",
                    unk_token="<unk>",
                    pad_token="<pad>",
                )
            except MemoryError:
                raise
            except Exception:  # what it does not accept is no excess
                continue
    sys.stdout.write("bounded")


class _OvertimeError(BaseException):
    """A rendering did not end in time. No `except Exception` on the way may take it."""


_armed = False


@contextmanager
def deadline() -> Iterator[None]:
    """Within: what has not ended after 30 s is stopped.

    That takes the process's alarm, which only its main thread can use and which may be in use
    already; without it there is no deadline.

    Raises:
        TimeoutError: it has not ended.
    """
    global _armed
    usable = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, _ring)
    )
    if not usable or _armed:
        yield
        return
    signal.signal(signal.SIGALRM, _ring)
    try:
        _armed = True
        signal.setitimer(signal.ITIMER_REAL, _RENDER_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _OvertimeError:  # out of the block, or just after its end
        raise TimeoutError(f"no end after {_RENDER_SECONDS:g} s") from None
    finally:
        _armed = False


def _ring(number: int, frame: FrameType | None) -> None:
    if _armed:
        raise _OvertimeError
