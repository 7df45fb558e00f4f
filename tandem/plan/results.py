"""A case's result: read from its run's folder, saved next to it, read again to resume."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tandem.config.stages import in_order
from tandem.errors import CheckpointError
from tandem.files import replace as replace_file
from tandem.metrics.folder import finite, read_folder
from tandem.metrics.metric import PHASES
from tandem.plan.cases import Case
from tandem.plan.processes import Ended

RESULT_FILE = "result.json"


@dataclass(frozen=True, slots=True)
class Result:
    """One case's figures.

    seconds, tokens_per_second: by phase, the sum and the mean over the training steps; steps: how
    many. peak_bytes: resident memory by rank. device: cpu or cuda. device_bytes: of the first
    rank's GPU by phase; on a CPU its resident memory. outcome: the last step's loss, or in PPO its
    reward. digest: of the case's configuration.
    """

    stage: str
    name: str
    ranks: int
    knobs: dict[str, Any]
    digest: str
    exit_code: int
    wall_seconds: float
    error: str = ""
    device: str = "cpu"
    steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    tokens_per_second: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    device_bytes: dict[str, int] = field(default_factory=dict)
    outcome: float | None = None

    @property
    def peak(self) -> int:
        """The largest rank's resident bytes; 0 if unknown."""
        return max(self.peak_bytes.values(), default=0)

    @property
    def gpu_peak(self) -> int:
        """Bytes on the first rank's GPU; 0 on a CPU."""
        return max(self.device_bytes.values(), default=0) if self.device == "cuda" else 0

    @property
    def seconds_per_step(self) -> float | None:
        """Mean time of a training step; None if there was none."""
        return self.seconds["step"] / self.steps if self.steps and "step" in self.seconds else None


def result_of(case: Case, digest: str, ended: Ended, run_folder: Path, device: str) -> Result:
    """Combine how the processes ended with what the run logged; `device` is cpu or cuda."""
    figures = _figures(case.stage, run_folder) if run_folder.is_dir() else {}
    peaks = dict(ended.peak_bytes)
    if device == "cpu" and peaks:  # a short peak may fall between two polls
        peaks[0] = max([peaks.get(0, 0), *figures.get("device_bytes", {}).values()])
    return Result(
        stage=case.stage,
        name=case.name,
        ranks=case.ranks,
        knobs=dict(case.knobs),
        digest=digest,
        exit_code=ended.exit_code,
        wall_seconds=ended.seconds,
        error=ended.error,
        device=device,
        peak_bytes={str(rank): size for rank, size in peaks.items()},
        **figures,
    )


def _figures(stage: str, run_folder: Path) -> dict[str, Any]:
    run = read_folder(run_folder)
    seconds: dict[str, float] = {}
    rates: dict[str, float] = {}
    device: dict[str, int] = {}
    for phase in PHASES:
        # Step 0 is an evaluation.
        timed = {at: s for at, s in finite(run.series(stage, f"seconds/{phase}")) if at > 0}
        if timed:
            seconds[phase] = sum(timed.values())
        tokens: defaultdict[str, float] = defaultdict(float)
        for at, rate in finite(run.series(stage, f"tokens_per_second/{phase}")):
            if at in timed:
                tokens["count"] += rate * timed[at]
                tokens["seconds"] += timed[at]
        if tokens["seconds"] > 0:
            rates[phase] = tokens["count"] / tokens["seconds"]
        peaks = finite(run.series(stage, f"peak_memory_bytes/{phase}"))
        if peaks:
            device[phase] = int(max(value for _, value in peaks))
    # The case that the others start from has several stages, and no result.
    outcome = [
        point for record in in_order([stage]) for point in run.series(stage, record.headline)
    ]
    last = outcome[-1][1] if outcome else math.nan
    return {
        "steps": len([at for at, _ in run.series(stage, "seconds/step") if at > 0]),
        "seconds": seconds,
        "tokens_per_second": rates,
        "device_bytes": device,
        "outcome": last if math.isfinite(last) else None,
    }


def write_result(result: Result, folder: Path) -> None:
    """Write a case's result.json, atomically: from now on the case is finished."""
    text = json.dumps(asdict(result), indent=1) + "\n"
    replace_file(folder / RESULT_FILE, text.encode("utf-8"))


def read_result(folder: Path) -> Result | None:
    """A finished case's result; None if there is none.

    Raises:
        CheckpointError: the file is there and cannot be read.
    """
    file = folder / RESULT_FILE
    if not file.exists():
        return None
    try:
        return Result(**json.loads(file.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{file} must be a case's result; got: {error}. Remove it to run the case again."
        ) from None
