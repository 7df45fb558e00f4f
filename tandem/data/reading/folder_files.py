"""Which files of a folder are data: not those of splits to measure on, of models and of runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tandem.data.reading.parts import ENDINGS, format_of, split_of

_METADATA = {"dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json"}
_MARKS_OF_RUN = ("config.yaml", "command.txt")
"""What the folder of every run of Tandem holds."""
RUN_FILES = {
    *("command.txt", "data.json", "data_rows.json", "environment.json", "evaluation.json"),
    *("metrics.jsonl", "samples.jsonl", "alarms.jsonl", "predictions.jsonl", "recorder.jsonl"),
    *("answers.jsonl", "rollouts.jsonl", "followed.jsonl", "wandb.json"),
}
"""What a run writes into its folder and could be taken for data. Votes are data."""
_RUN_FOLDERS = {"checkpoints", "evaluations", "tensorboard", "wandb"}
_MANIFEST = "MANIFEST.json"
"""In each folder that a stage leaves, and in each checkpoint."""


@dataclass(frozen=True)
class FolderFiles:
    """The files under a folder that end as data files do, in the order of their names.

    read: the data. other_splits: left, since there is a train split beside them. made: left, as
    they are a run's or a model's.
    """

    read: list[Path]
    other_splits: list[Path]
    made: list[Path]


def files_of_folder(path: Path) -> FolderFiles:
    """The data files under a folder, without hidden and metadata files.

    Where some are of a train split, those of test and validation splits are left.
    """
    found = [
        file
        for file in sorted(path.rglob("*"))
        if not file.is_dir()  # a pipe or a broken link is refused by its reader, not skipped
        and format_of(file) in ENDINGS
        and file.name not in _METADATA
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    made = _made(found, path)
    files = [file for file in found if file not in made]
    splits = {file: split_of(file.relative_to(path)) for file in files}
    left: set[Path] = set()
    if "train" in splits.values():
        left = {file for file in files if splits[file] not in ("train", "")}
    return FolderFiles(
        [file for file in files if file not in left], sorted(left), sorted(made & {*found})
    )


def _made(files: Iterable[Path], top: Path) -> set[Path]:
    """The files that a run wrote, or that belong to a model."""
    of_model: dict[Path, bool] = {}
    of_run: dict[Path, bool] = {}
    made = set()
    for file in files:
        folders = [file.parent, *(p for p in file.parent.parents if p.is_relative_to(top))]
        for folder in folders:
            if folder not in of_run:
                of_run[folder] = all((folder / name).is_file() for name in _MARKS_OF_RUN)
                of_model[folder] = _is_model(folder)
        is_own = file.name in RUN_FILES and of_run[file.parent]
        inside = any(of_run[folder] and file.relative_to(folder).parts[0] in _RUN_FOLDERS
                     for folder in folders)  # fmt: skip
        if is_own or inside or any(of_model[folder] for folder in folders):
            made.add(file)
    return made


def _is_model(folder: Path) -> bool:
    """Whether it is a stage's result, a checkpoint, or another model with its weights."""
    if (folder / _MANIFEST).is_file():
        return True
    config = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    return config and any(folder.glob("*.safetensors"))
