"""A run's folder that is taken away while the run is running."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.config.schema import RunConfig
from tandem.errors import CheckpointError
from tandem.parallel.world import World
from tandem.training.callbacks import Callback, RunState
from tandem.training.run_folder import Run
from tandem.training.run_stages import train
from tests.ranks import on_ranks
from tests.tiny import save_tiny_model, tiny_config, write_preferences


@pytest.mark.parametrize("moved", [True, False])
def test_a_run_whose_folder_is_taken_away_makes_no_other(tmp_path: Path, moved: bool) -> None:
    folder, lines = tmp_path / "run", list[str]()

    class Taking(Callback):
        """Takes the folder as soon as a stage is finished: the next one would make another."""

        def on_save(self, state: RunState) -> None:
            if state.stage == "sft" and (folder / "sft").exists():
                if moved:
                    folder.rename(tmp_path / "elsewhere")
                else:
                    shutil.rmtree(folder)

    config = tiny_config(
        folder,
        save_tiny_model(tmp_path / "model"),
        write_preferences(tmp_path / "prefs.jsonl", 60),
        stages=["sft", "dpo"],
        sft__max_steps=1,
        save_every=0,
    )
    with pytest.raises(CheckpointError, match=r"must stay where it is until the run ends; got a "):
        train(config, callbacks=[Taking()], print_line=lines.append)
    assert not folder.exists()
    assert not [line for line in lines if line.startswith("report")]


def test_a_folder_that_is_taken_away_within_a_stage_ends_it_at_the_step(tmp_path: Path) -> None:
    folder, steps = tmp_path / "run", list[int]()

    class Taking(Callback):
        def on_step(self, state: RunState) -> None:
            steps.append(state.step)
            shutil.rmtree(folder)

    config = tiny_config(
        folder,
        save_tiny_model(tmp_path / "model"),
        write_preferences(tmp_path / "prefs.jsonl", 60),
        stages=["sft"],
        sft__max_steps=3,
        save_every=1,
    )
    with pytest.raises(CheckpointError, match="must stay where it is until the run ends"):
        train(config, callbacks=[Taking()], print_line=lambda line: None)
    assert steps == [1]
    assert not folder.exists()


def opened(folder: Path, world: World | None = None) -> Run:
    run = Run(RunConfig(output_dir=str(folder)), lambda line: None, world)
    run.open("tandem train")
    return run


@pytest.mark.parametrize("instead", ["nothing", "a file", "a copy"])
def test_a_folder_that_is_back_is_the_same_and_another_is_not(tmp_path: Path, instead: str) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run = opened(folder)
    folder.rename(elsewhere)
    elsewhere.rename(folder)
    run.require_there()
    folder.rename(elsewhere)
    if instead == "a file":
        folder.touch()
    elif instead == "a copy":
        shutil.copytree(elsewhere, folder)
    with pytest.raises(CheckpointError, match=r"whose folder, or \.lock in it, was rem"):
        run.require_there()
    assert not run.writes
    run.close()


def taken_on_one_node(world: World, path: Path) -> str:
    """Two nodes without a shared file system, of which the second loses its folder."""
    folder = path / str(world.rank)
    run = opened(folder, replace(world, keepers=(0, 1)))
    run.require_there()
    world.barrier()
    if world.rank == 1:
        shutil.rmtree(folder)
    with pytest.raises(CheckpointError) as caught:
        run.require_there()
    run.close()
    return f"{run.writes} {str(caught.value).split(' on ')[0]}"


def test_every_rank_ends_where_one_nodes_folder_is_taken_away(tmp_path: Path) -> None:
    assert on_ranks(2, taken_on_one_node, tmp_path) == [f"False {tmp_path / '1'}"] * 2
