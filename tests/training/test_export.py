"""Models of an unfinished stage are what it would leave, and its run stays as it is."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file

from tandem.checkpoint.beside import verify_beside
from tandem.checkpoint.state import SavedState
from tandem.cli import main
from tandem.errors import CheckpointError, ConfigError
from tandem.training.export import export
from tandem.training.lineage import recorded
from tandem.training.run_folder import Run
from tandem.training.supervised import SupervisedTrainer
from tests.tiny import tiny_config
from tests.training.runs import StopError, contents, ran, stop_at


def stopped_before_the_end_of(stage: str, config: Any) -> Path:
    """A run all of whose steps of a stage are done and saved, and nothing else of it."""
    finish = Run.finish

    def stopping(self: Run, name: str, *arguments: Any) -> None:
        self.finish_saving(name)
        if name == stage:
            raise StopError
        finish(self, name, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "finish", stopping)
        with pytest.raises(StopError):
            ran(config)
    return Path(config.output_dir)


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        ("sft", {"lora__rank": 2, "save_dtype": "bf16"}),
        ("reward", {}),
        ("ppo", {"ppo__ema": True}),
    ],
)
def test_after_the_last_step_they_are_the_files_that_the_stage_leaves(
    stage: str, changes: dict[str, Any], tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = tiny_config(tmp_path / "run", tiny_model, preferences, **changes)
    run = stopped_before_the_end_of(stage, replace(config, save_every=1))
    before = contents(run)
    lines: list[str] = []
    model = export(str(run), str(tmp_path / "out"), print_line=lines.append)
    assert contents(run) == before, "the run is looked at, not changed"
    assert any(f"saved in {model}" in line for line in lines)
    verify_beside(model)
    assert "```\ntest\n```" in (model / "README.md").read_text("utf-8"), "the run's command"
    assert recorded(str(model))[-1]["model"] == str(model)
    assert " of " in recorded(str(model))[-1]["title"]
    ran(replace(config, save_every=1))
    left, made = contents(run / stage), contents(tmp_path / "out")
    own = ("README.md", "MANIFEST.json")
    assert left.keys() == made.keys()
    for name in left:
        if not name.endswith(own):
            assert left[name] == made[name], name


def test_any_checkpoint_that_is_kept_can_be_taken(
    tmp_path: Path, tiny_model: str, preferences: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tmp_path / "run", tiny_model, preferences, stages=["sft"])
    run = stopped_before_the_end_of("sft", replace(config, save_every=1, keep_checkpoints=2))
    steps = sorted((run / "checkpoints" / "sft").glob("step-*"))
    assert len(steps) == 2
    number = int(steps[0].name.removeprefix("step-"))
    out = tmp_path / "out"
    assert main(["export", str(run), "--output", str(out), "--step", str(number)]) == 0
    saved, made = load_file(steps[0] / "model.safetensors"), load_file(out / "model.safetensors")
    assert made
    for name, weight in made.items():
        assert weight.equal(saved[name].view_as(weight)), name
    assert main(["export", str(run), "--output", str(out), "--step", str(number + 9)]) == 2
    assert f": {number} or {number + 1}; got {number + 9}" in capsys.readouterr().err
    assert main(["export", str(run), "--output", str(out)]) == 0, "an export may be replaced"
    another = tmp_path / "another"
    ran(tiny_config(another, tiny_model, preferences, stages=["sft"]))
    before = contents(another)
    for inside in (run / "sft", another / "sft", another / "deep" / "er"):
        with pytest.raises(ConfigError, match="--output must be outside of runs' folders; got"):
            export(str(run), str(inside))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for place in ("full", "full/notes.txt", "full/notes.txt/x"):
        with pytest.raises(ConfigError, match="must be a new folder, an empty one or one that tan"):
            export(str(run), str(tmp_path / place))
    with pytest.raises(ConfigError, match="got nothing"):
        export(str(run), "")
    assert contents(another) == before
    with pytest.MonkeyPatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr("tandem.training.saving.save_model", Mock(side_effect=full))
        assert main(["export", str(run), "--output", str(tmp_path / "empty")]) == 2
    said = capsys.readouterr().err
    assert " must be writable; got: No space left on device (" in said
    assert said.endswith(
        "Free some space or choose another --output; what was saved before is intact.\n"
    )
    (tmp_path / "empty").mkdir()
    assert export(str(run), str(tmp_path / "empty")) == tmp_path / "empty"
    with pytest.raises(ConfigError, match=r"--stage must be sft, the run's stages; got 'ppo'"):
        export(str(run), str(out), stage="ppo")
    for newest in (steps[1], steps[0]):
        weights = newest / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match="must have a checkpoint that is whole; got none"):
        export(str(run), str(tmp_path / "other"), print_line=lambda line: None)


def test_the_checkpoint_before_the_first_step_is_taken_only_by_its_number(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["sft"], sft__keep_best=True
    )
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, "sft", 1)
        with pytest.raises(StopError):
            ran(config)
    with pytest.raises(CheckpointError, match=r"got only that of step 0, .* take it: --step 0\."):
        export(config.output_dir, str(tmp_path / "out"))
    model = export(config.output_dir, str(tmp_path / "out"), step=0)
    base, made = (
        load_file(f"{tiny_model}/model.safetensors"),
        load_file(model / "model.safetensors"),
    )
    assert all(weight.equal(base[name]) for name, weight in made.items())


def test_a_run_that_goes_on_meanwhile_has_a_newer_one(
    tmp_path: Path, tiny_model: str, preferences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path / "run", tiny_model, preferences, stages=["sft"])
    run = stopped_before_the_end_of("sft", replace(config, save_every=1, keep_checkpoints=3))
    first, *_, last = sorted((run / "checkpoints" / "sft").glob("step-*"))
    last.rename(tmp_path / "to come")
    restore = SupervisedTrainer.restore

    def going_on(self: SupervisedTrainer[Any], state: SavedState) -> None:
        if not last.exists():
            (tmp_path / "to come").rename(last)
            for gone in (run / "checkpoints" / "sft").glob("step-*"):
                if gone != last:
                    shutil.rmtree(gone)
        restore(self, state)

    monkeypatch.setattr(SupervisedTrainer, "restore", going_on)
    lines: list[str] = []
    export(str(run), str(tmp_path / "out"), print_line=lines.append)
    assert f"step {int(last.name.removeprefix('step-'))} of" in lines[-1]
    assert not first.exists()


def test_the_best_evaluation_is_named(tmp_path: Path, tiny_model: str, preferences: str) -> None:
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["sft"], sft__keep_best=True,
        sft__eval_every=1, sft__learning_rate=1.0, sft__warmup=0.0,
    )  # fmt: skip
    run = stopped_before_the_end_of("sft", replace(config, save_every=1))
    lines: list[str] = []
    export(str(run), str(tmp_path / "out"), print_line=lines.append)
    assert any("the best evaluation so far is that of step 0" in line for line in lines)
    export(str(run), str(tmp_path / "best"), step=0, print_line=lines.append)
    assert "step 0 of" in lines[-1]


def test_a_run_without_such_a_stage_is_told(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = tiny_config(tmp_path / "run", tiny_model, preferences, stages=["sft"])
    ran(config)
    with pytest.raises(CheckpointError, match=rf"it is finished, and its model is in .*{'sft'}\."):
        export(config.output_dir, str(tmp_path / "out"))
    changed = tiny_config(tmp_path / "two", tiny_model, preferences, stages=["sft"])
    run = stopped_before_the_end_of("sft", replace(changed, save_every=1))
    config_file = run / "config.yaml"
    config_file.write_text(config_file.read_text().replace("seed: ", "seed: 1"))
    with pytest.raises(CheckpointError, match=r"changed: seed.*Put back what it was made from"):
        export(str(run), str(tmp_path / "out"), print_line=lambda line: None)
    for path in (run / "checkpoints" / "sft").iterdir():
        path.rename(tmp_path / path.name)
    with pytest.raises(CheckpointError, match="must have a checkpoint of an unfinished stage"):
        export(str(run), str(tmp_path / "out"))
