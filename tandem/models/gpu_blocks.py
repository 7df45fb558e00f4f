"""Decoder blocks for a GPU: a sum and the norm after it are one kernel, also from block to block.

A block gives the next one its output as two addends, which the next block's first norm, or the
model's last, adds up. The blocks' own code runs wherever our GPU kernels do not (`ops.gpu`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from tandem.models.twin_layers import projected
from tandem.ops import gpu
from tandem.ops.attention import attend
from tandem.ops.attention_context import AttentionSpec
from tandem.ops.joined import join

Addends = tuple[Tensor, Tensor | None]


@cache
def on_gpu_rotary_layer(kind: Any) -> Any:
    """A pre-norm block as Llama's: norm, attention, norm, gated MLP."""

    def forward(self: Any, hidden_states: Any, *args: Any, **keywords: Any) -> Any:
        addends = _addends(hidden_states)
        if addends is None or args:
            return kind.forward(self, hidden_states, *args, **keywords)
        residual, normed = self.input_layernorm.of_sum(*addends)
        attended, _ = self.self_attn(
            hidden_states=normed, position_embeddings=keywords["position_embeddings"]
        )
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
    weights into memory of its own.

    Returns:
        how many groups of layers lie side by side now.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return 0
    joined = 0
    for module in model.modules():
        for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            layers = [module._modules.get(name) for name in names]
            if all(type(layer) is nn.Linear for layer in layers):
                joined += _join_layers(layers)
    return joined


def _join_layers(layers: Sequence[Any]) -> bool:
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    if not gpu.fuses(weights[0]) or not join(weights):
        return False
    return all(bias is None for bias in biases) or (None not in biases and join(biases))
