"""How many rollouts a stage has, and how many optimizer steps a rollout gives."""

from __future__ import annotations

from tandem.config.schema import RLConfig, RunConfig, rl_section

_MINIBATCHES = 8
"""Of a rollout, where `minibatch_size` names no size."""


def num_rollouts(rl: RLConfig, num_prompts: int) -> int:
    """Steps of the RL stage, of which 0 means one pass over its prompts."""
    return rl.steps or -(-num_prompts // rl.prompts_per_step)


def num_updates(config: RunConfig, num_steps: int) -> int:
    """Optimizer steps in `num_steps` steps of the RL stage (rollouts), if none stops early."""
    epochs = rl_section(config).epochs
    return num_steps * epochs * -(-answers_per_step(config) // minibatch_size(config))


def answers_per_step(config: RunConfig) -> int:
    """Answers of one rollout of the RL stage."""
    return rl_section(config).prompts_per_step * config.sampling.samples_per_prompt


def minibatch_size(config: RunConfig) -> int:
    """Answers per optimizer step of the RL stage."""
    return rl_section(config).minibatch_size or -(-answers_per_step(config) // _MINIBATCHES)
