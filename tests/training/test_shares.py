"""Which rows a step trains on: all, where it runs alone; its share, where the folder has shares."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.config.load import load_config
from tandem.config.schema import RunConfig
from tandem.data.dataset import load_data
from tandem.data.split import opening
from tandem.errors import CheckpointError, ConfigError
from tandem.parallel.world import World
from tandem.training.shares import settle_shares
from tandem.training.stage_data import prepare_rows
from tests.tiny import tiny_config
from tests.training.runs import StopError, ran, stop_at

ROWS = 120


@pytest.fixture
def config(tmp_path: Path, tiny_model: str, preferences: str) -> RunConfig:
    return tiny_config(
        tmp_path / "run", tiny_model, preferences, dataset__split=[],
        sft__max_steps=1, reward__max_steps=1, ppo__steps=1, ppo__eval_prompts=2,
        reward__normalize_prompts=ROWS,
    )  # fmt: skip


def alone(config: RunConfig, *stages: str, split: tuple[float, ...] = ()) -> RunConfig:
    return replace(config, stages=stages, dataset=replace(config.dataset, split=split))


def used(folder: Path) -> dict[str, int]:
    (account,) = json.loads((folder / "data.json").read_text())["datasets"]
    return {step: count for step, count in account["used"].items() if count}


@pytest.mark.parametrize(
    ("stages", "share"),
    [(["sft"], "texts"), (["reward"], "pairs"), (["dpo"], "pairs"), (["ppo"], "prompts")],
)
def test_a_step_alone_takes_all_but_the_heldout_rows(
    config: RunConfig, tiny_model: str, stages: list[str], share: str
) -> None:
    settled, _ = settle_shares(alone(config, *stages), World())
    rows = prepare_rows(settled, tiny_model, tiny_model)
    (account,) = rows.ledger.datasets.values()
    trained = {"sft": rows.sft, "reward": rows.pairs, "dpo": rows.dpo_pairs, "ppo": rows.prompts}
    assert {step for step, count in account.used.items() if count} == {share, "heldout"}
    assert account.used[share] + account.used["heldout"] + account.num_dropped == ROWS
    assert len(trained[stages[0]]) == account.used[share]
    assert account.used["heldout"] < ROWS / 5


def test_shares_are_dealt_among_the_steps_that_run(config: RunConfig, tiny_model: str) -> None:
    for stages, shares in (
        (("sft", "reward", "ppo"), (2, 4, 4)),
        (("reward", "ppo"), (0, 4, 4)),
        (("sft", "dpo"), (2, 4, 0)),
    ):
        settled, said = settle_shares(alone(config, *stages), World())
        assert settled.dataset.split == shares
        assert not said


def test_rows_kept_for_a_step_that_does_not_run_are_not_used(
    config: RunConfig, tiny_model: str
) -> None:
    settled, _ = settle_shares(alone(config, "sft", split=(2, 4, 4)), World())
    (account,) = prepare_rows(settled, tiny_model, tiny_model).ledger.datasets.values()
    assert set(account.unused) == {
        "kept for stage 2 (reward), which does not run",
        "kept for stage 3 (ppo), which does not run",
    }
    assert account.used["texts"] < ROWS / 2
    assert not account.used["pairs"] + account.used["prompts"]
    assert account.balances()


def test_a_reward_model_alone_normalizes_on_prompts_of_its_own(
    config: RunConfig, tiny_model: str
) -> None:
    all_its_own, _ = settle_shares(alone(config, "reward"), World())
    rows = prepare_rows(all_its_own, tiny_model, tiny_model)
    assert len(rows.prompts) == len(rows.pairs)
    parted, _ = settle_shares(alone(config, "reward", split=(2, 4, 4)), World())
    rows = prepare_rows(parted, tiny_model, tiny_model)
    mine = {pair.chosen.source.line for pair in rows.pairs}
    assert rows.prompts
    assert mine.isdisjoint(prompt.source.line for prompt in rows.prompts)


def test_steps_run_one_by_one_with_shares_stay_apart(config: RunConfig) -> None:
    """Only the first command names them; the folder has them from then on."""
    folder = Path(config.output_dir)
    lines: list[str] = []
    counts = {}
    ran(alone(config, "sft", split=(1, 1, 1)), lines=lines)
    counts |= used(folder)
    assert not [line for line in lines if line.startswith("rows: ")]
    for step, share in (("reward", "pairs"), ("ppo", "prompts")):
        lines.clear()
        ran(alone(config, step), lines=lines)
        (line,) = [line for line in lines if line.startswith("rows: ")]
        assert "split 1,1,1, as for sft" in line
        assert set(used(folder)) == {share, "heldout"}
        counts |= used(folder)
        assert load_config(folder / "config.yaml").dataset.split == (1, 1, 1)
    together = load_data(
        replace(config.dataset, split=(1, 1, 1)), config.data, seed=config.seed
    ).ledger.datasets["prefs"]
    assert counts == together.used
    ran(alone(config, "sft", "reward", "ppo"))  # all finished, from these very rows


def test_a_step_whose_rows_others_took_is_refused_before_it_begins(config: RunConfig) -> None:
    folder = Path(config.output_dir)
    lines: list[str] = []
    ran(alone(config, "sft"), lines=lines)
    (line,) = [line for line in lines if line.startswith("rows: ")]
    assert "all but the held-out ones are for sft; to keep some for reward and ppo" in line
    assert "--data-split 2,4,4" in line
    before = (folder / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match=r"stage reward must have a share of the rows") as raised:
        ran(alone(config, "reward"))
    assert "run tandem reward with --data-split 0,4,0" in str(raised.value)
    with pytest.raises(ConfigError, match=r"tandem train --stages reward ppo with .* 0,4,4"):
        ran(alone(config, "sft", "reward", "ppo"))
    with pytest.raises(CheckpointError, match=r"changed: dataset.split \[2.0, 0.0, 0.0\] -> "):
        ran(alone(config, "sft", "reward", "ppo", split=(2, 4, 4)))
    assert (folder / "config.yaml").read_bytes() == before
    lines.clear()
    ran(alone(config, "reward", split=(0, 4, 0)), lines=lines)  # as the message says
    assert any("reward, with the split 0,4,0, trains on rows that sft of" in line for line in lines)
    assert used(folder)["pairs"] > ROWS * 0.7


@pytest.mark.parametrize("split", [(), (2.0, 4.0, 4.0)])
def test_a_stopped_step_continues_with_its_rows(
    config: RunConfig, split: tuple[float, ...]
) -> None:
    config = replace(config, save_async=False, sft=replace(config.sft, max_steps=3))
    config = alone(config, "sft", split=split)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, "sft", 3)
        with pytest.raises(StopError):
            ran(config)
    first = used(Path(config.output_dir))
    lines: list[str] = []
    ran(alone(config, "sft"), lines=lines)  # the shares need not be given again
    assert "sft: continuing after step 2 (checkpoint verified)" in lines
    assert used(Path(config.output_dir)) == first


def test_no_opening_is_in_two_steps_of_a_run_of_all(config: RunConfig) -> None:
    settled, _ = settle_shares(config, World())
    data = load_data(settled.dataset, settled.data, seed=settled.seed, stages=settled.stages)
    sides = [
        {opening(s) for s in side} for side in (data.texts, data.pairs, data.prompts, data.heldout)
    ]
    assert sum(map(len, sides)) == len(set().union(*sides))
