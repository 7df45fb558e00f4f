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


def render(renderer: Renderer, sample: Sample) -> dict[str, TokenRow]:
    """A sample's sequences by part: prompt, chosen and rejected (with the prompt), or text.

    Raises:
        DataError: the renderer refuses one of them.
    """
    if sample.text is not None:
        return {"text": renderer.document(sample.text, sample.source)}
    prompt = renderer.prompt(sample.prompt, sample.columns, sample.source).token_ids
    rendered = {"prompt": TokenRow(prompt, (False,) * len(prompt), sample.source)}
    if sample.chosen is not None:
        rendered["chosen"] = renderer.conversation(sample.prompt, sample.chosen, sample.source)
    if sample.rejected is not None:
        # Pairs are compared by their last answers alone, so no earlier turn is marked.
        rendered["rejected"] = renderer.conversation(
            sample.prompt, sample.rejected, sample.source, last_turn_only=True
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
