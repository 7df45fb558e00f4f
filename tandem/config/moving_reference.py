"""Knobs of a reference that follows the policy, and the rules for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tandem.config.knob import knob


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """A reference that follows the policy (TR-DPO, arXiv:2404.09656), in every stage that compares
    the policy with where it started."""

    update_every: int = knob(0, ge=0)
    """Move the reference to the policy after every N optimizer steps of it (TRL: 512). 0: it stays
    the policy as the stage begins."""
    update_rate: float = knob(1.0, gt=0, le=1)
    """How far: reference = rate * policy + (1 - rate) * reference, in float32 (TRL: 0.6). 1 makes
    it the policy, and is the only rate with LoRA."""

    @property
    def takes_adapters(self) -> bool:
        """Whether the policy may be trained by adapters."""
        return self.update_every == 0 or self.update_rate == 1


def moving_reference_problems(
    reference: ReferenceConfig, *, lora_rank: int, reference_model: str, has_one: bool
) -> Iterator[str]:
    """Rules of a reference that moves.

    Args:
        has_one: a stage of the run compares the policy with where it started.
    """
    every, rate = reference.update_every, reference.update_rate
    if every == 0:
        if rate != 1:
            yield (
                "reference.update_rate must go with reference.update_every, without which nothing "
                f"reads it; got {rate:g}. Set reference.update_every, or remove "
                "reference.update_rate"
            )
        return
    if reference_model:
        yield (
            "reference.update_every must be 0 with reference_model, which stays as it is; got "
            f"{every} with {reference_model}. Remove one of them"
        )
    elif not has_one:
        yield (
            "reference.update_every must be 0 where no stage compares the policy with where it "
            f"started; got {every}. Remove it"
        )
    if lora_rank > 0 and not reference.takes_adapters:
        yield (
            "reference.update_rate must be 1 with lora.rank above 0 (a mixture of two adapters is "
            f"no adapter of that rank); got {rate:g}. Remove it, or train all weights"
        )
