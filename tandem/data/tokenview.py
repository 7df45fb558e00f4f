"""Samples token by token, as a stage trains on them."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from rich.text import Text

from tandem.text import counted, visible
from tandem.types import Sample, TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tandem.data.render import Renderer

_REMEMBERED = 200_000
"""Texts of tokens behind another that are kept in memory, some 165 bytes each; one that is not
takes 10 us, ten times as long."""
_HALF = "\ufffd"
"""What bytes of an unfinished character are decoded to."""
_MOST = 16
"""Tokens that are looked at to find whole characters; a character has at most four bytes."""
_SHOWN_TOKENS = 400
"""Of a row; the middle of a longer one is left out."""


def render(renderer: Renderer, sample: Sample) -> dict[str, TokenRow]:
    """A sample's sequences by part: prompt, chosen and rejected (with the prompt), or text.

    Raises:
        DataError: the renderer refuses one of them.
    """
    if sample.text is not None:
        return {"text": renderer.document(sample.text, sample.source)}
    prompt = renderer.prompt(sample.prompt, source=sample.source, tools=sample.tools).token_ids
    rendered = {"prompt": TokenRow(prompt, (False,) * len(prompt), sample.source)}
    if sample.chosen is not None:
        rows = renderer.learned(sample.prompt, sample.chosen, sample.source, sample.tools)
        numbers = ["", *(f" {number}" for number in range(2, len(rows) + 1))]
        rendered |= {f"chosen{n}": row for n, row in zip(numbers, rows, strict=True)}
    if sample.rejected is not None:
        # Pairs are compared by their last answers alone, so no earlier turn is marked.
        rendered["rejected"] = renderer.conversation(
            sample.prompt, sample.rejected, sample.source, last_turn_only=True, tools=sample.tools
        )
    return rendered


def token_text(
    row: TokenRow, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int]
) -> Text:
    """The row's tokens as text, colored by mask; stop tokens by name, reversed.

    Tokens that make a character together have the first one's color. Of a long row the middle is
    left out, and its tokens are counted.
    """
    text, pieces = Text(), TokenPieces(tokenizer)
    if len(row) <= _SHOWN_TOKENS:
        parts = [(row.token_ids, row.response_mask)]
    else:
        half = _SHOWN_TOKENS // 2
        parts = [
            (row.token_ids[part], row.response_mask[part])
            for part in (slice(half), slice(len(row) - half, None))
        ]
    for number, (ids, mask) in enumerate(parts):
        if number:
            left = counted(len(row) - _SHOWN_TOKENS, "token")
            text.append(f"\n[... {left} left out ...]\n", style="bold")
        for token, piece, learned in zip(ids, pieces(ids), mask, strict=True):
            style = "green" if learned else "dim"
            if token in stop_token_ids:
                name = str(tokenizer.convert_ids_to_tokens(token))
                text.append(visible(name), style=f"{style} reverse")
            else:
                text.append(visible(piece), style=style)
    return text


def _joined(
    ids: Sequence[int], added: Callable[[int, int], str], alone: Container[int]
) -> list[str]:
    """A piece per token. Where only several tokens together make whole characters, the first has
    them and the others have "".

    Args:
        added: the text of the tokens from one place to before another.
        alone: tokens that are never part of a character.
    """
    pieces: list[str] = []
    while (begin := len(pieces)) < len(ids):
        first = piece = added(begin, begin + 1)
        end = begin + 1
        while (
            piece.endswith(_HALF) and end < min(len(ids), begin + _MOST) and ids[end] not in alone
        ):
            end += 1
            piece = added(begin, end)
        if piece.endswith(_HALF):  # bytes that are no text, or cut off
            piece, end = first, begin + 1
        pieces += [piece, *[""] * (end - begin - 1)]
    return pieces


class TokenPieces:
    """The text of each token, with what the token before it gives it: a leading space, say.

    Where only several tokens together make whole characters, the first has them and the others have
    "". Remembers the text of tokens behind the one before them, so that those of thousands of
    answers cost few decodings.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._known: dict[tuple[int, ...], str] = {}

    def __call__(self, ids: Sequence[int], before: int = -1) -> list[str]:
        """A piece per token; control tokens by name.

        Args:
            before: the token in front of them; -1: none.
        """
        behind = [before, *ids]

        def added(begin: int, end: int) -> str:
            tokens = tuple(behind[begin : end + 1])
            if (known := self._known.get(tokens)) is None:
                known = self._piece(tokens[0], tokens[1:])
                if len(self._known) < _REMEMBERED:
                    self._known[tokens] = known
            return known

        return _joined(ids, added, self._special)

    def _piece(self, before: int, tokens: Sequence[int]) -> str:
        if tokens[0] in self._special:
            return str(self._tokenizer.convert_ids_to_tokens(tokens[0]))
        known = [] if before < 0 or before in self._special else [before]
        if _HALF in self._text(known):  # the end of a character would spoil this one
            known = self._letter
        front, whole = self._text(known), self._text([*known, *tokens])
        return whole[len(front) :] if whole.startswith(front) else self._text(list(tokens))

    @cached_property
    def _letter(self) -> list[int]:
        return [int(i) for i in self._tokenizer.encode("a", add_special_tokens=False)]

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)) if ids else ""
