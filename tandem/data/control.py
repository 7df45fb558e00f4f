"""A tokenizer's control tokens, and how to keep text from spelling one.

A control token steers a model or the program around it: <|im_end|> ends a turn, <s> begins a text.
Only a template may write one. A control string in someone's text is cut: a mark is put inside it,
the text on both sides of the mark is tokenized separately, and the mark itself is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise

from transformers import PreTrainedTokenizerBase

from tandem.data.excerpt import excerpt
from tandem.errors import DataError

_PRIVATE_USE = range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)
_UNWRITABLE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class ControlMatch:
    """One control string in a text: text[start:end] is token `token_id`."""

    start: int
    end: int
    token_id: int


class ControlTokens:
    """The control tokens of one tokenizer.

    These are all its special tokens and all tokens that were added to its vocabulary, except added
    white space that is not flagged as special (Pythia's runs of spaces, Gemma's line breaks), which
    is plain vocabulary.

    ids: control string to token id.
    forbidden: ids that text may never become. The unknown token is not one of them, since it stands
        for a character that the tokenizer lacks, unless it is also BOS, EOS or pad.
    longest: characters of the longest control string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.ids: dict[str, int] = {
            token.content: token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special or not token.content.isspace()
        }
        named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        self.ids.update((str(token), token_id) for token, token_id in named)
        self.ids.pop("", None)
        frame = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        harmless = {tokenizer.unk_token_id} - frame
        self.forbidden = frozenset(self.ids.values()) - harmless
        # A match is the longest string at the leftmost position, as in tokenizers.
        ordered = sorted(self.ids, key=len, reverse=True)
        strings = "|".join(map(re.escape, ordered)) or r"(?!)"
        self._match = re.compile(strings)
        self._every_start = re.compile(f"(?={strings})")
        self._heads = frozenset(s[:i] for s in ordered for i in range(1, len(s)))
        self._tails = frozenset(s[i:] for s in ordered for i in range(1, len(s)))
        self._last_of_heads = frozenset(head[-1] for head in self._heads)
        self._first_of_tails = frozenset(tail[0] for tail in self._tails)
        self._uncuttable = tuple(s for s in ordered if len(s) == 1)
        self.longest = max(map(len, ordered), default=0)

    def find(self, text: str) -> list[ControlMatch]:
        """The control strings of `text` that a tokenizer would read as control tokens."""
        return [
            ControlMatch(m.start(), m.end(), self.ids[m.group()])
            for m in self._match.finditer(text)
        ]

    def written(self, text: str) -> list[int]:
        """The ids of the control strings that `find` finds, in order."""
        return [self.ids[string] for string in self._match.findall(text)]

    def last(self, text: str) -> str:
        """The longest control string that `text` ends with, or ""."""
        lengths = range(min(self.longest, len(text)), 0, -1)
        return next((text[-n:] for n in lengths if text[-n:] in self.ids), "")

    def require_writable(self, text: str, where: str) -> None:
        """
        Raises:
            DataError: a character of the text cannot be neutralized (`unwritable`).
        """
        if char := self.unwritable(text):
            raise DataError(
                f"{where}: text must hold no half of a surrogate pair and no character that is a "
                f"control token; got {excerpt(char)}. Remove it from the text."
            )

    def unwritable(self, text: str) -> str:
        """The first character of `text` that no cut can neutralize, or "".

        That is a control string of one character, or half of a surrogate pair, which UTF-8 cannot
        encode.
        """
        if half := _UNWRITABLE.search(text):
            return half.group()
        return next((s for s in self._uncuttable if s in text), "")

    def cut(self, text: str, mark: str) -> str:
        """`text` with `mark` put inside every control string, overlapping ones included.

        A text that ends (begins) with a part of a control string is marked there too, so that the
        template's own text cannot complete it. Templates trim contents, so the text is taken
        without the white space around it.
        """
        points = {match.start() + 1 for match in self._every_start.finditer(text)}
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if begin < end:  # most texts end and begin with a character that no part has there
            reach = range(1, min(self.longest, end - begin + 1))
            if text[end - 1] in self._last_of_heads and any(
                text[end - n : end] in self._heads for n in reach
            ):
                points.add(end)
            if text[begin] in self._first_of_tails and any(
                text[begin : begin + n] in self._tails for n in reach
            ):
                points.add(begin)
        if not points:
            return text
        edges = [0, *sorted(points), len(text)]
        return mark.join(text[a:b] for a, b in pairwise(edges))


def free_mark(texts: Sequence[str]) -> str:
    """A private-use character that is in none of `texts`, nor escaped."""
    marks = map(chr, chain.from_iterable(_PRIVATE_USE))
    return next(
        mark
        for mark in marks
        if not any(form in text for form in (mark, *_escaped(mark)) for text in texts)
    )


def unescaped(text: str, mark: str) -> str:
    """`text` with the mark itself where Python's `repr` or JSON in ASCII wrote it: a template may
    print a list."""
    for form in _escaped(mark):
        text = text.replace(form, mark)
    return text


@cache
def _escaped(mark: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((repr(mark)[1:-1], json.dumps(mark)[1:-1])))
