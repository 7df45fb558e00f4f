"""The dense operations of a layer, the same in training, scoring, prefill and decoding.

On a CPU in float32 or bfloat16 they run in C++ (`csrc/dense.cpp`), where a row's result depends on
that row alone to the last bit; elsewhere in plain torch, equal to rounding, or on an NVIDIA GPU in
our kernels (`gpu`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.errors import ConfigError, ShapeError
from tandem.ops import gpu, native, summed
from tandem.ops.summed import SummedEmbedding, SummedLinear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in) by weight (out, in), which may be a transposed view, plus bias -> (..., out)."""
    if _native(x) and weight.dtype == x.dtype:
        if summed.sums(weight):
            return SummedLinear.apply(x, weight, bias)
        return native.op("linear")(x, weight, bias)
    return F.linear(x, weight, bias)


def pack_weight(weight: Tensor) -> Tensor:
    """A weight (out, in) laid out for `linear_packed`, which reads it faster; a copy."""
    if _native(weight):
        return native.op("pack_weight")(weight.detach())
    return weight.detach().clone(memory_format=torch.contiguous_format)


def linear_packed(
    x: Tensor, packed: Tensor, outputs: int, inputs: int, bias: Tensor | None = None
) -> Tensor:
    """`linear` on what `pack_weight` made, the same to the last bit, without gradient."""
    if _native(x):
        return native.op("linear_packed")(x, packed, outputs, inputs, bias)
    return F.linear(x, packed.view(outputs, inputs), bias)


def embedding(token_ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Rows of weight (V, D) by token ids (...) -> (..., D); padding's row gets no gradient.

    Raises:
        IndexError: an id is not in [0, V).
    """
    if _native(weight):
        padding = -1 if padding_idx is None else padding_idx
        if summed.sums(weight):
            return SummedEmbedding.apply(token_ids, weight, padding)
        return native.op("embedding")(token_ids, weight, padding)
    return F.embedding(token_ids, weight, padding_idx)


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """Root-mean-square norm of (..., D) in float32, as Llama's: round(x / rms(x)) * weight.

    unit_offset: Gemma's, x / rms(x) * (1 + weight), rounded once.
    """
    if _native(x) and weight.dtype in _DTYPES:
        return native.op("rms_norm")(x, weight, eps, unit_offset)
    if gpu.fuses(x) and weight.dtype == x.dtype:
        from tandem.ops.layer_gpu import RMS, UNIT_OFFSET, add_norm  # imports Triton

        return add_norm(x, None, weight, None, eps, UNIT_OFFSET if unit_offset else RMS)[1]
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1.0 + weight.float())).type_as(x)
    return weight * normed.to(x.dtype)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary positions (arXiv:2104.09864), Hugging Face's pairing of halves and its rounding.

    The first R columns of q (N, Hq, D) and k (N, Hkv, D) turn by cos and sin (N, R).
    """
    if _native(q) and q.dtype == k.dtype == cos.dtype:
        return native.op("rotary")(q, k, cos, sin)

    def turned(x: Tensor) -> Tensor:
        width = cos.shape[-1]
        first, second = x[..., :width].chunk(2, -1)
        part = x[..., :width] * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
        return torch.cat([part, x[..., width:]], -1)

    return turned(q), turned(k)


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x), x (..., I); on a CPU a number's bits do not depend on its place, which
    torch's do where vectors end."""
    return native.op("silu")(x) if _native(x) else F.silu(x)


def gelu(x: Tensor, *, tanh: bool = False) -> Tensor:
    """x times the normal distribution's share below x, or its tanh approximation; on a CPU
    with the same bits wherever a number stands, as `silu`."""
    if _native(x):
        return native.op("gelu_tanh" if tanh else "gelu")(x)
    return F.gelu(x, approximate="tanh" if tanh else "none")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (arXiv:2002.05202), both (..., I)."""
    if _native(gate) and gate.dtype == up.dtype:
        return native.op("swiglu")(gate, up)
    return F.silu(gate) * up


def geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, both (..., I), with the tanh approximation."""
    if _native(gate) and gate.dtype == up.dtype:
        return native.op("geglu_tanh")(gate, up)
    return F.gelu(gate, approximate="tanh") * up


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = True,
    *,
    keep_logits: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and the entropy it was chosen with, under softmax(logits / T).

    Args:
        logits: (n, V), -inf allowed.
        targets: (n,) int64.
        temperature: T, above 0.
        with_entropy: compute the entropy (zeros otherwise).
        keep_logits: False where nobody reads them any more: the backward pass may then write their
            gradient over them.
    Returns:
        (n,) and (n,), float32 nats, with gradient.
    Raises:
        ShapeError: targets are not one per row.
        ConfigError: the temperature is not above 0.
    """
    _check_rows(logits, temperature, targets=targets)
    if _native(logits):
        return native.op("token_logprobs")(logits, targets, temperature, with_entropy, keep_logits)
    if gpu.fuses(logits):
        from tandem.ops.logprobs_gpu import TokenLogprobs  # imports Triton

        logprobs, entropy = TokenLogprobs.apply(
            logits, targets, temperature, with_entropy, keep_logits
        )
        return logprobs, entropy
    scaled = logits.float()
    if temperature != 1.0:  # dividing by 1 would copy the largest tensor of the step
        scaled = scaled / temperature
    all_logprobs = torch.log_softmax(scaled, dim=-1)
    logprobs = all_logprobs.gather(1, targets[:, None]).squeeze(1)
    if not with_entropy:
        return logprobs, torch.zeros_like(logprobs)
    # A token that cannot occur (log-prob -inf) adds nothing; 0 * -inf must not become NaN, nor
    # its gradient overflow. e^-200 is 0 in float32.
    finite = all_logprobs.clamp(min=-200.0)
    with torch.autocast(logits.device.type, enabled=False):  # a caller's would take it to half
        return logprobs, -torch.linalg.vecdot(all_logprobs.exp(), finite)


def sample(
    logits: Tensor,
    keys: Tensor,
    token_numbers: Tensor,
    temperature: float = 1.0,
    num_ids: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw a token per row of softmax(logits / T) by the inverse of its cumulative distribution.

    The token is the first whose cumulative probability, summed in float64, is above the row's
    `uniforms`; one without probability is never drawn.

    Args:
        logits: (n, V), -inf allowed.
        keys, token_numbers: (n,) int64, what `uniforms` makes each row's number of.
        temperature: T, above 0.
        num_ids: only tokens below it are drawn, of the softmax over their logits; None: all.
    Returns:
        tokens (n,) int64; their log-probs and the entropy among all V, as `token_logprobs` gives
        them, to the bit; in between the log-probs among those that may be drawn. Where a logit is
        NaN, both log-probs are.
    Raises:
        ShapeError: keys or token numbers are not one per row.
        ConfigError: the temperature is not above 0.
    """
    _check_rows(logits, temperature, keys=keys, token_numbers=token_numbers)
    logits, width = logits.detach(), logits.shape[1]
    if _native(logits):
        most = width if num_ids is None else num_ids
        return native.op("sample")(logits, keys, token_numbers, temperature, most)
    some = logits[:, :num_ids]
    cumulative = torch.softmax(some.float() / temperature, -1).cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    goal = uniforms(keys, token_numbers)[:, None] * total
    # Where rounding leaves no sum above the goal: the last token with any probability.
    last = torch.searchsorted(cumulative, total)
    tokens = torch.minimum(torch.searchsorted(cumulative, goal, right=True), last)
    tokens = tokens.squeeze(1).clamp(max=some.shape[1] - 1)
    logprobs, entropy = token_logprobs(logits, tokens, temperature)
    if some.shape[1] == width:
        return tokens, logprobs, logprobs, entropy
    sampled, _ = token_logprobs(some, tokens, temperature, False)
    return tokens, logprobs, sampled.where(~logprobs.isnan(), logprobs), entropy


# splitmix64's finaliser (G. Steele et al., OOPSLA 2014), its constants as signed 64-bit numbers.
_GOLDEN = -0x61C8864680B583EB
_MIX_1 = -0x40A7B892E31B1A47
_MIX_2 = -0x6B2FB644ECCEEE15


def uniforms(keys: Tensor, token_numbers: Tensor) -> Tensor:
    """(n,) float64 in [0, 1), a pure function of each answer's key and its token's number."""
    x = keys + _GOLDEN * (token_numbers + 1)
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 11).double() * 2.0**-53


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch shifts int64 arithmetically, so the copied sign bits are cut off."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _check_rows(logits: Tensor, temperature: float, **per_row: Tensor) -> None:
    """Raise where a tensor is not (n,) int64 for logits (n, V), or T is not above 0."""
    for name, given in per_row.items():
        if logits.dim() != 2 or given.shape != logits.shape[:1] or given.dtype != torch.int64:
            raise ShapeError(
                f"{name} must be (n,) int64 for logits (n, V); got {tuple(given.shape)} "
                f"{given.dtype} for {tuple(logits.shape)}. Give one per row."
            )
    if not temperature > 0:
        raise ConfigError(
            f"temperature must be above 0; got {temperature}. Use a small one for the likeliest "
            "token."
        )


_DTYPES = (torch.float32, torch.bfloat16)


def _native(x: Tensor) -> bool:
    return x.is_cpu and x.dtype in _DTYPES and native.available()
