"""Decoder blocks for a GPU: a sum and the norm after it are one kernel, also from block to block.

A block gives the next one its output as two addends, which the next block's first norm, or the
model's last, adds up. Where our GPU kernels do not run (`ops.gpu`), a CPU computes what it can as a
whole (`cpu_blocks`), and the blocks' own code the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.models.blocks import is_split
from tandem.models.cpu_blocks import block_on_cpu
from tandem.models.twin_layers import projected
from tandem.ops import gpu
from tandem.ops.attention import attend
from tandem.ops.attention_context import AttentionSpec, wanted_tokens
from tandem.ops.joined import join

Addends = tuple[Tensor, Tensor | None]


@cache
def fused_rotary_layer(kind: Any) -> Any:
    """A pre-norm block as Llama's: norm, attention, norm, gated MLP. The last one (`_is_last`) goes
    on behind attention with the tokens alone whose states are wanted."""

    def forward(self: Any, hidden_states: Any, *args: Any, **keywords: Any) -> Any:
        if args:
            return kind.forward(self, hidden_states, *args, **keywords)
        positions = keywords["position_embeddings"]
        addends = _addends(hidden_states)
        wanted = wanted_tokens() if self._is_last else None

        def attended_to(normed: Tensor) -> Tensor:
            attended: Tensor = self.self_attn(
                hidden_states=normed,
                position_embeddings=positions,
                position_ids=keywords.get("position_ids"),
            )[0]
            return attended

        if addends is None:
            made = block_on_cpu(self, hidden_states, positions)
            if made is not None:
                return made
            if wanted is None:
                return kind.forward(self, hidden_states, **keywords)
            normed = self.input_layernorm(hidden_states)
            attended = attended_to(normed)
            attended, residual = wanted.of(attended, hidden_states)
            residual = residual + attended
            return residual + self.mlp(self.post_attention_layernorm(residual))
        residual, normed = self.input_layernorm.of_sum(*addends)
        attended = attended_to(normed)
        if wanted is not None:
            attended, residual = wanted.of(attended, residual)
        residual, normed = self.post_attention_layernorm.of_sum(residual, attended)
        return residual, self.mlp(normed)

    return _derived(kind, forward)


@cache
def on_gpu_opt_layer(kind: Any) -> Any:
    """OPT's block, where its norms come first and it drops nothing."""

    def forward(self: Any, hidden_states: Any, *args: Any, **keywords: Any) -> Any:
        addends = _addends(hidden_states)
        fits = (
            self.do_layer_norm_before
            and self.self_attn_layer_norm.weight is not None
            and not (self.training and self.dropout)
        )
        if addends is None or args or not fits:
            return kind.forward(self, hidden_states, *args, **keywords)
        residual, normed = self.self_attn_layer_norm.of_sum(*addends)
        attended, _ = self.self_attn(hidden_states=normed)
        residual, normed = self.final_layer_norm.of_sum(residual, attended)
        return residual, self.fc2(self.activation_fn(self.fc1(normed)))

    return _derived(kind, forward)


@cache
def on_gpu_opt_attention(kind: Any) -> Any:
    """OPT's attention with one product for queries, keys and values."""

    def forward(self: Any, hidden_states: Tensor, **keywords: Any) -> Any:
        if not gpu.fuses(hidden_states):
            return kind.forward(self, hidden_states, **keywords)
        tokens = hidden_states.shape[1]
        joined = projected(hidden_states, [self.q_proj, self.k_proj, self.v_proj])
        q, k, v = joined.view(tokens, 3, self.num_heads, self.head_dim).unbind(1)
        spec = AttentionSpec(self.scaling, dropout=self.dropout if self.training else 0.0)
        out = attend(self.layer_idx, q, k, v, spec)
        return self.out_proj(out.reshape(1, tokens, -1)), None

    return _derived(kind, forward)


def _derived(kind: Any, forward: Any) -> Any:
    """A class with this forward that goes by the name of its own."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {"forward": forward, **names})


def _addends(hidden_states: Any) -> Addends | None:
    """What the block before gave; None where our kernels do not run."""
    if isinstance(hidden_states, tuple):
        residual, delta = hidden_states
        return residual, delta
    return (hidden_states, None) if gpu.fuses(hidden_states) else None


def join_projections(model: PreTrainedModel) -> int:
    """Lay the weights of linear layers over one input side by side (`ops.joined`), in place.

    Parameters stay the objects that they are. A model split by FSDP2 is not touched: it gathers
    weights into memory of its own (`GatheredTogether`).

    Returns:
        how many groups of layers lie side by side now.
    """
    if is_split(model):
        return 0
    return sum(_join_layers(layers) for layers in _groups(model))


class GatheredTogether:
    """Weights that FSDP2 has gathered, laid side by side until `undo`.

    FSDP2 gathers each weight into memory of its own and frees it there. So a group's weights move
    into memory that they share, their own is given back meanwhile, and at the end they return to
    it: never are more than one group's weights there twice.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Does nothing where the model is not split or its weights are not gathered now."""
        self.num_groups = 0
        self._moved: list[tuple[Tensor, Tensor]] = []
        if is_split(model):
            for layers in _groups(model):
                self.num_groups += self._join(layers)

    @torch.no_grad()
    def undo(self) -> None:
        """The weights are where FSDP2 looks for them, before it frees or changes them."""
        for tensor, own in self._moved:
            own.untyped_storage().resize_(own.nbytes)
            own.copy_(tensor)
            tensor.data = own
        self._moved.clear()

    @torch.no_grad()
    def _join(self, layers: Sequence[Any]) -> bool:
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        if not gpu.fuses(weights[0]) or len({bias is None for bias in biases}) > 1:
            return False
        together = [weights] if biases[0] is None else [weights, biases]
        if not all(_are_alike(tensors) for tensors in together):
            return False
        for tensors in together:
            whole = torch.cat([tensor.detach() for tensor in tensors])
            parts = whole.split([len(tensor) for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                own = tensor.data
                tensor.data = part
                own.untyped_storage().resize_(0)
                self._moved.append((tensor, own))
        return True


def _groups(model: PreTrainedModel) -> Iterator[list[Any]]:
    """Plain linear layers over one input."""
    for module in model.modules():
        for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            layers = [module._modules.get(name) for name in names]
            if all(type(layer) is nn.Linear for layer in layers):
                yield layers


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    """Plain tensors of one kind that have their storages, from the beginning on, to themselves."""
    first = tensors[0]
    return len({tensor.untyped_storage()._cdata for tensor in tensors}) == len(tensors) and all(
        type(t.data) is Tensor and t.device == first.device and t.dtype == first.dtype
        and t.shape[1:] == first.shape[1:] and t.is_contiguous()
        and t.untyped_storage().nbytes() == t.nbytes
        for t in tensors
    )  # fmt: skip


def _join_layers(layers: Sequence[Any]) -> bool:
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    if not gpu.fuses(weights[0]) or not join(weights):
        return False
    return all(bias is None for bias in biases) or (None not in biases and join(biases))
