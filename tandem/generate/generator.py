"""Prompts in, Rollout out; and one answer as a stream, for chat.

Hugging Face's `generate` runs the model and its cache; drawing a token, and the numbers kept of
it, are ours (`sampler`). It wants prompts padded on the left: that stays inside this file, and a
Rollout is right-padded like everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

from tandem.config.schema import SamplingConfig
from tandem.errors import GenerationError
from tandem.generate.sampler import draw_tokens, keyed_uniforms, sequence_key
from tandem.types import PromptRow, Rollout, TokenBatch, TokenRow


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends an answer, what fills a row after it, and how ids become text."""

    stop_token_ids: tuple[int, ...]
    pad_token_id: int
    decode: Callable[[Sequence[int]], str]


def generate(
    model: PreTrainedModel,
    prompts: Sequence[PromptRow],
    sampling: SamplingConfig,
    stops: Stops,
    *,
    seed: int,
    step: int,
    prompt_numbers: Sequence[int] | None = None,
    batch_size: int = 64,
) -> Rollout:
    """Answer each prompt `sampling.samples_per_prompt` times.

    Args:
        prompts: P prompts of any lengths.
        seed, step: of the run; with the prompt's number and the sample's they key every draw.
        prompt_numbers: P numbers that name the prompts whatever batch or rank they are in;
            their positions here if None. Two equal numbers draw with the same randomness.
        batch_size: answers side by side.
    Returns:
        P * samples rows, the samples of a prompt side by side, on the model's device.
    Raises:
        GenerationError: a prompt is empty, or prompt and answer exceed the model's positions.
    """
    numbers = range(len(prompts)) if prompt_numbers is None else prompt_numbers
    requests = [
        _Request(row, sequence_key(seed, step, number, sample))
        for row, number in zip(prompts, numbers, strict=True)
        for sample in range(sampling.samples_per_prompt)
    ]
    _check_lengths(model, prompts, sampling.max_new_tokens)
    answers: list[_Answer | None] = [None] * len(requests)
    by_length = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
    for i in range(0, len(by_length), batch_size):
        chosen = by_length[i : i + batch_size]
        made = _generate_batch(model, [requests[j] for j in chosen], sampling, stops)
        for j, answer in zip(chosen, made, strict=True):
            answers[j] = answer
    return _rollout(requests, [a for a in answers if a is not None], stops, model.device)


def stream(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    sampling: SamplingConfig,
    stops: Stops,
    *,
    seed: int,
) -> Iterator[int]:
    """Yield one answer's tokens as they are drawn, its stop token left out.

    Raises:
        GenerationError: prompt and answer exceed the model's positions.
    """
    limit = _max_positions(model)
    budget = sampling.max_new_tokens
    if limit is not None:
        budget = min(budget, limit - len(prompt_ids))
    if not prompt_ids or budget < 1:
        raise GenerationError(
            f"the conversation must leave room for an answer in {limit} positions; it has "
            f"{len(prompt_ids)} tokens. Clear it or begin anew."
        )
    key = torch.tensor([sequence_key(seed, 0, 0, 0)], device=model.device)
    cache = DynamicCache(config=model.config)
    new_ids = torch.tensor([list(prompt_ids)], device=model.device)
    stop_ids = torch.tensor(stops.stop_token_ids, device=model.device)
    for token in range(budget):
        with torch.no_grad():
            logits = model(new_ids, past_key_values=cache, use_cache=True).logits[:, -1].float()
        draw = draw_tokens(
            logits,
            keyed_uniforms(key, token),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            forbidden=stop_ids if token < sampling.min_new_tokens else None,
        )
        if int(draw.tokens) in stops.stop_token_ids:
            return
        yield int(draw.tokens)
        new_ids = draw.tokens[:, None]


@dataclass(frozen=True, slots=True)
class _Request:
    prompt: PromptRow
    key: int


@dataclass(frozen=True, slots=True)
class _Answer:
    """ids with the stop token; both log-probs per id; whether a stop token ended it."""

    token_ids: list[int]
    logprobs: Tensor
    sampled_logprobs: Tensor
    entropy: Tensor
    finished: bool


class _Sampler(LogitsProcessor):
    """Draws our token and leaves `generate` no other: every other logit becomes -inf."""

    def __init__(
        self, keys: Tensor, prompt_width: int, sampling: SamplingConfig, stop_ids: Tensor
    ) -> None:
        self.keys = keys
        self.prompt_width = prompt_width
        self.sampling = sampling
        self.stop_ids = stop_ids
        self.logprobs: list[Tensor] = []
        self.sampled_logprobs: list[Tensor] = []
        self.entropy: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = input_ids.shape[1] - self.prompt_width
        draw = draw_tokens(
            scores,
            keyed_uniforms(self.keys, token),
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            forbidden=self.stop_ids if token < self.sampling.min_new_tokens else None,
        )
        self.logprobs.append(draw.logprobs)
        self.sampled_logprobs.append(draw.sampled_logprobs)
        self.entropy.append(draw.entropy)
        only = torch.full_like(scores, -torch.inf)
        return only.scatter_(1, draw.tokens[:, None], 0.0)


def _generate_batch(
    model: PreTrainedModel, requests: list[_Request], sampling: SamplingConfig, stops: Stops
) -> list[_Answer]:
    device = model.device
    width = max(len(request.prompt) for request in requests)
    input_ids = torch.full((len(requests), width), stops.pad_token_id, dtype=torch.long)
    attention_mask = torch.zeros((len(requests), width), dtype=torch.long)
    for i, request in enumerate(requests):
        input_ids[i, width - len(request.prompt) :] = torch.tensor(request.prompt.token_ids)
        attention_mask[i, width - len(request.prompt) :] = 1
    stop_ids = torch.tensor(stops.stop_token_ids, device=device)
    keys = torch.tensor([request.key for request in requests], device=device)
    sampler = _Sampler(keys, width, sampling, stop_ids)
    # Greedy search takes the one token that the sampler leaves.
    settings = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=False,
        eos_token_id=list(stops.stop_token_ids),
        pad_token_id=stops.pad_token_id,
        use_cache=True,
    )
    with torch.no_grad(), _without_own_settings(model):
        sequences = model.generate(  # type: ignore[operator]
            input_ids.to(device),
            attention_mask=attention_mask.to(device),
            generation_config=settings,
            logits_processor=LogitsProcessorList([sampler]),
        )
    return _cut_answers(
        sequences[:, width:].cpu(),
        torch.stack(sampler.logprobs, dim=1).cpu(),
        torch.stack(sampler.sampled_logprobs, dim=1).cpu(),
        torch.stack(sampler.entropy, dim=1).cpu(),
        stops,
    )


@contextmanager
def _without_own_settings(model: PreTrainedModel) -> Iterator[None]:
    """A checkpoint's generation settings (penalties, beams, limits) must not change what is
    sampled, and `generate` fills in every setting that its caller leaves open from them."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def _cut_answers(
    new_ids: Tensor, logprobs: Tensor, sampled_logprobs: Tensor, entropy: Tensor, stops: Stops
) -> list[_Answer]:
    """Each row up to and with its first stop token."""
    is_stop = torch.isin(new_ids, torch.tensor(stops.stop_token_ids))
    answers = []
    for i in range(len(new_ids)):
        ends = is_stop[i].nonzero().flatten()
        length = int(ends[0]) + 1 if len(ends) else new_ids.shape[1]
        answers.append(
            _Answer(
                token_ids=new_ids[i, :length].tolist(),
                logprobs=logprobs[i, :length],
                sampled_logprobs=sampled_logprobs[i, :length],
                entropy=entropy[i, :length],
                finished=len(ends) > 0,
            )
        )
    return answers


def _rollout(
    requests: list[_Request], answers: list[_Answer], stops: Stops, device: torch.device
) -> Rollout:
    rows = [
        TokenRow(
            token_ids=(*request.prompt.token_ids, *answer.token_ids),
            response_mask=(False,) * len(request.prompt) + (True,) * len(answer.token_ids),
            source=request.prompt.source,
        )
        for request, answer in zip(requests, answers, strict=True)
    ]
    batch = TokenBatch.from_rows(rows, stops.pad_token_id)
    placed = []
    for per_answer in (
        [a.logprobs for a in answers],
        [a.sampled_logprobs for a in answers],
        [a.entropy for a in answers],
    ):
        per_token = torch.zeros(batch.token_ids.shape, dtype=torch.float32)
        per_token[batch.response_mask] = torch.cat(per_answer).float()
        placed.append(per_token.to(device))
    texts = tuple(
        stops.decode(answer.token_ids[:-1] if answer.finished else answer.token_ids)
        for answer in answers
    )
    return Rollout(
        batch=batch.to(device),
        rollout_logprobs=placed[0],
        sampled_logprobs=placed[1],
        rollout_entropy=placed[2],
        finished=torch.tensor([answer.finished for answer in answers], device=device),
        prompts=tuple(request.prompt for request in requests),
        responses=texts,
    )


def _max_positions(model: PreTrainedModel) -> int | None:
    return getattr(model.config, "max_position_embeddings", None)


def _check_lengths(model: PreTrainedModel, prompts: Sequence[PromptRow], new_tokens: int) -> None:
    if not prompts:
        raise GenerationError("generate must get at least one prompt; got none.")
    limit = _max_positions(model)
    for row in prompts:
        if len(row) == 0:
            raise GenerationError(f"{row.source}: a prompt must have tokens; got none.")
        if limit is not None and len(row) + new_tokens > limit:
            raise GenerationError(
                f"{row.source}: prompt and answer must fit the model's {limit} positions; got "
                f"{len(row)} + {new_tokens} tokens. Lower dataset.max_prompt_tokens or "
                "sampling.max_new_tokens."
            )
