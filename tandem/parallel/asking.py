"""Questions to a store on another node, with a limit.

A call of torch's `TCPStore` waits in C++ until TCP gives up, about 16 minutes after a link went
down, whatever the store's timeout is; Python's signal handlers wait as long. So a thread asks, and
what needs the answer waits for the thread.

It is imported without torch: the command line uses the errors of `watchdog`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


class NoAnswerError(RuntimeError):
    """A store did not answer in time; it may answer later."""


class Asking:
    """Questions to one store. While one of them is late, no other is asked."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: how long to wait for an answer."""
        self._seconds = seconds
        self._late: Thread | None = None
        self._since = 0.0

    @property
    def silent_seconds(self) -> float:
        """For how long the late question has been open; 0 if none is late."""
        is_late = self._late is not None and self._late.is_alive()
        return time.monotonic() - self._since if is_late else 0.0

    def __call__(self, question: Callable[[], T]) -> T:
        """What `question` returns or raises. Signal handlers run meanwhile.

        Raises:
            NoAnswerError: it did not return in time, or an earlier one has still not.
        """
        if seconds := self.silent_seconds:
            raise NoAnswerError(f"no answer for {seconds:.0f} s")
        since, answer = time.monotonic(), Future[T]()
        thread = Thread(target=_ask, args=(question, answer), name="tandem-ask", daemon=True)
        thread.start()
        thread.join(self._seconds)
        if thread.is_alive() and not answer.done():
            if not self.silent_seconds:  # another thread may have asked before
                self._late, self._since = thread, since
            raise NoAnswerError(f"no answer for {self._seconds:.0f} s")
        return answer.result()


def _ask(question: Callable[[], T], answer: Future[T]) -> None:
    try:
        answer.set_result(question())
    except Exception as error:
        answer.set_exception(error)
