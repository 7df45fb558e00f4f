"""Tokenizing a span inside a text, and never into a control token.

Tokenizers are made for whole texts. SentencePiece styles put a space before every input, so " yo"
after "Assistant:" would become "  yo" when tokenized alone. Here a span is tokenized as the
continuation of the text before it.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable
from functools import cached_property

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tandem.data.control import ControlTokens, free_mark
from tandem.data.excerpt import excerpt
from tandem.data.short_cache import short_cache
from tandem.data.token_bound import TokenBound, token_bound
from tandem.errors import DataError, ModelError

# Characters that are usually not merged with what follows, the most likely first.
_ANCHORS = "\n:.,;!?)0aZ"
_PROBES = ("x", "Hi", "1", "the")
_NEIGHBORS = "ae0A.▁"
"""Characters between which another one is tried."""
_MOST_HOLES = 2**20
"""Unused ids that a vocabulary may have, besides one per token."""


class PieceTokenizer:
    """Text to ids and back, for spans inside a text.

    Args:
        tokenizer: any Hugging Face tokenizer; it is only called, never changed.
        control: its control tokens.
    Attributes:
        tokenizer, control: these.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control: ControlTokens) -> None:
        self.tokenizer = tokenizer
        self._is_plain = _decodes_plainly(tokenizer)
        self._encodes_plainly = _encodes_plainly(tokenizer)
        self.control = control
        self._in_context = short_cache(64)(self._ids_in_context)
        odd = control.forbidden | {tokenizer.unk_token_id}
        own = getattr(tokenizer.backend_tokenizer.model, "unk_token", None)
        unknown = tokenizer.unk_token_id, own and tokenizer.backend_tokenizer.token_to_id(own)
        self._unknown = frozenset(i for i in unknown if isinstance(i, int))
        anchors = {anchor: self._whole(anchor) for anchor in _ANCHORS}
        self._anchors = {a: ids for a, ids in anchors.items() if ids and not odd & set(ids)}
        self._adds_space = self._changes_a_beginning()
        self._decode_anchor = self._find_decode_anchor()

    def encode(self, text: str, mark: str, before: str, where: str) -> list[int]:
        """Ids of `text`, each piece between two marks tokenized separately.

        Args:
            text: may hold control strings of a template; people's text in it is already cut (see
                ControlTokens.cut).
            mark: where `text` is cut; it becomes no id.
            before: the text before it; "" at the very start.
            where: the source, for errors.
        Raises:
            DataError: the tokenizer turns one of the characters into a control token.
        """
        ids: list[int] = []
        for piece in text.split(mark):
            if piece:
                ids += self._encode_piece(piece, before, where)
                before = piece
        return ids

    def fewest(self, text: str) -> int:
        """Tokens that a text has at least, by its characters; 0 if that is not known."""
        return self._bound.fewest(text) if self._bound else 0

    @cached_property
    def num_ids(self) -> int:
        """The highest id, plus 1. Many models have embeddings and outputs for more."""
        return 1 + max(self.tokenizer.get_vocab().values())

    @cached_property
    def _bound(self) -> TokenBound | None:
        return token_bound(self.tokenizer.backend_tokenizer) if self._encodes_plainly else None

    def decoded_around(
        self, words: Iterable[str], lead: str, trail: str, before: str
    ) -> tuple[str, str]:
        """What decoding leaves of the text around one of `words`, behind the text `before`."""
        mark = free_mark([lead, trail])
        for word in words:
            ids = self.encode(lead + word + trail, mark, before, "")
            head, found, tail = self.decode(ids).rpartition(word)
            if found:
                return head, tail
        return lead, trail

    def decode(self, ids: list[int]) -> str:
        """The text of `ids` that follow other text: a leading space is kept."""
        if not self._decode_anchor:
            return self._text(ids)
        return self._text(self._decode_anchor + ids)[len(self._text(self._decode_anchor)) :]

    def lost(self, characters: Iterable[str]) -> set[str]:
        """Those of the characters that it cannot write: it makes nothing of one, or the unknown
        token. Characters that do not show are not among them, but for white space."""
        unknown = self._unknown
        plain = {c: self._whole(c) for c in _NEIGHBORS}
        written = (
            c for c, ids in plain.items() if unknown.isdisjoint(ids) and c in self._text(ids)
        )
        beside = next(written, None)
        if beside is None or not self.writes_by_character:
            return set()
        nothing = self._text(self._whole(beside * 2))
        found = set()
        for character in characters:
            text = beside + character + beside
            ids = self._whole(text)
            if not unknown.isdisjoint(ids):
                found.add(character)
            elif _shows(character) and text not in (decoded := self._text(ids)):
                found |= {character} if decoded == nothing else set()
        return found

    def has_unknown(self, text: str) -> bool:
        """Whether the unknown token is among the ids of a text."""
        return not self._unknown.isdisjoint(self._whole(text))

    @property
    def writes_by_character(self) -> bool:
        """Whether it can write a text if it can write each of its characters."""
        model = self.tokenizer.backend_tokenizer.model
        return type(model).__name__ not in ("WordLevel", "WordPiece")

    def _encode_piece(self, piece: str, before: str, where: str) -> list[int]:
        ids = list(self._in_context(piece, before))
        forbidden = self.control.forbidden
        written = [i for i in self.control.written(piece) if i in forbidden]
        if [i for i in ids if i in forbidden] == written:
            return ids
        # The tokenizer's normalizer made a control token of other text (of wide letters, say).
        ids, cursor = [], 0
        for match in self.control.find(piece):
            ids += self._spelled(piece[cursor : match.start], where)
            ids.append(match.token_id)
            cursor = match.end
        return ids + self._spelled(piece[cursor:], where)

    def _spelled(self, text: str, where: str) -> list[int]:
        """Ids of `text`, halved until no half becomes a control token."""
        ids = self._continuation(text)
        if self.control.forbidden.isdisjoint(ids):
            return ids
        if len(text) == 1:
            raise DataError(
                f"{where}: text must be writable without control tokens; got {excerpt(text)}, "
                "which the tokenizer turns into one. Remove the character from the text."
            )
        half = len(text) // 2
        return self._spelled(text[:half], where) + self._spelled(text[half:], where)

    def _ids_in_context(self, piece: str, before: str) -> tuple[int, ...]:
        if not before:
            return tuple(self._whole(piece))
        if control := self.control.last(before):
            # As in a whole text: some tokenizers add or remove a space after a control token.
            ids = self._whole(control + piece)
            if ids[:1] == [self.control.ids[control]]:
                return tuple(ids[1:])
        return tuple(self._continuation(piece))

    def _continuation(self, text: str) -> list[int]:
        if not self._adds_space:
            return self._whole(text)
        for anchor, anchor_ids in self._anchors.items():
            ids = self._whole(anchor + text)
            if ids[: len(anchor_ids)] == anchor_ids:
                return ids[len(anchor_ids) :]
        raise ModelError(
            f"tokenizer {self.tokenizer.name_or_path!r} must tokenize a text after one of "
            f"{_ANCHORS!r} separately from it; got {excerpt(text)} merged with each. "
            "Use a tokenizer that adds no space of its own."
        )

    def _changes_a_beginning(self) -> bool:
        for anchor, anchor_ids in self._anchors.items():
            n = len(anchor_ids)
            afters = [self._whole(anchor + probe) for probe in _PROBES]
            if any(after[:n] != anchor_ids for after in afters):
                continue
            if all(a[n:] == self._whole(p) for a, p in zip(afters, _PROBES, strict=True)):
                return False
        return bool(self._anchors)

    def _find_decode_anchor(self) -> list[int]:
        """Ids that keep a leading space from being stripped; none if nothing strips it."""
        ids = self._continuation(" x")
        if self._text(ids) == " x":
            return []
        for anchor_ids in self._anchors.values():
            if self._text(anchor_ids + ids) == self._text(anchor_ids) + " x":
                return anchor_ids
        return []  # The tokenizer drops spaces altogether.

    def _whole(self, text: str) -> list[int]:
        try:
            if self._encodes_plainly:
                backend = self.tokenizer.backend_tokenizer
                if self._is_as_called(backend):
                    return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
            # Not verbose: a text over the model's length is the length policy's business.
            return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))
        # The Rust library raises nothing more specific; if it gives up (on a regular expression
        # with too many ways to match), its error is not an `Exception`.
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
                raise
            raise ModelError(
                f"tokenizer {self.tokenizer.name_or_path!r} must take any text; got "
                f"{excerpt(f'{type(error).__name__}: {error}', 200)} for {excerpt(text)}. "
                "Fix its tokenizer.json (an unknown token, say), or use another."
            ) from error

    def _is_as_called(self, backend: Tokenizer) -> bool:
        """Whether the library holds the settings that Hugging Face's `encode` would give it."""
        return (
            backend.truncation is None
            and backend.padding is None
            and backend.encode_special_tokens == self.tokenizer.split_special_tokens
        )

    def _text(self, ids: list[int]) -> str:
        if self._is_plain:
            return str(self.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False))
        # Cleaning up spaces is for WordPiece and breaks every other tokenizer.
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _shows(character: str) -> bool:
    """Whether the loss of a character matters: control and format characters are seldom seen."""
    return character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs")


def _encodes_plainly(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the Rust library may be called where Hugging Face's `encode`, which takes longer than
    tokenizing a line of text, adds nothing to it: not where a class or an object has its own."""
    kind = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.encode is PreTrainedTokenizerBase.encode
        and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
        and vars(tokenizer).keys().isdisjoint(("encode", "_encode_plus"))
        and hasattr(tokenizer.backend_tokenizer, "encode_batch_fast")
    )


def _decodes_plainly(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer's `decode` is the Rust library's, so that the latter may be called: what
    Hugging Face does around it takes five times as long as decoding one token."""
    kind = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.decode is PreTrainedTokenizerBase.decode
        and kind._decode is PreTrainedTokenizerFast._decode
    )


def definition_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Everything that decides the ids of a text, without settings for batches."""
    vocabulary = tokenizer.get_vocab()
    largest = max(vocabulary.values(), default=0)
    if largest > _MOST_HOLES + 2 * len(vocabulary):
        # The library writes a line for every unused id: an id of 2^31 takes hours.
        raise ModelError(
            f"tokenizer {tokenizer.name_or_path!r} must number its {len(vocabulary)} tokens "
            f"without large gaps; got id {largest}. Use the tokenizer as it was published."
        )
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    return json.dumps(definition | {"padding": None, "truncation": None}, sort_keys=True)
