"""Which trained parameters have which learning rate, and which of them decay."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from tandem.config.optimizer import OptimizerConfig

_OF_RECURRENCES = ("A_log", "D", "dt_bias")
"""A state's decay, its skip and its step size, which Mamba's authors mark `_no_weight_decay`. Names
tell them, since parameters lose their marks where weights are sharded or cast."""


def parameter_groups(
    model: nn.Module, settings: OptimizerConfig
) -> Iterator[dict[str, list[nn.Parameter] | float]]:
    """The trained parameters by learning rate and decay, without empty groups.

    Adapters (`lora_A`, `lora_B`) have their own learning rate.
    """
    chosen: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_adapter = "lora_" in name
            chosen.setdefault((is_adapter, decays(model, name)), []).append(parameter)
    for (is_adapter, has_decay), parameters in sorted(chosen.items()):
        peak = settings.lora_learning_rate if is_adapter else settings.learning_rate
        yield {
            "params": parameters,
            "weight_decay": settings.weight_decay if has_decay else 0.0,
            "lr": peak,
            "peak_lr": peak,
        }


def decays(model: nn.Module, name: str) -> bool:
    """Whether weight decay is for a parameter: for matrices, embeddings among them, and kernels.

    Not for biases, norms and what a recurrence decays by, whatever their shape: a mixture's biases
    have a row per expert, norms of queries one per head, and Mamba 1 keeps a decay per channel and
    state. Nor for other vectors that are written with more than one dimension.
    """
    path, _, last = name.rpartition(".")
    shape = model.get_parameter(name).shape
    if len(shape) < 2 or last in (*_OF_RECURRENCES, "scale") or "bias" in last:
        return False
    if path.endswith("norm") or type(model.get_submodule(path)).__name__.endswith("Norm"):
        return False
    # A layer's weight of one output, such as a scalar head's, is a matrix.
    return last == "weight" or "lora_" in name or sum(size > 1 for size in shape) > 1
