"""A folder given as data may hold runs and models, which are not data."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config.dataset import DataConfig
from tandem.data.dataset import load_data
from tandem.data.reading.folder_files import RUN_FILES, files_of_folder
from tandem.data.reading.sources import parse_spec, read_rows
from tandem.errors import DataError
from tandem.metrics.answers import LINE_FILES, ROWS_FILE
from tandem.metrics.folder import EVALUATION_FILE, PREDICTIONS_FILE

ROW = '{"prompt": "a", "completion": "b"}\n'


def write(folder: Path, *names: str) -> None:
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(ROW)


def test_files_of_runs_and_models_are_left_and_counted(tmp_path: Path) -> None:
    write(tmp_path, "prefs.jsonl", "metrics.jsonl")
    write(tmp_path, *(f"runs/a/{name}" for name in ("config.yaml", "command.txt", "best.jsonl")))
    write(tmp_path, "runs/a/data_rows.json", "runs/a/votes.jsonl", "runs/a/checkpoints/x/list.json")
    write(tmp_path, "runs/a/sft/MANIFEST.json", "runs/a/ppo/actor/config.json")
    write(tmp_path, "runs/a/ppo/actor/model.safetensors", "runs/a/ppo/actor/vocab.txt")
    write(tmp_path, "not_a_run/config.yaml", "not_a_run/data.json", "not_a_model/config.json")
    found = files_of_folder(tmp_path)
    names = {str(file.relative_to(tmp_path)) for file in found.read}
    assert names == {
        *("metrics.jsonl", "not_a_model/config.json", "not_a_run/data.json", "prefs.jsonl"),
        *("runs/a/best.jsonl", "runs/a/votes.jsonl"),
    }
    assert len(found.made) == 6
    assert found.other_splits == []
    data = load_data(DataConfig(heldout=0.0), [str(tmp_path)], seed=1)
    (account,) = data.ledger.datasets.values()
    assert account.notes[
        "files of runs and models, not read (runs/a/checkpoints/x/list.json, runs/a/command.txt, "
        "runs/a/data_rows.json, ...)"
    ] == len(found.made)


def test_a_folder_with_nothing_but_a_run_says_so(tmp_path: Path) -> None:
    write(tmp_path, "config.yaml", "command.txt", "metrics.jsonl")
    with pytest.raises(DataError, match="got only 2 files of a run or a model"):
        list(read_rows(parse_spec(str(tmp_path))))


def test_every_file_of_rows_that_a_run_writes_is_known() -> None:
    assert {*LINE_FILES, ROWS_FILE, EVALUATION_FILE, PREDICTIONS_FILE} <= RUN_FILES
