"""A stage that leaves its best evaluation's models, and one that ends early."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem import TrackedLoop
from tandem.checkpoint.folder import read_manifest
from tandem.checkpoint.state import numbered
from tandem.config.load import build_config, check_config
from tandem.config.parallel import ParallelConfig
from tandem.config.schema import RunConfig
from tandem.config.stages import STAGES, stage_of
from tandem.errors import CheckpointError, ConfigError
from tandem.metrics.names import find_metric
from tandem.metrics.report import write_report
from tandem.parallel.world import World
from tandem.training.replay import replay
from tandem.training.run_stages import train
from tandem.training.selection import Selection
from tests.ranks import on_ranks
from tests.tiny import tiny_config
from tests.training.runs import StopError, assert_equal_runs, ran, ran_with_stops, records, stop_at
from tests.training.test_nodes import ran_on, stopped_on


def overfitting(folder: Path, model: str, data: str, **changes: Any) -> RunConfig:
    """SFT on 25 rows at a high rate: the held-out loss is lowest at step 10 (`BEST`)."""
    values = {
        "stages": ["sft"], "save_every": 3, "sft__max_steps": 16, "sft__eval_every": 2,
        "sft__keep_best": True, "sft__learning_rate": 3e-2, "sft__schedule": "constant",
        "sft__warmup": 0.0, "ppo__eval_prompts": 2,
    }  # fmt: skip
    return tiny_config(folder, model, data, **{**values, **changes})


BEST = 10


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: str, preferences: str) -> Path:
    """That run, which ends by its patience."""
    folder = tmp_path_factory.mktemp("best") / "run"
    lines: list[str] = []
    ran(overfitting(folder, tiny_model, preferences, sft__patience=2), lines=lines)
    (folder / "said.txt").write_text("\n".join(lines))
    return folder


def losses(folder: Path, stage: str = "sft", measure: str = "heldout_loss") -> dict[int, float]:
    return {
        record["step"]: record["values"][measure]
        for record in records(folder)
        if record["stage"] == stage and measure in record["values"]
    }


def facts_of(folder: Path) -> Mapping[str, Any]:
    return read_manifest(folder).facts


def scripted(patch: pytest.MonkeyPatch, values: Mapping[int, float]) -> None:
    """Let evaluations count as these, by their steps."""
    hear = Selection.hear

    def hearing(
        self: Selection, step: int, evaluation: Mapping[str, float], world: World
    ) -> dict[str, float]:
        return hear(self, step, {self._stage.measure: values[step]}, world)

    patch.setattr(Selection, "hear", hearing)


def test_the_best_evaluations_model_is_that_of_a_run_that_ends_there(
    tmp_path: Path, tiny_model: str, preferences: str, whole: Path
) -> None:
    measured = losses(whole)
    assert min(measured, key=lambda step: measured[step]) == BEST
    assert max(measured) == BEST + 4, "two evaluations later"
    by_hand = overfitting(
        tmp_path / "hand", tiny_model, preferences, sft__max_steps=BEST, sft__keep_best=False
    )
    ran(by_hand)
    ours, theirs = whole / "sft/model.safetensors", tmp_path / "hand/sft/model.safetensors"
    assert ours.read_bytes() == theirs.read_bytes()
    facts = facts_of(whole / "sft")
    assert facts["heldout_loss"] == measured[BEST] == losses(tmp_path / "hand")[BEST]
    assert (facts["best_step"], facts["evaluations"]) == (BEST, 8)
    assert (facts["steps"], facts["last_step"]) == (BEST + 4, BEST + 4)
    assert facts["last_value"] == measured[BEST + 4]
    best_so_far = losses(whole, measure="heldout_best_step")
    assert best_so_far == {
        step: min(range(0, step + 1, 2), key=lambda at: measured[at]) for step in measured
    }


def test_the_console_the_report_and_the_card_say_which_it_is(whole: Path) -> None:
    measured = losses(whole)
    best, last = f"{measured[BEST]:.3f}".rstrip("0"), f"{measured[BEST + 4]:.3f}".rstrip("0")
    said = (whole / "said.txt").read_text()
    assert (
        f"sft: ends after step 14 of 16: held-out cross-entropy {best} of step 10 was not "
        "improved on in 2 evaluations (sft.patience)" in said
    )
    told = (
        f"best of 8 evaluations: step 10, held-out cross-entropy {best} (the last, step 14: {last})"
    )
    assert f"sft: {told}" in said
    assert "warning" not in said
    assert f"This model is the {told}." in (whole / "sft/README.md").read_text()
    page = write_report(whole).read_text()
    assert f"step {BEST}, the best of 8 evaluations; " in page
    assert " at the last step, 14" in page


@pytest.mark.parametrize(
    "stops",
    [
        pytest.param([1, 4, 12], id="before the first save, before the best, after it"),
        pytest.param([11, 13, 14], id="after the best, at the end"),
    ],
)
def test_a_run_that_was_killed_leaves_the_same(
    tmp_path: Path, tiny_model: str, preferences: str, whole: Path, stops: list[int]
) -> None:
    config = overfitting(whole, tiny_model, preferences, sft__patience=2)
    ran_with_stops(config, tmp_path / "run", [("sft", step) for step in stops])
    assert_equal_runs(tmp_path / "run", whole)
    assert not (tmp_path / "run/checkpoints/sft").exists()


def test_a_kill_before_the_model_is_written_does_not_train_on(
    tmp_path: Path,
    tiny_model: str,
    preferences: str,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its last step is saved, so that the stage is over when it is continued."""
    config = overfitting(tmp_path / "run", tiny_model, preferences, sft__patience=2, save_every=1)

    def stopping(*arguments: Any) -> None:
        raise StopError

    with monkeypatch.context() as patch:
        patch.setattr("tandem.training.run_folder.Run.finish", stopping)
        with pytest.raises(StopError):
            ran(config)
    checkpoints = tmp_path / "run/checkpoints/sft"
    assert [path.name for path in numbered(checkpoints)] == [
        "step-000010", "step-000013", "step-000014",
    ]  # fmt: skip
    lines: list[str] = []
    ran(config, lines=lines)
    assert "sft: continuing after step 14 (checkpoint verified)" in lines
    assert_equal_runs(tmp_path / "run", whole)


def test_a_best_that_is_damaged_is_told_before_training_goes_on(
    tmp_path: Path, tiny_model: str, preferences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = overfitting(tmp_path / "run", tiny_model, preferences, save_async=False)
    with monkeypatch.context() as patch:
        stop_at(patch, "sft", 16)
        with pytest.raises(StopError):
            ran(config)
    best = tmp_path / "run/checkpoints/sft/step-000010"
    before = (best / "model.safetensors").read_bytes()
    (best / "model.safetensors").write_bytes(before[:-1])
    with pytest.raises(CheckpointError, match=r"bytes.* It is that of the best evaluation") as told:
        ran(config)
    assert "\n" not in str(told.value)
    (best / "model.safetensors").write_bytes(before)
    ran(config)
    assert facts_of(tmp_path / "run/sft")["best_step"] == BEST


def test_a_start_that_no_step_improves_on_is_left_with_a_warning(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = overfitting(
        tmp_path / "run", tiny_model, preferences, sft__learning_rate=3.0, sft__max_steps=4
    )
    lines: list[str] = []
    ran_with_stops(config, tmp_path / "stopped", [("sft", 1)])
    ran(config, lines=lines)
    assert (
        "warning: sft: no step improved on the start: the policy stays as it began. Lower the "
        "learning rate, or look at the rows" in lines
    )
    assert facts_of(tmp_path / "run/sft")["best_step"] == 0
    found = load_file(tmp_path / "run/sft/model.safetensors")
    for name, weight in load_file(Path(tiny_model) / "model.safetensors").items():
        assert torch.equal(found[name], weight), name
    assert_equal_runs(tmp_path / "stopped", tmp_path / "run")


PARTS = {
    "ppo": ("actor", "critic", "ema"),
    "grpo": ("actor", "ema"),
    "online-dpo": ("actor", "ema"),
}


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        ("reward", {}),
        ("dpo", {"lora__rank": 2}),
        ("kto", {"dtype": "bf16", "parallel__offload": ["optimizer"]}),
        ("ppo", {"ppo__ema": True, "ppo__kl_coef_target": 0.01}),
        ("grpo", {"grpo__ema": True, "sampling__samples_per_prompt": 4}),
        pytest.param("online-dpo", {"ppo__ema": True}, marks=pytest.mark.slow),
    ],
)
def test_every_stage_leaves_the_models_of_one_step(
    tmp_path: Path,
    tiny_model: str,
    preferences: str,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    changes: dict[str, object],
) -> None:
    """Its evaluations are made to be best after step 2 of 4; stopped once, after that."""
    record = stage_of(stage)
    section, length = record.section, "steps" if record.family == "rl" else "max_steps"
    rate: object = {"learning_rate": 1e-2, "schedule": "constant", "warmup": 0.0}
    if record.family == "rl":
        # Not of the stage's length: their rates follow a schedule of all of its updates.
        roles = ("actor", "critic") if stage == "ppo" else ("actor",)
        changes = changes | {f"{section}__{role}": rate for role in roles}
        changes[f"{section}__reward_function"] = [
            f"{Path(__file__).with_name('letter_rewards.py')}:starts_early"
        ]
        changes |= {f"{section}__{n}": 4 for n in ("prompts_per_step", "minibatch_size")}
    else:
        assert isinstance(rate, dict)
        changes = changes | {f"{section}__{name}": value for name, value in rate.items()}
        changes[f"{section}__batch_size"] = 8
        changes[f"{section}__epochs"] = 10

    def config(folder: str, steps: int, *, keeps: bool) -> RunConfig:
        more = {f"{section}__{length}": steps, f"{section}__keep_best": keeps}
        more[f"{section}__eval_every"] = 1
        values = {"stages": [stage], "ppo__eval_prompts": 2, **changes, **more}
        return tiny_config(tmp_path / folder, tiny_model, preferences, **values)

    ran(config("hand", 2, keeps=False))
    better = 1.0 if find_metric(record.measure).better == "higher" else -1.0
    scripted(monkeypatch, {step: better * v for step, v in enumerate([0.0, 1.0, 3.0, 2.0, 2.5])})
    ran(config("kept", 4, keeps=True))
    ran_with_stops(config("kept", 4, keeps=True), tmp_path / "stopped", [(stage, 4)])
    assert facts_of(tmp_path / "kept" / stage)["best_step"] == 2
    for part in PARTS.get(stage, (".",)):
        name = f"{stage}/{part}/model.safetensors"
        left = (tmp_path / "hand" / name).read_bytes()
        assert (tmp_path / "kept" / name).read_bytes() == left, part
    ours, theirs = facts_of(tmp_path / "kept" / stage), facts_of(tmp_path / "hand" / stage)
    for name, value in theirs.items():
        if name.startswith(("heldout", "normalize")):
            assert ours[name] == value, name
    assert_equal_runs(tmp_path / "stopped", tmp_path / "kept")


def zero(stage: int) -> ParallelConfig:
    return ParallelConfig(actor_zero_stage=stage, critic_zero_stage=stage)


def test_ranks_keep_the_same_step_and_continue_on_other_numbers_and_nodes(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    """Killed after its best, on two nodes without a shared file system, and continued by three
    ranks on one that has all parts."""
    nodes = [tmp_path / "a", tmp_path / "b"]
    for node in nodes:
        node.mkdir()
    config = overfitting(
        tmp_path / "alone", tiny_model, preferences, sft__learning_rate=1e-2, sft__max_steps=6,
        sft__eval_every=1, save_every=1,
    )  # fmt: skip
    values = {0: 5.0, 1: 4.0, 2: 3.0, 3: 4.0, 4: 4.0, 5: 4.0, 6: 4.0}
    with pytest.MonkeyPatch.context() as patch:
        scripted(patch, values)
        ran(config)
        on_ranks(2, stopped_on, replace(config, parallel=zero(3)), nodes, "sft", 6, 6)
        kept = sorted(path.name for path in numbered(nodes[0] / "run/checkpoints/sft"))
        assert kept == [f"step-00000{step}-part-1-of-2" for step in (2, 4, 5)]
        joined = tmp_path / "joined"
        for node in nodes:  # the parts of all nodes, in one folder
            shutil.copytree(node, joined, dirs_exist_ok=True)
        on_ranks(2, ran_on, replace(config, parallel=zero(2)), nodes)
        said = on_ranks(3, ran_on, replace(config, parallel=zero(1)), [joined])[0]
    assert "sft: continuing after step 5 (checkpoint verified)" in said
    assert "sft: best of 7 evaluations: step 2, " in said
    expected = load_file(tmp_path / "alone/sft/model.safetensors")
    for folder in (*nodes, joined):
        assert facts_of(folder / "run/sft")["best_step"] == 2
        found = load_file(folder / "run/sft/model.safetensors")
        for name, weight in expected.items():
            assert float((found[name] - weight).abs().mean()) < 1e-4, name


def test_patience_alone_ends_a_stage_with_its_last_model(
    tmp_path: Path, tiny_model: str, preferences: str, whole: Path
) -> None:
    config = overfitting(
        tmp_path / "run", tiny_model, preferences, sft__patience=2, sft__keep_best=False
    )
    ran(config)
    last = overfitting(
        tmp_path / "hand", tiny_model, preferences, sft__max_steps=14, sft__keep_best=False
    )
    ran(last)
    ours, theirs = tmp_path / "run/sft", tmp_path / "hand/sft"
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    assert facts_of(ours)["steps"] == 14
    assert "best_step" not in facts_of(ours)
    lines: list[str] = []
    ran(config, lines=lines)
    assert f"sft: finished before, in {ours}" in lines


def selection(stage: str = "sft", **knobs: object) -> Selection:
    section = stage_of(stage).section
    config = build_config({section: knobs}, where="test: ")
    return Selection(stage_of(stage), getattr(config, section))


def heard(chosen: Selection, *values: float) -> list[int | None]:
    """The best step after each of some evaluations."""
    steps = []
    for step, value in enumerate(values):
        chosen.hear(step, {chosen._stage.measure: value}, World())
        steps.append(chosen.step)
    return steps


def test_of_equal_evaluations_the_first_is_best_and_no_number_is_never() -> None:
    assert heard(selection(keep_best=True), 3.0, 2.0, 2.0, math.nan, 1.0) == [0, 1, 1, 1, 4]
    assert heard(selection("ppo", keep_best=True), 3.0, 2.0, 4.0, math.inf) == [0, 0, 2, 2]
    lost = selection(keep_best=True, patience=2)
    assert heard(lost, math.nan, math.nan) == [None, None]
    assert lost.ends
    assert lost.kept_step is None
    assert lost.facts() == {}
    (line,) = lost.result()
    assert line.startswith("warning: sft: no evaluation had a finite held-out cross-entropy")
    assert "no held-out cross-entropy was finite in 2 evaluations" in lost.end(9)


def test_what_was_heard_survives_a_checkpoint() -> None:
    first = selection(keep_best=True, patience=3)
    heard(first, 3.0, 2.0, math.nan)
    numbers = json.loads(json.dumps(first.numbers(), allow_nan=False))
    second = selection(keep_best=True, patience=3)
    second.restore(numbers)
    assert (second.step, second.ends, second.numbers()) == (1, False, first.numbers())
    second.hear(3, {}, World())
    assert not second.ends
    second.hear(4, {"heldout_loss": 2.0}, World())
    assert second.ends


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_every_stages_measure_has_a_direction(stage: Any) -> None:
    metric = find_metric(stage.measure)
    assert metric.better in ("higher", "lower")
    assert stage.family in metric.families
    assert metric.is_heldout


@pytest.mark.parametrize(
    ("stage", "knobs", "told"),
    [
        ("sft", {"keep_best": True, "eval_every": 0}, "sft.eval_every must be > 0 where sft.keep_"),
        ("dpo", {"patience": 2, "eval_every": 0}, "dpo.eval_every must be > 0 where dpo.patience"),
        ("ppo", {"keep_best": True, "eval_prompts": 0}, "Give --ppo.eval-prompts 20, or remove"),
    ],
)
def test_nothing_to_compare_is_refused(stage: str, knobs: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace(".", r"\.")):
        check_config(build_config({"stages": [stage], stage: knobs}, where="test: "))
    other = {"stages": ["reward"], stage: knobs}
    check_config(build_config(other, where="test: "))  # of a stage that does not run


def test_no_held_out_rows_and_a_loop_of_ones_own_are_refused(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = overfitting(tmp_path / "run", tiny_model, preferences, dataset__heldout=0.0)
    with pytest.raises(ConfigError, match=r"sft\.keep_best must have held-out rows.* got none of"):
        ran(config)
    assert not (tmp_path / "run").exists()
    from tests.training.test_tracked_loop import made

    trainer = made(tiny_model, tmp_path / "loop")
    trainer.rl = replace(trainer.rl, patience=3)
    with pytest.raises(ConfigError, match=r"patience must be off in a TrackedLoop.* got 3"):
        TrackedLoop(trainer, 3)


def test_how_often_it_evaluates_is_part_of_what_it_was_made_from(
    tiny_model: str, preferences: str, whole: Path
) -> None:
    config = overfitting(whole, tiny_model, preferences, sft__patience=2)
    other = replace(config, sft=replace(config.sft, eval_every=4))
    with pytest.raises(CheckpointError, match=r"changed: sft\.eval_every 2 -> 4"):
        ran(other)


def test_steps_of_a_stage_that_ended_early_are_repeated_and_others_are_not(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    assert replay(str(tmp_path / "run"), 14) == 0
    assert "heldout_best_step" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--step must be at most 14, where sft ended; got 15"):
        replay(str(tmp_path / "run"), 15, stage="sft")


def test_a_program_reads_the_kept_step(tmp_path: Path, tiny_model: str, preferences: str) -> None:
    config = overfitting(tmp_path / "run", tiny_model, preferences, sft__max_steps=2)
    run = train(config, print_line=lambda line: None)
    assert run.verify("sft")["best_step"] == 2.0
