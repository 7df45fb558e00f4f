"""Connections on which nothing happens are closed; those of a slow answer are not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from tandem.serve import idle
from tandem.serve.idle import LimitedProtocol

HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
LONG = 10_000.0
"""Seconds that no test waits for."""


class Wire(asyncio.Transport):
    """A connection's other end, whose reader takes what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.unread, self.is_aborted = b"", 0, False
        self.closed = asyncio.Event()

    def write(self, data: Any) -> None:
        self.sent += data

    def close(self) -> None:
        self.closed.set()

    def abort(self) -> None:
        self.is_aborted = True
        self.closed.set()

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def get_write_buffer_size(self) -> int:
        return self.unread

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def run(
    test: Callable[[Any, Wire, asyncio.Event], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    head: float = LONG,
    read: float = LONG,
) -> None:
    """Run a test of a connection to an application that answers once the event is set."""
    monkeypatch.setattr(idle, "HEAD_SECONDS", head)
    monkeypatch.setattr(idle, "READ_SECONDS", read)

    async def whole() -> None:
        may_answer = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await may_answer.wait()
            headers = [(b"content-length", b"2")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"ok"})

        config = uvicorn.Config(app, log_level="critical", timeout_keep_alive=int(LONG))
        protocol: Any = LimitedProtocol(config, ServerState(), {})  # type: ignore[call-arg]
        wire = Wire()
        protocol.connection_made(wire)
        await test(protocol, wire, may_answer)
        protocol.connection_lost(None)

    asyncio.run(asyncio.wait_for(whole(), 60))


async def turns(seconds: float = 0.0) -> None:
    await asyncio.sleep(seconds)
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"X: a"])
def test_a_client_that_asks_for_nothing_is_closed(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(protocol: Any, wire: Wire, may_answer: asyncio.Event) -> None:
        if sent:
            protocol.data_received(sent)
        await wire.closed.wait()
        assert not wire.sent

    run(test, monkeypatch, head=0.01)


def test_a_head_that_trickles_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(protocol: Any, wire: Wire, may_answer: asyncio.Event) -> None:
        protocol.data_received(HEAD + b"X: ")
        while not wire.closed.is_set():
            await asyncio.sleep(0.002)
            protocol.data_received(b"a")

    run(test, monkeypatch, head=0.02)


@pytest.mark.parametrize("more", [b"", HEAD, b"GET"])
def test_a_connection_is_closed_when_no_further_request_comes(
    more: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(protocol: Any, wire: Wire, may_answer: asyncio.Event) -> None:
        protocol.data_received(HEAD + b"\r\n")
        may_answer.set()
        await turns()
        assert wire.sent.endswith(b"ok")
        if more:
            protocol.data_received(more)
        await wire.closed.wait()

    run(test, monkeypatch, head=0.01)


def test_a_body_that_nobody_reads_may_not_trickle_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a request that was refused by its head alone."""

    async def test(protocol: Any, wire: Wire, may_answer: asyncio.Event) -> None:
        may_answer.set()
        protocol.data_received(HEAD + b"Content-Length: 100000\r\n\r\n")
        await turns()
        while not wire.closed.is_set():
            await asyncio.sleep(0.002)
            protocol.data_received(b"a")

    run(test, monkeypatch, head=0.02)


def test_an_answer_may_take_long_and_the_time_begins_anew_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(protocol: Any, wire: Wire, may_answer: asyncio.Event) -> None:
        protocol.data_received(HEAD + b"\r\n")
        await turns(0.1)
        assert not wire.closed.is_set()
        monkeypatch.setattr(idle, "HEAD_SECONDS", LONG)
        may_answer.set()
        await turns()
        assert wire.sent.endswith(b"ok")
        assert protocol._head_timer is not None
        may_answer.clear()
        protocol.data_received(HEAD + b"\r\n")
        assert protocol._head_timer is None

    run(test, monkeypatch, head=0.02)


def test_a_reader_that_takes_nothing_is_dropped_and_a_slow_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(protocol: Any, wire: Wire, may_answer: asyncio.Event) -> None:
        protocol.data_received(HEAD + b"\r\n")
        wire.unread = 100
        protocol.pause_writing()
        for _ in range(5):
            protocol._read_timer.cancel()  # as if the time were over
            wire.unread -= 1
            protocol._look(wire.unread + 1)
        assert not wire.is_aborted
        protocol.resume_writing()
        assert protocol._read_timer is None
        protocol.pause_writing()
        protocol._look(wire.unread)
        assert wire.is_aborted

    run(test, monkeypatch)


def test_what_is_unread_does_not_keep_a_closed_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(protocol: Any, wire: Wire, may_answer: asyncio.Event) -> None:
        may_answer.set()
        protocol.data_received(HEAD + b"Connection: close\r\n\r\n")
        wire.unread = 100
        await turns()
        assert wire.is_closing()  # by uvicorn, once all is read
        assert not wire.is_aborted
        while not wire.is_aborted:
            await asyncio.sleep(0.01)

    run(test, monkeypatch, head=0.01, read=0.01)
