"""How answers end, and how their ids become text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.data.render import Renderer


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends an answer, what fills a row after it, and how ids become text.

    renderer: of the conversation format, for answers that must have a form. num_ids: tokens below
    it have a text, and no other is drawn; None: all that the model has.
    """

    stop_token_ids: tuple[int, ...]
    pad_token_id: int
    decode: Callable[[Sequence[int]], str]
    renderer: Renderer | None = None
    num_ids: int | None = None

    @staticmethod
    def of(renderer: Renderer) -> Stops:
        """Those of the conversation format that the prompts are rendered in."""
        return Stops(
            renderer.stop_token_ids,
            renderer.pad_token_id,
            renderer.decode,
            renderer,
            renderer.pieces.num_ids,
        )
