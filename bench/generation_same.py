"""Proof that the sides of the generation bench do the same work."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import torch

from bench.generation_sides import Answers, TandemSide
from bench.generation_work import EOS, GenerationStart, GenerationWork

AGREEMENT = {"fp32": 1e-4, "bf16": 0.2}
"""How far Tandem's log-prob of a token may be from that of Hugging Face's own forward, in nats."""

CHECKED_ANSWERS = 4


@torch.no_grad()
def agreement(work: GenerationWork, start: GenerationStart) -> float:
    """The largest difference of Tandem's log-probs from a forward of Hugging Face's.

    One answer at a time and without padding, so that the reference has none of its own.

    Raises:
        RuntimeError: it is more than AGREEMENT.
    """
    rollout = TandemSide(work, start).generate(0, min(work.max_new_tokens, 32))
    worst = 0.0
    for i in range(min(CHECKED_ANSWERS, len(rollout))):
        mask = rollout.batch.response_mask[i]
        token_ids = rollout.batch.token_ids[i, : int(mask.nonzero().max()) + 1]
        logits = start.model(token_ids[None], use_cache=False).logits[0, :-1].float()
        logprobs = logits.log_softmax(dim=-1).gather(1, token_ids[1:, None]).squeeze(1)
        chosen = mask[1 : len(token_ids)]
        ours = rollout.rollout_logprobs[i, mask]
        worst = max(worst, float((ours - logprobs[chosen]).abs().max()))
    if not worst <= AGREEMENT[work.dtype]:
        raise RuntimeError(
            f"log-probs of sampled tokens must agree to {AGREEMENT[work.dtype]:g} with Hugging "
            f"Face's; got {worst:.3g} apart."
        )
    return worst


def require_whole(work: GenerationWork, answers: Answers) -> None:
    """As many answers as asked for, each up to and with its EOS or of the whole length.

    Raises:
        RuntimeError: one is neither.
    """
    if len(answers) != work.num_answers:
        raise RuntimeError(
            f"every side must answer {work.num_answers} times; got {len(answers)} answers."
        )
    for answer in answers:
        ended = bool(answer) and answer[-1] == EOS and work.ends
        if EOS in answer[:-1] or len(answer) > work.max_new_tokens:
            raise RuntimeError(f"an answer must stop at its EOS or limit; got {answer}.")
        if not ended and len(answer) != work.max_new_tokens:
            raise RuntimeError(
                f"an answer without EOS must have {work.max_new_tokens} tokens; got {len(answer)}."
            )


def require_same_lengths(lengths: Mapping[str, list[list[int]]]) -> None:
    """Sides sample lengths of their own: their means may differ by chance only.

    Raises:
        RuntimeError: two means are more than 5 standard errors apart.
    """
    flat = {side: [float(n) for one in rounds for n in one] for side, rounds in lengths.items()}
    first = next(iter(flat))
    for side, tokens in flat.items():
        error = math.sqrt(sum(statistics.pvariance(ns) / len(ns) for ns in (tokens, flat[first])))
        apart = abs(statistics.mean(tokens) - statistics.mean(flat[first]))
        if apart > 5 * max(error, 1e-9):
            raise RuntimeError(
                f"answers of {side} and {first} must be equally long but for chance; got means "
                f"{apart:.1f} tokens apart, with a standard error of {error:.1f}."
            )
