"""On-policy distillation: a policy answers prompts, and learns at each token of its answers what a
teacher would have said there.

The loss is the exact KL to the teacher over the vocabulary, in either direction, or their
Jensen-Shannon divergence; there is no reward and no critic. Rollouts, updates and evaluation are
GRPO's, and so are their knobs (section `grpo`); the teacher is the reference model.
Source: arXiv:2306.13649 (GKD). Its lambda chooses at each step between own and given answers; here
each update learns from both, with a weight on the given ones (ptx_data, ptx_target, ptx_coef).
"""

from __future__ import annotations

from tandem.training.ppo import rl_job
from tandem.training.run_folder import Run
from tandem.training.stage_data import StepRows
from tandem.training.stage_loop import StageJob


def prepare(run: Run, rows: StepRows) -> StageJob:
    """The stage, ready to run; it leaves `RUN/distill/{actor,ema}`, folders that from_pretrained
    opens.

    Raises:
        DataError: there is no prompt.
    """
    return rl_job(run, rows, "distill")
