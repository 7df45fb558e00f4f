"""A line where much of a stage's data is left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tandem.config.schema import RunConfig
from tandem.data.ledger import DatasetLedger, Dropped, Ledger
from tandem.training.checks.left_out import left_out_lines
from tandem.training.run_stages import train
from tests.tiny import tiny_config

LONG = "longer than max_tokens (pairs)"


def lines(room: int | None = None, policy: str = "drop", **account: object) -> list[str]:
    config = RunConfig(stages=("dpo",))
    config = replace(config, dataset=replace(config.dataset, on_long_row=policy))
    found = DatasetLedger("prefs", "prefs.jsonl", rows=100)
    for name, value in account.items():
        getattr(found, name).update(value)
    lengths = {"pairs": [500] * 60 + [900] * 36 + [5000] * 4}
    return left_out_lines(config, Ledger({"prefs": found}), lengths, room)


def test_share_reason_and_what_helps_are_named() -> None:
    half = {"used": {"pairs": 60}, "dropped": {LONG: Dropped(40)}}
    start = "note: 40 of 100 rows for dpo (40%) are left out: longer than max_tokens 512. "
    cut = "--dataset.on-long-row truncate cuts the ends of answers whose prompts leave room"
    assert lines(**half) == [f"{start}--max-tokens 960 keeps 96%; {cut}"]
    most = f"{start}--max-tokens 700, the most that the model takes, keeps 60% whole"
    assert lines(room=700, policy="truncate", **half) == [most]
    no_more = f"{start}the model takes no more than 512 tokens"
    assert lines(room=512, **half) == [f"{no_more}; {cut}"]
    assert lines(room=512, policy="truncate", **half) == [no_more]


def test_the_room_of_a_prompt_is_what_the_answer_leaves() -> None:
    reason = "longer than max_prompt_tokens"
    found = DatasetLedger("prefs", "prefs.jsonl", rows=100)
    found.used.update(prompts=60)
    found.dropped[f"{reason} (prompts)"] = Dropped(40)
    ledger, lengths = Ledger({"prefs": found}), {"prompts": [200] * 60 + [700] * 40}
    start = f"note: 40 of 100 rows for ppo (40%) are left out: {reason} 256. "
    cut = "--dataset.on-long-row truncate cuts the oldest turns of prompts"
    beside = "beside 128 tokens of the answer (--max-new-tokens)"
    for room, advice in (
        (384, f"the model takes no more than 256 tokens {beside}"),
        (672, f"--max-prompt-tokens 544, the most that the model takes {beside}, keeps 60%"),
        (None, "--max-prompt-tokens 704 keeps 100%"),
    ):
        told = left_out_lines(RunConfig(stages=("ppo",)), ledger, lengths, room)
        assert told == [f"{start}{advice}; {cut}"]


def test_few_rows_are_not_told_of() -> None:
    assert lines(used={"pairs": 75}, dropped={LONG: Dropped(25)}) == []
    assert lines(dropped={"chosen must not be blank": Dropped(25)}) == []


def test_bad_and_held_out_rows_are_told_of_too() -> None:
    (line,) = lines(dropped={"chosen must not be blank": Dropped(26)})
    assert line.startswith("note: 26 of 100 rows of prefs (26%) are left out: chosen must not be")
    long = {"longer than max_tokens (measuring)": 4, "answer cut at max_tokens (measuring)": 9}
    (line,) = lines(used={"heldout": 10}, notes=long)
    assert line.startswith("note: 4 of 10 rows for measuring (40%) are left out: longer than max_t")


def test_a_run_says_it(tiny_model: str, preferences: str, tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run", tiny_model, preferences, stages=["dpo"])
    told: list[str] = []
    short = replace(config, dataset=replace(config.dataset, max_tokens=30))
    train(short, print_line=told.append)
    (line,) = [line for line in told if " rows for dpo (" in line]
    assert "left out: longer than max_tokens 30. --max-tokens " in line
