"""Tensor-parallel generation: a twin that holds a slice of the model's weights.

Column layers are sliced along their outputs (heads, inner width), row layers along their inputs;
their partial results are summed over the ranks that hold the other slices (arXiv:1909.08053). A
plan per architecture says which layers are which. `selfcheck` compares the logits of the model in
use before a run relies on its plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tandem.errors import ModelError
from tandem.models.lora import LoraLayer
from tandem.models.shared_copy import shared_copy
from tandem.ops import dense

SliceOf = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How an architecture is sliced: endings of the names of column and row layers.

    head_counts: attributes of its modules that count heads. inner_width: the config's name for the
    width of the MLP's inner layer.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    head_counts: tuple[str, ...] = field(default=())
    inner_width: str = "intermediate_size"


_LLAMA = _Plan(
    columns=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    rows=("self_attn.o_proj", "mlp.down_proj"),
)
_PLANS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "granite"), _LLAMA),
    "opt": _Plan(
        columns=("q_proj", "k_proj", "v_proj", "fc1"),
        rows=("out_proj", "fc2"),
        head_counts=("num_heads",),
        inner_width="ffn_dim",
    ),
    "gpt_neox": _Plan(
        columns=("attention.query_key_value", "mlp.dense_h_to_4h"),
        rows=("attention.dense", "mlp.dense_4h_to_h"),
    ),
}


class _ColumnLinear(nn.Module):
    """A linear layer with some of its outputs."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out / parts)."""
        return dense.linear(x, self.weight, self.bias)


class _RowLinear(nn.Module):
    """A linear layer with some of its inputs; the results are summed over all slices."""

    weight: Tensor
    bias: Tensor | None
    add_up: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """(..., in / parts) -> (..., out), the same on every rank."""
        summed = self.add_up(dense.linear(x, self.weight, None))
        return summed if self.bias is None else summed + self.bias.to(summed.dtype)


def check_sliceable(config: PreTrainedConfig, parts: int) -> None:
    """Refuse a model that cannot be sliced into `parts`.

    Raises:
        ModelError: a family without a plan, or heads or widths that `parts` does not divide.
    """
    config = config.get_text_config()
    if config.model_type not in _PLANS:
        raise ModelError(
            f"tensor-parallel generation must have a plan for the family; got "
            f"{config.model_type!r}, plans are there for {', '.join(sorted(_PLANS))}. Use "
            "--inference-tp-size 1."
        )
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = _PLANS[config.model_type].inner_width
    for name, number in (
        ("attention heads", heads),
        ("key and value heads", kv_heads),
        (f"inner width ({inner})", getattr(config, inner)),
    ):
        if number % parts:
            raise ModelError(
                f"--inference-tp-size must divide the model's {name}; got {parts} for {number}. "
                "Use a divisor."
            )


@torch.no_grad()
def sliced_twin(
    model: PreTrainedModel,
    parts: int,
    *,
    slice_of: SliceOf,
    whole: Callable[[Tensor], Tensor],
    add_up: Callable[[Tensor], Tensor],
    dtype: torch.dtype | None,
) -> PreTrainedModel:
    """A twin whose planned layers hold 1 / `parts` of their weights; all others are whole.

    Adapters are merged into the slices, which are temporary; the model's own weights stay as they
    are.

    Args:
        slice_of: this rank's slice of a weight along a dimension.
        whole: all of a weight.
        add_up: sums partial results over the ranks that hold the other slices, in place.
        dtype: of the slices; None: the weights' own.
    """
    check_sliceable(model.config, parts)
    plan = _PLANS[model.config.get_text_config().model_type]
    copies = shared_copy(model)
    originals = {copied: module for module, copied in copies.items()}
    twin = copies[model]
    assert isinstance(twin, PreTrainedModel)
    taken: dict[int, Tensor] = {}

    def kept(weight: Tensor) -> Tensor:
        """The whole weight, gathered once if it is tied."""
        if id(weight) not in taken:
            taken[id(weight)] = nn.Parameter(_cast(whole(weight), dtype), requires_grad=False)
        return taken[id(weight)]

    sliced: set[str] = set()
    for name, module in list(twin.named_modules()):
        if any(name.startswith(f"{done}.") for done in sliced):
            continue  # an adapter inside a sliced layer
        original = originals[module]
        is_column = name.endswith(plan.columns)
        if (is_column or name.endswith(plan.rows)) and hasattr(original, "weight"):
            layer = _layer(original, is_column, slice_of, whole, add_up, dtype)
            twin.set_submodule(name, layer)
            sliced.add(name)
            continue
        state: dict[str, Any] = module.__dict__
        state["_parameters"] = {
            key: None if weight is None else kept(weight)
            for key, weight in original._parameters.items()
        }
        for count in plan.head_counts:
            if isinstance(state.get(count), int):
                state[count] //= parts
    return twin.eval()


def _layer(
    original: nn.Module,
    is_column: bool,
    slice_of: SliceOf,
    whole: Callable[[Tensor], Tensor],
    add_up: Callable[[Tensor], Tensor],
    dtype: torch.dtype | None,
) -> nn.Module:
    weight = getattr(original, "weight")  # noqa: B009, a module's attributes have no static type
    if not weight.is_floating_point():
        raise ModelError(
            "tensor-parallel generation must slice weights that are not quantized; got "
            f"{weight.dtype}. Leave --frozen-weights off, or --inference-tp-size 1."
        )
    layer: Any = _ColumnLinear() if is_column else _RowLinear()
    own = slice_of(weight, 0 if is_column else 1)
    if isinstance(original, LoraLayer):
        a, b = whole(original.lora_A.weight), whole(original.lora_B.weight)
        if original.switch.on:
            parts = (
                weight.shape[0] // own.shape[0] if is_column else weight.shape[1] // own.shape[1]
            )
            index = _index_of(slice_of, parts, weight.device)
            if is_column:
                b = b.chunk(parts, 0)[index]
            else:
                a = a.chunk(parts, 1)[index]
            own = own + ((b @ a) * (original.alpha / original.rank)).to(own.dtype)
    layer.weight = nn.Parameter(_cast(own, dtype), requires_grad=False)
    bias = getattr(original, "bias", None)
    if bias is not None:
        full = slice_of(bias, 0) if is_column else whole(bias)
        bias = nn.Parameter(_cast(full, dtype), requires_grad=False)
    layer.bias = bias
    if not is_column:
        layer.add_up = add_up
    return layer


def _index_of(slice_of: SliceOf, parts: int, device: torch.device) -> int:
    """The index of this rank's slice."""
    return int(slice_of(torch.arange(parts, device=device), 0)[0])


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
