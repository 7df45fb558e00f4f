"""Fewest tokens of a text, never more than it has."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE

from tandem.data.render import Renderer
from tandem.data.token_bound import TokenBound, token_bound
from tandem.message import Message
from tests.data.built_tokenizers import CHATML, byte_level, folding, sentencepiece

TEXTS = (
    "",
    "hello there " * 50,
    " " * 200,
    "\n\n\t" * 60,
    "\x04\x06\x1d" * 40,
    "é\u0301ᾂ\u1112\u1161\u11ab" * 30,
    "\u03b1\u0313\u0300\u0345" * 40,
    "漢字🙂\U000e0041" * 30,
    "<|im_start|>" * 20,
)


def _byte_fallback(*, letters: str = "helo▁", normalizer: object = None) -> Tokenizer:
    """Llama's style: characters that it lacks are written as bytes."""
    pieces = [*letters, "▁hello", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("h", "e"), ("l", "o"), ("he", "l"), ("hel", "lo"), ("▁", "hello")]
    pieces = [*dict.fromkeys([*pieces, *("".join(pair) for pair in merges)])]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, byte_fallback=True))
    tokenizer.normalizer = normalizer or normalizers.Replace(" ", "▁")
    return tokenizer


def _without_letters(*letters: str) -> Tokenizer:
    """Byte-level, without these bytes of the alphabet, so that it drops them."""
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {*letters})
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def _composing() -> Tokenizer:
    tokenizer = byte_level().backend_tokenizer
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_level().backend_tokenizer,
        _byte_fallback(),
        _without_letters("Ą", "Ć"),  # U+0004 and U+0006
        _composing(),
    ],
    ids=["byte level", "byte fallback", "drops control characters", "composes"],
)
def test_no_text_has_fewer_tokens(tokenizer: Tokenizer) -> None:
    bound = token_bound(tokenizer)
    assert bound is not None
    draw = random.Random(0)
    drawn = ["".join(chr(draw.randrange(0xD800)) for _ in range(200)) for _ in range(20)]
    for text in (*TEXTS, *drawn, "".join(TEXTS)):
        assert bound.fewest(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_the_bound_is_that_of_the_longest_token() -> None:
    tokenizer = _byte_fallback()
    assert token_bound(tokenizer) == TokenBound(len("<0x00>"))
    assert token_bound(_without_letters("Ą")) == TokenBound(1, "\x04")
    bound = token_bound(byte_level().backend_tokenizer)
    assert bound is not None
    assert bound.longest == len("<|endoftext|>")
    assert bound.fewest("a" * 14) == 2


def _with_words_apart() -> Tokenizer:
    tokenizer = _byte_fallback()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit()])
    return tokenizer


def _with_removed_words() -> Tokenizer:
    tokenizer = _byte_fallback()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return tokenizer


def _with_a_greedy_token() -> Tokenizer:
    tokenizer = byte_level().backend_tokenizer
    tokenizer.add_special_tokens([AddedToken("<|greedy|>", rstrip=True)])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        folding().backend_tokenizer,
        sentencepiece().backend_tokenizer,
        _without_letters("a"),
        _byte_fallback(normalizer=normalizers.Strip()),
        _byte_fallback(normalizer=normalizers.Replace("hello", "h")),
        _with_words_apart(),
        _with_removed_words(),
        _with_a_greedy_token(),
    ],
    ids=["words", "unknown", "drops a letter", "strips", "shortens", "drops space", "removes",
         "swallows space"],
)  # fmt: skip
def test_a_tokenizer_that_may_lose_text_has_no_bound(tokenizer: Tokenizer) -> None:
    assert token_bound(tokenizer) is None


def test_a_prompt_is_bounded_by_what_the_template_writes_of_it() -> None:
    asked = [Message("user", "a" * 5000), Message("assistant", "yes"), Message("user", "hello")]
    for template in (CHATML, CHATML.replace("m.content", "m.content[-40:]")):
        renderer = Renderer(byte_level(template))
        fewest = renderer.fewest_tokens(asked)
        assert (fewest > 300) == (template == CHATML)
        assert 0 < fewest <= len(renderer.prompt(asked).token_ids)
    assert Renderer(folding()).fewest_tokens([Message("user", "yes")]) == 0
