"""What the stages on preferences tell of held-out rows: of all, and of each data set."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.config.schema import RunConfig
from tandem.training.stage_data import prepare_rows
from tests.jsonl import write_jsonl
from tests.tiny import tiny_config
from tests.training.runs import ran, records


def config_of(folder: Path, model: str, data: list[str], stage: str, batch_size: int) -> RunConfig:
    changes = {"max_steps": 6, "epochs": 10, "batch_size": batch_size, "learning_rate": 1e-3}
    config = tiny_config(
        folder, model, "", stages=[stage], dataset__split=[], dataset__heldout=0.3,
        reward__normalize_prompts=0, save_async=False, ppo__eval_prompts=0,
        **{f"{stage}__{name}": value for name, value in changes.items()},
    )  # fmt: skip
    return replace(config, data=tuple(data))


@pytest.fixture
def two_sets(tmp_path: Path, preferences: str) -> list[str]:
    """The preferences in two files, a third of them in one."""
    lines = Path(preferences).read_text(encoding="utf-8").splitlines(keepends=True)
    for name, some in (("few", lines[::3]), ("many", lines[1::3] + lines[2::3])):
        (tmp_path / f"{name}.jsonl").write_text("".join(some), encoding="utf-8")
    return [str(tmp_path / f"{name}.jsonl") for name in ("few", "many")]


@pytest.mark.parametrize("stage", ["reward", "dpo", "kto"])
def test_the_parts_of_each_data_set_make_up_the_whole(
    tmp_path: Path, tiny_model: str, two_sets: list[str], stage: str
) -> None:
    folder = ran(config_of(tmp_path / "run", tiny_model, two_sets, stage, 8))
    *_, last = (r["values"] for r in records(folder) if "heldout_loss" in r["values"])
    parts = {}
    for name in ("heldout_loss", "heldout_margin", "heldout_accuracy"):
        parts[name] = [value for key, value in last.items() if key.startswith(f"{name}/")]
        assert len(parts[name]) == 2, name
        if stage == "kto" and name != "heldout_loss":
            continue  # of every good answer beside every bad one, of other data sets too
        few, many = parts[name]
        share = (last[name] - many) / (few - many) if few != many else None
        loss_few, loss_many = parts["heldout_loss"]
        of_loss = (last["heldout_loss"] - loss_many) / (loss_few - loss_many)
        assert 0.1 < of_loss < 0.5
        if share is not None:
            assert share == pytest.approx(of_loss, abs=1e-3)


def test_a_step_has_no_implicit_reward_of_a_label_that_it_does_not_have(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    lines = []
    for line in Path(preferences).read_text(encoding="utf-8").splitlines():
        given = json.loads(line)
        for label, side in ((True, "chosen"), (False, "rejected")):
            lines.append({"prompt": given["prompt"], "completion": given[side], "label": label})
    data = tmp_path / "labelled.jsonl"
    write_jsonl(data, lines)
    config = config_of(tmp_path / "run", tiny_model, [str(data)], "kto", 2)
    steps = [r["values"] for r in records(ran(config)) if "desirable_share" in r["values"]]
    shares = [values["desirable_share"] for values in steps]
    assert {0.0, 1.0} & set(shares)
    for share, values in zip(shares, steps, strict=True):
        had = {"chosen": share > 0, "rejected": share < 1, "margin": 0 < share < 1}
        assert {name: f"implicit_reward_{name}" in values for name in had} == had


def test_an_evaluation_reads_so_many_rows_spread_over_all_of_them(
    tmp_path: Path, tiny_model: str, two_sets: list[str]
) -> None:
    config = config_of(tmp_path / "run", tiny_model, two_sets, "dpo", 8)
    whole = prepare_rows(config, tiny_model, tiny_model)
    assert whole.spread == {}
    few = replace(config, dataset=replace(config.dataset, eval_rows=10))
    rows = prepare_rows(few, tiny_model, tiny_model, trains=False)
    every = len(whole.heldout_dpo_pairs)
    assert rows.spread == dict.fromkeys(("texts", "pairs"), (10, every))
    small, large = (
        [pair for pair in whole.heldout_dpo_pairs if pair.chosen.source.dataset == name]
        for name in ("few", "many")
    )
    # Two of each, and of the other six as many as the data sets have.
    first = 2 + 6 * (len(small) - 2) // (every - 4)
    assert rows.heldout_dpo_pairs == [
        own[i * len(own) // count] for own, count in ((small, first), (large, 10 - first))
        for i in range(count)
    ]  # fmt: skip
    assert (len(rows.heldout_sft), rows.dpo_pairs, rows.sft) == (10, [], [])
    one = replace(config, dataset=replace(config.dataset, eval_rows=1))
    assert len(prepare_rows(one, tiny_model, tiny_model, trains=False).heldout_sft) == 1
    assert rows.heldout_prompts == whole.heldout_prompts
    lines: list[str] = []
    evaluated = [
        r["values"] for r in records(ran(few, lines=lines)) if "heldout_loss" in r["values"]
    ]
    assert len(evaluated) > 1
    told = f"note: an evaluation reads 10 of {every} texts, 10 of {every} pairs held out"
    assert any(line.startswith(told) for line in lines)
