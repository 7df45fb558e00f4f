"""The bytes that single tokens stand for, as log-prob entries list them."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"


class TokenBytes:
    """Token id to bytes, for byte-level and SentencePiece-like tokenizers; others by decoding."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """The tokenizer is only called, never changed."""
        self._tokenizer = tokenizer
        kinds = _decoders(tokenizer)
        self._of_character = _byte_level() if "ByteLevel" in kinds else {}
        self._has_word_starts = bool({"Metaspace", "ByteFallback", "Replace"} & kinds)
        self._added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """The bytes of one token; a control token's are its name."""
        if token_id not in self._known:
            self._known[token_id] = self._bytes(token_id)
        return self._known[token_id]

    def text(self, token_id: int) -> str:
        """The token's text; U+FFFD for bytes that are no character of their own."""
        return self.of(token_id).decode("utf-8", errors="replace")

    def name(self, token_id: int) -> str:
        """As `text`, but bytes that are no text are spelled as OpenAI does: bytes:\\xe2\\x80."""
        raw = self.of(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def is_added(self, token_id: int) -> bool:
        """Whether it is none of the model's own pieces of text, such as a control token."""
        return token_id in self._added

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode("utf-8", errors="replace")
        token: Any = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):  # an embedding that the tokenizer has no token for
            return b""
        if self._of_character:
            if all(char in self._of_character for char in token):
                return bytes(self._of_character[char] for char in token)
        elif self._has_word_starts:
            if found := _BYTE_TOKEN.fullmatch(token):
                return bytes([int(found[1], 16)])
            return token.replace(_WORD_START, " ").encode("utf-8", errors="replace")
        text = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return str(text).encode("utf-8", errors="replace")


class Offsets:
    """Where in their text the tokens of one sequence begin, in characters, as they come.

    A control token that the text does not show has no width, and neither has the space before a
    text's first word that SentencePiece puts there and decoding takes away.
    """

    def __init__(self, tokens: TokenBytes) -> None:
        """No token has come."""
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._place = 0
        self._waiting: list[int] = []  # from _place on, those whose text had not all come

    def of(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Those of the next tokens; `text`: all that has come by now, with that of earlier ones."""
        waiting = [*self._waiting, *token_ids]
        places, place, num_settled, settled = [], self._place, 0, self._decoder.getstate()
        for token_id in waiting:
            raw, (before, _) = self._tokens.of(token_id), self._decoder.getstate()
            written = self._decoder.decode(raw)
            # Bytes that wait for the rest of a character, and end here without it, are U+FFFD.
            broken = before if raw and not 0x80 <= raw[0] < 0xC0 else b""
            places.append(place + len(broken.decode("utf-8", errors="replace")))
            has_come = place + len(written) <= len(text)
            if not self._tokens.is_added(token_id) or text.startswith(written, place):
                if place == 0 and written.startswith(" ") and not text.startswith(" "):
                    written = written[1:]
                place += len(written)
            if has_come and num_settled + 1 == len(places):
                self._place, num_settled, settled = place, len(places), self._decoder.getstate()
        self._decoder.setstate(settled)
        self._waiting = waiting[num_settled:]
        return places[len(waiting) - len(token_ids) :]


def _decoders(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The types of the tokenizer's decoders."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return set()
    top = json.loads(backend.to_str()).get("decoder") or {}
    return {str(part.get("type")) for part in [top, *(top.get("decoders") or [])]}


def _byte_level() -> dict[str, int]:
    """GPT-2's table of characters that stand for bytes (openai/gpt-2, `bytes_to_unicode`)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}
