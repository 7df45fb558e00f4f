"""A step run again is the step as it was, and the run stays as it is."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.config.engine import engine_settings
from tandem.config.load import dump_config, load_config
from tandem.config.parallel import ParallelConfig
from tandem.config.schema import RunConfig
from tandem.data.tokenview import TokenPieces
from tandem.engine.shard_plan import check_layout
from tandem.errors import BadStepError, CheckpointError, ConfigError, Stopped
from tandem.parallel.tensor import check_divides
from tandem.parallel.world import World
from tandem.training.comparing.eval_command import evaluate_run
from tandem.training.export import export
from tandem.training.own_folder import SAVE_NOW, on_these_ranks
from tandem.training.replay import _learned, replay
from tandem.training.stage_loop import BAD_STEPS, StepLoop
from tandem.training.supervised import SupervisedTrainer
from tandem.types import Source, TokenRow
from tests.data.built_tokenizers import sentencepiece
from tests.tiny import tiny_config
from tests.training.runs import contents, ran


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, tiny_model: str, preferences: str) -> Path:
    """A run that was stopped after its second PPO step, a checkpoint after each."""
    folder = tmp_path_factory.mktemp("replayed") / "run"
    config = replace(tiny_config(folder, tiny_model, preferences), save_every=1)
    end = StepLoop.end

    def ending(self: StepLoop, values: dict[str, float]) -> None:
        if self.stage == "ppo" and len(self._recorded) == 2:
            self.run.stops.requested = 15
        end(self, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepLoop, "end", ending)
        with pytest.raises(Stopped):
            ran(config)
    return folder


@pytest.mark.parametrize(("stage", "step"), [("ppo", 2), ("ppo", 1), ("reward", 3), ("sft", 2)])
def test_a_step_comes_out_as_recorded_and_nothing_is_touched(
    stopped: Path, capsys: pytest.CaptureFixture[str], stage: str, step: int
) -> None:
    (stopped / SAVE_NOW).touch()  # of the run, not of who looks at it
    before = contents(stopped)
    assert replay(str(stopped), step, stage=stage, rows=1) == 0
    assert contents(stopped) == before
    shown = capsys.readouterr().out
    assert f"{stage} step {step}, again" in shown
    if stage == "ppo":
        assert (
            "from the checkpoint after 1" in shown if step == 2 else "from the beginning" in shown
        )
        for column in ("log-prob", "reference", "kl", "value", "reward", "advantage", "return"):
            assert column in shown
    assert "prefs.jsonl:" in shown


def test_words_keep_the_spaces_between_them() -> None:
    """A token's text alone lacks the space before it where tokenizers are SentencePiece's."""
    tokenizer = sentencepiece()
    ids = tokenizer("yes hello yes").input_ids
    row = TokenRow(tuple(ids), (True,) * len(ids), Source("prefs", "prefs.jsonl", 3))
    assert "<s>yes hello yes" in _learned(row, TokenPieces(tokenizer)).plain


def test_a_record_that_differs_is_shown(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines()
    changed = [
        line.replace('"kl_coef": 0.05', '"kl_coef": 0.06') if '"ppo"' in line else line
        for line in lines
    ]
    assert changed != lines
    metrics.write_text("\n".join(changed) + "\n", encoding="utf-8")
    assert replay(str(run), 2, rows=0) == 1
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.strip().startswith("kl_coef")]
    assert line.split() == ["kl_coef", "0.05", "0.06", "!"]


def test_a_difference_that_int8_weights_explain_is_explained(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    config, metrics = run / "config.yaml", run / "metrics.jsonl"
    text = config.read_text(encoding="utf-8")
    assert "zero_quantized_weights: false" in text
    config.write_text(
        text.replace("zero_quantized_weights: false", "zero_quantized_weights: true").replace(
            "actor_zero_stage: 0", "actor_zero_stage: 1"
        ),
        encoding="utf-8",
    )
    assert replay(str(run), 2, rows=0) == 0
    assert "int8" not in capsys.readouterr().out, "nothing differs"
    text = metrics.read_text(encoding="utf-8")
    metrics.write_text(text.replace('"kl_coef": 0.05', '"kl_coef": 0.06'), encoding="utf-8")
    assert replay(str(run), 2, rows=0) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "they gathered weights as int8 (parallel.zero_quantized_weights); one rank" in said


def test_a_number_that_does_not_come_again_is_a_difference(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    metrics = run / "metrics.jsonl"
    text = metrics.read_text(encoding="utf-8")
    metrics.write_text(text.replace('"kl_coef": 0.05', '"kl_loss": 0.05'), encoding="utf-8")
    assert replay(str(run), 2, rows=0) == 1
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["kl_coef", "0.05", "!"] in shown
    assert ["kl_loss", "0.05", "!"] in shown


def test_a_step_that_was_left_out_is_left_out_again_and_nothing_is_touched(
    tmp_path: Path, tiny_model: str, preferences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(tiny_config(tmp_path, tiny_model, preferences), save_every=1, stages=("sft",))
    train_step = SupervisedTrainer.step

    def second_fails(self: SupervisedTrainer[Any], *args: Any) -> dict[str, float]:
        values = train_step(self, *args)
        if values["learning_rate"] < 1e-3:
            raise BadStepError("a test")
        return values

    monkeypatch.setattr(SupervisedTrainer, "step", second_fails)
    ran(config)
    assert list((tmp_path / BAD_STEPS).iterdir())
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert replay(str(tmp_path), 3, rows=0) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == times


def test_what_cannot_be_replayed_is_said_in_one_line(stopped: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\(sft 1 to 3, .*ppo 1 to 2\); got 9"):
        replay(str(stopped), 9)
    with pytest.raises(ConfigError, match=r"got 'rewrd'\. Did you mean reward\?"):
        replay(str(stopped), 1, stage="rewrd")
    with pytest.raises(ConfigError, match="--rows must be >= 0; got -1"):
        replay(str(stopped), 2, rows=-1)
    with pytest.raises(CheckpointError, match="must be a run's folder"):
        replay(str(tmp_path), 1)


def test_a_stage_with_nothing_but_its_first_evaluation_has_no_step_to_repeat(
    stopped: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text("utf-8").splitlines(keepends=True)
    kept = [x for x in lines if json.loads(x)["stage"] != "ppo" or json.loads(x)["step"] == 0]
    assert len(kept) == len(lines) - 2
    metrics.write_text("".join(kept), "utf-8")
    with pytest.raises(ConfigError, match=r"\(sft 1 to 3, reward 1 to 3\); got 0 of ppo"):
        replay(str(folder), 0, stage="ppo")


@pytest.mark.parametrize("knob", ["replicas", "inference_tp_size"])
def test_one_rank_reads_a_run_whose_layout_needs_several(
    stopped: Path, tmp_path: Path, knob: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    config = load_config(folder / "config.yaml")
    several = replace(config, parallel=replace(config.parallel, **{knob: 2}))
    (folder / "config.yaml").write_text(dump_config(several), "utf-8")
    assert replay(str(folder), 2, rows=0) == 0
    assert (export(str(folder), str(tmp_path / "out")) / "config.json").exists()
    assert "sft" in evaluate_run(str(folder), 2)["models"]


@pytest.mark.parametrize(
    ("world", "replicas", "slices", "left"),
    [
        (World(), 2, 2, (1, 1)),
        (World(0, 4, 4), 2, 2, (2, 2)),
        (World(0, 2, 2), 2, 2, (1, 2)),
        (World(0, 4, 2), 2, 4, (2, 1)),
        (World(0, 3, 3), 2, 3, (1, 3)),
        (World(0, 12, 3), 2, 3, (2, 3)),
        (World(0, 12, 4), 2, 2, (1, 2)),
    ],
)
def test_a_layout_is_kept_as_far_as_the_ranks_can_have_it(
    world: World, replicas: int, slices: int, left: tuple[int, int]
) -> None:
    parallel = ParallelConfig(replicas=replicas, inference_tp_size=slices)
    kept = on_these_ranks(replace(RunConfig(), parallel=parallel), world).parallel
    assert (kept.replicas, kept.inference_tp_size) == left
    check_layout(engine_settings(replace(RunConfig(), parallel=kept)), world)
    check_divides(world, kept.inference_tp_size)


def test_a_stage_whose_knobs_a_later_command_replaced_is_named(
    stopped: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    config = load_config(folder / "config.yaml")
    (folder / "config.yaml").write_text(dump_config(replace(config, stages=["ppo"])), "utf-8")
    with pytest.raises(ConfigError, match="knobs of the last command in this folder; got sft"):
        replay(str(folder), 1, stage="sft")
