"""The length policy: what is kept, cut and dropped, and under which reason."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.data.length import fit, fit_answer, fit_graded, fit_pair, fit_prompt, fit_ranked
from tandem.data.render import Renderer
from tandem.errors import DataError
from tandem.types import (
    LabelledRow,
    Message,
    PairRow,
    PromptRow,
    RankedRow,
    Source,
    TokenRow,
)
from tests.data.built_tokenizers import byte_level

SOURCE = Source("set", "rows.jsonl", 3)
RENDERER = Renderer(byte_level(None))


def row_of(mask: str, first: int = 0) -> TokenRow:
    ids = tuple(range(first, first + len(mask)))
    return TokenRow(ids, tuple(c == "1" for c in mask), SOURCE)


@pytest.mark.parametrize("policy", ["drop", "truncate", "error"])
def test_a_row_that_fits_is_kept(policy: str) -> None:
    row = row_of("00111")
    fitted = fit(row, 5, policy)  # type: ignore[arg-type]
    assert fitted.row is row
    assert (fitted.outcome, fitted.reason) == ("kept", "")


def test_a_row_that_is_too_long_is_dropped() -> None:
    fitted = fit(row_of("00111"), 4, "drop")
    assert (fitted.row, fitted.outcome) == (None, "dropped")
    assert fitted.reason == "longer than max_tokens"


@pytest.mark.parametrize(("limit", "mask"), [(4, "0011"), (3, "001")])
def test_truncating_cuts_the_answers_end(limit: int, mask: str) -> None:
    fitted = fit(row_of("00111"), limit, "truncate")
    assert fitted.row == row_of(mask)
    assert (fitted.outcome, fitted.reason) == ("truncated", "answer cut at max_tokens")


@pytest.mark.parametrize(("mask", "limit"), [("00111", 2), ("01100111", 5), ("01100111", 3)])
def test_an_answer_that_would_vanish_drops_the_row(mask: str, limit: int) -> None:
    fitted = fit(row_of(mask), limit, "truncate")
    assert (fitted.row, fitted.outcome) == (None, "dropped")
    assert fitted.reason == "no room for the answer within max_tokens"


def test_a_truncated_row_teaches_no_end() -> None:
    row = RENDERER.conversation([Message("user", "hello")], "I am fine.", SOURCE)
    cut = fit(row, len(row) - 1, "truncate").row
    assert cut is not None
    assert RENDERER.terminator_id in row.token_ids
    assert RENDERER.terminator_id not in cut.token_ids


def test_both_sides_of_a_pair_are_made_to_fit() -> None:
    chosen, rejected = row_of("0011111"), row_of("00111")
    pair = PairRow(chosen, rejected)
    assert fit_pair(pair, 7, "drop").row is pair
    assert fit_pair(pair, 6, "drop").reason == "longer than max_tokens"
    other = PairRow(chosen, TokenRow((0, 1, 9), (False, False, True), SOURCE))
    cut = fit_pair(other, 4, "truncate")
    assert cut.row == PairRow(row_of("0011"), other.rejected)
    assert cut.outcome == "truncated"
    same = fit_pair(pair, 5, "truncate")
    assert (same.row, same.outcome) == (None, "dropped")
    assert same.reason == "both answers equal within max_tokens"
    assert fit_pair(pair, 2, "truncate").outcome == "dropped"


def prompt_of(*turns: tuple[str, str]) -> PromptRow:
    messages = [Message(role, content) for role, content in turns]  # type: ignore[arg-type]
    return RENDERER.prompt(messages, {"level": 1}, SOURCE)


def test_a_prompt_loses_its_oldest_turns_but_no_system_turn() -> None:
    system, last = ("system", "Be kind."), ("user", "What is it?")
    old = [("user", "hello"), ("assistant", "yes"), ("tool", "4"), ("assistant", "four")]
    middle = [("user", "and now"), ("assistant", "no")]
    row = prompt_of(system, *old, *middle, last)
    expected = [prompt_of(system, *middle, last), prompt_of(system, last)]
    for limit in range(len(row)):
        fitted = fit_prompt(row, limit, "truncate", RENDERER)
        best = next((e for e in expected if len(e) <= limit), None)
        assert fitted.row == best
        assert fitted.outcome == ("truncated" if best else "dropped")
        assert fitted.reason == (
            "oldest turns removed for max_prompt_tokens"
            if best
            else "last turns alone longer than max_prompt_tokens"
        )
    assert fit_prompt(row, len(row), "truncate", RENDERER).row is row
    assert fit_prompt(row, 3, "drop", RENDERER).reason == "longer than max_prompt_tokens"


def test_truncating_a_long_prompt_renders_few_of_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    row = prompt_of(*[("user", "hello"), ("assistant", "yes")] * 100, ("user", "bye"))
    rendered = 0
    prompt = Renderer.prompt

    def counting(self: Renderer, *args: Any) -> PromptRow:
        nonlocal rendered
        rendered += 1
        return prompt(self, *args)

    monkeypatch.setattr(Renderer, "prompt", counting)
    fitted = fit_prompt(row, len(row) // 3, "truncate", RENDERER)
    assert fitted.row is not None
    assert len(fitted.row) <= len(row) // 3
    assert rendered < 10


def test_the_error_policy_stops() -> None:
    with pytest.raises(DataError, match=r"rows.jsonl:3: a sequence must have at most 4 tokens .da"):
        fit(row_of("00111"), 4, "error")
    with pytest.raises(DataError, match=r"max_prompt_tokens\); got \d+. Raise dataset.max_prompt"):
        fit_prompt(prompt_of(("user", "hello there")), 4, "error", RENDERER)


def test_a_labelled_answer_is_held_to_the_limit_like_any() -> None:
    row = LabelledRow(row_of("00111"), False)
    assert fit_answer(row, 5, "drop").row is not None
    cut = fit_answer(row, 4, "truncate").row
    assert cut is not None
    assert (len(cut), cut.is_desirable) == (4, False)
    assert fit_answer(row, 4, "drop").row is None
    with pytest.raises(DataError, match="a sequence must have at most 4 tokens"):
        fit_answer(row, 4, "error")


def test_a_ranking_is_dropped_whole_or_keeps_every_answer() -> None:
    answers = (row_of("0011"), row_of("00111"), row_of("001", 7))
    ranking = RankedRow(answers, (1, 2, 3))
    assert fit_ranked(ranking, 5, "drop").row is ranking
    assert fit_ranked(ranking, 4, "drop").reason == "longer than max_tokens"
    # Its first four tokens are the first answer's.
    fitted = fit_ranked(ranking, 4, "truncate")
    assert (fitted.row, fitted.reason) == (None, "two answers equal within max_tokens")
    other = RankedRow((row_of("0011", 9), *answers[1:]), (1, 2, 3))
    cut = fit_ranked(other, 4, "truncate")
    assert cut.row is not None
    assert (cut.outcome, [len(a) for a in cut.row.sequences]) == ("truncated", [4, 4, 3])


def test_a_ranking_of_graded_answers_loses_the_long_ones_alone() -> None:
    answers = (row_of("0011"), row_of("00111"), row_of("001", 7))
    ranking = RankedRow(answers, (1, 1, 2), grades=(4.0, 4.0, 1.0))
    assert fit_graded(ranking, 5, "drop").row is ranking
    fitted = fit_graded(ranking, 4, "drop")
    assert (fitted.outcome, fitted.reason) == ("dropped", "longer than max_tokens")
    assert fitted.row == RankedRow((answers[0], answers[2]), (1, 2), grades=(4.0, 1.0))
    # Nothing is left to compare, and truncation makes equal what was not.
    assert fit_graded(ranking, 3, "drop").row is None
    assert fit_graded(RankedRow(answers, (1, 2, 1), grades=(2, 1, 2)), 4, "drop").row is None
    equal = fit_graded(ranking, 4, "truncate")
    assert (equal.row, equal.reason) == (None, "two answers equal within max_tokens")
    none = RankedRow((*answers, row_of("00001")), (1, 2, 3, 4), grades=(4, 3, 2, 1))
    both = fit_graded(none, 4, "truncate")
    assert (both.row, both.reason) == (None, "two answers equal within max_tokens")


def test_a_pair_keeps_its_margin_where_it_is_cut() -> None:
    pair = PairRow(row_of("00111"), row_of("00111", 7), margin=0.5)
    cut = fit_pair(pair, 4, "truncate").row
    assert cut is not None
    assert (len(cut), cut.margin) == (4, 0.5)
