"""Whether the disk has room for what a run writes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.memory.ways import size_text
from tandem.predict.stage import StagePrediction


@dataclass(frozen=True, slots=True)
class Room:
    """A folder's file system, and what is to be written there, all in bytes.

    free: now. models: that the stages leave, at least. most: of models and checkpoints at a time.
    """

    folder: Path
    free: float
    models: float
    most: float

    @property
    def takes_models(self) -> bool:
        """Whether the models fit, if nothing else is written."""
        return self.models <= self.free

    @property
    def problem(self) -> str:
        """What does not fit, or may not, in one clause; empty if all fits."""
        free = f"{self.folder} has {size_text(self.free)} free"
        if not self.takes_models:
            return f"{free}, and the models alone need {size_text(self.models)}"
        if self.most > self.free:
            most, models = size_text(self.most), size_text(self.models)
            return f"{free}, and checkpoints and models may need {most} (the models {models})"
        return ""


def room_for(stages: Sequence[StagePrediction], folder: Path, held: float = 0.0) -> Room:
    """The room for stages that run one after the other.

    Args:
        held: bytes of what is there already and counts as written: checkpoints of the first stage.
    """
    models = most = 0.0
    for stage in stages:  # its checkpoints are removed once its models are written
        most = max(most, models + stage.disk)
        models += stage.models
    there = folder
    while not os.path.exists(there):  # False, too, where it may not be looked at
        there = there.parent
    return Room(folder, float(shutil.disk_usage(there).free), models, max(models, most - held))
