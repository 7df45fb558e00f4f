"""Calls on their way to workers: all at once, or one by one while others are being answered."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterable

from tandem.rewards.calling import Call


class Feed:
    """Calls for `WorkerPool.serve`, which takes them in another thread than the one that puts them.

    Attributes:
        bell: can be read from once there is something new; None if all calls were there at first.
    """

    def __init__(self, calls: Iterable[Call] | None = None) -> None:
        """
        Args:
            calls: all that will come; None: they are put, until `close`.
        """
        self.bell: socket.socket | None = None
        self._rope: socket.socket | None = None
        self._waiting = deque(enumerate(calls or ()))
        self._lock = threading.Lock()
        self._is_closed = calls is not None
        if not self._is_closed:
            self.bell, self._rope = socket.socketpair()

    def put(self, call: Call, number: int) -> None:
        """Add a call, which is answered by that number."""
        with self._lock:
            self._waiting.append((number, call))
        self._ring()

    def close(self) -> None:
        """No more calls come."""
        self._is_closed = True
        self._ring()

    def take(self) -> tuple[int, Call] | None:
        """The next call and its number; None if none waits."""
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def is_over(self) -> bool:
        """Whether none waits and none will come."""
        with self._lock:
            return self._is_closed and not self._waiting

    def heard(self) -> None:
        """Silence the bell, which has been heard."""
        if self.bell is not None:
            self.bell.recv(4096)

    def end(self) -> None:
        """Give its descriptors back."""
        for end in (self.bell, self._rope):
            if end is not None:
                end.close()

    def _ring(self) -> None:
        if self._rope is not None:
            self._rope.send(b"x")
