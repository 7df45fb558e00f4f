"""A decoder block on a CPU as three operations: before attention, attention, after it.

Its linear layers may have adapters or quantized weights. A block with something else in it (dropout
before an adapter, a slice of a weight, norms of queries and keys, a forward or hook of its own)
runs module by module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.models.computed import has_its_own, is_computed
from tandem.models.laid_out import LaidOutWeight
from tandem.models.quantized import PackedWeight
from tandem.models.recompute import checkpointed, recomputing
from tandem.models.twin_layers import (
    TwinAdaptedLinear,
    TwinGatedMLP,
    TwinLinear,
    TwinRMSNorm,
    TwinRotaryAttention,
)
from tandem.ops import layer
from tandem.ops.attention import attend, takes_asked
from tandem.ops.attention_context import AttentionSpec, Decode, current_step, wanted_tokens

_ATTENTION = {TwinRotaryAttention: False, recomputing(TwinRotaryAttention): True}
_MLP = {TwinGatedMLP: False, recomputing(TwinGatedMLP): True}
"""Classes, and whether they recompute."""


@dataclass(frozen=True, slots=True)
class PlainBlock:
    """The parts of a pre-norm block as Llama's, all of them what their classes say.

    linears: of queries, keys, values, out, gate, up, down. norms: before attention and after it.
    """

    linears: list[Any]
    norms: list[Any]
    attention: Any
    mlp: Any

    @property
    def layer(self) -> int:
        """The block's number."""
        return int(self.attention.layer_idx)

    @property
    def head_dim(self) -> int:
        """Numbers of one head."""
        return int(self.attention.head_dim)

    @property
    def kind(self) -> AttentionSpec:
        """How it attends."""
        kind: AttentionSpec = self.attention.kind()
        return kind

    @property
    def tanh(self) -> bool:
        """Whether the gate is the tanh GELU, else SiLU."""
        return bool(self.mlp._tanh)

    @property
    def first(self) -> tuple[float, bool]:
        """Epsilon and unit offset of the norm before attention."""
        return self.norms[0]._eps, self.norms[0]._unit_offset

    @property
    def second(self) -> tuple[float, bool]:
        """The same of the norm after it."""
        return self.norms[1]._eps, self.norms[1]._unit_offset

    @property
    def recomputes(self) -> bool:
        """Whether something is computed again in the backward pass."""
        return _ATTENTION[type(self.attention)] or _MLP[type(self.mlp)]

    def weights(self) -> list[Tensor | None]:
        """Norm; q, k, v; their biases; out and its bias; the second norm; gate, up, down."""
        q, k, v, out, gate, up, down = self.linears
        first, second = self.norms
        return [first.weight, q.weight, k.weight, v.weight, q.bias, k.bias, v.bias, out.weight,
                out.bias, second.weight, gate.weight, up.weight, down.weight]  # fmt: skip


def plain_block(block: Any, dtype: torch.dtype) -> PlainBlock | None:
    """A block's parts, None where one has more in it; `dtype` is what it computes in."""
    return _block_of(block, dtype, _is_plain_linear)


def _block_of(
    block: Any, dtype: torch.dtype, is_linear: Callable[[Any, torch.dtype], bool]
) -> PlainBlock | None:
    """A block's parts, whose linear layers all have to be what `is_linear` asks for."""
    parts = block._modules
    attention, mlp = parts.get("self_attn"), parts.get("mlp")
    if type(attention) not in _ATTENTION or type(mlp) not in _MLP:
        return None
    assert attention is not None
    assert mlp is not None
    own, inner = attention._modules, mlp._modules
    linears: list[Any] = [own["q_proj"], own["k_proj"], own["v_proj"], own["o_proj"]]
    linears += [inner["gate_proj"], inner["up_proj"], inner["down_proj"]]
    norms = [parts["input_layernorm"], parts["post_attention_layernorm"]]
    if (
        "q_norm" in own
        or has_its_own(attention)
        or has_its_own(mlp)
        or not all(is_linear(linear, dtype) for linear in linears)
        or not all(_is_plain(norm, TwinRMSNorm, dtype) for norm in norms)
    ):
        return None
    biased = [linear.bias is not None for linear in linears]
    if any(has and "bias" not in one._parameters for has, one in zip(biased, linears, strict=True)):
        return None  # but a buffer, say
    if biased[0] != biased[1] or biased[0] != biased[2] or True in biased[4:]:
        return None
    if len({id(linear.weight) for linear in linears}) < len(linears):
        return None
    return PlainBlock(linears, norms, attention, mlp)


def block_on_cpu(block: Any, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor | None:
    """What a pre-norm block as Llama's makes of x (1, N, D), positions being cos and sin (1, N, R);
    None where it must run module by module."""
    if not x.numel() or not layer.takes(x):
        return None
    wanted = wanted_tokens() if block._is_last else None
    if wanted is not None and not len(wanted.rows):
        return None  # operations over no rows give no gradients
    cos, sin = positions
    plain = _block_of(block, x.dtype, _is_multiplied)
    if plain is None or not cos.dtype == sin.dtype == x.dtype:
        return None
    attention, mlp, linears = plain.attention, plain.mlp, plain.linears
    trains = torch.is_grad_enabled()
    if isinstance(current_step(), Decode) and any(_is_packed(linear) for linear in linears):
        return None  # each layer by itself unpacks a part of its weight at a time
    first, second = (layer.Norm(norm.weight, norm._eps, norm._unit_offset) for norm in plain.norms)

    adapters = [_adapter(linear) for linear in linears]
    parts = [part for adapter in adapters if adapter is not None for part in adapter[:2]]
    if len(set(map(id, parts))) < len(parts):
        return None

    kind = attention.kind()
    asked = wanted.rows if wanted is not None and takes_asked(kind, x.dtype) else None

    def attended_of(x: Tensor) -> tuple[Tensor, Tensor]:
        weights = [_weight(linear) for linear in linears[:3]]
        biases = [linear.bias for linear in linears[:3]]
        q, k, v, residual = layer.before_attention(
            x, first, weights, biases, cos[0], sin[0], attention.head_dim, adapters[:3], asked
        )
        attended = attend(attention.layer_idx, q, k, v, kind, asked)
        return attended.reshape(1, len(attended), -1), residual

    if trains and attention.training and _ATTENTION[type(attention)]:
        attended, residual = checkpointed(attended_of, x)
    else:
        attended, residual = attended_of(x)
    if wanted is not None:
        if asked is None:
            attended, residual = wanted.of(attended, residual)
        wanted.alone = True
    out, *others = linears[3:]
    gate, up, down = map(_weight, others)
    return layer.after_attention(
        attended, residual, (_weight(out), out.bias), second, gate, up, down, bool(mlp._tanh),
        adapters[3:], recomputes=trains and mlp.training and _MLP[type(mlp)],
    )  # fmt: skip


def _weight(linear: Any) -> layer.Weight:
    weight = linear.weight
    if _is_packed(linear):
        return layer.Stored((weight.packed, weight.scales), weight.layout.unpacked)
    plain: Tensor = weight
    return plain


def _is_packed(linear: Any) -> bool:
    return isinstance(linear.weight, PackedWeight)


def _adapter(linear: Any) -> layer.Adapter | None:
    acting = linear.acting() if type(linear) is TwinAdaptedLinear else None
    if acting is None:
        return None
    down, up = acting
    return layer.Adapter(down.weight, up.weight, linear.scale)


def _is_plain_linear(module: Any, dtype: torch.dtype) -> bool:
    return _is_plain(module, TwinLinear, dtype)


def _is_multiplied(module: Any, dtype: torch.dtype) -> bool:
    """Whether `layer` computes what a linear layer does."""
    if not is_computed(module, dtype) or isinstance(module.weight, LaidOutWeight):
        return False
    return type(module) is not TwinLinear or "weight" in module._parameters  # and no slice of one


def _is_plain(module: Any, kind: Any, dtype: torch.dtype) -> bool:
    """Whether a module is of a kind, with a weight of a type, and computes what its class says."""
    if type(module) is not kind or has_its_own(module):
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.dtype == dtype
