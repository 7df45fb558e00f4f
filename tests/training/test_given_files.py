"""Files that are edited while a run uses what it read of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from tandem.checkpoint.folder import read_facts
from tandem.config.schema import RunConfig
from tandem.errors import CheckpointError, DataError
from tandem.files import sha256
from tandem.metrics.log import MetricLog
from tandem.models.source import Located
from tandem.parallel.world import World
from tandem.training import given_files
from tandem.training.given_files import GivenFiles
from tests.ranks import on_ranks
from tests.tiny import save_tiny_model, tiny_config, write_preferences
from tests.training.runs import StopError, ran

REWARD = """
def letters(prompts, completions, **columns):
    return [float(text[:1] < "{}") for text in completions]
"""


@pytest.fixture
def config(tmp_path: Path, tiny_model: str) -> RunConfig:
    """SFT, then GRPO on a reward function, of a model and a function in this folder."""
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "mine.py").write_text(REWARD.format("m"))
    data = write_preferences(tmp_path / "prefs.jsonl", 60)
    return tiny_config(
        tmp_path / "run", str(tmp_path / "model"), data, stages=["sft", "grpo"], save_every=1,
        grpo__steps=3, grpo__prompts_per_step=4, grpo__minibatch_size=8, grpo__eval_prompts=2,
        grpo__reward_function=[f"{tmp_path}/mine.py:letters"],
        sampling__samples_per_prompt=2, sampling__max_new_tokens=6,
    )  # fmt: skip


def edited(patch: pytest.MonkeyPatch, stage: str, edit: Callable[[], object]) -> None:
    """Edit something after the first step of a stage."""
    log = MetricLog.log

    def editing(self: MetricLog, at: int, values: dict[str, float]) -> object:
        if self._stage == stage and at == 1:
            edit()
        return log(self, at, values)

    patch.setattr(MetricLog, "log", editing)


def test_a_function_edited_in_its_stage_is_not_what_the_stage_was_made_from(
    config: RunConfig, tmp_path: Path
) -> None:
    """Its checkpoints name the file that the run began with: to go on with another is refused."""
    mine, config = tmp_path / "mine.py", replace(config, stages=("grpo",))
    first = mine.read_text()

    def edit_and_stop() -> None:
        if mine.read_text() == first:
            mine.write_text(REWARD.format("c"))
            return
        raise StopError

    with pytest.MonkeyPatch.context() as patch:
        edited(patch, "grpo", edit_and_stop)
        log = MetricLog.log
        patch.setattr(MetricLog, "log", lambda self, at, values: (
            edit_and_stop() if at == 3 else None, log(self, at, values)
        )[1])  # fmt: skip
        with pytest.raises(StopError):
            ran(config)
    assert list((tmp_path / "run/checkpoints/grpo").glob("step-*"))
    with pytest.raises(CheckpointError, match=r"changed: the reward function \(mine.py\)"):
        ran(config)
    mine.write_text(first)
    ran(config)
    facts = read_facts(tmp_path / "run/grpo")
    assert facts["made_from"]["the reward function"] == {"mine.py": sha256(mine)}


def test_a_function_edited_before_its_stage_ends_the_run_and_is_taken_by_the_next(
    config: RunConfig, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    with pytest.MonkeyPatch.context() as patch:
        edited(patch, "sft", lambda: mine.write_text(REWARD.format("c")))
        with pytest.raises(CheckpointError, match=r"began with: the reward function \(mine.py\)\."):
            ran(config)
    assert (tmp_path / "run/sft/MANIFEST.json").exists()
    ran(config)
    facts = read_facts(tmp_path / "run/grpo")
    assert facts["made_from"]["the reward function"] == {"mine.py": sha256(mine)}


def test_one_edited_before_the_comparison_does_not_score_it(
    config: RunConfig, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    first = mine.read_text()
    with pytest.MonkeyPatch.context() as patch:
        edited(patch, "grpo", lambda: mine.write_text(REWARD.format("c")))
        with pytest.raises(CheckpointError, match="began with: the reward function"):
            ran(config)
    assert (tmp_path / "run/grpo/MANIFEST.json").exists()
    assert not (tmp_path / "run/evaluation.json").exists()
    mine.write_text(first)
    ran(config)
    made_from = json.loads((tmp_path / "run/evaluation.json").read_text())["made_from"]
    assert made_from["the reward function"] == {"mine.py": sha256(mine)}


def test_a_model_replaced_between_its_stages_ends_the_run(tmp_path: Path, tiny_model: str) -> None:
    """The reward model would start from other weights than its manifest names."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    other = Path(save_tiny_model(tmp_path / "other", seed=9))
    data = write_preferences(tmp_path / "prefs.jsonl", 60)
    config = tiny_config(tmp_path / "run", str(model), data, stages=["sft", "reward"])
    with pytest.MonkeyPatch.context() as patch:
        edited(patch, "sft", lambda: shutil.copy(other / "model.safetensors", model))
        with pytest.raises(CheckpointError, match=r"with: model .*/model \(model.safetensors\)"):
            ran(config)
    assert not (tmp_path / "run/reward").exists()
    shutil.copy(Path(tiny_model) / "model.safetensors", model)
    ran(config)
    assert (tmp_path / "run/reward").exists()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda folder: None, ""),
        (lambda folder: (folder / "model.safetensors").touch(), ""),
        (lambda folder: (folder / "README.md").write_text("mine"), ""),
        (lambda folder: (folder / "extra.json").write_text("{}"), "extra.json"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "model.safetensors"),
        (shutil.rmtree, "not there"),
    ],
)
def test_what_counts_as_a_change_of_a_model(
    config: RunConfig, tmp_path: Path, change: Callable[[Path], object], names: str
) -> None:
    files = GivenFiles(config, World())
    files.note()
    change(tmp_path / "model")
    if not names:
        files.require_unchanged()
        return
    with pytest.raises(CheckpointError, match=rf"model .*/model \({names}\)\. Put them back"):
        files.require_unchanged()


def test_a_model_of_the_hub_that_moved_on_can_be_named_as_it_was(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = {"name/model": "a1", "name/model@v2": "b1"}
    monkeypatch.setattr(given_files, "model_folders", lambda model: [])
    monkeypatch.setattr(given_files, "locate", lambda model: Located(model, commit=commits[model]))
    config = replace(config, actor_model="name/model", reward_model="name/model@v2")
    files = GivenFiles(config, World())
    files.note()
    files.require_unchanged()
    commits["name/model"], commits["name/model@v2"] = "a2", "b2"
    with pytest.raises(CheckpointError, match=r"model name/model \(.* began with name/model@a1\)"):
        files.require_unchanged()
    with pytest.raises(CheckpointError, match=r"name/model@v2 \(.* began with name/model@b1\)"):
        files.require_unchanged()


def test_what_no_stage_reads_is_not_asked_for(config: RunConfig, tmp_path: Path) -> None:
    dpo = replace(config.dpo, loss_function=f"{tmp_path}/nowhere.py:mine")
    GivenFiles(replace(config, dpo=dpo), World()).note()


def test_a_run_that_is_refused_for_its_rows_has_not_read_its_models_whole(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Mock(wraps=given_files.sha256_once)
    monkeypatch.setattr(given_files, "sha256_once", read)
    (tmp_path / "bad.jsonl").write_text('{"other": 1}\n')
    with pytest.raises(DataError):
        ran(replace(config, data=(f"{tmp_path}/bad.jsonl",)))
    assert not read.called


def test_every_rank_hears_of_a_change(config: RunConfig, tmp_path: Path) -> None:
    """Each reads its share of the files."""
    assert on_ranks(2, heard, config) == ["", ""]


def heard(world: World, config: RunConfig) -> str:
    files = GivenFiles(config, world)
    files.note()
    world.barrier()
    if world.is_first:
        (Path(config.actor_model) / "config.json").write_text("{}")
    world.barrier()
    try:
        files.require_unchanged()
    except CheckpointError as error:
        return "" if "(config.json)" in str(error) else str(error)
    return "nothing"
