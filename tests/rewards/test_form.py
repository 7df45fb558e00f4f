"""Functions written for conversational data get messages where they, or their names, ask for it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tandem.errors import ConfigError
from tandem.rewards.calling import Call, outcomes_of
from tandem.rewards.columns import columns_of
from tandem.rewards.form import reads_messages
from tandem.rewards.loading import load_reward_function
from tandem.rewards.scoring import Answers, GivenFunction, RewardFunctions, text_of
from tandem.rewards.selftest import ReferenceRow, self_test
from tandem.rewards.spec import parse_spec

PUBLISHED = r"""
import re
def accuracy_reward(completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [float(content == sol) for content, sol in zip(contents, solution)]
def format_reward(completions, **kwargs):
    pattern = r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$"
    contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content, re.DOTALL | re.MULTILINE) for content in contents]
    return [1.0 if match else 0.0 for match in matches]
def polite(prompts, completions, *, bonus=1.0, **kwargs):
    assert [turn["role"] for turn in prompts[0]] == ["system", "user", "assistant", "user"]
    prompts[0].append(completions[0][0])  # what is given is the function's own
    return [bonus * len(prompts[0])] * len(completions)
def words(completions, **kwargs):
    return [float(len(completion.split())) for completion in completions]
def shout(completions, *, conversational="no"):
    return [float(conversational == "YES")] * len(completions)
"""
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "2+2?"},
]
GOOD = "<think>\n2+2\n</think>\n<answer>\n4\n</answer>"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("form") / "published.py"
    path.write_text(PUBLISHED)
    return str(path)


def answers(*completions: str) -> Answers:
    count = len(completions)
    rows = [{"solution": GOOD}] * count
    return Answers(["2+2?"] * count, list(completions), [TURNS] * count, rows, ["d:1"] * count)


def scored(functions: list[GivenFunction], *completions: str) -> list[list[float | None]]:
    rewards = RewardFunctions(functions, None, lambda line: None)
    try:
        return [found.scores for found in rewards.score(answers(*completions))]
    finally:
        rewards.close()


def test_published_functions_run_beside_one_of_texts(file: str) -> None:
    """In worker processes, which know a function by its name alone."""
    names: list[GivenFunction] = [
        f"{file}:accuracy_reward?conversational=on",
        f"{file}:format_reward?conversational=on:0.5",
        f"{file}:polite?bonus=2&conversational=on",
        f"{file}:words",
    ]
    assert scored(names, GOOD, "4 is it") == [[1.0, 0.0], [1.0, 0.0], [10.0, 10.0], [6.0, 3.0]]


@pytest.mark.parametrize("here", [False, True])
def test_an_attribute_says_the_same(here: bool) -> None:
    given: list[Any] = []

    def length(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        given.append(prompts)
        return [float(len(turn["content"])) for (turn,) in completions]

    length.conversational = True  # type: ignore[attr-defined]
    length.in_process = here  # type: ignore[attr-defined]
    assert scored([length], "four") == [[4.0]]
    if here:
        assert given == [[TURNS]]
        assert given[0][0] is not TURNS


def test_a_name_outweighs_the_attribute_and_leaves_the_function_as_it_is(file: str) -> None:
    plain = load_reward_function(f"{file}:words")
    on = load_reward_function(f"{file}:words?conversational=on")
    assert not hasattr(plain, "conversational")
    assert on.conversational  # type: ignore[attr-defined]
    off = load_reward_function(text_of(parse_spec(f"{file}:words?conversational=off:2")))
    call = Call(["q"], ["a b"], {"messages": [TURNS]})
    assert outcomes_of(off, call)[0].score == outcomes_of(plain, call)[0].score == 2.0


def test_an_option_of_that_name_is_the_functions_own(file: str) -> None:
    assert scored([f"{file}:shout?conversational=YES"], "a") == [[1.0]]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("words?conversational=maybe", "words?conversational must be on or off; got 'maybe'"),
        ("words?messages=on", "must have the option messages, .*; got conversational"),
    ],
)
def test_what_asks_for_it_wrongly_is_told(file: str, name: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part.replace("?", r"\?")):
        load_reward_function(f"{file}:{name}")
    with pytest.raises(ConfigError, match="must have the option conversational"):
        load_reward_function("tandem:length?conversational=on&limit=3")


def tried(function: GivenFunction, *references: str | None) -> list[str]:
    rows = [ReferenceRow("2+2?", TURNS, {"answer": a, "solution": a}, "d:1") for a in references]
    rewards = RewardFunctions([function], None, lambda line: None)
    try:
        return self_test(rewards, rows)
    finally:
        rewards.close()


def test_the_trial_before_the_first_step_names_the_remedy(file: str) -> None:
    with pytest.raises(ConfigError, match="prompts and completions as texts") as told:
        tried(f"{file}:accuracy_reward", None)
    (remedy,) = re.findall(r"as in file\.py:(\S+),", str(told.value))
    assert tried(f"{file}:{remedy}", GOOD, "no")[0].endswith(
        "on 2 rows: reference 1, empty 0, another row's reference 0"
    )
    with pytest.raises(
        ConfigError, match=r"as lists of messages; got, on d:1: .*no attribute 'spl"
    ):
        tried(f"{file}:words?conversational=on", None)


def careless(completions: Any, **columns: Any) -> list[float | None]:
    try:
        return [float(completion[0]["content"] == "4") for completion in completions]
    except Exception:
        return [None for _ in completions]


def test_a_function_that_catches_the_error_is_told_by_its_code() -> None:
    note, _ = tried(careless, None)
    assert note.startswith("reward function careless gives None for its first answer: it reads mes")
    assert "?conversational=on" in note
    with pytest.raises(ConfigError, match=r"got none, none and none .*careless\.conversational = "):
        tried(careless, "4", "5")
    rewards = RewardFunctions([careless], None, lambda line: None)
    (found,) = rewards.score(answers("4", "5"))
    rewards.close()
    assert "careless.conversational = True" in found.advice


def either(completions: Any, **columns: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(len(text)) for text in texts]


def of_messages(completions: Any, messages: Any, **columns: Any) -> list[float]:
    return [float(len(turns[-1]["content"])) for turns in messages]


def test_code_that_reads_messages_rightly_is_left_alone() -> None:
    assert reads_messages(careless)
    for function in (either, of_messages, max, tried):
        assert reads_messages(function) == ""


def test_the_columns_stay_what_they_are(file: str) -> None:
    """An answer is no message, even where completions are."""
    columns = columns_of([{"solution": "x"}])
    call = Call(["q"], ["x"], {**columns, "messages": [TURNS]})
    function = load_reward_function(f"{file}:accuracy_reward?conversational=on")
    assert outcomes_of(function, call)[0].score == 1.0
