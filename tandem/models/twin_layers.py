"""The layers of a twin, on the operations of `ops`: same weights and result, fewer passes.

`fused` says which of a model's layers they replace. Where our GPU kernels run (`ops.gpu`),
projections over one input are one product (`ops.joined`), and what lies between products is one
kernel; a norm may be given a pair, whose sum it takes first (`gpu_blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tandem.models.frozen import FrozenConv1D, FrozenLinear
from tandem.models.lora import LoraLinear
from tandem.models.quantized import PackedWeight
from tandem.models.token_layers import TokenEmbedding, TokenHead
from tandem.ops import dense, gpu
from tandem.ops.attention import attend, attend_rotary
from tandem.ops.attention_context import AttentionSpec, Decode, current_step
from tandem.ops.joined import joined_linear
from tandem.ops.recurrence import sigmoid


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


class TwinTokenEmbedding(TokenEmbedding):
    """An embedding with trained rows, on the embedding of `ops`."""

    @staticmethod
    def _look_up(token_ids: Tensor, matrix: Tensor) -> Tensor:
        return dense.embedding(token_ids, matrix)


class TwinTokenHead(TokenHead):
    """A vocabulary head with trained rows."""


class TwinConv1D(Conv1D):
    """GPT-2's linear layer, its weight stored (in, out)."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return dense.linear(x, self.weight.t(), self.bias)


class TwinFrozenLinear(FrozenLinear):
    """nn.Linear over a quantized weight, on the linear of `ops`."""

    _linear = staticmethod(dense.linear)


class TwinFrozenConv1D(FrozenConv1D):
    """Conv1D over a quantized weight, on the linear of `ops`."""

    _linear = staticmethod(dense.linear)


class TwinAdaptedLinear(LoraLinear):
    """nn.Linear with an adapter; one kernel where a GPU decodes."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        made = adapted_together(x, [self]) if gpu.fuses(x) else None
        return super().forward(x) if made is None else made


class TwinRMSNorm(nn.Module):
    """Root-mean-square norm, times the weight (Gemma's: times one plus the weight)."""

    weight: Tensor

    def forward(self, x: Tensor | tuple[Tensor, Tensor | None]) -> Tensor:
        """(..., D), or a pair to add up, -> (..., D)."""
        if isinstance(x, tuple):
            return self.of_sum(*x)[1]
        return dense.rms_norm(x, self.weight, self._eps, self._unit_offset)  # type: ignore[arg-type]

    def of_sum(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + delta and its norm, on a GPU, in one kernel."""
        from tandem.ops.layer_gpu import RMS, UNIT_OFFSET, add_norm

        kind = UNIT_OFFSET if self._unit_offset else RMS
        return add_norm(x, delta, self.weight, None, self._eps, kind)  # type: ignore[arg-type]


class TwinLayerNorm(nn.LayerNorm):
    """nn.LayerNorm, on a GPU perhaps of a pair's sum."""

    def forward(self, x: Tensor | tuple[Tensor, Tensor | None]) -> Tensor:
        """(..., D), or a pair to add up, -> (..., D)."""
        return self.of_sum(*x)[1] if isinstance(x, tuple) else super().forward(x)

    def of_sum(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + delta and its norm, on a GPU, in one kernel."""
        from tandem.ops.layer_gpu import CENTERED, add_norm

        return add_norm(x, delta, self.weight, self.bias, self.eps, CENTERED)


class TwinSiLU(nn.Module):
    """SiLU."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., I)."""
        return dense.silu(x)


class TwinGELU(nn.Module):
    """GELU, or its tanh approximation."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., I)."""
        return dense.gelu(x, tanh=bool(self._tanh))


class TwinGatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), with SiLU or the tanh GELU."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        if gpu.fuses(x):
            gate_up = projected(x, [self.gate_proj, self.up_proj])
            return gated_product(gate_up, self.down_proj, bool(self._tanh))
        gate, up = self.gate_proj(x), self.up_proj(x)  # type: ignore[operator]
        inner = dense.geglu_tanh(gate, up) if self._tanh else dense.swiglu(gate, up)
        return self.down_proj(inner)  # type: ignore[operator]


class TwinNumberedMLP(nn.Module):
    """w2(silu(w1(x)) * w3(x)), as LFM 2 names them."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.w2(dense.swiglu(self.w1(x), self.w3(x)))  # type: ignore[operator]


class TwinJoinedMLP(nn.Module):
    """down(silu(gate) * up), gate and up being halves of one projection."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        gate_up = self.gate_up_proj(hidden_states)  # type: ignore[operator]
        if gpu.fuses(gate_up):
            return gated_product(gate_up, self.down_proj, False)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down_proj(dense.swiglu(gate, up))  # type: ignore[operator]


class TwinRotaryAttention(nn.Module):
    """Projections, norms of queries and keys where the layer has them, rotation, attention."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> tuple[Tensor, None]:
        """(1, N, D) -> (1, N, D) and no weights; cos and sin (1, N, R)."""
        module: Any = self
        heads = (hidden_states.shape[1], -1, module.head_dim)
        if gpu.fuses(hidden_states):
            cos, sin = position_embeddings
            qkv, sizes = self._projected(hidden_states)
            qkv = self.scaled(qkv, sizes[0], **kwargs)
            out = attend_rotary(module.layer_idx, qkv, sizes, cos[0], sin[0], self.kind())
            return module.o_proj(out.reshape(1, heads[0], -1)), None
        q = module.q_proj(hidden_states).view(heads)
        k = module.k_proj(hidden_states).view(heads)
        v = module.v_proj(hidden_states).view(heads)
        if "q_norm" in self._modules:
            q, k = module.q_norm(q), module.k_norm(k)
        cos, sin = position_embeddings
        q, k = dense.rotary(q, k, cos[0], sin[0])
        q = self.scaled(q, q.shape[1], **kwargs)
        out = attend(module.layer_idx, q, k, v, self.kind())
        return module.o_proj(out.reshape(1, heads[0], -1)), None

    def scaled(self, x: Tensor, heads: int, **kwargs: Any) -> Tensor:
        """x (N, H, D), its first `heads` heads, the queries, scaled by their positions; here x."""
        return x

    def kind(self) -> AttentionSpec:
        """What `attend` has to know of this layer."""
        module: Any = self
        return AttentionSpec(
            scale=module.scaling,
            window=module._window,
            softcap=module._softcap,
            dropout=module.attention_dropout if self.training else 0.0,
        )

    def _projected(self, hidden_states: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Queries, keys and values (N, Hq + 2 Hkv, D) of a GPU, not yet turned; Hq and Hkv."""
        module: Any = self
        joined = projected(hidden_states, [module.q_proj, module.k_proj, module.v_proj])
        qkv = joined.view(hidden_states.shape[1], -1, module.head_dim)
        # By the weights that are here: a slice of tensor-parallel generation has fewer heads.
        heads = module.k_proj.weight.shape[0] // module.head_dim
        sizes = qkv.shape[1] - 2 * heads, heads
        if "q_norm" in self._modules:
            q, k, v = qkv.split((*sizes, heads), 1)
            qkv = torch.cat([module.q_norm(q), module.k_norm(k), v], 1)
        return qkv, sizes


class TwinScaledAttention(TwinRotaryAttention):
    """Attention whose queries are scaled by 1 + beta log(1 + floor(position / reached)), as Llama
    4's, so that long contexts are attended to as sharply."""

    def scaled(self, x: Tensor, heads: int, **kwargs: Any) -> Tensor:
        """(N, H, D), with `position_ids` (1, N) -> (N, H, D)."""
        module: Any = self
        if not module._beta:
            return x
        far = torch.floor(kwargs["position_ids"][0] / module._reached)
        factor = (1 + module._beta * torch.log(1 + far)).to(x.dtype)[:, None, None]
        if heads == x.shape[1]:
            return x * factor
        return torch.cat([x[:, :heads] * factor, x[:, heads:]], 1)


class TwinGatedAttention(TwinRotaryAttention):
    """Attention whose output is gated head by head, the gates lying beside the queries, as Qwen
    3.5's."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> tuple[Tensor, None]:
        """(1, N, D) -> (1, N, D) and no weights; cos and sin (1, N, R)."""
        module: Any = self
        heads = (hidden_states.shape[1], -1, module.head_dim)
        q, gate = module.q_proj(hidden_states).view(*heads[:2], 2 * heads[2]).chunk(2, -1)
        k = module.k_norm(module.k_proj(hidden_states).view(heads))
        v = module.v_proj(hidden_states).view(heads)
        cos, sin = position_embeddings
        q, k = dense.rotary(module.q_norm(q), k, cos[0], sin[0])
        out = attend(module.layer_idx, q, k, v, self.kind()) * sigmoid(gate)
        return module.o_proj(out.reshape(1, heads[0], -1)), None


class TwinDifferentialAttention(TwinRotaryAttention):
    """Differential attention (arXiv:2410.05258): the difference of two maps over the same values.

    Each key is kept with a value of either half, side by side, so that it is attended to once.
    """

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> tuple[Tensor, None]:
        """(1, N, D) -> (1, N, D) and no weights; cos and sin (1, N, R)."""
        module: Any = self
        heads = (hidden_states.shape[1], -1, module.head_dim)
        q = module.q_proj(hidden_states).view(heads)
        k = module.k_proj(hidden_states).view(heads)
        halves = module.v_proj(hidden_states).view(heads).chunk(2, dim=1)
        v = torch.cat([half.repeat(1, 2, 1) for half in halves], dim=-1)
        cos, sin = position_embeddings
        q, k = dense.rotary(q, k, cos[0], sin[0])
        one, other = attend(module.layer_idx, q, k, v, self.kind()).chunk(2, dim=1)
        start = module.lambda_init
        first, second = (
            torch.exp(torch.sum(a * b, dtype=torch.float32)).to(q.dtype)
            for a, b in [
                (module.lambda_q1, module.lambda_k1),
                (module.lambda_q2, module.lambda_k2),
            ]
        )
        out = (1 - start) * module.groupnorm(one - (first - second + start) * other)
        return module.o_proj(out.reshape(1, heads[0], -1)), None


def projected(x: Tensor, layers: Sequence[Any]) -> Tensor:
    """What linear layers over one input give, side by side; in decoding by one product where they
    are plain and lie side by side, or have adapters."""
    biases = [layer.bias for layer in layers]
    alike = len({bias is None for bias in biases}) == 1
    if alike and all(type(layer) is TwinLinear for layer in layers):
        weights = [layer.weight for layer in layers]
        return joined_linear(x, weights, biases, together=isinstance(current_step(), Decode))
    made = adapted_together(x, layers)
    return made if made is not None else torch.cat([layer(x) for layer in layers], -1)


def adapted_together(x: Tensor, layers: Sequence[Any]) -> Tensor | None:
    """Linear layers over one input, some with adapters, side by side, by one kernel; None outside
    of decoding or where that kernel does not fit."""
    if torch.is_grad_enabled() or not isinstance(current_step(), Decode):
        return None
    from tandem.ops.adapted_gpu import Adapter, Weight, adapted_linear, takes  # imports Triton

    weights: list[Weight] = []
    found: list[Adapter | None] = []
    for layer in layers:
        if type(layer) not in (TwinLinear, TwinFrozenLinear, TwinAdaptedLinear):
            return None
        acting = layer.acting() if isinstance(layer, LoraLinear) else None
        if acting is not None and layer.training and layer.lora_dropout.p:
            return None
        found.append(acting and Adapter(acting[0].weight, acting[1].weight, layer.scale))
        own = layer.weight
        if isinstance(own, PackedWeight):
            own = own.layout.on_gpu(own.packed, own.scales)
        weights.append(own)
    biases = [layer.bias for layer in layers]
    return adapted_linear(x, weights, biases, found) if takes(x, weights, biases, found) else None


def gated_product(gate_up: Tensor, down: Any, tanh: bool) -> Tensor:
    """down(act(gate) * up) of the two side by side, on a GPU."""
    from tandem.ops.layer_gpu import GELU_TANH, SILU, gated, gated_linear

    kind = GELU_TANH if tanh else SILU
    if type(down) is TwinLinear and down.bias is None:
        return gated_linear(gate_up, down.weight, kind)
    return down(gated(gate_up, kind))
