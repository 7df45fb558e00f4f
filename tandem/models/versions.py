"""Whether a model still computes what it did: for what was computed with it and is kept."""

from __future__ import annotations

from copy import copy
from functools import cache
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedModel

from tandem.models.lora import adapter_switches


def weights_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """Equal as long as no weight is replaced or changed in place, no optimizer has made a step and
    no adapter is switched. What is written into a parameter's `data` is not seen."""
    return (
        _optimizer_steps()[0],
        tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters()),
        tuple(map(copy, adapter_switches(model))),
    )


@cache
def _optimizer_steps() -> list[int]:
    """One number: steps that optimizers of this process have made since the first call. Fused ones
    change weights without raising their version."""
    steps = [0]

    def count(*_: Any) -> None:
        steps[0] += 1

    register_optimizer_step_post_hook(count)
    return steps
