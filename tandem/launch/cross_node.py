"""What the launchers of several nodes exchange: requests to stop, and who failed."""

from __future__ import annotations

import signal
import time
from typing import Any

from tandem.launch.failure_report import Verdict

_ASK_SECONDS = 1.0
_AGREE_SECONDS = 4.0
_POLL_SECONDS = 0.05
_STOP = "tandem/stop"


class Peers:
    """The other nodes' launchers, through the store of one attempt; none on one node."""

    def __init__(self, store: Any, node: int, num_nodes: int) -> None:
        """`store` is this attempt's own."""
        self._store = store
        self._node = node
        self._num_nodes = num_nodes
        self._asked = time.monotonic()

    def tell_stop(self, number: signal.Signals) -> None:
        """Stop all nodes as if they had received this signal."""
        if self._num_nodes > 1:
            try:
                self._store.set(_STOP, str(int(number)))
            except RuntimeError:  # the node that kept the store has stopped already
                return

    def asked_to_stop(self) -> signal.Signals | None:
        """The signal that another node received."""
        if self._num_nodes > 1 and self._store.check([_STOP]):
            return signal.Signals(int(self._store.get(_STOP)))
        return None

    def is_time_to_ask(self) -> bool:
        """Whether a second has passed since the last time."""
        if self._num_nodes == 1 or time.monotonic() < self._asked + _ASK_SECONDS:
            return False
        self._asked = time.monotonic()
        return True

    def verdict(self) -> Verdict | None:
        """The other nodes' verdict on a failure; None while there is none."""
        told = self._told()
        return _best(told) if told else None

    def agree(self, verdict: Verdict) -> Verdict:
        """Share our verdict; returns another node's if only that one knows the cause."""
        if self._num_nodes == 1:
            return verdict
        try:
            self._store.set(_key(self._node), verdict.to_json())
            deadline = time.monotonic() + (0.0 if verdict.is_certain else _AGREE_SECONDS)
            while True:
                best = _best([verdict, *self._told()])
                if best.is_certain or time.monotonic() > deadline:
                    return best
                time.sleep(_POLL_SECONDS)
        except RuntimeError:  # the node that kept the store is gone
            return verdict

    def _told(self) -> list[Verdict]:
        keys = [_key(node) for node in range(self._num_nodes)]
        return [Verdict.from_json(self._store.get(key)) for key in keys if self._store.check([key])]


def _key(node: int) -> str:
    return f"tandem/verdict/{node}"


def _best(verdicts: list[Verdict]) -> Verdict:
    return min(verdicts, key=lambda verdict: (not verdict.is_certain, verdict.time))
