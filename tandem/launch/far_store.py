"""A store that another node's launcher keeps, behind a link that may go down."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from tandem.parallel.asking import Asking

_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.05


class FarStore(Store):
    """A client's store, asked on threads of its own.

    Has the methods that launchers call. They raise NoAnswerError if the store does not answer
    within some seconds, and then at once until the late answer has come. Those that wait for a key
    look for it again and again.
    """

    def __init__(self, store: Any) -> None:
        """`store`: a TCPStore that nobody else uses."""
        super().__init__()
        self._store = store
        self._ask = Asking(_ANSWER_SECONDS)
        self.set_timeout(store.timeout)

    @property
    def silent_seconds(self) -> float:
        """For how long an answer has been missing; 0 if none is."""
        return self._ask.silent_seconds

    def set(self, key: str, value: Any) -> None:
        """Store a value."""
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """A key's value, once there is one.

        Raises:
            DistStoreError: there was none within this store's timeout.
        """
        self.wait([key])
        return self._ask(lambda: self._store.get(key))

    def add(self, key: str, amount: int) -> int:
        """A counter's value after adding."""
        return self._ask(lambda: self._store.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """A key's value after setting it if it was as expected."""
        return self._ask(lambda: self._store.compare_set(key, expected, desired))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return self._ask(lambda: self._store.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all keys have values.

        Raises:
            DistStoreError: some had none within the timeout.
        """
        own: Any = self  # torch declares no `timeout`
        seconds = (timeout or own.timeout).total_seconds()
        deadline = time.monotonic() + seconds
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise DistStoreError(f"nothing was set for {seconds:.0f} s: {', '.join(keys)}")
            time.sleep(_POLL_SECONDS)
