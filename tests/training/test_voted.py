"""A run in which people decide."""

from __future__ import annotations

import threading
from pathlib import Path

from tandem.rewards.votes import asked_file
from tests.rewards.voter import voting
from tests.training.runs import assert_equal_runs, ran, ran_with_stops, records
from tests.training.test_preferences import config_of


def test_online_dpo_learns_from_votes_and_finds_them_again(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    file = tmp_path / "votes.jsonl"
    config = config_of(
        tmp_path / "straight",
        tiny_model,
        preferences,
        "online-dpo",
        sampling__samples_per_prompt=2,
        sampling__max_new_tokens=6,
        ppo__reward_function=f"tandem:votes?file={file}",
        ppo__missing_eos_penalty=0.0,
        ppo__eval_prompts=2,
        ppo__steps=2,
        save_every=1,
    )
    stop = threading.Event()
    voter = threading.Thread(target=voting, args=(file, stop))
    voter.start()
    try:
        straight = ran(config)
        asked = asked_file(file).read_bytes()
        ran_with_stops(config, tmp_path / "run", [("online-dpo", 2)])
    finally:
        stop.set()
        voter.join()
    assert asked_file(file).read_bytes() == asked, "nothing is asked twice"
    assert_equal_runs(tmp_path / "run", straight)
    first, values = (record["values"] for record in records(straight)[:2])
    assert "heldout_eos_rate" in first
    assert "heldout_reward" not in first, "held-out answers are not asked about"
    assert values["preference_pairs"] == 8 * (1 - values["tied_prompts"]) > 0
    assert values["score_gap"] == 1.0
