"""How many tokens a prompt has once a model's chat template has framed its turns, without torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.data.chat.own_template import OwnTemplate, read_template, settings_in, template_in
from tandem.data.chat.template_limits import deadline, require_bounded, sandbox
from tandem.data.tools import for_template
from tandem.errors import ModelError
from tandem.message import Message, answer_text
from tandem.predict.rows import common_beginning

Count = Callable[[str], int]
_FRAME_TOKENS = 4
"""Tokens that a chat template adds per turn, where there is none to render."""


class PromptFrame:
    """A prompt's tokens as a run would render it.

    The template is the run's own, else the model's, else the one that Tandem gives a tokenizer
    without. Where it cannot be rendered, a few tokens per turn stand for it.
    """

    def __init__(
        self, folder: Path, count: Count, before: int | None, own: OwnTemplate | None = None
    ) -> None:
        """
        Args:
            folder: the model's; it need not exist.
            count: tokens of a text.
            before: tokens that the model's tokenizer puts before a text (its BOS); None: `count` is
                not by that tokenizer, and a template's words are no measure.
            own: the run's own template.
        """
        self._count = count
        self._before = 0
        self._special: dict[str, str] = {}
        self._template: Any = None
        if before is not None:
            settings = settings_in(folder / "tokenizer_config.json")
            source = template_in(folder, settings)
            if not source and (own is None or not own.source):
                own = read_template("default")
            if own is not None:
                source, self._before = own.filled("", source), before if own.built_in else 0
            self._special = _special_tokens(settings)
            self._template = _compiled(source)

    def tokens(self, prompt: Sequence[Message], tools: str = "") -> int:
        """Tokens of a prompt, up to where the assistant begins.

        Args:
            tools: that may be called, a list as JSON text.
        """
        text = self._rendered(prompt, tools)
        if text is not None:
            return self._before + self._count(text)
        said = sum(self._count(answer_text(turn)) + _FRAME_TOKENS for turn in prompt)
        return said + _FRAME_TOKENS

    def common_tokens(self, prompts: Iterable[tuple[Sequence[Message], str]]) -> int:
        """Tokens that a prompt, with its tools, begins with like another one; of most prompts, if
        not of all."""
        text = common_beginning(
            self._rendered(*one) or "\n".join(map(answer_text, one[0])) for one in prompts
        )
        return self._before + self._count(text) if text else 0

    def _rendered(self, prompt: Sequence[Message], tools: str) -> str | None:
        if self._template is None:
            return None
        # A template is a program that came with a model: it may raise or refuse anything.
        try:
            with deadline():
                text: str = self._template.render(
                    messages=[_as_given(turn) for turn in prompt], add_generation_prompt=True,
                    tools=json.loads(tools) if tools else None, documents=None, **self._special,
                )  # fmt: skip
                return text
        except Exception:
            return None


def _as_given(turn: Message) -> dict[str, Any]:
    """A turn as templates take it."""
    if turn.tool_calls:
        turn = replace(turn, tool_calls=for_template(turn.tool_calls, as_text=False))
    return turn.as_dict()


def _compiled(source: str) -> Any:
    try:
        require_bounded(source, "the chat template")
        return sandbox().from_string(source)
    except ModelError:
        return None
    except Exception:  # jinja's; the run says what is wrong with it
        return None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and the like, as a template names them; "" for those that there are not."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = settings.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        found[name] = content if isinstance(content, str) else ""
    return found
