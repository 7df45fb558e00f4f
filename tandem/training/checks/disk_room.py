"""Before a stage begins: does the disk have room for what it will write?"""

from __future__ import annotations

from tandem.checkpoint.folder import together
from tandem.errors import CheckpointError
from tandem.predict.room import room_for
from tandem.predict.stage import StagePrediction
from tandem.training.run_folder import Run


def require_room(run: Run, stage: str, prediction: StagePrediction | None) -> None:
    """Refuse a disk that cannot take the stage's models, and print a warning if it may not take its
    checkpoints; all ranks together.

    Args:
        prediction: the stage's; None: nothing is known, and nothing checked.
    Raises:
        CheckpointError: a node's disk is too small.
    """
    warnings: list[str] = []

    def check() -> None:
        if prediction is None or not run.world.is_keeper:
            return
        files = run.checkpoints(stage).rglob("*")
        room = room_for([prediction], run.path, sum(f.stat().st_size for f in files if f.is_file()))
        if not room.takes_models:
            raise CheckpointError(
                f"--output-dir must have room for what {stage} leaves; {room.problem}. Free some "
                "space or choose another --output-dir."
            )
        if room.problem:
            warnings.append(
                f"{stage}: the disk may be too small: {room.problem}. Free some space, or choose "
                "another --output-dir."
            )

    together(check, run.path, run.world)
    for line in warnings:
        run.print_line(line)
