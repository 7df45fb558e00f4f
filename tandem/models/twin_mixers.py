"""The layers of a twin that carry a state along a sequence: gated delta nets, Mamba 2, short
convolutions. Weights and result are the family's own; sequences stand side by side, and decoding
goes on from the states that memory keeps (`ops.recurrence`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tandem.ops import dense
from tandem.ops.attention_context import StateShape
from tandem.ops.recurrence import causal_conv, recurrence, sigmoid, softplus


@dataclass(frozen=True, slots=True)
class MixerSize:
    """What a layer keeps of a sequence, and of a token for its backward pass: numbers in the type
    that computes, and in float32."""

    state: StateShape
    kept: int
    kept_floats: int


class TwinMixer(nn.Module):
    """A layer whose convolutions keep to their sequence."""

    @classmethod
    def size_of(cls, module: Any) -> MixerSize:
        """Of the family's own layer."""
        raise NotImplementedError


class TwinShortConv(TwinMixer):
    """LFM 2's gated convolution over a few tokens."""

    @classmethod
    def size_of(cls, module: Any) -> MixerSize:
        """As `TwinMixer` says: the projection, and what the convolution gets and gives."""
        channels, _, width = module.conv.weight.shape
        return MixerSize(StateShape((width - 1, channels)), 6 * channels, 0)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(1, N, D) -> (1, N, D)."""
        module: Any = self
        before, after, x = module.in_proj(hidden_states)[0].chunk(3, -1)
        conv = module.conv
        made = causal_conv(module.layer_idx, before * x, conv.weight, conv.bias, silu=False)
        return module.out_proj((after * made)[None])


class TwinDeltaNet(TwinMixer):
    """A gated delta net (arXiv:2412.06464) with Qwen 3.5's projections."""

    @classmethod
    def size_of(cls, module: Any) -> MixerSize:
        """As `TwinMixer` says: what the convolution gets and gives, unit queries and keys, and each
        of gate, output, norm and their product."""
        channels, _, width = module.conv1d.weight.shape
        state = StateShape(
            (width - 1, channels), (module.num_v_heads, module.head_k_dim, module.head_v_dim)
        )
        return MixerSize(state, 2 * channels + 4 * module.value_dim, 2 * module.key_dim)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(1, N, D) -> (1, N, D)."""
        module: Any = self
        mixed, gate, rate, step = self.projected(hidden_states[0])
        conv, keys = module.conv1d, module.head_k_dim
        mixed = causal_conv(module.layer_idx, mixed, conv.weight, conv.bias, silu=True)
        q, k, v = mixed.split([module.key_dim, module.key_dim, module.value_dim], -1)
        tokens = len(mixed)
        q = _unit(q.view(tokens, -1, keys), keys**-0.5)
        k = _unit(k.view(tokens, -1, keys), 1.0)
        decay = -module.A_log.float().exp() * softplus(step, module.dt_bias)
        out = recurrence(
            module.layer_idx, q, k, v.view(tokens, -1, module.head_v_dim), decay, self.beta(rate)
        )
        norm, project = self.last()
        normed = dense.rms_norm(out.to(mixed.dtype), norm.weight, norm.variance_epsilon)
        gated = dense.swiglu(gate.reshape(normed.shape), normed)
        return project(gated.reshape(1, tokens, -1))

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x (N, D) to queries, keys and values side by side (N, C), gates (N, H V), and what the
        delta rule's rate and the decay are made of, (N, H) each."""
        module: Any = self
        return (
            module.in_proj_qkv(x), module.in_proj_z(x), module.in_proj_b(x), module.in_proj_a(x)
        )  # fmt: skip

    def beta(self, rate: Tensor) -> Tensor:
        """(N, H): how much of what a key finds is replaced."""
        return sigmoid(rate)

    def last(self) -> tuple[Any, Any]:
        """The norm of each head, and the projection behind it."""
        module: Any = self
        return module.norm, module.out_proj


class TwinGroupedDeltaNet(TwinDeltaNet):
    """The same with Qwen 3 Next's projections: those of a key head lie together."""

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `TwinDeltaNet` says."""
        module: Any = self
        heads, keys = module.num_k_heads, module.head_k_dim
        shared = module.num_v_heads // heads
        values = shared * module.head_v_dim
        q, k, v, gate = (
            module.in_proj_qkvz(x).view(len(x), heads, -1).split([keys, keys, values, values], -1)
        )
        rate, step = module.in_proj_ba(x).view(len(x), heads, -1).chunk(2, -1)
        return (
            torch.cat([part.flatten(1) for part in (q, k, v)], -1), gate.flatten(1),
            rate.flatten(1), step.flatten(1),
        )  # fmt: skip


class TwinSeparateDeltaNet(TwinDeltaNet):
    """The same with OLMo Hybrid's projections, and perhaps a rate of up to 2."""

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `TwinDeltaNet` says."""
        module: Any = self
        mixed = torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], -1)
        return mixed, module.g_proj(x), module.b_proj(x), module.a_proj(x)

    def beta(self, rate: Tensor) -> Tensor:
        """As `TwinDeltaNet` says."""
        made = sigmoid(rate)
        return made * 2.0 if self.allow_neg_eigval else made

    def last(self) -> tuple[Any, Any]:
        """As `TwinDeltaNet` says."""
        module: Any = self
        return module.o_norm, module.o_proj


class TwinMamba2(TwinMixer):
    """A Mamba 2 mixer (arXiv:2405.21060), its output gated and then normed in groups."""

    @classmethod
    def size_of(cls, module: Any) -> MixerSize:
        """As `TwinMixer` says: the projection, what the convolution gives, and of the inner width
        inputs times steps, output, gated, normed and scaled."""
        channels, _, width = module.conv1d.weight.shape
        inner = module.intermediate_size
        state = StateShape(
            (width - 1, channels), (module.num_heads, module.ssm_state_size, module.head_dim)
        )
        return MixerSize(state, 2 * inner + 2 * channels + module.num_heads, 4 * inner)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(1, N, D) -> (1, N, D)."""
        module: Any = self
        conv, layer, states = module.conv1d, module.layer_idx, module.ssm_state_size
        inner, width = module.intermediate_size, conv.weight.shape[0]
        projected = self.projected(hidden_states[0])
        gate, mixed, step = projected.split([inner, width, projected.shape[1] - inner - width], -1)
        mixed = causal_conv(layer, mixed, conv.weight, conv.bias, silu=True)
        in_groups = module.n_groups * states
        x, b, c = mixed.split([inner, in_groups, in_groups], -1)
        tokens = len(mixed)
        x = x.view(tokens, -1, module.head_dim).float()
        b, c = (part.view(tokens, module.n_groups, states) for part in (b, c))
        step = softplus(step, module.dt_bias).clamp(*module.time_step_limit)
        decay = -module.A_log.float().exp() * step
        out = recurrence(layer, c, b, x * step[..., None], decay) + module.D.float()[:, None] * x
        made = self.normed(out.reshape(tokens, -1), gate)
        return module.out_proj(made.to(hidden_states.dtype)[None])

    def projected(self, x: Tensor) -> Tensor:
        """x (N, D) to gates, what is convolved, and steps, side by side."""
        module: Any = self
        return module.in_proj(x)

    def normed(self, out: Tensor, gate: Tensor) -> Tensor:
        """(N, I) in float32 and its gates (N, I) -> (N, I)."""
        norm: Any = self.norm
        size = getattr(norm, "group_size", out.shape[1])
        made = _in_groups(dense.swiglu(gate.float(), out), size, norm.variance_epsilon)
        return norm.weight * made.to(gate.dtype)


class TwinScaledMamba2(TwinMamba2):
    """Falcon H1's: inputs and projections scaled, the norm before the gate, or none."""

    def projected(self, x: Tensor) -> Tensor:
        """As `TwinMamba2` says."""
        module: Any = self
        made = module.in_proj(x * module.ssm_in_multiplier) * module.mup_vector[0]
        return made.to(x.dtype)  # the factors are float32 whatever the weights are

    def normed(self, out: Tensor, gate: Tensor) -> Tensor:
        """As `TwinMamba2` says."""
        norm: Any = self.norm
        gate = gate.float()
        if not self.mamba_rms_norm:
            return dense.swiglu(gate, out)
        if not norm.norm_before_gate:
            out = dense.swiglu(gate, out)
        size = out.shape[1] // norm.n_groups
        out = norm.weight.float() * _in_groups(out, size, norm.variance_epsilon)
        return dense.swiglu(gate, out) if norm.norm_before_gate else out


def _unit(x: Tensor, length: float) -> Tensor:
    """Vectors (N, G, K) of this length, in float32: x / sqrt(sum of squares + 1e-6)."""
    width = x.shape[-1]
    scale = torch.full((width,), length * width**-0.5, device=x.device)
    return dense.rms_norm(x.float(), scale, 1e-6 / width)


def _in_groups(x: Tensor, size: int, eps: float) -> Tensor:
    """Root-mean-square norms of groups of `size` columns of x (N, I)."""
    groups = x.reshape(-1, size)
    return dense.rms_norm(groups, torch.ones(size, device=x.device), eps).view(x.shape)
