"""Drawing a token, and the log-prob of what was drawn.

Randomness is a pure function of (seed, step, prompt, sample, token), so a text does not depend on
which batch, slot, order or rank it was drawn in.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

# splitmix64's finaliser (G. Steele et al., OOPSLA 2014), its constants as signed 64-bit numbers.
_GOLDEN = -0x61C8864680B583EB
_MIX_1 = -0x40A7B892E31B1A47
_MIX_2 = -0x6B2FB644ECCEEE15


def sequence_key(seed: int, step: int, prompt: int, sample: int) -> int:
    """A signed 64-bit key for one answer, from the run's seed and what the answer is."""
    text = f"{seed}/{step}/{prompt}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def keyed_uniforms(keys: Tensor, token: int) -> Tensor:
    """(B,) float64 in [0, 1), one per sequence key (B,) int64, for its token number `token`."""
    return _shift_right(_mix(keys + _wrapped(_GOLDEN * (token + 1))), 11).double() * 2.0**-53


def _wrapped(number: int) -> int:
    """The number as 64-bit arithmetic would have it, for torch takes no larger one."""
    return (number + 2**63) % 2**64 - 2**63


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch shifts int64 arithmetically, so the copied sign bits are cut off."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True, slots=True)
class Draw:
    """One token per row. tokens: (B,) int64; log-probs and entropy (B,) float32, nats.

    logprobs: under softmax(logits / temperature). sampled_logprobs: under the distribution that
    the token was drawn from, which top-k and top-p have cut and renormalized.
    """

    tokens: Tensor
    logprobs: Tensor
    sampled_logprobs: Tensor
    entropy: Tensor


def draw_tokens(
    logits: Tensor,
    uniforms: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    forbidden: Tensor | None = None,
) -> Draw:
    """Draw a token per row by the inverse of the cumulative distribution.

    Args:
        logits: (B, V), -inf for tokens that may not be drawn.
        uniforms: (B,) float64 in [0, 1).
        temperature: > 0.
        top_k: keep the k likeliest (ties at the border are kept); 0 is off.
        top_p: of those, keep the smallest set with at least this much of their probability
            (arXiv:1904.09751); 1 is off.
        forbidden: (n,) ids that may not be drawn now, though the policy gives them probability.
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    allowed = logprobs
    if forbidden is not None:
        allowed = logprobs.index_fill(1, forbidden, -torch.inf)
    kept = truncated(allowed, top_k=top_k, top_p=top_p)
    # Summed in float64: the last token with any probability is reached, none without one is.
    cumulative = kept.exp().cumsum(dim=-1, dtype=torch.float64)
    target = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)
    tokens = tokens.clamp(max=logits.shape[-1] - 1)
    drawn = logprobs.gather(1, tokens).squeeze(1)
    finite = logprobs.clamp(min=torch.finfo(torch.float32).min)
    entropy = -torch.linalg.vecdot(logprobs.exp(), finite)
    if kept is logprobs:
        return Draw(tokens.squeeze(1), drawn, drawn, entropy)
    return Draw(tokens.squeeze(1), drawn, drawn - torch.logsumexp(kept, dim=-1), entropy)


def truncated(logprobs: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """`logprobs` (B, V) with -inf for every token that top-k, then top-p, leaves out."""
    if 0 < top_k < logprobs.shape[-1]:
        border = logprobs.topk(top_k, dim=-1).values[:, -1:]
        logprobs = logprobs.masked_fill(logprobs < border, -torch.inf)
    if top_p < 1:
        ordered, order = logprobs.sort(dim=-1, descending=True)
        probabilities = torch.softmax(ordered, dim=-1)
        # A token stays while the ones before it have not reached top_p: the first always does.
        left_out = probabilities.cumsum(dim=-1) - probabilities >= top_p
        logprobs = logprobs.masked_fill(left_out.scatter(1, order, left_out), -torch.inf)
    return logprobs
