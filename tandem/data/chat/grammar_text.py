"""A template's text in a grammar, as its tokenizer writes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.config.answer_form import quoted
from tandem.data.chat.call_shape import ID
from tandem.data.control import ControlTokens


@dataclass(frozen=True, slots=True)
class GrammarText:
    """Writes texts into a grammar.

    control: the tokenizer's control tokens. is_special: whether whoever follows the grammar holds a
    token for no text.
    """

    control: ControlTokens
    is_special: Callable[[int], bool]

    def literal(self, text: str) -> str:
        """A text: its control strings as tokens, the rest as it is; "" for none.

        The place of a call's id takes nine letters and digits, as Mistral's templates ask for.
        """
        parts: list[str] = []
        at = 0
        for found in self.control.find(text):
            parts += [_plain(text[at : found.start]), f"<[{found.token_id}]>"]
            at = found.end
        return " ".join(filter(None, [*parts, _plain(text[at:])]))

    def until(self, name: str, ends: str) -> list[str]:
        """Rules, of which the first has that name, for any text up to the first place where `ends`
        stands, that included."""
        special = (m for m in self.control.find(ends) if self.is_special(m.token_id))
        start = next((found.start for found in special), len(ends))
        before, rest = ends[:start], ends[start:]
        if not before.strip():  # white space before a token is the text's own
            return [f"{name}: /(?s:.*)/ {self.literal(rest)}"]
        return [
            f"{name}: {name}_text {self.literal(rest)}".rstrip(),
            f"{name}_text[suffix={quoted(before)}]: /(?s:.*)/",
        ]


def _plain(text: str) -> str:
    parts = [quoted(part) if part else "" for part in text.split(ID)]
    return " /[a-zA-Z0-9]{9}/ ".join(parts).strip()
