"""Real sockets: clients that leave, half-close, read slowly or speak no HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tandem.serve import connection
from tests.serve.serving import Running, ask

SECONDS = 120.0


@pytest.fixture(scope="module")
def server(served_run: Path) -> Iterator[Running]:
    running = Running(served_run, slots=4, max_queue=4, max_context=256)
    yield running
    running.close()


def until(is_so: Callable[[], bool]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def endless(**more: Any) -> dict[str, Any]:
    """An answer of the most tokens that there is room for."""
    return ask(max_tokens=200, ignore_eos=True, **more)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["close", "half-close", "reset"])
def test_a_client_that_leaves_frees_its_slot(server: Running, stream: bool, way: str) -> None:
    with closing(server.send(endless(stream=stream, n=3))) as connection:
        if stream:
            assert connection.recv(10).startswith(b"HTTP/1.1 2")
        if way == "half-close":
            connection.shutdown(socket.SHUT_WR)
        elif way == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if way != "half-close":
            connection.close()
        until(server.is_free)


def test_a_full_queue_is_told_with_a_time_and_frees_again(server: Running) -> None:
    waiting = [server.send(endless(n=2, stream=True, seed=i)) for i in range(4)]
    until(lambda: server.service.outstanding == 8)
    with closing(server.send(ask())) as connection:
        answer = b"".join(iter(lambda: connection.recv(4000), b"")).decode()
    assert answer.startswith("HTTP/1.1 429")
    assert "retry-after: " in answer.lower()
    assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["code"] == "rate_limit_exceeded"
    for connection in waiting:
        connection.close()
    until(server.is_free)


def test_a_slow_reader_holds_nobody_up(server: Running) -> None:
    with closing(server.send(endless(stream=True, logprobs=True, top_logprobs=20))):
        with closing(server.send(ask())) as quick:
            assert quick.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: server.service.engine.num_running == 0)
    until(server.is_free)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(server: Running, sent: bytes) -> None:
    with closing(server.connect()) as connection:
        connection.sendall(sent)
        try:
            answer = connection.recv(1000)
        except ConnectionResetError:
            answer = b""
    assert answer == b"" or b" 40" in answer.splitlines()[0]
    with closing(server.send(ask())) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_a_reader_that_takes_nothing_for_long_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_WRITE_SECONDS", 0.05)
    closed, released = [], []

    async def chunks() -> AsyncIterator[dict[str, Any]]:
        try:
            while True:
                yield {"a": 1}
        finally:
            closed.append(True)

    async def release() -> None:
        released.append(True)

    async def never() -> Any:
        await asyncio.Event().wait()

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 3:
            await never()

    asyncio.run(connection.EventStream(chunks(), release)({"type": "http"}, never, send))
    assert closed == released == [True]
    assert len(sent) == 4
