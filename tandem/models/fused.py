"""Layers of a twin that run on the operations of `ops`: same weights, same result, fewer passes.

`fused` chooses by class name. Only classes whose code was read and compared are named here; every
other layer runs its own code. `tests/models/test_twin.py` compares each with the original.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation
from transformers.pytorch_utils import Conv1D

from tandem.models.frozen import FrozenConv1D, FrozenLinear
from tandem.models.rope import packed_rope
from tandem.ops import dense
from tandem.ops.attention import attend
from tandem.ops.attention_context import AttentionSpec

Fused = tuple[type[nn.Module], dict[str, Any]]
"""A class, and attributes that its forward needs beside those of the layer that it replaces."""


class TwinLinear(nn.Linear):
    """nn.Linear on the linear of `ops`."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return dense.linear(x, self.weight, self.bias)


class TwinEmbedding(nn.Embedding):
    """nn.Embedding on the embedding of `ops`."""

    def forward(self, token_ids: Tensor) -> Tensor:
        """(...) -> (..., D)."""
        return dense.embedding(token_ids, self.weight, self.padding_idx)


class _Conv1D(Conv1D):
    """GPT-2's linear layer, its weight stored (in, out)."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return dense.linear(x, self.weight.t(), self.bias)


class _FrozenLinear(FrozenLinear):
    """nn.Linear over a quantized weight, on the linear of `ops`."""

    _linear = staticmethod(dense.linear)


class _FrozenConv1D(FrozenConv1D):
    """Conv1D over a quantized weight, on the linear of `ops`."""

    _linear = staticmethod(dense.linear)


class TwinRMSNorm(nn.Module):
    """Root-mean-square norm, times the weight (Gemma's: times one plus the weight)."""

    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return dense.rms_norm(x, self.weight, self._eps, self._unit_offset)  # type: ignore[arg-type]


class TwinGatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), with SiLU or the tanh GELU."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        gate, up = self.gate_proj(x), self.up_proj(x)  # type: ignore[operator]
        inner = dense.geglu_tanh(gate, up) if self._tanh else dense.swiglu(gate, up)
        return self.down_proj(inner)  # type: ignore[operator]


class _JoinedMLP(nn.Module):
    """down(silu(gate) * up), gate and up being halves of one projection."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)  # type: ignore[operator]
        return self.down_proj(dense.swiglu(gate, up))  # type: ignore[operator]


class TwinRotaryAttention(nn.Module):
    """Projections, norms of queries and keys where the layer has them, rotation, attention."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> tuple[Tensor, None]:
        """(1, N, D) -> (1, N, D) and no weights; cos and sin (1, N, R)."""
        module: Any = self
        heads = (hidden_states.shape[1], -1, module.head_dim)
        q = module.q_proj(hidden_states).view(heads)
        k = module.k_proj(hidden_states).view(heads)
        v = module.v_proj(hidden_states).view(heads)
        if "q_norm" in self._modules:
            q, k = module.q_norm(q), module.k_norm(k)
        cos, sin = position_embeddings
        q, k = dense.rotary(q, k, cos[0], sin[0])
        kind = AttentionSpec(
            scale=module.scaling,
            window=self._window,  # type: ignore[arg-type]
            softcap=self._softcap,  # type: ignore[arg-type]
            dropout=module.attention_dropout if self.training else 0.0,
        )
        out = attend(module.layer_idx, q, k, v, kind)
        return module.o_proj(out.reshape(1, heads[0], -1)), None


def fused(module: Any, kind: type[nn.Module]) -> Fused:
    """The class that computes a module in a twin: one above, or its own, `kind`."""
    plain = {
        nn.Linear: TwinLinear,
        Conv1D: _Conv1D,
        FrozenLinear: _FrozenLinear,
        FrozenConv1D: _FrozenConv1D,
    }
    if kind in plain:
        return plain[kind], {}
    if kind is nn.Embedding:
        return (TwinEmbedding if _only_looks_up(module) else kind), {}
    if kind.__module__.startswith("transformers.") and kind.__name__ in _BY_NAME:
        return _BY_NAME[kind.__name__](module, kind)
    return packed_rope(module, kind)


def _norm(module: Any, kind: type[nn.Module]) -> Fused:
    eps = getattr(module, "variance_epsilon", None) or module.eps
    return TwinRMSNorm, {"_eps": eps, "_unit_offset": kind.__name__.startswith("Gemma")}


def _gated_mlp(module: Any, kind: type[nn.Module]) -> Fused:
    if not isinstance(module.act_fn, SiLUActivation | GELUTanh | nn.SiLU):
        return kind, {}
    return TwinGatedMLP, {"_tanh": isinstance(module.act_fn, GELUTanh)}


def _joined_mlp(module: Any, kind: type[nn.Module]) -> Fused:
    is_silu = isinstance(module.activation_fn, SiLUActivation | nn.SiLU)
    return (_JoinedMLP if is_silu else kind), {}


def _attention(module: Any, kind: type[nn.Module]) -> Fused:
    softcap = float(getattr(module, "attn_logit_softcapping", None) or 0.0)
    return TwinRotaryAttention, {"_window": _window(module, kind), "_softcap": softcap}


def _window(module: Any, kind: type[nn.Module]) -> int:
    """How many keys a layer sees; 0 is all. Mistral reads it from its config at every call."""
    if "sliding_window" in module.__dict__:
        return int(module.sliding_window or 0)
    if kind.__name__ == "MistralAttention":
        return int(getattr(module.config, "sliding_window", None) or 0)
    return 0


def _router(module: Any, kind: Any) -> Fused:
    return _steady_router(kind), {}


@cache
def _steady_router(kind: Any) -> type[nn.Module]:
    """A router that samples its experts in training, made to choose as it does in evaluation:
    else the trained policy is not the one that samples."""

    class Steady(kind):
        def forward(self, *args: Any, **keywords: Any) -> Any:
            module: Any = self
            training, module.training = module.training, False
            try:
                return super().forward(*args, **keywords)
            finally:
                module.training = training

    return Steady


def _only_looks_up(embedding: Any) -> bool:
    unscaled = embedding.max_norm is None and not embedding.scale_grad_by_freq
    return unscaled and not embedding.sparse


def _names(families: str, ending: str) -> list[str]:
    return [family + ending for family in families.split()]


_BY_NAME: dict[str, Callable[[Any, type[nn.Module]], Fused]] = {
    **dict.fromkeys(
        _names(
            "Llama Mistral Qwen2 Qwen3 Mixtral Phi3 Olmo2 SmolLM3 Granite Gemma Gemma2 Gemma3",
            "RMSNorm",
        ),
        _norm,
    ),
    **dict.fromkeys(
        _names("Llama Mistral Qwen2 Qwen3 Gemma Gemma2 Gemma3 Granite SmolLM3", "MLP"), _gated_mlp
    ),
    **dict.fromkeys(_names("Phi3 Glm Glm4", "MLP"), _joined_mlp),
    **dict.fromkeys(
        _names("Llama Mistral Qwen2 Qwen3 Gemma Gemma2 Granite", "Attention"), _attention
    ),
    "PhimoeTopKRouter": _router,
}
