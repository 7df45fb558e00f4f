"""Layers of a twin that run on the operations of `ops`: same weights, same meaning, fewer passes.

A layer is taken over by its class, the classes being those that were read and compared; every
other layer runs its own code. `tests/models/test_twin.py` holds each against the original.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation
from transformers.pytorch_utils import Conv1D

from tandem.models.frozen import FrozenConv1D, FrozenLinear
from tandem.models.rope import take_over_rope
from tandem.ops import dense
from tandem.ops.attention import attend
from tandem.ops.attention_context import AttentionSpec

_PLAIN_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "MixtralRMSNorm",
                "Phi3RMSNorm", "Olmo2RMSNorm", "SmolLM3RMSNorm", "GraniteRMSNorm")  # fmt: skip
_OFFSET_NORMS = ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm")
_ATTENTIONS = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention",
               "GemmaAttention", "Gemma2Attention", "GraniteAttention")  # fmt: skip
_GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "GemmaMLP", "Gemma2MLP", "Gemma3MLP",
          "GraniteMLP", "SmolLM3MLP")  # fmt: skip
_JOINED = ("Phi3MLP", "GlmMLP", "Glm4MLP")


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

    @staticmethod
    def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return dense.linear(x, weight, bias)


class _FrozenConv1D(FrozenConv1D):
    """Conv1D over a quantized weight, on the linear of `ops`."""

    @staticmethod
    def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return dense.linear(x, weight, bias)


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


def fuse(module: nn.Module) -> None:
    """Give a twin's module the class above that means the same, if there is one."""
    kind, state = type(module), module.__dict__
    if kind is nn.Linear:
        module.__class__ = TwinLinear
    elif kind is nn.Embedding and _only_looks_up(module):
        module.__class__ = TwinEmbedding
    elif kind is Conv1D:
        module.__class__ = _Conv1D
    elif kind is FrozenLinear:
        module.__class__ = _FrozenLinear
    elif kind is FrozenConv1D:
        module.__class__ = _FrozenConv1D
    elif kind.__module__.startswith("transformers."):
        name = kind.__name__
        if name in _PLAIN_NORMS or name in _OFFSET_NORMS:
            state["_eps"] = getattr(module, "variance_epsilon", None) or module.eps
            state["_unit_offset"] = name in _OFFSET_NORMS
            module.__class__ = TwinRMSNorm
        elif name in _GATED and isinstance(module.act_fn, SiLUActivation | GELUTanh | nn.SiLU):
            state["_tanh"] = isinstance(module.act_fn, GELUTanh)
            module.__class__ = TwinGatedMLP
        elif name in _JOINED and isinstance(module.activation_fn, SiLUActivation | nn.SiLU):
            module.__class__ = _JoinedMLP
        elif name in _ATTENTIONS:
            state["_window"] = _window(module)
            state["_softcap"] = float(getattr(module, "attn_logit_softcapping", None) or 0.0)
            module.__class__ = TwinRotaryAttention
        elif name == "PhimoeTopKRouter":
            module.__class__ = _steady(type(module))  # type: ignore[arg-type]
    take_over_rope(module)


@cache
def _steady(kind: Any) -> type[nn.Module]:
    """A router that draws its experts in training, made to choose them as it does in evaluation:
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


def _window(module: Any) -> int:
    """Keys in sight of a layer; 0 is all. Mistral reads it from its config at every call."""
    if "sliding_window" in module.__dict__:
        return int(module.sliding_window or 0)
    if type(module).__name__ == "MistralAttention":
        return int(getattr(module.config, "sliding_window", None) or 0)
    return 0
