"""One request's connection: its body within limits, a stream of events, and whether it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.serve.api_errors import ApiError, json_text
from tandem.serve.fields import read_object
from tandem.serve.guard import server_ends, too_large

T = TypeVar("T")
_BODY_SECONDS = 60.0
"""A body that takes longer to arrive is given up."""
_WRITE_SECONDS = 60.0
"""A reader that takes nothing for so long is taken to be gone."""
_WRITES_AT_ONCE = 4
"""Writes after which the loop has a turn, so that it can tell that the client has left: from the
sixth write on to a client that is gone, asyncio logs a line for each."""


class ClientGoneError(Exception):
    """The client left before its answer was ready."""


async def read_body(request: Request, most: int) -> dict[str, Any]:
    """The JSON object in a request's body, of at most `most` bytes.

    Raises:
        ApiError: it is too large, too slow, or not an object.
        ClientGoneError: the client left.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large(most)
    except TimeoutError:
        raise ApiError(
            f"a body must arrive within {_BODY_SECONDS:.0f} s; it did not.",
            status=408,
            code="body_too_slow",
        ) from None
    except ClientDisconnect:
        raise ClientGoneError from None
    return read_object(bytes(body))


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client leaves.

    Raises:
        ClientGoneError: it left.
    """
    running = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise ClientGoneError
    finally:
        for task in (running, gone):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(running, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, one JSON object each, then [DONE].

    An error on the way is an event of its own, because the status has been sent. The events are
    closed when the client leaves or reads nothing for a minute.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[dict[str, Any]],
        release: Callable[[], Awaitable[None]],
        on_gone: Callable[[], None] = lambda: None,
    ) -> None:
        """`release`: called once at the end, however it comes. `on_gone`: before it, where the
        client left before the end."""
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            media_type=self.media_type,
        )
        del self.headers["content-length"]
        self._events, self._release, self._on_gone = events, release, on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await unless_gone(receive, self._send_all(send))
        except (ClientGoneError, OSError):
            self._on_gone()
        except asyncio.CancelledError:  # the server ends and waits no longer
            with suppress(asyncio.CancelledError):
                text = f"data: {json_text(server_ends().body())}\n\ndata: [DONE]\n\n"
                await send({"type": "http.response.body", "body": text.encode()})
        finally:
            await self._release()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        writer = _Writer(send)
        try:
            async with aclosing(self._events) as events:  # type: ignore[type-var]
                async for event in events:
                    await writer.write(f"data: {json_text(event)}\n\n")
        except ApiError as error:
            await writer.write(f"data: {json_text(error.body())}\n\n")
        finally:
            writer.close()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


class _Writer:
    """Writes of one stream, given up when the reader takes nothing for long.

    One timer watches all of them; a timeout around each would cost more than the write.
    """

    def __init__(self, send: Send) -> None:
        self._send, self._loop = send, asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._since: float | None = None
        self._is_late = False
        self._num_writes = 0
        self._timer = self._loop.call_later(_WRITE_SECONDS, self._look)

    async def write(self, text: str) -> None:
        """Returns when there is room for more.

        Raises:
            ClientGoneError: the reader takes nothing.
        """
        self._since = self._loop.time()
        try:
            await self._send(
                {"type": "http.response.body", "body": text.encode(), "more_body": True}
            )
            self._num_writes += 1
            if self._num_writes % _WRITES_AT_ONCE == 0:
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            if self._is_late:
                raise ClientGoneError from None
            raise
        finally:
            self._since = None

    def close(self) -> None:
        """End the watch."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        since = now if self._since is None else self._since
        if now - since >= _WRITE_SECONDS:
            self._is_late = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(since + _WRITE_SECONDS - now, self._look)
