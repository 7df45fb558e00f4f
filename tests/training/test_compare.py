"""Which held-out prompts a comparison shows."""

from __future__ import annotations

from tandem.training.comparing.compare import first_of_each
from tandem.types import Message, PromptRow, Source


def test_a_prompt_of_several_pairs_is_shown_once() -> None:
    texts = ["a", "b", "a", "c", "b", "d"]
    prompts = [
        PromptRow((1,), (Message("user", text),), {}, Source("x", "x", i))
        for i, text in enumerate(texts)
    ]
    assert first_of_each(prompts, 3) == [0, 1, 3]
    assert first_of_each(prompts, 9) == [0, 1, 3, 5]
