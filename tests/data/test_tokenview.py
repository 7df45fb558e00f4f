"""Tokens as they read, coloured by mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from tandem.data.tokenview import TokenPieces, render, token_text
from tandem.types import Message, PromptRow, Sample, Source, TokenRow

HERE = Source("a", "a.jsonl", 1)


class Letters:
    """A tokenizer of one token per character; the end of text is token 0."""

    all_special_ids = (0,)

    def decode(self, ids: Sequence[int], **kwargs: Any) -> str:
        return "".join(chr(i) for i in ids).lstrip(" ")  # like SentencePiece, drops a first space

    def convert_ids_to_tokens(self, token: int) -> str:
        return "<eos>" if token == 0 else chr(token)


class LetterRenderer:
    """A renderer of letters: what a prompt says, then what an answer says, then 0."""

    def prompt(
        self,
        messages: Sequence[Message],
        columns: Mapping[str, Any] | None = None,
        source: Source = HERE,
        tools: str = "",
    ) -> PromptRow:
        ids = tuple(ord(c) for text in (tools, *(m.content for m in messages)) for c in text)
        return PromptRow(ids, tuple(messages), columns or {}, source)

    def conversation(
        self,
        messages: Sequence[Message],
        answer: str,
        source: Source,
        last_turn_only: bool = False,
        tools: str = "",
    ) -> TokenRow:
        mask = [m.role == "assistant" and not last_turn_only for m in messages for _ in m.content]
        ids = [ord(c) for m in messages for c in m.content] + [ord(c) for c in answer] + [0]
        return TokenRow(tuple(ids), (*mask, *[True] * (len(answer) + 1)), source)

    def learned(
        self, messages: Sequence[Message], answer: str, source: Source, tools: str = ""
    ) -> tuple[TokenRow, ...]:
        return (self.conversation(messages, answer, source, False, tools),)

    def document(self, text: str, source: Source) -> TokenRow:
        return TokenRow((*map(ord, text), 0), (False, *[True] * len(text)), source)


def styles(text: Text) -> dict[str, str]:
    """Style to the text under it."""
    found: dict[str, str] = {}
    for span in text.spans:
        found[str(span.style)] = found.get(str(span.style), "") + text.plain[span.start : span.end]
    return found


def test_tokens_are_coloured_by_mask_and_cannot_act() -> None:
    prompt = (Message("user", "a b\x1b["), Message("assistant", "c"), Message("user", "d"))
    rendered = render(LetterRenderer(), Sample(HERE, prompt, " e f\n", "g"))  # type: ignore[arg-type]
    assert list(rendered) == ["prompt", "chosen", "rejected"]
    chosen = styles(token_text(rendered["chosen"], Letters(), (0,)))  # type: ignore[arg-type]
    assert chosen == {"dim": "a b\\x1b[d", "green": "c e f\\n", "green reverse": "<eos>"}
    rejected = styles(token_text(rendered["rejected"], Letters(), (0,)))  # type: ignore[arg-type]
    assert rejected == {"dim": "a b\\x1b[cd", "green": "g", "green reverse": "<eos>"}


def test_prompts_and_documents() -> None:
    asked = render(LetterRenderer(), Sample(HERE, (Message("user", "hi"),)))  # type: ignore[arg-type]
    assert list(asked) == ["prompt"]
    assert asked["prompt"].response_mask == (False, False)
    told = render(LetterRenderer(), Sample(HERE, text="ab"))  # type: ignore[arg-type]
    assert told["text"].response_mask == (False, True, True)


def test_pieces_join_to_the_text(shared: Any) -> None:
    from transformers import AutoTokenizer

    words = "Hello there, caf\u00e9 \u4f60\u597d  two spaces."
    for folder in ("tokenizers/gpt2", "tokenizers/smollm2", "models/stories260K/hf"):
        tokenizer = AutoTokenizer.from_pretrained(str(shared / folder))
        ids = tokenizer(words, add_special_tokens=False)["input_ids"]
        text = token_text(TokenRow(tuple(ids), (True,) * len(ids), HERE), tokenizer, ())
        assert text.plain.strip() == words, folder
        assert "".join(TokenPieces(tokenizer)(ids)).strip() == words, folder


def test_a_character_of_several_tokens_is_whole_and_at_its_first(shared: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(shared / "tokenizers/smollm2"))
    ids = tokenizer("a \U0001f926\U0001f3fd b", add_special_tokens=False)["input_ids"]
    pieces = TokenPieces(tokenizer)(ids)
    assert len(pieces) == len(ids)
    assert [piece for piece in pieces if piece] == ["a", " \U0001f926", "\U0001f3fd", " b"]
    mask = tuple(place > 0 for place in range(len(ids)))
    text = token_text(TokenRow(tuple(ids), mask, HERE), tokenizer, ())
    assert styles(text) == {"dim": "a", "green": " \U0001f926\U0001f3fd b"}


def test_bytes_that_are_no_character_stand_for_themselves(shared: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(shared / "tokenizers/smollm2"))
    half = tokenizer("\U0001f926", add_special_tokens=False)["input_ids"][:2]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = (*half, end)
    assert TokenPieces(tokenizer)(ids) == ["\ufffd", "\ufffd", "<|im_end|>"]
    text = token_text(TokenRow(ids, (True,) * 3, HERE), tokenizer, (end,))
    assert text.plain == "\ufffd\ufffd<|im_end|>"


def test_the_middle_of_a_long_row_is_left_out_and_counted() -> None:
    ids = tuple(ord(c) for c in "a" * 300 + "b" * 300)
    text = token_text(TokenRow(ids, (True,) * 600, HERE), Letters(), (0,))  # type: ignore[arg-type]
    assert text.plain == "a" * 200 + "\n[... 200 tokens left out ...]\n" + "b" * 200
