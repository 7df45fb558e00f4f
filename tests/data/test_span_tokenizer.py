"""Stretches tokenized apart, against the ids of the whole text."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tandem.data.control import ControlTokens
from tandem.data.span_tokenizer import PieceTokenizer
from tandem.errors import DataError, ModelError
from tests.data.built_tokenizers import byte_level, folding, sentencepiece

MARK = "\ue00f"


def pieces_of(tokenizer: object) -> PieceTokenizer:
    return PieceTokenizer(tokenizer, ControlTokens(tokenizer))  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["first", "always"])
@pytest.mark.parametrize("text", [" yes", "yes", "  yes hello", "x", "\nyes", ": x"])
def test_a_stretch_gains_no_space(scheme: str, text: str) -> None:
    tokenizer = sentencepiece(scheme=scheme)
    pieces = pieces_of(tokenizer)
    ids = pieces.encode(text, MARK, "hello:", "row")
    whole = tokenizer.encode("hello:" + text, add_special_tokens=False)
    assert whole[-len(ids) :] == ids
    assert pieces.decode(ids) == text


def test_a_start_and_a_stretch_after_a_control_token_are_as_in_a_whole_text() -> None:
    tokenizer = sentencepiece(scheme="always")
    pieces = pieces_of(tokenizer)
    start = pieces.encode("<s>yes</s>", MARK, "", "row")
    after = pieces.encode("hello", MARK, "<s>yes</s>", "row")
    assert start + after == tokenizer.encode("<s>yes</s>hello", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(after) == ["▁hello"]


def test_marks_leave_nothing_behind() -> None:
    tokenizer = byte_level()
    ids = pieces_of(tokenizer).encode(f"{MARK}hel{MARK}lo{MARK}{MARK}", MARK, "", "row")
    assert ids == tokenizer.encode("hel") + tokenizer.encode("lo")


def test_plain_tokenizers_are_left_as_they_are() -> None:
    for tokenizer in (byte_level(), folding()):
        text = "hello: yes <|im_end|> hello"
        assert pieces_of(tokenizer).encode(text, MARK, "yes", "row") == tokenizer.encode(text)


def test_what_a_normalizer_makes_is_spelled_out_and_the_template_kept() -> None:
    tokenizer = folding()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = pieces_of(tokenizer).encode("yes <|IM_END|> yes<|im_end|>", MARK, "x", "row")
    assert ids.count(end) == 1
    assert ids[-1] == end
    assert ids.count(tokenizer.convert_tokens_to_ids("yes")) == 2


def test_a_character_that_only_a_control_token_can_write() -> None:
    tokenizer = sentencepiece(unknown=2)
    with pytest.raises(DataError, match=r"^a.jsonl:7: text must be .* got '%', .*Remove the char"):
        pieces_of(tokenizer).encode("yes % hello", MARK, "", "a.jsonl:7")


def test_a_tokenizer_that_merges_across_every_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = pieces_of(sentencepiece())
    whole = pieces._whole
    monkeypatch.setattr(pieces, "_whole", lambda text: [99] if "yes" in text else whole(text))
    with pytest.raises(ModelError, match=r"must tokenize a text after one of .* got 'yes' merged"):
        pieces.encode("yes", MARK, "x", "row")


def test_a_tokenizer_that_gives_up_is_named() -> None:
    tokenizer = byte_level()
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    pattern = {"Regex": "(x+x+)+y"}
    core["normalizer"] = {"type": "Replace", "pattern": pattern, "content": "z"}
    hostile = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(core)))
    pieces = PieceTokenizer(hostile, ControlTokens(hostile))
    with pytest.raises(ModelError, match=r"must take any text; got .*PanicException"):
        pieces.encode("x" * 40, "|", "", "row")


@pytest.mark.parametrize("setting", ["truncation", "padding", "split"])
def test_settings_of_the_library_do_not_change_a_stretch(setting: str) -> None:
    tokenizer = byte_level()
    pieces, text = pieces_of(tokenizer), "hello: yes <|im_end|> hello"
    expected = tokenizer.encode(text, add_special_tokens=False)
    if setting == "truncation":
        tokenizer.backend_tokenizer.enable_truncation(2)
    elif setting == "padding":
        tokenizer.backend_tokenizer.enable_padding(length=64)
    else:
        tokenizer.split_special_tokens = True
        expected = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in expected
    assert pieces._whole(text) == expected


def test_a_class_with_an_encoding_of_its_own_is_asked() -> None:
    class Own(PreTrainedTokenizerFast):
        def encode(self, text: str, *args: object, **options: object) -> list[int]:
            return [1, 2, 3] if text == "ask" else super().encode(text, *args, **options)  # type: ignore[arg-type]

    tokenizer = byte_level()
    own = Own(tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token)
    assert pieces_of(own)._whole("ask") == [1, 2, 3]


def test_an_object_with_an_encoding_of_its_own_is_asked() -> None:
    tokenizer = byte_level()
    own = tokenizer.encode
    tokenizer.encode = lambda text, **options: [1, 2, 3] if text == "ask" else own(text, **options)
    assert pieces_of(tokenizer)._whole("ask") == [1, 2, 3]


def test_a_backend_that_is_replaced_later_is_used() -> None:
    tokenizer, other = byte_level(), byte_level()
    pieces = pieces_of(tokenizer)
    other.add_tokens(["hello there"])
    expected = other.encode("hello there", add_special_tokens=False)
    assert pieces._whole("hello there") != expected
    tokenizer._tokenizer = other.backend_tokenizer
    assert pieces._whole("hello there") == expected
