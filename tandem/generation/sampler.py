"""Sampling a token, with its log-prob.

Randomness is a pure function of (seed, step, prompt, sample, token), so a text does not depend on
which batch, slot, order or rank it was drawn in. For the same reason no row affects another
here.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.config.schema import SamplingConfig
from tandem.errors import GenerationError
from tandem.ops import dense, gpu

_FIRST_LOOK = 1024
"""Tokens among which the nucleus is searched before the whole vocabulary."""


def sequence_key(seed: int, step: int, prompt: int, sample: int, turn: int = 0) -> int:
    """A signed 64-bit key for one answer: the run's seed, and the answer's numbers.

    Args:
        turn: answers before it in its conversation.
    """
    later = f"/{turn}" if turn else ""
    text = f"{seed}/{step}/{prompt}/{sample}{later}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


@dataclass(frozen=True, slots=True)
class Draw:
    """One token per row. tokens: (n,) int64; log-probs and entropy (n,) float32, nats.

    logprobs, entropy: of softmax(logits / temperature), all of the model's. sampled_logprobs: under
    the distribution that was sampled from: after biases, penalties and truncation, and without what
    the model has beyond its tokenizer.
    """

    tokens: Tensor
    logprobs: Tensor
    sampled_logprobs: Tensor
    entropy: Tensor

    def at(self, rows: Sequence[int]) -> Draw:
        """The rows of these numbers, in this order."""
        index = torch.tensor(rows, device=self.tokens.device)
        parts = (self.tokens, self.logprobs, self.sampled_logprobs, self.entropy)
        return Draw(*(part[index] for part in parts))


class TokenCounts:
    """Which tokens are in each row's prompt, and how often in its answer; for penalties."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self.prompted = torch.zeros((rows, vocabulary), dtype=torch.bool, device=device)
        self.answered = torch.zeros((rows, vocabulary), dtype=torch.int32, device=device)

    def begin(self, row: int, prompt: Sequence[int]) -> None:
        """Start a row over, after this prompt."""
        self.prompted[row] = False
        self.prompted[row, torch.tensor(prompt, device=self.prompted.device)] = True
        self.answered[row] = 0

    def add(self, rows: slice, tokens: Tensor) -> None:
        """Count one token for each of these rows."""
        column = tokens[:, None]
        self.answered[rows].scatter_add_(1, column, torch.ones_like(column, dtype=torch.int32))

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Move rows."""
        self.prompted[targets] = self.prompted[sources]
        self.answered[targets] = self.answered[sources]

    def of(self, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """(n, V) bool and (n, V) int32 of these rows."""
        return self.prompted[rows], self.answered[rows]


class Sampler:
    """Samples as one SamplingConfig says.

    Attributes:
        rule: samplers of one model with equal rules sample alike.
        is_plain: the logits are divided by the temperature, and nothing else is done to them but
            that none is drawn from `num_ids` on, and stop tokens wait for `min_new_tokens`.
        num_ids: tokens below it may be drawn.
        stop_token_ids: those of them that end an answer.
    """

    def __init__(
        self,
        sampling: SamplingConfig,
        stop_token_ids: Sequence[int],
        device: torch.device,
        vocabulary: int,
        num_ids: int | None = None,
    ) -> None:
        """One sampler serves any number of rows.

        Args:
            stop_token_ids: ids that cannot be drawn are ignored.
            vocabulary: how many tokens the model has.
            num_ids: only tokens below it are drawn, the tokenizer's; None: all.
        Raises:
            ConfigError: a logit bias that is not a token and a number.
            GenerationError: a bias for a token that the model does not have, or an infinite one; or
                no token may be drawn.
        """
        if num_ids is not None and num_ids < 1:
            raise GenerationError(
                f"num_ids must be above 0, or None for all that a model has; got {num_ids}. It is "
                "the tokenizer's highest id plus 1."
            )
        self.num_ids = vocabulary if num_ids is None else min(num_ids, vocabulary)
        self.sampling = sampling
        self.penalizes = (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )
        self._truncates = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
        biases = sampling.logit_biases()
        self._biased = torch.tensor(list(biases), dtype=torch.long, device=device)
        self._biases = torch.tensor(list(biases.values()), device=device)
        _check_biases(biases, vocabulary)
        self.stop_token_ids = tuple(token for token in stop_token_ids if 0 <= token < self.num_ids)
        self._stop_ids = torch.tensor(self.stop_token_ids, dtype=torch.long, device=device)
        self.rule: Hashable = (sampling, self.stop_token_ids, self.num_ids)
        self._edits = bool(biases) or self.penalizes or sampling.min_new_tokens > 0
        self.is_plain = not (biases or self.penalizes or self._truncates)

    def draw(
        self,
        logits: Tensor,
        keys: Tensor,
        token_numbers: Tensor,
        counts: tuple[Tensor, Tensor] | None = None,
        allowed: Tensor | None = None,
    ) -> Draw:
        """Sample a token per row.

        Args:
            logits: (n, V); -inf for tokens that may not be drawn.
            keys: (n,) int64, each answer's `sequence_key`.
            token_numbers: (n,) int64, how many tokens each answer has before this one.
            counts: what `TokenCounts.of` says of the rows; needed where `penalizes`.
            allowed: (n, V) bool, the tokens that a form leaves each row; stop tokens that alone
                are left come early, too. None: all.
        Returns:
            if no token has any probability, or a logit is NaN: a meaningless token, with NaN as
            its `sampled_logprobs`, so that the host need not wait for the device.
        """
        temperature = self.sampling.temperature
        if gpu.fuses(logits):
            return self._draw_fused(logits, keys, token_numbers, counts, allowed)
        if allowed is None and not self._edits and not self._truncates:
            return Draw(*dense.sample(logits, keys, token_numbers, temperature, self.num_ids))
        changed = logits
        if self._edits or allowed is not None:
            changed = self._edited(logits.float(), token_numbers, counts, allowed)
        changed = changed[:, : self.num_ids]
        if self._truncates:
            s = self.sampling
            changed = truncated(
                changed, temperature=temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p
            )
        tokens, sampled, _, _ = dense.sample(changed, keys, token_numbers, temperature)
        logprobs, entropy = dense.token_logprobs(logits, tokens, temperature)
        if changed.shape[1] < logits.shape[1]:  # what is NaN may be beyond
            sampled = sampled.where(~logprobs.isnan(), logprobs)
        return Draw(tokens, logprobs, sampled, entropy)

    def _draw_fused(
        self,
        logits: Tensor,
        keys: Tensor,
        token_numbers: Tensor,
        counts: tuple[Tensor, Tensor] | None,
        allowed: Tensor | None,
    ) -> Draw:
        """`draw` by our GPU kernels."""
        from tandem.ops.sampling_gpu import sample_gpu  # imports Triton

        s = self.sampling
        changed, least = None, s.min_new_tokens
        if allowed is not None:
            changed, least = self._edited(logits.float(), token_numbers, counts, allowed), 0
        elif self.penalizes or len(self._biased) > 0:
            changed = self._reweighed(logits.float(), counts)
        tokens, numbers = sample_gpu(
            logits, changed, keys, token_numbers, self._stop_ids, least,
            s.temperature, s.top_k, s.top_p, s.min_p, self.num_ids,
        )  # fmt: skip
        logprobs, sampled, entropy = numbers.unbind()
        return Draw(tokens, logprobs, sampled, entropy)

    def _reweighed(self, logits: Tensor, counts: tuple[Tensor, Tensor] | None) -> Tensor:
        """Logits after biases and penalties."""
        if len(self._biased):
            logits = logits.index_add(1, self._biased, self._biases.expand(len(logits), -1))
        if self.penalizes:
            assert counts is not None
            logits = penalized(logits, *counts, self.sampling)
        return logits

    def _edited(
        self,
        logits: Tensor,
        token_numbers: Tensor,
        counts: tuple[Tensor, Tensor] | None,
        allowed: Tensor | None,
    ) -> Tensor:
        """Logits after biases, penalties, a form's ban and that on early stop tokens."""
        logits = self._reweighed(logits, counts)
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -torch.inf)
        if self.sampling.min_new_tokens > 0:
            young = token_numbers < self.sampling.min_new_tokens
            if allowed is not None:
                others = allowed.sum(dim=1) - allowed[:, self._stop_ids].sum(dim=1)
                young = young & (others > 0)
            stops = logits[:, self._stop_ids]
            logits = logits.index_copy(
                1, self._stop_ids, stops.masked_fill(young[:, None], -torch.inf)
            )
        return logits


def _check_biases(biases: Mapping[int, float], vocabulary: int) -> None:
    largest = max(biases, default=-1)
    if largest >= vocabulary:
        raise GenerationError(
            f"sampling.logit_bias must name tokens below the model's {vocabulary}; got {largest}. "
            "Use ids of its tokenizer."
        )
    for token, bias in biases.items():
        if bias > torch.finfo(torch.float32).max:
            raise GenerationError(
                f"sampling.logit_bias must be a float32 number or -inf; got {bias} for token "
                f"{token}. A bias of 1000 leaves no other token."
            )


def penalized(
    logits: Tensor, prompted: Tensor, answered: Tensor, sampling: SamplingConfig
) -> Tensor:
    """Logits (n, V) float32 after the penalties for tokens that have occurred.

    repetition_penalty r (arXiv:1909.05858, as in Hugging Face): the logit of a token of prompt or
    answer is divided by r if positive, multiplied by r if negative. frequency_penalty is
    subtracted once per occurrence in the answer, presence_penalty once at most.
    """
    penalty = sampling.repetition_penalty
    if penalty != 1.0:
        seen = prompted | (answered > 0)
        changed = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(seen, changed, logits)
    if sampling.frequency_penalty != 0.0:
        logits = logits - sampling.frequency_penalty * answered
    if sampling.presence_penalty != 0.0:
        logits = logits - sampling.presence_penalty * (answered > 0)
    return logits


def truncated(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """Logits (n, V) with -inf for every token that top-k, then top-p, then min-p excludes.

    Tokens that tie with the last one kept are kept.

    Args:
        temperature: divides the logits before the softmax; > 0.
        top_k: keep the k likeliest; 0 is off.
        top_p: keep the smallest set of those with this share of their probability
            (arXiv:1904.09751).
        min_p: keep tokens at least this likely relative to the likeliest (arXiv:2407.01082).
    """
    if 0 < top_k < logits.shape[-1]:
        border = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < border, -torch.inf)
    if top_p < 1:
        probabilities = torch.softmax(logits.float() / temperature, dim=-1)
        logits = logits.masked_fill(
            probabilities < _nucleus_border(probabilities, top_p), -torch.inf
        )
    if min_p > 0:
        scaled = logits.float() / temperature
        border = scaled.amax(dim=-1, keepdim=True) + math.log(min_p)
        logits = logits.masked_fill(scaled < border, -torch.inf)
    return logits


def _nucleus_border(probabilities: Tensor, top_p: float) -> Tensor:
    """(n, 1): probability of the last token kept."""
    vocabulary = probabilities.shape[-1]
    # On a GPU the host would have to wait to know whether the first search was enough.
    width = vocabulary if probabilities.is_cuda else min(_FIRST_LOOK, vocabulary)
    border, goes_on = _border_among(_likeliest(probabilities, width), top_p)
    if width < vocabulary and bool(goes_on.any()):
        wide = _likeliest(probabilities[goes_on], vocabulary)
        border[goes_on] = _border_among(wide, top_p)[0]
    return border


def _border_among(likeliest: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The last of these (n, W) probabilities, in descending order, that is kept, (n, 1); and
    whether all of them are, (n,) bool."""
    # A token stays while those before it have not reached top_p, so the first always stays.
    stays = likeliest.cumsum(dim=-1, dtype=torch.float64) - likeliest < top_p
    # With NaN none stays; the log-prob of the draw is then NaN.
    last = (stays.sum(dim=-1, keepdim=True) - 1).clamp(min=0)
    return likeliest.gather(1, last), stays[:, -1]


def _likeliest(probabilities: Tensor, width: int) -> Tensor:
    """The `width` largest of each row in descending order; numpy finds and sorts them several
    times faster than torch on a CPU."""
    if probabilities.device.type != "cpu":
        return probabilities.sort(dim=-1).values.flip(-1)[:, :width]
    values, others = probabilities.numpy(), probabilities.shape[-1] - width
    if others > 0:
        values = np.partition(values, others, axis=-1)[:, others:]
    return torch.from_numpy(np.sort(values, axis=-1)).flip(-1)
