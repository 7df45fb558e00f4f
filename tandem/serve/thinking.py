"""How the answers to one prompt have thoughts."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.data.render import Renderer
from tandem.data.thoughts import ThoughtForm

_PROMPT_END = 64
"""Tokens of a prompt that are looked at for whether its end begins a thought, or ends one."""


def thoughts_behind(renderer: Renderer, prompt: Sequence[int]) -> ThoughtForm:
    """The form of answers to a prompt, by its ids."""
    return renderer.thoughts.behind(renderer.continuation(prompt[-_PROMPT_END:]))
