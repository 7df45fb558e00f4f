"""The engine's thread: what a step that draws several tokens adds to an answer."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.config.schema import SamplingConfig
from tandem.errors import NumericsError
from tandem.generation.streaming import Handle
from tandem.serve.engine import Engine, Generation, Progress, _Running

LOADED: Any = object()


class OneStep:
    """In place of `Conversations`: an answer that draws these tokens in one step, and fails."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        self._handle = Handle()

    def submit_samples(self, *_: Any, **__: Any) -> list[Handle]:
        return [self._handle]

    def step(self) -> Iterator[tuple[Handle, list[int]]]:
        self._handle.token_ids += self._token_ids
        self._handle.ended, self._handle.error = True, NumericsError("not a number")
        yield self._handle, self._token_ids

    def cancel(self, handle: Handle) -> None:
        assert handle is self._handle

    def close(self) -> None:
        """Nothing to free."""


@pytest.mark.parametrize(
    ("token_ids", "taken", "ends"), [([4, 5, 6], (4, 5), True), ([4, 6], (4, 6), False)]
)
def test_an_answer_does_not_fail_by_what_was_drawn_behind_its_end(
    token_ids: list[int], taken: tuple[int, ...], ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: queue.SimpleQueue[list[Progress]] = queue.SimpleQueue()
    generation = Generation(
        loaded=LOADED, prompt_ids=(3,), sampling=SamplingConfig(), seed=1, samples=1,
        top_logprobs=-1, stops=(), stop_ids=frozenset({5}), min_tokens=0,
        decode=lambda ids: "a" * len(ids), deliver=told.put,
    )  # fmt: skip
    talk: Any = OneStep(token_ids)
    engine = Engine(slots=1, max_context=64)

    def opened(_: Engine, loaded: Any) -> Any:
        return engine._running.setdefault(loaded, _Running(loaded, talk))

    monkeypatch.setattr(Engine, "_open", opened)
    engine.start(generation)
    (progress,) = told.get(timeout=60)
    engine.close()
    assert progress.token_ids == taken
    assert progress.finish == ("stop" if ends else "length")
    assert (progress.error is None) == ends
