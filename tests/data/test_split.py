"""The split: by content alone, in the shares asked for, nothing on two sides."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.data.split import SHARES, Split, content_key, copies, opening, split_key
from tandem.errors import ConfigError
from tandem.types import Message, Sample, Source

HERE = Source("a", "a", 1)


def asked(text: str, *more: str) -> Sample:
    turns = [Message("user", text)]
    for answer, question in zip(more[::2], more[1::2], strict=True):
        turns += [Message("assistant", answer), Message("user", question)]
    return Sample(HERE, tuple(turns), "answer")


def test_the_opening_ignores_spelling_and_what_follows() -> None:
    plain = opening(asked("What is a cafe\u0301?"))
    assert plain == "what is a caf\u00e9?"
    assert opening(asked("  WHAT\u00a0is\n a caf\u00c9? ")) == plain
    assert opening(asked("What is a caf\u00e9?", "A place", "Why?")) == plain
    assert opening(asked("\ufb01ne\uff1f")) == "fine?"  # a ligature and a full-width mark
    system = Sample(HERE, (Message("system", "s"), Message("user", "What is a caf\u00e9?")))
    assert opening(system) == plain
    assert opening(Sample(HERE, text="Two  Words")) == "two words"


def test_shares_are_met() -> None:
    split = Split((2, 4, 4), 0.05)
    n = 20_000
    counts = dict.fromkeys((*SHARES, "heldout"), 0)
    for i in range(n):
        counts[split.place_of(split_key(asked(f"question {i}"), 7))] += 1
    expected = {"texts": 0.19, "pairs": 0.38, "prompts": 0.38, "heldout": 0.05}
    for step, share in expected.items():
        sd = (share * (1 - share) / n) ** 0.5
        assert abs(counts[step] / n - share) < 4 * sd, step


def test_the_seed_moves_prompts_and_the_heldout_share_does_not() -> None:
    keys = [split_key(asked(f"question {i}"), 1) for i in range(500)]
    few, many = Split((1, 1, 1), 0.05), Split((10, 10, 10), 0.2)
    for key in keys:
        if many.place_of(key) != "heldout":
            assert few.place_of(key) == many.place_of(key)
        if few.place_of(key) == "heldout":
            assert many.place_of(key) == "heldout"
    other = [split_key(asked(f"question {i}"), 2) for i in range(500)]
    moved = sum(few.place_of(a) != few.place_of(b) for a, b in zip(keys, other, strict=True))
    assert moved > 250


def test_a_share_of_nothing_gets_nothing() -> None:
    split = Split((0, 1, 0), 0.0)
    places = {split.place_of(split_key(asked(str(i)), 0)) for i in range(300)}
    assert places == {"pairs"}


@example(bytes(32), [1.0, 524287.2355608368, 1.2355608367943205])
@given(st.binary(min_size=32, max_size=32), st.lists(st.floats(0, 1e6), min_size=3, max_size=3))
def test_every_key_has_a_step(key: bytes, shares: list[float]) -> None:
    if sum(shares) > 0:
        assert Split(shares, 0.1).place_of(key) in (*SHARES, "heldout")
        assert Split(shares, 0.0).place_of(b"\xff" * 32) in SHARES


@pytest.mark.parametrize(
    "shares", [(1, 1), (1, 1, 1, 1), (0, 0, 0), (-1, 1, 1), (float("nan"), 1, 1), ()]
)
def test_wrong_shares_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="must be three shares of at least 0 with a sum above 0"):
        Split(shares, 0.0)


def test_content_keys_tell_every_part() -> None:
    samples = [
        Sample(HERE, (Message("user", "a"),), "b", "c"),
        Sample(HERE, (Message("user", "a"),), "b"),
        Sample(HERE, (Message("user", "a"),), None, "b"),
        Sample(HERE, (Message("system", "a"),), "b", "c"),
        Sample(HERE, (Message("user", "a"), Message("user", "b")), "c"),
        Sample(HERE, text="a"),
    ]
    assert len({content_key(s) for s in samples}) == len(samples)
    again = Sample(Source("other", "o", 9), (Message("user", "a"),), "b", "c", None, {"x": 1})
    assert content_key(again) == content_key(samples[0])


@pytest.mark.parametrize("weight", [0.25, 0.5, 1.0, 1.75, 3.0])
def test_copies_average_to_the_weight(weight: float) -> None:
    n = 4000
    drawn = [copies(weight, content_key(asked(str(i))), 5) for i in range(n)]
    assert set(drawn) <= {int(weight), int(weight) + 1}
    assert abs(sum(drawn) / n - weight) < 4 * 0.5 / n**0.5
    if weight == int(weight):
        assert set(drawn) == {int(weight)}


def test_copies_are_drawn_apart_from_the_split() -> None:
    """Half of the rows by weight must be half of each step's rows."""
    split = Split((1, 1, 1), 0.0)
    kept = dict.fromkeys(SHARES, 0)
    for i in range(6000):
        row = asked(str(i))
        kept[split.place_of(split_key(row, 3))] += copies(0.5, content_key(row), 3)
    assert all(abs(count - 1000) < 120 for count in kept.values())


def test_a_megabyte_of_combining_marks_takes_no_hours() -> None:
    marks = "\u0301\u0316" * 500_000
    assert len(opening(asked("a" + marks))) > 900_000


def test_long_openings_are_normalized_as_short_ones() -> None:
    word = "ÉTÉ e\u0301\u0316te\u0301 ﬁn "
    assert opening(asked(word * 2000)) == " ".join([opening(asked(word))] * 2000)
