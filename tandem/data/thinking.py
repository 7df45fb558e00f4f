"""How the answers to one prompt have thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tandem.data.render import Renderer
from tandem.data.thoughts import NO_THOUGHTS, ThoughtForm

_PROMPT_END = 64
"""Tokens of a prompt that are looked at for whether its end begins a thought, or ends one."""


def thoughts_behind(renderer: Renderer, prompt: Sequence[int]) -> ThoughtForm:
    """The form of answers to a prompt, by its ids."""
    return renderer.thoughts.behind(renderer.continuation(prompt[-_PROMPT_END:]))


def thoughts_within(renderer: Renderer, begun: str) -> ThoughtForm:
    """The form of the rest of an answer that has begun: words, unless a thought has not ended."""
    form = renderer.thoughts
    text = begun.rstrip() + "x"  # no part of a tag is held back
    thoughts, words = form.so_far(text, is_over=True)
    return replace(form, in_prompt=True) if thoughts and not words else NO_THOUGHTS
