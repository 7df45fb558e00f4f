"""Limits on the time and memory of a chat template, which is a program that came with a model.

Its sandbox keeps it away from files and code, but not from running forever or making a string of
gigabytes, which one operation can do and no timer can interrupt. So a template first renders a few
conversations in a separate process with system limits, the one on memory where the system has one
(macOS does not); after that every rendering has a deadline.
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
from itertools import product
from types import FrameType
from typing import TYPE_CHECKING, Any

from tandem.errors import DataError, ModelError
from tandem.process import lower_limit

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

_CPU_SECONDS = 10
_MEMORY_BYTES = 2**30
_RENDER_SECONDS = 30.0
_TRIED = 8
"""Turns of the longest trial conversation."""


def require_bounded(
    source: str, name: str, advice: str = "Give the tokenizer another chat_template."
) -> None:
    """Try a template in a process with limits.

    Args:
        name, advice: the template's, for the error.
    Raises:
        ModelError: it takes more than 10 s of CPU time or 1 GiB.
    """
    if reason := _excess(source):
        raise ModelError(
            f"{name} must render a short conversation within {_CPU_SECONDS} s and "
            f"{_MEMORY_BYTES >> 20} MiB; got {reason}. {advice}"
        )


@lru_cache(maxsize=64)
def _excess(source: str) -> str:
    """The limit that a template exceeded, or "". Other errors are reported when it is used."""
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
    """Render conversations of 1 to 8 turns, without tools and with one, with the template on stdin,
    within the limits."""
    source = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_AS, memory_bytes)
    lower_limit(resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1)
    environment = sandbox()
    roles = ("user", "assistant") * _TRIED
    try:
        template = environment.from_string(source)
    except MemoryError:
        raise
    except Exception:
        template = environment.from_string("")
    parameters = {"type": "object", "properties": {"hello": {"type": "string"}}}
    function = {"name": "hello", "description": "hello", "parameters": parameters}
    systems: Any = ([], [{"role": "system", "content": "hello"}])
    for tools, system in product((None, [{"type": "function", "function": function}]), systems):
        for n in range(1, _TRIED + 1):
            turns = [*system, *({"role": role, "content": "hello"} for role in roles[:n])]
            try:
                template.render(
                    messages=turns,
                    tools=tools,
                    add_generation_prompt=roles[n - 1] == "user",
                    bos_token="<s>",
                    eos_token="</s>",
                    unk_token="<unk>",
                    pad_token="<pad>",
                )
            except MemoryError:
                raise
            except Exception:  # refusing turns is fine
                continue
    sys.stdout.write("bounded")


def sandbox() -> ImmutableSandboxedEnvironment:
    """Where a template is rendered.

    The environment is that of transformers, as far as the limits depend on it.
    """
    from jinja2 import TemplateError, ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """The `generation` tag around the assistant's words."""

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

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.globals.update(raise_exception=raise_exception, strftime_now=str)
    return environment


class _OvertimeError(BaseException):
    """A rendering took too long. Not an Exception, so that no `except Exception` catches it."""


_armed = False


@contextmanager
def deadline() -> Iterator[None]:
    """Stop the block after 30 s.

    This uses the process's alarm, which is only available to the main thread and may already be in
    use; without it there is no deadline.

    Raises:
        TimeoutError: the block took longer.
    """
    global _armed
    if _armed or threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGALRM)
    if handler not in (signal.SIG_DFL, _ring):
        yield
        return
    if handler is not _ring:
        signal.signal(signal.SIGALRM, _ring)
    try:
        _armed = True
        signal.setitimer(signal.ITIMER_REAL, _RENDER_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _OvertimeError:  # in the block, or just after its end
        raise TimeoutError(f"no end after {_RENDER_SECONDS:g} s") from None
    finally:
        _armed = False


def _ring(number: int, frame: FrameType | None) -> None:
    if _armed:
        raise _OvertimeError


@contextmanager
def in_time(where: str) -> Iterator[None]:
    """Within: a `deadline` for the turns of a row; `where` it came from.

    Raises:
        DataError: it has passed.
    """
    try:
        with deadline():
            yield
    except TimeoutError as error:
        raise DataError(
            f"{where}: turns must render in time; got {error} of the chat template. Remove this "
            "row, or use another chat_template."
        ) from error
