"""Connections on which nothing happens: uvicorn's protocol with a limit of time for each request's
head, and for a reader that takes nothing.

Uvicorn limits the time between two requests alone, and only until the next one's first byte. A
request that is being answered has no limit: a model may take long. Its body has one of its own
(`tandem/serve/connection.py`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_SECONDS = 30.0
"""From the connection's beginning, or the last answer's end, to the end of a request's head."""
READ_SECONDS = 60.0
"""A reader that takes none of what lies ready for so long is dropped."""


class _Limited(asyncio.Protocol):
    """What uvicorn's protocols, of h11 and of httptools, have in common, with the limits."""

    transport: asyncio.Transport
    cycle: Any
    """The newest request with its answer; None before the first."""

    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come; it must ask for something."""
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """A part of a request; it is in time once its head is whole."""
        super().data_received(data)
        if self._is_answering():
            self._stop_head_timer()

    def on_response_complete(self) -> None:
        """An answer has been written, as uvicorn tells."""
        super().on_response_complete()  # type: ignore[misc]
        if not self._is_answering():  # else the next request had come before
            self._wait_for_head()

    def pause_writing(self) -> None:
        """The client reads more slowly than answers come."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """It has read what lay there."""
        super().resume_writing()
        self._stop_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._stop_head_timer()
        self._stop_read_timer()
        super().connection_lost(exc)

    def _unsupported_upgrade_warning(self) -> None:
        """Uvicorn's, of two lines for each request with an Upgrade (browsers' websockets, HTTP/2 in
        plain text). Such a request is answered as any other; a client could fill the log."""

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._stop_head_timer()
        loop = asyncio.get_running_loop()
        self._head_timer = loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self.transport.close()  # what the client still has to read of the last answer is kept
        self._watch_reader()

    def _watch_reader(self) -> None:
        self._stop_read_timer()
        unread = self.transport.get_write_buffer_size()
        loop = asyncio.get_running_loop()
        self._read_timer = loop.call_later(READ_SECONDS, self._look, unread)

    def _look(self, unread: int) -> None:
        if self.transport.get_write_buffer_size() >= unread:
            self.transport.abort()
        else:
            self._watch_reader()

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None


LimitedProtocol: type[asyncio.Protocol] = type("LimitedProtocol", (_Limited, AutoHTTPProtocol), {})
"""For `uvicorn.Config(http=)`."""
