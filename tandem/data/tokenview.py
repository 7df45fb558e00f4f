"""Samples token by token, as a stage trains on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from tandem.text import visible
from tandem.types import Sample, TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tandem.data.render import Renderer

_CONTEXT = 8
"""Tokens decoded before each one, to see what it adds."""
_REMEMBERED = 1_000_000
"""Pairs of tokens whose text is kept in memory."""


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
    """The row's tokens as text, colored by mask; stop tokens by name, reversed."""
    text = Text()
    pieces = _pieces(row.token_ids, tokenizer)
    for token, piece, learned in zip(row.token_ids, pieces, row.response_mask, strict=True):
        style = "green" if learned else "dim"
        if token in stop_token_ids:
            name = str(tokenizer.convert_ids_to_tokens(token))
            text.append(visible(name), style=f"{style} reverse")
        else:
            text.append(visible(piece), style=style)
    return text


def _pieces(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What each token adds to the few before it: a token alone may lose its leading space."""

    def text(some: Sequence[int]) -> str:
        return str(tokenizer.decode(list(some), clean_up_tokenization_spaces=False))

    pieces = []
    for end in range(1, len(ids) + 1):
        start = max(0, end - _CONTEXT)
        before, after = text(ids[start : end - 1]), text(ids[start:end])
        whole = after.startswith(before)
        pieces.append(after[len(before) :] if whole else text(ids[end - 1 : end]))
    return pieces


class TokenPieces:
    """The text of each token, with what the token before it gives it: a leading space, say.

    Remembers pairs of tokens, so that the tokens of thousands of answers cost few decodings.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._known: dict[tuple[int, int], str] = {}

    def __call__(self, ids: Sequence[int], before: int = -1) -> list[str]:
        """A piece per token; control tokens by name.

        Args:
            before: the token in front of them; -1: none.
        """
        pairs = zip([before, *ids[:-1]], ids, strict=True)
        return [self._known.get(pair) or self._piece(*pair) for pair in pairs]

    def _piece(self, before: int, token: int) -> str:
        if token in self._special:
            piece = str(self._tokenizer.convert_ids_to_tokens(token))
        else:
            known = [] if before < 0 or before in self._special else [before]
            front, whole = self._text(known), self._text([*known, token])
            piece = whole[len(front) :] if whole.startswith(front) else self._text([token])
        if len(self._known) < _REMEMBERED:
            self._known[before, token] = piece
        return piece

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)) if ids else ""
