"""The reward functions that come with Tandem, on small rows and on real ones."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.data.reading.gym import rows as gym_rows
from tandem.data.reading.sources import parse_spec, read_rows
from tandem.errors import ConfigError, DataError
from tandem.rewards.choice import chosen_letter
from tandem.rewards.code import code_of
from tandem.rewards.loading import load_reward_function
from tandem.rewards.scoring import RewardFunctions
from tests.rewards.answers import answers_of


def score(name: str, completions: list[str], **columns: list[Any]) -> list[float | None]:
    return list(load_reward_function(f"tandem:{name}")([""] * 9, completions, **columns))


def real_rows(shared: Path, name: str) -> list[dict[str, Any]]:
    path = shared / "verifiable" / name
    if not path.is_file():
        pytest.skip(f"no {name}")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_gsm8k_strict_and_lenient() -> None:
    completions = ["so #### 1,234", "it is 1234.", "#### 7 or 1234", "", "#### \n1234", "####1234!"]
    answer = ["1 + 1233 = 1234\n#### 1,234"] * 5 + [1234]
    assert score("gsm8k", completions, answer=answer) == [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    assert score("gsm8k_lenient", completions, answer=answer) == [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert score("gsm8k", ["#### 1"], answer=[None]) == [None]
    assert score("gsm8k", ["#### 1"], answer=["none"]) == [None]


def test_gsm8k_on_real_rows(shared: Path) -> None:
    rows = real_rows(shared, "gsm8k_train_3000.jsonl.gz")
    answers = [row["answer"] for row in rows]
    others = [*answers[1:], answers[0]]
    for name in ("gsm8k", "gsm8k_lenient"):
        assert score(name, answers, answer=answers) == [1.0] * len(rows)
        assert sum(map(float, score(name, others, answer=answers))) < 0.05 * len(rows)
        assert score(name, [""] * len(rows), answer=answers) == [0.0] * len(rows)


def test_lenient_agrees_with_the_labels_of_real_solutions(shared: Path) -> None:
    """2,048 solutions by models, each labelled by the data set's authors."""
    rows = real_rows(shared, "gsm8k_model_solutions.jsonl.gz")
    pairs = [(row["ground_truth"], s) for row in rows for s in row["solutions"]]
    found = score("gsm8k_lenient", [s["solution"] for _, s in pairs], answer=[t for t, _ in pairs])
    agree = sum(f == float(s["is_correct"]) for f, (_, s) in zip(found, pairs, strict=True))
    assert agree / len(pairs) > 0.99
    strict = score("gsm8k", [s["solution"] for _, s in pairs], answer=[t for t, _ in pairs])
    assert strict == [0.0] * len(pairs), "these solutions end in A: and not in ####"


def test_word_problems_by_exact_number_and_choice(shared: Path) -> None:
    rows = real_rows(shared, "easy_arith_word_problems.jsonl.gz")
    answers = [row["answer"] for row in rows]
    found = score("exact_number", [f"The answer is {a}." for a in answers], answer=answers)
    assert found == [1.0] * len(rows)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"), ("(b)", "B"), ("**C**", "C"), ("The answer is D.", "D"),
        ("Answer: (A)", "A"), ("A dog has four legs. So the answer is B", "B"),
        ("B) Paris", "B"), ("\\boxed{C}", "C"), ("\\boxed{\\text{(A)}}", "A"),
        ("The answer is a dog", None), ("I think so.", None), ("", None), ("I choose C", "C"),
        ("first A, then the answer is C. No, the answer is D", "D"), ("It's a cat", None),
        ("the correct option is **B**.", "B"),
    ],
)  # fmt: skip
def test_the_chosen_letter(text: str, letter: str | None) -> None:
    assert chosen_letter(text) == letter


def test_choice_scores_the_letter_or_the_number() -> None:
    completions = ["The answer is B", "C", "B", "x", "A"]
    answer = ["(b)", "B", 1, "A", "cats"]
    assert score("choice", completions, answer=answer) == [1.0, 0.0, 1.0, 0.0, None]


def test_format_scores_answers_that_match_the_pattern() -> None:
    completions = ["<answer>\n4</answer>", "4", "<answer>4</answer> so"]
    name = "format?pattern=<answer>.*</answer>"
    assert score(name, completions) == [1.0, 0.0, 1.0]
    assert score(f"{name}&where=whole", completions) == [1.0, 0.0, 0.0]
    for wrong, part in (
        ("format", "must have a pattern"),
        ("format?pattern=(", "must be a regular"),
    ):
        with pytest.raises(ConfigError, match=part):
            score(wrong, ["a"])
    with pytest.raises(ConfigError, match="where must be anywhere or whole; got 'start'"):
        score("format?pattern=a&where=start", ["a"])


def test_length_falls_from_the_buffer_on() -> None:
    completions = ["w " * n for n in (0, 6, 8, 9, 10, 50)]
    assert score("length?limit=10&buffer=4", completions) == [0.0, 0.0, -0.5, -0.75, -1.0, -1.0]
    assert score("length?limit=10", completions) == [0.0, 0.0, 0.0, -0.5, -1.0, -1.0]
    assert score("length?limit=10&unit=characters", ["x" * 9]) == [-0.5]
    with pytest.raises(ConfigError, match="must have a limit above 0 and a buffer within it"):
        score("length?limit=3&buffer=5", ["a"])
    with pytest.raises(ConfigError, match="unit must be words or characters; got 'tokens'"):
        score("length?limit=3&unit=tokens", ["a"])


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("length", "must have a limit above 0"),
        ("length?limit=3&unit=tokens", "unit must be words or characters"),
        ("format", "must have a pattern"),
        ("votes", "must have a file of votes"),
        ("python_tests?seconds=0", "seconds must be a number above 0; got 0"),
        ("python_tests?memory_mb=-1", "memory_mb must be a number above 0; got -1"),
    ],
)
def test_options_that_cannot_be_used_are_refused_before_an_answer_is_there(
    name: str, part: str
) -> None:
    with pytest.raises(ConfigError, match=part):
        load_reward_function(f"tandem:{name}")


ADD = "```python\ndef add(a, b):\n    return a + b\n```\nand that is all"
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
HOSTILE_CODE = {
    "wrong": "def add(a, b): return 0",
    "syntax": "def add(a, b: return",
    "exit": "import sys; sys.exit(0)",
    "os exit": "import os; os._exit(0)",
    "endless": "while True: pass",
    "fork bomb": "import os\nwhile True: os.fork()",
    "memory": "x = 'a' * 10**11",
    "output": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "disk": "f = open('x', 'wb')\nwhile True: f.write(b'x' * 10**6)",
    "kill": "import os; os.kill(0, 9)",
}


def test_python_code_against_unit_tests() -> None:
    completions = [ADD, "def add(a, b): return a + b", "print('noise')\nadd = lambda a, b: a + b"]
    assert score("python_tests", completions, tests=[TESTS] * 3) == [1.0] * 3
    assert score("python_tests", [ADD], tests=["\n".join(TESTS)]) == [1.0]
    assert score("python_tests", [ADD] * 2, tests=[None, []]) == [None, None]
    assert code_of("a ```py\nx = 1\n``` b ```\ny = 2\n```") == "y = 2\n"


@pytest.mark.parametrize("name", HOSTILE_CODE)
def test_hostile_code_scores_0_in_its_time(name: str) -> None:
    start = time.monotonic()
    completions = [HOSTILE_CODE[name]]
    assert score("python_tests?seconds=1", completions, tests=[TESTS]) == [0.0]
    assert time.monotonic() - start < 15


def test_code_sees_an_empty_folder_and_leaves_no_process() -> None:
    rewards = RewardFunctions(["tandem:python_tests"], None, lambda line: None)
    own = f"{4321 + os.getpid() / 2**22:.6f}"  # no other test's
    code = (
        "import os\nfiles = sorted(os.listdir())\n"
        f"if os.fork() == 0:\n    os.setsid()\n    os.execvp('sleep', ['sleep', '{own}'])\n"
    )
    tests = ["assert files == ['answer.py', 'tests.py']"]
    found = rewards.score(answers_of([code], tests=[tests]))[0]
    rewards.close()
    assert found.scores == [1.0]
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _lives(path)]
    assert not any(line.split(b"\0")[:2] == [b"sleep", own.encode()] for line in running)


def _lives(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False


def test_math_verify_scores_equal_expressions() -> None:
    pytest.importorskip("math_verify")
    completions = ["so \\boxed{\\frac{1}{2}}", "0.5", "the answer is $2x + x$", "7", ""]
    answer = ["1/2", "\\frac{1}{2}", "$3x$", "so #### 8", "1"]
    assert score("math_verify", completions, answer=answer) == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert score("math_verify", ["1"], answer=[None]) == [None]
    with pytest.raises(ValueError, match="holds no expression"):
        score("math_verify", ["1"], answer=["---"])


def test_math_verify_on_real_rows_in_workers(shared: Path) -> None:
    """The references score 1, and what hangs or blows up is counted, never a silent 0."""
    pytest.importorskip("math_verify")
    rows = real_rows(shared, "gsm8k_test.jsonl.gz")[:60]
    answers = [row["answer"].rpartition("####")[2].strip() for row in rows]
    completions = [f"The answer is $\\boxed{{{a}}}$." for a in answers]
    completions[3] = "$9^{9^{9^{9}}}$"
    lines: list[str] = []
    rewards = RewardFunctions(["tandem:math_verify"], None, lines.append)
    found = rewards.score(answers_of(completions, answer=answers))[0]
    rewards.close()
    assert [s for i, s in enumerate(found.scores) if i != 3] == [1.0] * 59
    assert found.scores[3] == 0.0 or found.failures, "0 only where it was compared"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "tandem.rewards.mathematics", raising=False)
    load_reward_function.cache_clear()
    with pytest.raises(ConfigError, match=r"Install it: pip install math-verify\."):
        load_reward_function("tandem:math_verify")
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"package reasoning-gym; .* Run pip install reasoning-gym"):
        list(gym_rows("syllogism"))


def test_reasoning_gym_as_data_and_reward() -> None:
    pytest.importorskip("reasoning_gym")
    spec = parse_spec("reasoning-gym:syllogism?size=20&seed=1")
    assert (spec.name, spec.weight) == ("syllogism", 1.0)
    assert parse_spec("reasoning-gym:syllogism?size=20:0.5").weight == 0.5
    rows = [row.columns for row in read_rows(spec)]  # type: ignore[union-attr]
    assert len(rows) == 20
    assert rows == [row.columns for row in read_rows(spec)]  # type: ignore[union-attr]
    entries = [row["reasoning_gym"] for row in rows]
    assert entries[3] == "syllogism?size=20&seed=1#3"
    right = [row["answer"] for row in rows]
    wrong = ["No" if answer == "Yes" else "Yes" for answer in right]
    assert score("reasoning_gym", right, reasoning_gym=entries) == [1.0] * 20
    assert score("reasoning_gym", wrong, reasoning_gym=entries) == [0.0] * 20
    tagged = [f"Let me see. <answer> {a} </answer>" for a in right]
    assert score("reasoning_gym", tagged, reasoning_gym=entries) == [1.0] * 20
    assert score("reasoning_gym", ["x"], reasoning_gym=[None]) == [None]
    for wrong_spec, part in (
        ("reasoning-gym:sylogism", "must be a task of reasoning-gym; got 'sylogism'"),
        ("reasoning-gym:syllogism?sise=3", "must have options that the task takes"),
    ):
        with pytest.raises(DataError, match=part):
            list(read_rows(parse_spec(wrong_spec)))
