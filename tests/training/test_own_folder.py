"""A run's folder that is taken away while the run is running."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tandem.errors import CheckpointError
from tandem.training.callbacks import Callback, RunState
from tandem.training.run_stages import train
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
