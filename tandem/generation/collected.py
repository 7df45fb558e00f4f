"""Ended requests and what they drew, as a Rollout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.errors import GenerationError, NumericsError, TandemError
from tandem.generation.keeping import StateKeeper
from tandem.generation.request import Request
from tandem.generation.sampler import Draw
from tandem.generation.stops import Stops
from tandem.types import PromptRow, Rollout, TokenBatch, TokenRow


def rollout_of(
    prompts: Sequence[PromptRow],
    chains: Sequence[Sequence[Request]],
    draws: Draw,
    stops: Stops,
    samples: int,
    keeper: StateKeeper | None = None,
) -> Rollout:
    """Rows of which each was drawn by a chain of requests: the next one's prompt begins with the
    prompt of the one before and its answer.

    Args:
        prompts: of each row, that of its last answer.
        draws: one row per request, in the order of the chains; undefined past an answer's end.
        samples: rows side by side that answer one prompt of the rollout.
    Raises:
        NumericsError: something was drawn from NaN.
        GenerationError: an answer's form left nothing to draw.
    """
    device = draws.tokens.device
    requests = [request for chain in chains for request in chain]
    ids = [row[: r.length] for row, r in zip(draws.tokens.tolist(), requests, strict=True)]
    lasts, rows, end = [], [], 0
    for prompt, chain in zip(prompts, chains, strict=True):
        last, end = chain[-1], end + len(chain)
        mask = [False] * len(last.prompt) + [True] * last.length
        for request in chain[:-1]:
            begin = len(request.prompt)
            mask[begin : begin + request.length] = [True] * request.length
        rows.append(TokenRow((*last.prompt, *ids[end - 1]), tuple(mask), prompt.source))
        lasts.append(end - 1)
    batch = TokenBatch.from_rows(rows, stops.pad_token_id).to(device)
    if keeper is not None:
        keeper.end(requests, batch.token_ids.shape[1])
    lengths = torch.tensor([request.length for request in requests], device=device)
    drawn = torch.arange(draws.tokens.shape[1], device=device) < lengths[:, None]
    broken = (draws.logprobs.isnan() | draws.sampled_logprobs.isnan()) & drawn
    if bool(broken.any()):  # all numbers of the rollout at once: nobody waited for them before
        at, token = broken.nonzero()[0].tolist()
        row = next(row for row, end in enumerate(lasts) if at <= end)
        raise not_a_number(str(prompts[row].source), requests[at], token + 1)

    def placed(values: Tensor) -> Tensor:
        per_token = torch.zeros(batch.token_ids.shape, dtype=torch.float32, device=device)
        per_token[batch.response_mask] = values[drawn]
        return per_token

    return Rollout(
        batch=batch,
        rollout_logprobs=placed(draws.logprobs),
        sampled_logprobs=placed(draws.sampled_logprobs),
        rollout_entropy=placed(draws.entropy),
        finished=torch.tensor([requests[i].finished for i in lasts], device=device),
        prompts=tuple(prompts),
        responses=tuple(text_of(requests[i], ids[i], stops) for i in lasts),
        group=torch.arange(len(chains), device=device) // samples,
    )


def text_of(request: Request, token_ids: list[int], stops: Stops) -> str:
    """An ended answer's text, without its stop token or from its stop string on."""
    if request.text is not None and request.text.ended:
        return request.text.text
    if token_ids[-1] in stops.stop_token_ids:
        token_ids = token_ids[:-1]
    return stops.decode(token_ids)


def not_a_number(where: str, request: Request, token_number: int = 0) -> TandemError:
    """The error of an answer that had nothing to be drawn from.

    Args:
        token_number: of which of its tokens, counted from 1; its last one if 0.
    """
    number = token_number or request.length
    if request.constraint is not None and request.constraint.problem:
        return GenerationError(
            f"{where}: an answer's form must leave a token to go on with; it left none at token "
            f"{number}: {request.constraint.problem[:200]}. Ask for a simpler form."
        )
    return NumericsError(
        f"{where}: an answer must have finite logits for some token; got none at its token "
        f"{number}. Look for NaN in the model's weights; see sampling.temperature and "
        "sampling.logit_bias."
    )
