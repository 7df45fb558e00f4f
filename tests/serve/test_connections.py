"""Real sockets: clients that leave, half-close, read slowly or speak no HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from asyncio import constants
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tandem.serve import connection
from tandem.serve.guard import Guard
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


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_counted_with_what_was_drawn_for_it(
    server: Running, stream: bool
) -> None:
    def count(name: str) -> float:
        page = server.service.counters.page({})
        found = [line for line in page.splitlines() if line.startswith(f"tandem_{name} ")]
        return float(found[0].rpartition(" ")[2]) if found else 0

    def is_counted() -> bool:
        """Whether it is; the server may have been done before the client left."""
        with closing(server.send(endless(stream=stream, n=3))) as connection:
            seen = b""
            while stream and seen.count(b"data: ") < 6:  # three openings come before any token
                part = connection.recv(1000)
                assert part, "the server closed the stream"
                seen += part
        until(server.is_free)
        return count("gone_total") > gone

    gone, drawn = count("gone_total"), count("completion_tokens_total")
    until(is_counted)
    assert count("completion_tokens_total") > drawn or not stream


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

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 3:
            await never()

    asyncio.run(connection.EventStream(chunks(), release)({"type": "http"}, never, send))
    assert closed == released == [True]
    assert len(sent) == 4


async def never() -> Any:
    await asyncio.Event().wait()


def test_the_loop_has_a_turn_before_asyncio_complains_of_a_lost_client() -> None:
    """It logs a line for each write after the fifth to a client that it knows to be gone."""

    async def chunks() -> AsyncIterator[dict[str, Any]]:
        for number in range(40):
            yield {"number": number}

    async def release() -> None:
        pass

    async def run() -> list[int]:
        counts = [0]

        def turn() -> None:
            counts.append(0)
            asyncio.get_running_loop().call_soon(turn)

        async def send(message: Any) -> None:
            counts[-1] += 1

        asyncio.get_running_loop().call_soon(turn)
        await connection.EventStream(chunks(), release)({"type": "http"}, never, send)
        return counts

    counts = asyncio.run(run())
    assert sum(counts) == 42  # the status, 40 events, [DONE]
    assert max(counts) <= constants.LOG_THRESHOLD_FOR_CONNLOST_WRITES


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_server_that_ends_tells_those_who_wait(has_begun: bool) -> None:
    """Uvicorn cancels their tasks; a traceback for each would be all that the log shows."""
    sent: list[Any] = []
    released: list[bool] = []

    async def chunks() -> AsyncIterator[dict[str, Any]]:
        yield {"a": 1}
        await never()

    async def release() -> None:
        released.append(True)

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if not has_begun:
            await never()
        await connection.EventStream(chunks(), release)(scope, receive, send)

    async def run() -> None:
        guard = Guard(app, hosts=(), origins=(), api_key="", max_body_bytes=10)
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", b"localhost")]}
        task = asyncio.ensure_future(guard(scope, never, send))
        await asyncio.sleep(0.01)
        task.cancel()
        await task  # it ends of itself

    asyncio.run(run())
    last = sent[-1]["body"].decode()
    assert "the server ends" in last
    assert sent[0]["status"] == (200 if has_begun else 503)
    assert last.endswith("data: [DONE]\n\n") is has_begun
    assert released == [True] * has_begun
    assert not sent[-1].get("more_body")
