"""Which held-out prompts a comparison shows, and of how many answers its rewards are."""

from __future__ import annotations

import json
from pathlib import Path

from tandem.training.comparing.compare import first_of_each
from tandem.types import Message, PromptRow, Source
from tests.tiny import tiny_config
from tests.training.runs import ran


def test_a_prompt_of_several_pairs_is_shown_once() -> None:
    texts = ["a", "b", "a", "c", "b", "d"]
    prompts = [
        PromptRow((1,), (Message("user", text),), {}, Source("x", "x", i))
        for i, text in enumerate(texts)
    ]
    assert first_of_each(prompts, 3) == [0, 1, 3]
    assert first_of_each(prompts, 9) == [0, 1, 3, 5]


def test_a_model_whose_answers_have_no_score_is_told_from_one_whose_all_have(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    function = tmp_path / "fourth.py"
    function.write_text(
        "calls = []\n"
        "def reward(completions, **columns):\n"
        "    calls.append(1)\n"
        "    return [None if len(calls) == 4 else 1.0 for _ in completions]\n"
        "reward.in_process = True\n"
    )
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["grpo"], grpo__steps=1,
        grpo__reward_function=[f"{function}:reward"],
    )  # fmt: skip
    ran(config)
    models = json.loads((tmp_path / "run" / "evaluation.json").read_text())["models"]
    assert "heldout_reward" not in models["base"]
    assert models["base"]["heldout_unscored"] == 1
    assert models["grpo"]["heldout_reward"] == 1
    assert "heldout_unscored" not in models["grpo"]
