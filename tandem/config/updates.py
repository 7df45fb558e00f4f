"""How many optimizer steps a rollout gives."""

from __future__ import annotations

from tandem.config.schema import RunConfig, rl_section

_MINIBATCHES = 8
"""Of a rollout, where `minibatch_size` names no size."""


def num_updates(config: RunConfig, num_steps: int) -> int:
    """Optimizer steps in `num_steps` steps of the RL stage (rollouts), if none stops early."""
    rl = rl_section(config)
    answers = rl.prompts_per_step * config.sampling.samples_per_prompt
    return num_steps * rl.epochs * -(-answers // minibatch_size(config))


def minibatch_size(config: RunConfig) -> int:
    """Answers per optimizer step of the RL stage."""
    rl = rl_section(config)
    answers = rl.prompts_per_step * config.sampling.samples_per_prompt
    return rl.minibatch_size or -(-answers // _MINIBATCHES)
