"""Stages run one by one in one folder: what of the stages before has to be as it was."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.config.schema import RunConfig
from tandem.errors import CheckpointError
from tests.tiny import tiny_config
from tests.training.runs import ran


def alone(config: RunConfig, stage: str, **changed: object) -> RunConfig:
    return replace(config, stages=(stage,), **changed)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> str:
    """A copy that a test may damage."""
    folder = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(tiny_model, folder)
    return str(folder)


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, model: str, preferences: str
) -> tuple[Path, RunConfig]:
    """SFT and the reward model, one after the other, with knobs of their own."""
    folder = tmp_path_factory.mktemp("run") / "first"
    config = tiny_config(folder, model, preferences, sft__max_steps=1, reward__max_steps=1,
                         ppo__steps=1)  # fmt: skip
    ran(alone(config, "sft"))
    ran(alone(config, "reward", sft=RunConfig().sft))  # nobody repeats the knobs of stages before
    return folder, config


def test_finished_stages_are_taken_as_they_stand(finished: tuple[Path, RunConfig]) -> None:
    folder, config = finished
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*.safetensors")}
    defaults = RunConfig()
    ran(alone(config, "ppo", actor_model="", sft=defaults.sft, reward=defaults.reward))
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert (folder / "ppo/actor").is_dir()
    shutil.rmtree(folder / "ppo")


def test_a_model_may_lie_elsewhere_but_not_be_another(
    finished: tuple[Path, RunConfig], model: str, tmp_path: Path
) -> None:
    folder, config = finished
    link = tmp_path / "link"
    link.symlink_to(model)
    ran(alone(config, "reward", actor_model=f"{link}/"))  # finished, and of the same files
    other = tmp_path / "other"
    shutil.copytree(model, other)
    tokens = other / "tokenizer_config.json"
    tokens.write_text(tokens.read_text() + " ")
    # Of SFT, which this run does not run, only the model's files are compared.
    files = r"the files of actor_model \(tokenizer_config.json\)\."
    made = f"^{folder / 'sft'} and {folder / 'reward'} were made .*; changed: {files}"
    with pytest.raises(CheckpointError, match=made):
        ran(alone(config, "ppo", actor_model=str(other)))


def test_what_later_stages_build_on_has_to_be_as_it_was(
    finished: tuple[Path, RunConfig], tmp_path: Path
) -> None:
    """Another seed holds out rows that a stage before has trained on."""
    folder, config = finished
    both = f"^{folder / 'sft'} and {folder / 'reward'} were made"
    with pytest.raises(CheckpointError, match=f"{both} .* changed: seed 1234 -> 5"):
        ran(alone(config, "ppo", seed=5))
    rows = replace(config.dataset, heldout=0.3)
    with pytest.raises(CheckpointError, match=f"{both} .* changed: dataset.heldout"):
        ran(alone(config, "ppo", dataset=rows))
    copied = tmp_path / "copy"
    shutil.copytree(folder, copied)
    shutil.rmtree(copied / "sft")
    for stage in ("sft", "ppo"):  # the reward model's policy is gone
        with pytest.raises(
            CheckpointError, match=r"copy/reward was made .* changed: the sft stage"
        ):
            ran(alone(replace(config, output_dir=str(copied)), stage))


def test_all_stages_that_were_made_otherwise_are_named_at_once(
    finished: tuple[Path, RunConfig],
) -> None:
    folder, config = finished
    again = replace(config, stages=("sft", "reward"))
    with pytest.raises(CheckpointError) as raised:
        ran(replace(again, seed=7))
    both = f"{folder / 'sft'} and {folder / 'reward'}"
    assert str(raised.value).startswith(f"{both} were made with other knobs")
    assert f"remove {both}; to keep them" in str(raised.value)
    assert str(raised.value).count("seed 1234 -> 7") == 1
    other = replace(again.reward, learning_rate=0.1)
    with pytest.raises(CheckpointError, match=f"^{folder / 'reward'} was made"):
        ran(alone(again, "reward", reward=other))
