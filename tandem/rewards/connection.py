"""One HTTP request whose connection another thread can close."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener


class Connection:
    """What a request is sent by. `close` ends the request from another thread, whatever it waits
    for: the handshake of TLS, the head or the body of the reply."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._is_closed = False

    def open(self, request: Request, seconds: float) -> HTTPResponse:
        """Send a request; the reply, of which the head is read. Redirects are not followed.

        Args:
            seconds: that each wait of its socket may take.
        Raises:
            OSError, http.client.HTTPException: as `urllib.request.urlopen`.
        """
        opener = build_opener(_NoRedirect, _Plain(self._hold), _Secure(self._hold))
        response: HTTPResponse = opener.open(request, timeout=seconds)
        return response

    def close(self) -> None:
        """Close the connection, and the one that a request may still be about to make."""
        with self._lock:
            self._is_closed = True
            for one in self._sockets:
                with suppress(OSError):  # the other side has closed it
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
            self._sockets.clear()

    def _hold(self, one: socket.socket) -> None:
        with self._lock:
            if self._is_closed:
                raise TimeoutError
            # TLS takes the socket over, and urllib closes it early; a second descriptor of the
            # same connection stays.
            self._sockets.append(one.dup())


class _NoRedirect(HTTPRedirectHandler):
    """A redirected POST would lose its body, and show the token to another host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none."""
        return


class _Held(HTTPConnection):
    """Hands over its socket once it is connected; for TLS, before the handshake."""

    hold: Callable[[socket.socket], None]

    def connect(self) -> None:
        """Connect, and hand the socket over."""
        super().connect()
        try:
            self.hold(self.sock)
        except BaseException:
            self.close()
            raise


class _HeldSecure(HTTPSConnection, _Held):
    """The same by TLS: HTTPSConnection.connect calls the one above, then shakes hands."""


Hold = Callable[[socket.socket], None]


def _maker(kind: type[_Held], hold: Hold) -> Any:
    """What urllib makes its connections by: of this kind, each handed over."""

    def made(host: str, /, **more: Any) -> _Held:
        connection = kind(host, **more)
        connection.hold = hold
        return connection

    return made


class _Plain(HTTPHandler):
    def __init__(self, hold: Hold) -> None:
        super().__init__()
        self._made = _maker(_Held, hold)

    def http_open(self, req: Request) -> HTTPResponse:
        """Open by a held connection."""
        return self.do_open(self._made, req)


class _Secure(HTTPSHandler):
    def __init__(self, hold: Hold) -> None:
        super().__init__()
        self._made = _maker(_HeldSecure, hold)

    def https_open(self, req: Request) -> HTTPResponse:
        """Open by a held connection."""
        return self.do_open(self._made, req)
