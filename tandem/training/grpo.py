"""Policy gradients without a critic: GRPO, RLOO, REINFORCE++, DAPO and others.

The trainer is PPO's; what differs is in `algorithm`, read off this stage's section.
"""

from __future__ import annotations

from tandem.training.ppo import rl_job
from tandem.training.run_folder import Run
from tandem.training.stage_data import StepRows
from tandem.training.stage_loop import StageJob


def prepare(run: Run, rows: StepRows) -> StageJob:
    """The stage, ready to run; it leaves `RUN/grpo/{actor,ema}`, folders that from_pretrained
    opens.

    Raises:
        DataError: there is no prompt.
        ConfigError: there is nothing to reward with.
    """
    return rl_job(run, rows, "grpo")
