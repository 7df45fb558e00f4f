"""What can be known to fail before the first step, so that it does not cost two others."""

from __future__ import annotations

from collections.abc import Sequence, Sized

from tandem.config.schema import RunConfig
from tandem.engine.bases import check_base
from tandem.errors import ConfigError
from tandem.models.sliced import check_sliceable
from tandem.models.source import load_config, locate
from tandem.models.starts import same_base, start_of
from tandem.parallel.tensor import check_divides
from tandem.parallel.world import World
from tandem.train.reward_function import check_columns
from tandem.train.rows import StepRows


def check_rows(config: RunConfig, rows: StepRows, policy: str, reward: str) -> None:
    """Every configured step has rows, and every row fits its model's positions.

    Args:
        policy, reward: where the models come from.
    Raises:
        ConfigError: some do not; all that is wrong at once.
        DataError: a column has the name of a reward function's argument.
    """
    if "ppo" in config.steps and config.ppo.reward_function:
        check_columns([*rows.prompts, *rows.heldout_prompts])
    problems = list(_empty_steps(config, rows))
    limit = _positions(policy, config)
    longest_answer = config.sampling.max_new_tokens
    problems += _too_long("sft", [*rows.sft, *rows.heldout_sft, *rows.ptx], limit)
    problems += _too_long("dpo", [*rows.dpo_pairs, *rows.heldout_dpo_pairs], limit)
    if "reward" in config.steps:
        pairs = [*rows.pairs, *rows.heldout_pairs]
        problems += _too_long("reward", pairs, _positions(reward, config))
    scored = min(config.reward.normalize_prompts, len(rows.prompts))
    if "reward" in config.steps and scored * config.sampling.samples_per_prompt == 1:
        problems.append(
            "reward.normalize_prompts must be 0 or find two prompts at least, whose scores differ; "
            f"got 1 ({len(rows.prompts)} prompts, reward.normalize_prompts "
            f"{config.reward.normalize_prompts}). Use more, or set reward.normalize_prompts 0"
        )
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


def check_parallel(config: RunConfig, world: World, policy: str) -> None:
    """How models are to lie over the ranks, as far as it shows before any is loaded.

    Args:
        policy: where the actor comes from.
    Raises:
        ConfigError, ModelError: PPO would be refused, after steps that cost their time.
    """
    check_base(config, world)
    parts = config.parallel.inference_tp_size
    if parts > 1:
        check_divides(world, parts)
        source = locate(policy)
        check_sliceable(load_config(source, trust_remote_code=config.trust_remote_code), parts)
    trains_both = {"reward", "ppo"} <= set(config.steps)
    if config.parallel.shared_base and trains_both and config.reward_model:
        start = start_of(config.reward_model, unmerged=True).base
        base = start_of(policy, unmerged=True).base
        if not same_base(start, base):
            raise ConfigError(
                "--shared-base must find one model under actor, critic and reward model; got "
                f"--reward-model {config.reward_model!r} and {base!r} under the actor. Start both "
                "from one model, or leave --shared-base off."
            )


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
