"""The demo keeps its word: judged by the rule that training never sees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from tandem.errors import CheckpointError
from tandem.metrics.log import read_metrics
from tandem.training.demo import answer_table, demo


@pytest.mark.slow
def test_every_step_shows_by_the_hidden_rule(tmp_path: Path) -> None:
    judged = demo(str(tmp_path / "demo"))
    assert judged["base"]["form"] < 0.05
    assert judged["sft"]["form"] > 0.95
    assert judged["ppo"]["score"] > judged["sft"]["score"] + 0.15
    assert judged["ppo"]["form"] > 0.95
    evaluation = json.loads((tmp_path / "demo" / "evaluation.json").read_text())
    assert evaluation["models"]["reward model"]["rule: agreement"] > 0.88
    last = read_metrics(tmp_path / "demo")[-1].values
    assert last["heldout_kl"] < 3
    assert last["heldout_eos_rate"] > 0.95


def test_a_folder_with_other_things_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(CheckpointError, match=r"an empty one; got .* with 'thesis\.txt'"):
        demo(str(tmp_path))
    assert [found.name for found in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_answer_of_control_characters_does_not_reach_the_terminal() -> None:
    console = Console(width=80, force_terminal=True, color_system=None)
    with console.capture() as shown:
        console.print(answer_table("Name two colors.", {"base": "red\x1b]0;owned\x07\x08blue"}))
    assert r"red\x1b]0;owned\x07\x08blue" in shown.get()
    assert "\x1b" not in shown.get()
