"""Advantages and losses of the user's own, tried on made-up answers before a run begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import cycle, islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.config.schema import RLConfig, RunConfig, SamplingConfig
from tandem.config.stages import stage_of
from tandem.errors import ConfigError
from tandem.parallel.world import World
from tandem.training.checks.agreement import refused_together
from tandem.training.policy_functions import (
    as_written,
    named_advantages,
    named_losses,
    named_pair_losses,
    on_made_up,
    required_advantages,
    try_pair_losses,
    try_token_losses,
)
from tandem.training.scored_answers import ScoredAnswers
from tandem.types import Experience, PromptRow, Rollout, TokenBatch, TokenRow

if TYPE_CHECKING:
    from tandem.training.algorithm import AdvantagesOf


class _Metrics(dict[str, float]):
    """Figures of a rollout that was not made: any that are asked for, as there are more with every
    reward."""

    def __missing__(self, name: str) -> float:
        return 0.0


def check_policy_functions(
    rl: RLConfig,
    section: str,
    prompts: Sequence[PromptRow],
    sampling: SamplingConfig,
    world: World,
) -> None:
    """Try the functions that a section names, on every rank.

    Args:
        prompts: what the run draws its prompts from.
    Raises:
        ConfigError: on every rank, one of them cannot be used on some.
    """
    with refused_together(world):
        advantages = named_advantages(rl, section)
        if advantages is not None and prompts:
            drawn = list(islice(cycle(prompts), rl.prompts_per_step))
            made = _made_up(drawn, rl, sampling)
            try_advantages(
                as_written(advantages),
                f"{section}.advantage_function {rl.advantage_function}",
                made,
            )
        losses = named_losses(rl, section)
        if losses is not None:
            try_token_losses(as_written(losses), f"{section}.loss_function {rl.loss_function}")


def check_pair_losses(config: RunConfig, stages: Iterable[str], world: World) -> None:
    """Try the loss on pairs that `dpo.loss_function` names, on every rank.

    Args:
        stages: that are to run.
    Raises:
        ConfigError: on every rank, it cannot be used on some.
    """
    if not any(stage_of(name).reads("dpo.loss_function") for name in stages):
        return
    with refused_together(world):
        if (losses := named_pair_losses(config.dpo)) is not None:
            try_pair_losses(as_written(losses), f"dpo.loss_function {config.dpo.loss_function}")


def try_advantages(advantages_of: AdvantagesOf, name: str, made: Experience) -> None:
    """Call advantages on an experience, here a made-up one.

    Raises:
        ConfigError: they fail, are no tensors of the response mask's shape, are not finite, or
            change what they were given; or the critic's returns are not finite.
    """
    of_experience = [getattr(made, field.name) for field in fields(made)]
    of_batch = [made.batch.token_ids, made.batch.attention_mask, made.batch.response_mask]
    tensors = [part for part in (*of_experience, *of_batch) if isinstance(part, Tensor)]
    figures = dict(made.metrics)
    # What the function is to give; in a run it is 0 until then.
    made = replace(made, advantages=torch.full_like(made.rewards, torch.nan))
    with on_made_up(name, f"{len(made)} made-up answers to the data's prompts", tensors):
        given = required_advantages(advantages_of(made), made)
    for what, found in zip(("advantages", "returns"), given, strict=True):
        if found is not None and not bool(found.isfinite().all()):
            raise ConfigError(
                f"{name} must give finite {what}; got {int((~found.isfinite()).sum())} that are "
                f"not, for {len(made)} made-up answers. Look for a division by 0, and compute them "
                "from scores or rewards: the experience's advantages are what it is to give."
            )
    if dict(made.metrics) != figures:
        raise ConfigError(
            f"{name} must leave its arguments as they are; it changed the experience's metrics, "
            "whose names and units are fixed. A callback can log figures of your own."
        )


def _made_up(prompts: Sequence[PromptRow], rl: RLConfig, sampling: SamplingConfig) -> Experience:
    """A rollout that nobody made: every fourth answer cut off, the others of one to three tokens,
    and no two alike in score."""
    samples, longest = sampling.samples_per_prompt, sampling.max_new_tokens
    asked = [prompt for prompt in prompts for _ in range(samples)]
    lengths = [min(place % 4 or longest, longest) for place in range(len(asked))]
    rows = [
        TokenRow((*p.token_ids, *[p.token_ids[-1]] * n), (False,) * len(p) + (True,) * n, p.source)
        for p, n in zip(asked, lengths, strict=True)
    ]
    batch = TokenBatch.from_rows(rows, rows[0].token_ids[-1])
    mask = batch.response_mask
    noise = torch.Generator().manual_seed(0)

    def drawn(scale: float, mean: float = 0.0) -> Tensor:
        return (mean + scale * torch.rand(mask.shape, generator=noise)) * mask

    logprobs, scores = drawn(-3.0, -0.1), torch.linspace(-1.0, 2.0, len(asked))
    last = mask & ~torch.nn.functional.pad(mask, (0, 1))[:, 1:]
    rewards = drawn(-0.02, 0.01) + last * scores[:, None]
    group = torch.arange(len(prompts)).repeat_interleave(samples)
    finished = torch.arange(len(asked)) % 4 != 0
    said = tuple(" ".join(["yes"] * length) for length in lengths)
    rollout = Rollout(batch, logprobs, logprobs, drawn(2.0), finished, tuple(asked), said, group)
    absent = torch.full_like(scores, torch.nan)
    scored = ScoredAnswers(
        scores=scores,
        shown=scores,
        mixed=scores,
        is_scored=torch.ones_like(scores, dtype=torch.bool),
        was_clipped=torch.zeros_like(scores, dtype=torch.bool),
        raw=absent,
        model=absent,
        further=scores.new_zeros(len(scores), 0),
        function=scores,
    )
    made = Experience(
        batch=batch,
        old_logprobs=logprobs,
        rewards=rewards,
        advantages=torch.zeros_like(rewards),
        scores=scores,
        group=group,
        rollout=rollout,
        metrics=_Metrics({**scored.metrics(rollout), "kl_coef": rl.kl_coef}),
    )
    if rl.has_reference:
        made = replace(made, ref_logprobs=drawn(-3.0, -0.1))
    return replace(made, values=drawn(1.0)) if rl.has_critic else made
