"""The self-test before the first step: right above empty and above another row's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tandem.config.scoring import ScoringConfig
from tandem.errors import ConfigError, DataError
from tandem.rewards.scoring import RewardFunctions
from tandem.rewards.selftest import ReferenceRow, self_test


def rows_of(*answers: Any, column: str = "answer") -> list[ReferenceRow]:
    return [
        ReferenceRow(f"q{i}", [], {column: answer}, f"d.jsonl:{i + 1}")
        for i, answer in enumerate(answers)
    ]


def report_of(function: Any, rows: list[ReferenceRow], **knobs: Any) -> list[str]:
    lines: list[str] = []
    config = ScoringConfig(**({"deadline_seconds": 600.0} | knobs))  # on a busy machine, too
    rewards = RewardFunctions([function], config, lines.append)
    try:
        return self_test(rewards, rows)
    finally:
        rewards.close()


def equal(prompts: Any, completions: Any, answer: Any, **columns: Any) -> list[float]:
    return [float(c == str(a)) for c, a in zip(completions, answer, strict=True)]


def test_a_reward_that_tells_answers_apart_passes() -> None:
    (line,) = report_of(equal, rows_of("Paris", "Rome", "Nairobi", None))
    assert line.startswith("reward function equal tells answers apart on 3 rows: reference 1, ")
    assert line.endswith("empty 0, another row's reference 0")
    assert (
        "on 2 rows" in report_of(equal, rows_of(3, 4, column="result"), answer_column="result")[0]
    )
    for name in ("gsm8k", "exact_number", "choice"):
        rows = rows_of("A", "B") if name == "choice" else rows_of("so 1 + 1 = 2 #### 2", "3")
        assert (
            "reference 1, empty 0, another row's reference 0"
            in report_of(f"tandem:{name}", rows)[0]
        )


def zero(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [0.0 for _ in completions]


def longer(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(c)) for c in completions]


def short(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [-float(len(c)) for c in completions]


def nothing(prompts: Any, completions: Any, **columns: Any) -> list[None]:
    return [None for _ in completions]


def raises(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    raise ValueError("signal only works in main thread")


def never(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(c == f"#### {a}") for c, a in zip(completions, columns["answer"], strict=True)]


def never_named(completions: Any, answer: Any) -> list[float]:
    return [float(f"<{a}>" in c) for c, a in zip(completions, answer, strict=True)]


def format_and_never(completions: Any, answer: Any) -> list[float]:
    return [bool(c) / 10 + (c == [a]) for c, a in zip(completions, answer, strict=True)]


def backwards(completions: Any, answer: Any) -> list[float]:
    return [float(c != a) for c, a in zip(completions, answer, strict=True)]


def declared(completions: Any) -> list[float]:
    return [float(len(c)) for c in completions]


declared.checks_answer = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (never, "got 0, 0 and 0 .* though it reads the column answer. Fix"),
        (never_named, "got 0, 0 and 0 .* though it reads the column answer. Fix"),
        (format_and_never, "got 0.1, 0 and 0.1 .* though it reads the column answer. Fix"),
        (backwards, "got 0, 1 and 1 .means over 3 rows.. Fix"),
        (declared, "got 4.33, 0 and 4.33"),
        (nothing, "got none, none and none"),
    ],
)
def test_a_reward_that_cannot_stops_the_run_with_its_scores(
    function: Callable[..., Any], part: str
) -> None:
    with pytest.raises(ConfigError, match=part) as raised:
        report_of(function, rows_of("aaaa", "bbbb", "ccccc"))
    assert f"reward function {function.__name__} must score the reference" in str(raised.value)
    assert "--no-scoring.self-test" in str(raised.value)


def half(prompts: Any, completions: Any, answer: Any, **columns: Any) -> list[float]:
    return [0.1 * len(c) for c in completions]  # tenths, whose sum depends on their order


def within(completions: Any, most: Any) -> list[float]:
    return [-float(len(c) > limit) for c, limit in zip(completions, most, strict=True)]


@pytest.mark.parametrize("function", [longer, short, half])
def test_a_reward_of_form_is_told_in_a_line_whatever_the_order_of_the_references(
    function: Callable[..., Any],
) -> None:
    texts = ["a" * length for length in (1, 2, 3, 7, 6, 12, 9, 4, 5, 8, 11)]
    for turn in range(len(texts)):
        (line,) = report_of(function, rows_of(*texts[turn:], *texts[:turn]))
        assert line == (
            f"reward function {function.__name__} gives an answer the same score whatever row it "
            "is for: it is taken as a reward of form, not tested against the references"
        )


def broken_once(prompts: Any, completions: Any, answer: Any, **columns: Any) -> list[float]:
    if (prompts[0], completions[0]) == ("q0", "aa"):
        raise ValueError("only here")
    return [0.1 * len(c) for c in completions]


def test_a_failure_does_not_make_a_reward_of_form_one_that_tells_answers_apart() -> None:
    lines = report_of(broken_once, rows_of("a", "aa", "aaa", "aaaa"))
    assert any("reward of form" in line for line in lines), lines


def length_and_never(completions: Any, answer: Any) -> list[float]:
    return [len(c) / 10 + (c == [a]) for c, a in zip(completions, answer, strict=True)]


def test_longer_references_do_not_make_a_comparison_that_never_matches_right() -> None:
    texts = [*(f"long {i}" for i in range(8)), "a", "b", "c"]
    with pytest.raises(ConfigError, match=r"got 0\.6, 0 and 0\.506 .* reads the column answer"):
        report_of(length_and_never, rows_of(*texts))


def test_one_score_for_all_is_told_and_more_if_no_other_function_counts() -> None:
    rows = [
        ReferenceRow("q", [], {"answer": answer, "most": 9}, "d") for answer in ("aa", "b", "cc")
    ]
    told = (
        "reward function {} gives 0 to all that it was tried on (the references of 3 rows and an "
        "empty answer): the self-test cannot tell whether it works"
    )
    alone = report_of(zero, rows)[0]
    assert alone == told.format("zero") + (
        ". No other function has a weight: if all answers of the policy get one score, too, "
        "nothing is learned from it"
    )
    assert told.format("within") in report_of(within, rows)[0].replace("-0", "0")
    lines: list[str] = []
    rewards = RewardFunctions([(zero, 0.5), (equal, 1.0)], ScoringConfig(), lines.append)
    found = self_test(rewards, rows)
    rewards.close()
    assert found[0] == told.format("zero")
    assert found[1].startswith("reward function equal tells answers apart on 3 rows")


def test_the_same_reference_on_most_rows_does_not_make_a_comparison_one_of_form() -> None:
    rows = rows_of(*["yes"] * 12, "no", *["yes"] * 3, "maybe")
    assert "on 8 rows: reference 1, empty 0" in report_of(equal, rows)[0]


def test_a_function_of_weight_0_is_never_refused() -> None:
    calls = [never, nothing, raises, conversational, equal]
    lines: list[str] = []
    weighed: list[Any] = [(call, float(call is equal)) for call in calls]
    rewards = RewardFunctions(weighed, ScoringConfig(), lines.append)
    found = self_test(rewards, rows_of("a", "b"))
    rewards.close()
    assert found[0].startswith("reward function raises (")
    assert "reward function conversational must take prompts and completions as texts" in found[1]
    assert lines == []
    assert found[2:4] == [
        f"reward function {name}, of weight 0, does not tell answers apart on 2 rows: reference "
        f"{score}, empty {score}, another row's reference {score}"
        for name, score in (("never", "0"), ("nothing", "none"))
    ]
    assert "equal tells answers apart" in found[4]


def test_what_judges_no_right_and_wrong_is_not_tested() -> None:
    assert report_of("tandem:length?limit=5", rows_of("a", "b")) == []


def test_rows_without_references_are_told_in_a_line() -> None:
    for rows in (rows_of(None, None), rows_of("same", "same"), rows_of(["a"], {"b": 1})):
        (line,) = report_of(zero, rows)
        assert line.startswith("reward functions are not tested before the first step: no two rows")


def conversational(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


conversational.checks_answer = False  # type: ignore[attr-defined]


def test_a_function_of_message_lists_is_told_so_before_the_first_step() -> None:
    for rows in (rows_of("a", "b"), rows_of(None)):
        with pytest.raises(ConfigError, match="must take prompts and completions as texts") as told:
            report_of(conversational, rows)
        assert "TypeError: string indices must be integers" in str(told.value)
        assert "\n" not in str(told.value)
    conversational.conversational = True  # type: ignore[attr-defined]
    try:
        assert len(report_of(conversational, rows_of(None))) == 1
    finally:
        del conversational.conversational  # type: ignore[attr-defined]


def one_number(prompt: Any, response: Any, **columns: Any) -> float:
    return 0.5


def empty_list(completions: Any) -> list[float]:
    return []


def not_finite(completions: Any) -> list[float]:
    return [float("nan") for _ in completions]


def misses_a_name(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [columns["gold"] for _ in completions]


@pytest.mark.parametrize(
    ("function", "number", "told"),
    [
        (one_number, "the answer", "must return a list of 1 numbers or None; got float"),
        (empty_list, "the answer", "must return a list of 1 numbers or None; got 0"),
        (
            not_finite,
            r"all \d+ answers",
            "must return finite numbers within 1e\\+15 or None; got nan",
        ),
        (misses_a_name, r"all \d+ answers", "KeyError: 'gold'"),
        (raises, r"all \d+ answers", "ValueError: signal only works in main thread"),
    ],
)
def test_a_function_that_fails_on_all_stops_the_run_with_its_cause(
    function: Callable[..., Any], number: str, told: str
) -> None:
    place = rf"{re.escape(__file__)}:{function.__code__.co_firstlineno}"
    expected = (
        rf"^reward function {function.__name__} \({place}\) must score answers; it failed on "
        rf"{number} that it was tried on; the first: d\.jsonl:1: {told}\. Fix the function, or "
    )
    for rows in (rows_of(None), rows_of("a", "b"), rows_of("a", "b", "c", "d")):
        lines: list[str] = []
        rewards = RewardFunctions([function], ScoringConfig(), lines.append)
        with pytest.raises(ConfigError, match=expected) as error:
            self_test(rewards, rows)
        rewards.close()
        assert lines == []  # it is told once
        assert "checks_answer" not in str(error.value)


def numeric(completions: Any) -> list[float]:
    return [float(int(completion)) for completion in completions]


def test_a_failure_that_the_answer_may_cause_is_a_line() -> None:
    lines: list[str] = []
    rewards = RewardFunctions([numeric], ScoringConfig(), lines.append)
    self_test(rewards, rows_of(None))
    rewards.close()
    (line,) = lines
    assert line == (
        "reward function numeric failed on 1 of 1 answers (exception 1), which get no score "
        "from it; the first: d.jsonl:1: ValueError: invalid literal for int() with base 10: "
        "'An answer.'"
    )
    stopping = RewardFunctions([numeric], ScoringConfig(on_failure="stop"), lines.append)
    with pytest.raises(DataError, match=r"failed on 1 of 1 answers .* set scoring\.on_failure"):
        self_test(stopping, rows_of(None))
    stopping.close()


def test_what_fails_on_the_tested_answers_alone_is_told_once() -> None:
    def refuses(completions: Any, answer: Any) -> list[float]:
        if completions[0] in ("a", "b", ""):
            raise ValueError("no")
        return [1.0]

    with pytest.raises(ConfigError, match=r"^reward function refuses failed on 6 of 6 .* Fix the"):
        report_of(refuses, rows_of("a", "b"))


def test_references_are_found_where_rows_of_verl_have_them() -> None:
    rows = [ReferenceRow("q", [], {"reward_model": {"ground_truth": a}}, "d") for a in "ab"]
    assert "on 2 rows: reference 1, empty 0" in report_of(equal, rows)[0]


def test_a_function_of_token_ids_is_tested_on_the_answers_tokens() -> None:
    def right(completion_ids: Any, answer: Any) -> list[float]:
        pairs = zip(completion_ids, answer, strict=True)
        return [float(ids == [ord(c) for c in a]) for ids, a in pairs]

    rewards = RewardFunctions([right], ScoringConfig(), lambda line: None)
    (line,) = self_test(rewards, rows_of("ab", "c"), lambda text: [ord(c) for c in text])
    rewards.close()
    assert "on 2 rows: reference 1, empty 0, another row's reference 0" in line


def tagged(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    return [float(re.findall(r"<answer>(.*)</answer>", text)[0] == "4") for text in completions]


def boxed(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    return [float(re.findall(r"\\boxed{(.*)}", text)[0] == "4") for text in completions]


def keyed(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    return [float(json.loads(text)["answer"] == 4) for text in completions]


def picky(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    raise ValueError("another form")


picky.checks_answer = False  # type: ignore[attr-defined]


@pytest.mark.parametrize("function", [tagged, boxed, keyed, picky])
def test_one_that_raises_for_texts_of_another_form_may_begin(
    function: Callable[..., list[float]],
) -> None:
    lines: list[str] = []
    rewards = RewardFunctions([function], ScoringConfig(), lines.append)
    self_test(rewards, rows_of(None))
    assert any("failed on 1 of 1 answers" in line for line in lines)
