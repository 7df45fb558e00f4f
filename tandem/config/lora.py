"""Knobs of low-rank adapters, and their rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tandem.config.knob import knob
from tandem.config.parallel import ParallelConfig

TrainedRole = Literal["actor", "critic"]
"""What is trained: a policy, or a model with a scalar head (reward model, critic)."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (arXiv:2106.09685). Rank 0 trains the whole model."""

    rank: int = knob(0, ge=0, common=True)
    """Rank of the adapters; 0 turns LoRA off."""
    critic_rank: int = knob(-1, ge=-1)
    """The same of reward model and critic, as for a small one that is trained whole beside a large
    policy's adapters; -1: lora.rank."""
    alpha: float = knob(16.0, gt=0)
    """The adapters' output is scaled by alpha / rank."""
    dropout: float = knob(0.0, ge=0, lt=1)
    """Dropout on the adapters' input. Off by default: PPO needs two forwards of one policy to
    agree."""
    targets: tuple[str, ...] = knob(("all-linear",))
    """Which linear layers: `all-linear` (except the vocabulary head), or endings of module
    names. Of models of different families each takes the names that it has, and must have
    one."""
    train_tokens: tuple[str, ...] = knob(())
    """Tokens whose embeddings, and rows of the vocabulary head, are trained beside the adapters, as
    PEFT's trainable_token_indices: tokens of the vocabulary, or `control`, the chat template's
    control tokens, which a base model has not learned. Needs lora.rank."""

    def of(self, role: TrainedRole) -> LoraConfig:
        """What a role's adapters are: with its own rank."""
        if role == "actor" or self.critic_rank < 0:
            return self
        return replace(self, rank=self.critic_rank)

    def rank_flag(self, role: TrainedRole) -> str:
        """The flag that sets a role's rank."""
        own = role == "critic" and self.critic_rank >= 0
        return "--lora.critic-rank" if own else "--lora-rank"


def adapter_problems(lora: LoraConfig) -> Iterator[str]:
    """Rules for adapters alone."""
    if lora.train_tokens and not (lora.rank or lora.of("critic").rank):
        yield (
            "lora.train_tokens must go with adapters (without, all embeddings are trained); got "
            f"{' '.join(lora.train_tokens)} with lora.rank 0. Set --lora-rank, or remove it"
        )


def frozen_base_problems(parallel: ParallelConfig, lora: LoraConfig) -> Iterator[str]:
    """Rules for frozen bases, on any number of ranks."""
    for name in ("frozen_weights", "shared_base"):
        if getattr(parallel, name) and lora.rank == 0:
            yield (
                f"parallel.{name} must go with LoRA, whose base stays frozen; got lora.rank 0, "
                "which trains all weights. Set --lora-rank"
            )
    own = lora.of("critic").rank
    if parallel.shared_base and lora.rank and own == 0:
        yield (
            "parallel.shared_base must find adapters on actor and critic alike; got "
            "lora.critic_rank 0, which trains all of the critic's weights. Remove it"
        )
    elif (parallel.shared_base or parallel.frozen_weights) and own not in (0, lora.rank):
        name = "shared_base" if parallel.shared_base else "frozen_weights"
        yield (
            f"lora.critic_rank must be lora.rank{'' if parallel.shared_base else ' or 0'} with "
            f"parallel.{name}, by which a stage goes on with the adapters of an earlier one; got "
            f"{own} for {lora.rank}. Remove it"
        )
    moved = [name for name in ("params", "reward") if name in parallel.offload]
    if parallel.shared_base and moved:
        yield (
            "parallel.shared_base must stay where all its models run; got parallel.offload "
            f"{' '.join(moved)}. Offload the optimizer alone, or turn --shared-base off"
        )
