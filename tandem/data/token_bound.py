"""How many characters a token stands for at most: so a text is known to be too long before it is
tokenized, which takes a second for 4 MB.

The bound must hold for every text, or one that fits would be refused. It is that of tokenizers that
keep all characters: byte-level and byte-fallback vocabularies without a normalizer that drops any.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

_KEEPING = ("ByteLevel", "Digits", "Metaspace")
"""Pre-tokenizers that drop no character."""
_CUTTING = ("Split", "Punctuation")
"""Pre-tokenizers that drop none unless they remove what they find."""
_NORMALIZERS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1}
"""Characters that become one at most: a composed character decomposes into four or fewer."""


@dataclass(frozen=True, slots=True)
class TokenBound:
    """longest: characters of a text that one token stands for at most. dropped: control characters
    of which the tokenizer makes nothing."""

    longest: int
    dropped: str = ""

    def fewest(self, text: str) -> int:
        """Tokens that a text has at least."""
        kept = len(text) - sum(map(text.count, self.dropped))
        return -(-kept // self.longest)


def token_bound(tokenizer: Tokenizer) -> TokenBound | None:
    """What one token stands for at most; None if there is no bound for every text."""
    definition = json.loads(tokenizer.to_str())
    joined = _joined(definition["normalizer"])
    strips = any(token["lstrip"] or token["rstrip"] for token in definition["added_tokens"])
    if joined is None or strips or not _keeps(definition["pre_tokenizer"]):
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    dropped = _dropped(definition, vocabulary)
    if dropped is None:
        return None
    return TokenBound(joined * max(map(len, vocabulary)), dropped)


def _joined(normalizer: Mapping[str, Any] | None) -> int | None:
    """Characters that a normalizer makes one of, at most; None without a bound."""
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind == "Sequence":
        product = 1
        for part in normalizer["normalizers"]:
            if (joined := _joined(part)) is None:
                return None
            product *= joined
        return product
    if kind == "Replace":
        found = normalizer["pattern"].get("String", "")
        return 1 if 0 < len(found) <= len(normalizer["content"]) else None
    return _NORMALIZERS.get(kind)


def _keeps(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether a pre-tokenizer drops no character."""
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return all(map(_keeps, pre_tokenizer["pretokenizers"]))
    return kind in _KEEPING or (kind in _CUTTING and pre_tokenizer["behavior"] != "Removed")


def _dropped(definition: Mapping[str, Any], vocabulary: Mapping[str, int]) -> str | None:
    """The characters of which a model makes nothing; None if they are others than control
    characters, or become parts of an unknown token."""
    model = definition["model"]
    if model["type"] not in ("BPE", "Unigram"):
        return None
    if model.get("byte_fallback"):
        return "" if all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)) else None
    if "ByteLevel" not in _kinds(definition["pre_tokenizer"]):
        return None
    letter = ByteLevel(add_prefix_space=False, use_regex=False)
    ascii_only = [chr(byte) for byte in range(128)]
    dropped = [c for c in ascii_only if letter.pre_tokenize_str(c)[0][0] not in vocabulary]
    # Every other character has bytes from 0x80 to 0xBF behind its first one.
    behind = {letter.pre_tokenize_str(chr(code))[0][0][1] for code in range(0x80, 0xC0)}
    is_bound = not any(map(str.isprintable, dropped)) and behind <= vocabulary.keys()
    return "".join(dropped) if is_bound else None


def _kinds(pre_tokenizer: Mapping[str, Any] | None) -> list[str]:
    """Of a pre-tokenizer and its parts."""
    if pre_tokenizer is None:
        return []
    parts = pre_tokenizer.get("pretokenizers", ())
    return [pre_tokenizer["type"], *(kind for part in parts for kind in _kinds(part))]
