"""`tandem serve`: checks, one line on the models and their memory, then uvicorn until Ctrl-C."""

from __future__ import annotations

import asyncio
import errno
import gc
import ipaddress
import logging
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import Any

import uvicorn

from tandem.config.recorded import is_gone
from tandem.errors import ConfigError
from tandem.generation.blocks import free_bytes
from tandem.serve.api_errors import ApiError
from tandem.serve.app import make_app
from tandem.serve.idle import HEAD_SECONDS, LimitedProtocol
from tandem.serve.loading import check_there, weight_bytes
from tandem.serve.service import ServeSettings, Service, load_settings
from tandem.serve.sources import unfinished_stages
from tandem.text import visible

_FILES = 10_240
"""Open files that are asked for where the limit is infinite, which some systems do not grant."""


def serve(settings: ServeSettings, port: int, print_line: Callable[[str], None] = print) -> int:
    """Serve until a signal, which is raised again once all is closed; returns the exit code.

    Raises:
        ConfigError: the address cannot be listened on.
        ModelError: the path offers no model, or the preferred one cannot be loaded.
    """
    service = Service(settings, load_settings(settings))
    try:
        check_there(service.offer.models[service.offer.preferred], service.load_settings)
        listener = _listen(settings.host, port)
        _allow_connections()
        for line in describe(service):
            print_line(line)
        with listener:
            ended_by = _run(service, listener, print_line)
    finally:
        service.close()
    if ended_by:
        signal.raise_signal(ended_by)
    return 0


def describe(service: Service) -> list[str]:
    """The models and the memory that they take, as lines for the terminal."""
    offer, load = service.offer, service.load_settings
    scorers = [scorer for scorer in (offer.reward_model, offer.critic) if scorer is not None]
    device = load.place.device
    kind = load.place.weights
    sizes = [weight_bytes(source, load, quantizes=True) for source in offer.models.values()]
    sizes += [weight_bytes(source, load, quantizes=False) for source in scorers]
    known = [size for size in sizes if size is not None]
    free = free_bytes(device)
    dtypes = sorted({str(dtype).removeprefix("torch.") for _, dtype in known})
    total = f"{_size(sum(size for size, _ in known))}{' and more' * (len(known) < len(sizes))}"
    total = total if known else "an unknown size"
    kinds = [*dtypes, kind] if kind else dtypes
    in_types = f" as {' and '.join(kinds)}" if dtypes else ""
    of, when = "of the model take", "loaded now"
    if len(sizes) > 1:
        of, when = f"of all {len(sizes)} models take", "each loaded when first asked for"
    names = ", ".join(offer.models)
    lines = [f"models: {names} (without a name: {offer.preferred})"]
    lines += [f"scores: {', '.join(scorer.name for scorer in scorers)}"] if scorers else []
    lines.append(
        f"memory: weights {of} {total}{in_types} on {device.type}, {when}; KV memory comes on "
        f"top, of {_size(free)} free"
    )
    votes = service.votes_file
    lines.append(f"votes:  {votes}" if votes else "votes:  refused without --votes FILE")
    lines += _gone(service)
    return [visible(line) for line in lines + _unfinished(service) + _short_judges(service)]


def _gone(service: Service) -> list[str]:
    """A line if the run's base is nowhere."""
    gone = service.offer.gone
    if not gone:
        return []
    where = f"not at {gone}" if is_gone(gone) else f"{gone}, no folder here and not in the hub"
    line = f"warning: the run's base model is {where}: it is not offered, and there is no "
    return [f"{line}kl to it (--base MODEL says where it is)"]


def _unfinished(service: Service) -> list[str]:
    """A line for each stage of the run that is not finished."""
    offer = service.offer
    if offer.run is None or offer.config is None:
        return []
    return [
        f"note:   {name} is not finished{f': {step} answers' * (name in offer.models)}; the same "
        "tandem train command finishes it"
        for name, step in unfinished_stages(offer.run, offer.config).items()
    ]


def _short_judges(service: Service) -> list[str]:
    """A line for each judge that cannot read the longest answers."""
    offer, read = service.offer, cache(service.context_of)
    written = {name: read(source) for name, source in offer.models.items()}
    if not written:
        return []
    longest = max(written, key=lambda name: (written[name], name == offer.preferred))
    pairs = [
        (scorer, role, number, longest)
        for scorer, role, number in (
            (offer.reward_model, "reward model", "reward"),
            (offer.critic, "critic", "values"),
        )
        if scorer is not None
    ]
    pairs += [
        (offer.models[source.reference], f"reference {source.reference}", "kl", name)
        for name, source in offer.models.items()
        if source.reference in offer.models
    ]
    return [
        f"warning: the {role} reads at most {read(judge)} tokens of prompt and answer, {policy} "
        f"writes up to {written[policy]}: longer ones get no {number}"
        for judge, role, number, policy in pairs
        if read(judge) < written[policy]
    ]


class _Server(uvicorn.Server):
    """Uvicorn's server, which would raise its signals again inside the loop, where they break off
    what its last tasks have to say. Attributes: ended_by: the first signal, 0 before one."""

    ended_by = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends the server; after it, Ctrl-C does not wait for answers."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
        self.ended_by = self.ended_by or sig


class _Full:
    """Says once that the system allows no further connection, of which asyncio would log hundreds
    of tracebacks a second."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print_line, self._is_told = print_line, False

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What asyncio calls with an error that nobody handles."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
        elif not self._is_told:
            self._is_told = True
            self._print_line(
                "warning: there are as many connections as the system lets this process have "
                "(ulimit -n); further clients wait until some end"
            )


def _allow_connections() -> None:
    """Let this process have as many open files, connections among them, as it may."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(now, _FILES) if most == resource.RLIM_INFINITY else most
    with suppress(ValueError, OSError):  # the system has a limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _run(service: Service, listener: socket.socket, print_line: Callable[[str], None]) -> int:
    """Serve until a signal; returns its number, 0 if there was none."""
    settings = service.settings
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    config = uvicorn.Config(
        make_app(service),
        http=LimitedProtocol,
        ws="none",  # else a library that happens to be installed decides what an Upgrade gets
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(HEAD_SECONDS),
        timeout_graceful_shutdown=5,
        limit_concurrency=None,
        lifespan="off",  # the service is closed after the loop, also if Ctrl-C comes twice
        h11_max_incomplete_event_size=64 * 1024,
    )
    logging.getLogger("uvicorn.error").addFilter(_printable)
    server = _Server(config)

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(_Full(print_line).handle)
        try:
            await service.policy("")  # a model that cannot be used is told now
        except ApiError as error:
            raise ConfigError(str(error)) from error
        # Else a search for garbage, which all streams wait for, walks through torch and the models.
        gc.collect()
        gc.freeze()
        print_line(
            f"page:   http://{shown}:{port}/   API: http://{shown}:{port}/v1   (Ctrl-C ends)"
        )
        if not _is_private(host) and not settings.api_key:
            print_line("note:   anyone who reaches this address may use it; see --api-key")
        await server.serve(sockets=[listener])

    asyncio.run(run())
    return server.ended_by


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        is_elsewhere = isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL
        if is_elsewhere or isinstance(error, socket.gaierror):
            raise ConfigError(
                f"--host must be an address of this machine; got {visible(host)} ({error}). Use "
                "127.0.0.1, or 0.0.0.0 for all its networks."
            ) from None
        raise ConfigError(
            f"--host and --port must be an address that is free; got {visible(host)} {port} "
            f"({error}). Use another --port; 0 takes any."
        ) from None
    listener.listen(256)
    return listener


def _is_private(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _printable(record: logging.LogRecord) -> bool:
    """Log lines of one printable line each, whatever a client sent."""
    record.msg, record.args = visible(record.getMessage()), ()
    return True


def _size(size: int) -> str:
    """Bytes in the unit that shows two or more digits."""
    for unit, bytes_of in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= bytes_of:
            return f"{size / bytes_of:.2f} {unit}"
    return f"{size / 2**10:.0f} KiB"
