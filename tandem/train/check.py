"""What can be known to fail before the first step, so that it does not cost two others."""

from __future__ import annotations

from collections.abc import Sequence, Sized

from tandem.config.schema import RunConfig
from tandem.errors import ConfigError
from tandem.models.source import load_config, locate
from tandem.train.rows import StepRows


def check_rows(config: RunConfig, rows: StepRows, policy: str, reward: str) -> None:
    """Every configured step has rows, and every row fits its model's positions.

    Args:
        policy, reward: where the models come from.
    Raises:
        ConfigError: some do not; all that is wrong at once.
    """
    problems = list(_empty_steps(config, rows))
    limit = _positions(policy, config)
    longest_answer = config.sampling.max_new_tokens
    problems += _too_long("sft", [*rows.sft, *rows.heldout_sft, *rows.ptx], limit)
    problems += _too_long("dpo", [*rows.dpo_pairs, *rows.heldout_dpo_pairs], limit)
    if "reward" in config.steps:
        pairs = [*rows.pairs, *rows.heldout_pairs]
        problems += _too_long("reward", pairs, _positions(reward, config))
    longest = max(map(len, [*rows.prompts, *rows.heldout_prompts]), default=0)
    generates = {"reward", "ppo"} & set(config.steps)
    if generates and limit is not None and longest + longest_answer > limit:
        problems.append(
            f"the longest prompt and sampling.max_new_tokens must fit the model's {limit} "
            f"positions; got {longest} + {longest_answer}. Lower dataset.max_prompt_tokens or "
            "sampling.max_new_tokens"
        )
    if problems:
        raise ConfigError("; ".join(problems))


def _empty_steps(config: RunConfig, rows: StepRows) -> list[str]:
    needed = {"sft": rows.sft, "reward": rows.pairs, "dpo": rows.dpo_pairs, "ppo": rows.prompts}
    return [
        f"step {step} must have at least one row; got none. See the data account above, "
        "--data-split, and the lengths"
        for step in config.steps
        if not needed[step]
    ]


def _too_long(step: str, rows: Sequence[Sized], limit: int | None) -> list[str]:
    longest = max(map(len, rows), default=0)
    if limit is None or longest <= limit:
        return []
    return [
        (
            f"rows of step {step} must fit the model's {limit} positions; got {longest} tokens. "
            f"Set dataset.max_tokens to at most {limit}"
        )
    ]


def _positions(path: str, config: RunConfig) -> int | None:
    found = load_config(locate(path), trust_remote_code=config.trust_remote_code)
    return getattr(found.get_text_config(), "max_position_embeddings", None)
