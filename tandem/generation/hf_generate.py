"""Generation for families that cannot be packed: by Hugging Face's `generate` and its cache.

It runs the model; sampling, the recorded log-probs and the end of an answer are ours. `generate`
needs prompts padded on the left, which they are nowhere outside this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from tandem.generation.observed import observe, read_observed
from tandem.generation.sampler import Draw, TokenCounts
from tandem.generation.scheduler import Request
from tandem.models.twin import rope_border


def answer(
    model: PreTrainedModel,
    requests: Sequence[Request],
    stop_token_ids: Sequence[int],
) -> Draw:
    """Answer requests with one sampler in a batch, and set their ends.

    Rows are padded with token 0, which every model has and the mask hides. If a model's numbers
    depend on it nevertheless, only prompts of equal length share a batch.

    Returns:
        All draws, (n, T) each, T the longest answer; meaningless past an answer's end.
    """
    groups: dict[int, list[int]] = {}
    for i, request in enumerate(requests):
        groups.setdefault(len(request.prompt), []).append(i)
    if len(groups) > 1 and _padding_enters(model):
        parts = [
            answer(model, [requests[i] for i in group], stop_token_ids) for group in groups.values()
        ]
        return _joined(parts, [i for group in groups.values() for i in group])
    device = model.device
    width = max(len(request.prompt) for request in requests)
    input_ids = torch.zeros((len(requests), width), dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for i, request in enumerate(requests):
        input_ids[i, width - len(request.prompt) :] = torch.tensor(request.prompt)
        attention_mask[i, width - len(request.prompt) :] = 1
    sampler = _Sampler(requests, device)
    border = rope_border(model)
    longest = width + max(request.limit for request in requests)
    # Greedy search takes the only token that the sampler leaves.
    settings = GenerationConfig(
        max_new_tokens=max(request.limit for request in requests),
        do_sample=False,
        eos_token_id=list(stop_token_ids),
        pad_token_id=0,
        # Past the border cached keys have other rotations; not every version recomputes them.
        use_cache=border is None or not width <= border < longest,
    )
    with torch.no_grad(), _without_own_settings(model), _last_logits_only(model):
        model.generate(  # type: ignore[operator]
            input_ids.to(device),
            attention_mask=attention_mask.to(device),
            generation_config=settings,
            logits_processor=LogitsProcessorList([sampler]),
            stopping_criteria=StoppingCriteriaList([_Ends(requests, stop_token_ids)]),
        )
    draws = sampler.draws
    return Draw(
        torch.stack([draw.tokens for draw in draws], dim=1),
        torch.stack([draw.logprobs for draw in draws], dim=1),
        torch.stack([draw.sampled_logprobs for draw in draws], dim=1),
        torch.stack([draw.entropy for draw in draws], dim=1),
    )


_padded: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def _padding_enters(model: PreTrainedModel) -> bool:
    """Whether masked tokens on the left change a model's logits: those of a recurrent one, or of
    one whose layers take keys together by their place in the row."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if any(word in kind for kind in kinds for word in ("compressed", "sparse")):
        return True  # though it shows only past the length of such a block
    if not getattr(model, "_is_stateful", False):
        return False
    if model not in _padded:
        ids = torch.tensor([[1, 2, 3]], device=model.device)
        wide = F.pad(ids, (3, 0))
        settings = GenerationConfig(
            max_new_tokens=1, pad_token_id=0, output_logits=True, return_dict_in_generate=True
        )
        with torch.no_grad(), _without_own_settings(model):
            alone, padded = (
                model.generate(  # type: ignore[operator]
                    tokens, attention_mask=mask, generation_config=settings
                )
                .logits[0]
                .float()
                for tokens, mask in [
                    (ids, torch.ones_like(ids)),
                    (wide, F.pad(torch.ones_like(ids), (3, 0))),
                ]
            )
        rounding = 16 * torch.finfo(model.dtype).eps * float(alone.abs().max().clamp_min(1.0))
        _padded[model] = bool((alone - padded).abs().max() > rounding)
    return _padded[model]


def _joined(parts: Sequence[Draw], order: Sequence[int]) -> Draw:
    """The draws of several groups as one, with the rows in `order`."""
    width = max(part.tokens.shape[1] for part in parts)
    back = torch.tensor(order).argsort()

    def joined(name: str) -> Tensor:
        tensors = [getattr(part, name) for part in parts]
        wide = [F.pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors]
        return torch.cat(wide)[back.to(wide[0].device)]

    return Draw(*map(joined, ("tokens", "logprobs", "sampled_logprobs", "entropy")))


def stream(
    model: PreTrainedModel, request: Request, stop_token_ids: Sequence[int]
) -> Iterator[int]:
    """Yield one answer's tokens, the stop token included; sets the request's end, and what it
    observes."""
    cache = DynamicCache(config=model.config)
    ids, border = list(request.prompt), rope_border(model)
    new = len(ids)
    draw_next = _Sampler([request], model.device)
    while not request.ended:
        if border is not None and len(ids) == border + 1:  # cached keys have other rotations
            cache, new = DynamicCache(config=model.config), len(ids)
        new_ids = torch.tensor([ids[-new:]], device=model.device)
        with torch.no_grad(), _last_logits_only(model):
            logits = model(new_ids, past_key_values=cache, use_cache=True).logits[:, -1]
        draw, new = draw_next.draw(logits), 1
        if bool(draw.sampled_logprobs.isnan()):
            request.length += 1
            request.ended = request.failed = True
            return
        ids.append(int(draw.tokens))
        if request.top >= 0:
            numbers = observe(logits, draw.tokens, request.top)
            request.observed += read_observed(ids[-1:], numbers, [request.top])
        _see(request, ids[-1], stop_token_ids)
        yield ids[-1]


class _Sampler(LogitsProcessor):
    """Samples a token and sets every other logit to -inf, so that `generate` takes it."""

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        self.requests = requests
        self.draws: list[Draw] = []
        self._keys = torch.tensor([request.key for request in requests], device=device)
        self._counts: TokenCounts | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens = self.draw(scores).tokens
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)

    def draw(self, logits: Tensor) -> Draw:
        sampler, rows = self.requests[0].sampler, slice(0, len(self.requests))
        if sampler.penalizes and self._counts is None:
            self._counts = TokenCounts(len(self.requests), logits.shape[1], logits.device)
            for row, request in enumerate(self.requests):
                self._counts.begin(row, request.prompt)
        numbers = torch.full_like(self._keys, len(self.draws))
        counts = self._counts.of(rows) if self._counts else None
        draw = sampler.draw(logits, self._keys, numbers, counts)
        if self._counts is not None:
            self._counts.add(rows, draw.tokens)
        self.draws.append(draw)
        return draw


class _Ends(StoppingCriteria):
    """Tells `generate` which rows have ended."""

    def __init__(self, requests: Sequence[Request], stop_token_ids: Sequence[int]) -> None:
        self._requests, self._stop_token_ids = requests, stop_token_ids

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
        for request, token in zip(self._requests, input_ids[:, -1].tolist(), strict=True):
            if not request.ended:
                _see(request, token, self._stop_token_ids)
        ended = [request.ended for request in self._requests]
        return torch.tensor(ended, device=input_ids.device)


def _see(request: Request, token: int, stop_token_ids: Sequence[int]) -> None:
    """Count a token of an answer, and end the answer if it is the last."""
    request.length += 1
    if token in stop_token_ids:
        request.ended = request.finished = True
    elif request.text is not None:
        request.text.push(token)
        request.ended = request.finished = request.text.ended
    request.ended = request.ended or request.length == request.limit


@contextmanager
def _last_logits_only(model: PreTrainedModel) -> Iterator[None]:
    """Within: only the last token's logits, which some families compute for the whole prompt."""

    def last(head: nn.Module, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *others = states
        return hidden[:, -1:], *others

    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(last) if head is not None else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


@contextmanager
def _without_own_settings(model: PreTrainedModel) -> Iterator[None]:
    """Within: without the checkpoint's generation settings (penalties, beams, limits), which
    `generate` would take for every setting that its caller leaves open."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
