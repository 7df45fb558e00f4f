"""examples/guess.py: its games keep to the rules, and docs/environments.md shows its functions."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.named_functions import named_function
from tests.jsonl import read_jsonl

EXAMPLE = Path(__file__).parents[1] / "examples/guess.py"
PAGE = Path(__file__).parents[1] / "docs/environments.md"


def named(name: str) -> Any:
    return named_function(f"{EXAMPLE}:{name}", "test")


@pytest.mark.parametrize("name", ["asked", "environment", "reward"])
def test_the_page_shows_the_functions_of_the_example(name: str) -> None:
    def without_docstring(text: str) -> str:
        return "\n".join(line for line in text.splitlines() if '"""' not in line)

    shown = without_docstring(PAGE.read_text("utf-8"))
    assert without_docstring(inspect.getsource(named(name))).strip() in shown


def test_games_keep_to_the_rules(tmp_path: Path) -> None:
    games, numbers = tmp_path / "games.jsonl", tmp_path / "numbers.jsonl"
    named("main")(games, numbers)
    environment, asked = named("environment"), named("asked")
    found = 0
    for line in games.read_text("utf-8").splitlines()[:500]:
        turns = json.loads(line)["messages"]
        guesses = [asked(turn) for turn in turns[1::2]]
        assert 1 <= len(guesses) <= 4
        assert None not in guesses
        # Some number explains every turn; the last guess is it, or the game ended with the fourth.
        fits = [
            n
            for n in range(1, 16)
            if all(
                environment(turns[: 2 * i], n) == turns[2 * i]["content"]
                for i in range(1, len(guesses))
            )
        ]
        assert fits
        found += len(guesses) < 4
        if len(guesses) < 4:
            assert guesses[-1] in fits
    assert found
    rows = read_jsonl(numbers)
    assert {row["number"] for row in rows} == set(range(1, 16))


def test_scores_count_guesses() -> None:
    def says(*guesses: int) -> list[dict[str, str]]:
        turns = []
        for guess in guesses:
            turns += [
                {"role": "assistant", "content": f"Is it {guess}?"},
                {"role": "user", "content": "Higher."},
            ]
        return turns[:-1]

    new = [says(7), says(3, 5, 7), says(3, 5), [{"role": "assistant", "content": "7"}]]
    scores = named("reward")(completions=[""] * 4, new_messages=new, number=[7, 7, 7, 7])
    assert scores == pytest.approx([1.0, 0.8, 0.0, 0.0])


@pytest.mark.parametrize("name", ["guess", "calculator"])
def test_examples_say_what_they_need(name: str) -> None:
    def run(*words: str) -> tuple[int, str]:
        command = [sys.executable, str(EXAMPLE.with_name(f"{name}.py")), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    code, page = run("--help")
    assert code == 0
    assert f"python examples/{name}.py" in page
    assert "begin with" in page
    code, told = run()
    assert code == 2
    assert "the following arguments are required" in told
