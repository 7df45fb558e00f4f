"""Finding and cutting control strings, against a slow search at every place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.data.control import ControlTokens, free_mark
from tests.data.built_tokenizers import byte_level, folding

CONTROL = ControlTokens(byte_level())
MARK = "\ue000"
pieces = st.sampled_from([*CONTROL.ids, "<|im_", "end|>", "<", "think>", " ", "hello", "\n"])


def test_white_space_that_was_added_is_no_control_token() -> None:
    tokenizer = byte_level()
    assert len(tokenizer.encode("  ")) == 1
    assert set(CONTROL.ids) == {
        "<|im_start|>", "<|im_end|>", "<|endoftext|>", "</s>", "<think>", "</think>"
    }  # fmt: skip
    assert CONTROL.forbidden == set(CONTROL.ids.values())


def test_the_unknown_token_is_forbidden_only_where_it_is_more() -> None:
    tokenizer = folding()
    unknown = tokenizer.unk_token_id
    assert unknown not in ControlTokens(tokenizer).forbidden
    assert "[unk]" in ControlTokens(tokenizer).ids
    tokenizer.pad_token = "[unk]"
    assert unknown in ControlTokens(tokenizer).forbidden


@given(st.lists(pieces, max_size=8).map("".join), st.lists(pieces, max_size=2).map("".join))
def test_no_piece_holds_a_control_string(text: str, template: str) -> None:
    cut = CONTROL.cut(text, MARK)
    assert cut.replace(MARK, "") == text
    for piece in cut.split(MARK):
        assert not any(control in piece for control in CONTROL.ids)
    if not text.strip():
        return
    # Whatever stands beside it, no control string reaches from the template into the text.
    for whole in (template + cut, cut + template, template + cut.strip()):
        assert occurrences(whole) == occurrences(template)


def occurrences(text: str) -> int:
    return sum(piece.count(control) for piece in text.split(MARK) for control in CONTROL.ids)


def test_plain_text_stays_whole() -> None:
    text = "a < b, or 1 > 0; im_end | end|> of <text"
    assert CONTROL.cut(text, MARK) == text


def test_edges_that_a_template_could_complete_are_cut() -> None:
    assert CONTROL.cut("hello <|im_ \n", MARK) == f"hello <|im_{MARK} \n"
    assert CONTROL.cut(" end|> hello", MARK) == f" {MARK}end|> hello"


def test_find_takes_the_leftmost_and_longest() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["<think>!"])
    text = "a<think>!<|im_end|>"
    found = [(m.start, m.end, m.token_id) for m in ControlTokens(tokenizer).find(text)]
    ids = tokenizer.convert_tokens_to_ids(["<think>!", "<|im_end|>"])
    assert found == [(1, 9, ids[0]), (9, 19, ids[1])]
    assert CONTROL.last("x</s>") == "</s>"
    assert CONTROL.last("x</s> ") == CONTROL.last("") == ""


def test_the_mark_is_in_no_text() -> None:
    assert free_mark(["a"]) == "\ue000"
    assert free_mark(["a\ue000", "\ue001"]) == "\ue002"
    everything = "".join(map(chr, range(0xE000, 0xF900)))
    assert free_mark([everything]) == "\U000f0000"


def test_half_a_surrogate_pair_is_unwritable() -> None:
    for char in ("\ud800", "\udfff"):
        assert CONTROL.unwritable(f"a{char}b") == char
    assert CONTROL.unwritable("a🙂b") == ""


def test_control_strings_that_overlap_are_all_cut() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["[a b]", "b] c"])
    control = ControlTokens(tokenizer)
    pieces = control.cut("[a b] c", MARK).split(MARK)
    assert "".join(pieces) == "[a b] c"
    assert not any(string in piece for piece in pieces for string in control.ids)
