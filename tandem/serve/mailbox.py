"""What other threads have to say to an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress


class Mailbox:
    """Calls from other threads into a loop, which is woken once for all that have come."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[Callable[[], None]] = deque()
        self._is_woken = False

    def post(self, call: Callable[[], None]) -> None:
        """From any thread; the calls are made in order."""
        self._calls.append(call)
        if not self._is_woken:  # if another thread asks at once, the loop is woken twice
            self._is_woken = True
            with suppress(RuntimeError):  # the loop has ended, and so have all who asked
                self.loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._is_woken = False  # first, so that what comes while they are taken wakes it again
        while self._calls:
            self._calls.popleft()()
