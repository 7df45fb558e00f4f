"""Generation for families that cannot be packed: by Hugging Face's `generate` and its cache.

It runs the model; sampling, the recorded log-probs and the end of an answer are ours. `generate`
needs prompts padded on the left, which they are nowhere outside this file.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
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

from tandem.errors import ModelError
from tandem.generation.constrained import allowed_tokens, take_drawn
from tandem.generation.observed import observe, read_observed
from tandem.generation.request import Request
from tandem.generation.sampler import Draw, TokenCounts
from tandem.models.selfcheck import random_rows
from tandem.models.source import positions_in
from tandem.models.twin import rope_border, running
from tandem.text import first_line


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
    input_ids, attention_mask = _left_padded([request.prompt for request in requests])
    sampler = _Sampler(requests, device)
    border, width = rope_border(model), input_ids.shape[1]
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
    runs = running(model)
    with torch.no_grad(), _without_own_settings(runs), _last_logits_only(runs):
        _forget(runs)
        runs.generate(  # type: ignore[operator]
            input_ids.to(device),
            attention_mask=attention_mask.to(device),
            generation_config=settings,
            logits_processor=LogitsProcessorList([sampler]),
            stopping_criteria=StoppingCriteriaList([_Ends(requests, stop_token_ids)]),
            synced_gpus=False,  # other ranks may have no such batch
        )
    draws = sampler.draws
    return Draw(
        torch.stack([draw.tokens for draw in draws], dim=1),
        torch.stack([draw.logprobs for draw in draws], dim=1),
        torch.stack([draw.sampled_logprobs for draw in draws], dim=1),
        torch.stack([draw.entropy for draw in draws], dim=1),
    )


_LENGTHS = (9, 4)
_NEW_TOKENS = 5
_OTHER = "Train it without answers of its own (SFT, reward model, DPO, KTO), or another family."
_padded: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def _padding_enters(model: PreTrainedModel) -> bool:
    """Whether masked tokens on the left change a model's logits by more than rounding: those of a
    recurrent one, or of one whose layers take keys together by their place in the row."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if any(word in kind for kind in kinds for word in ("compressed", "sparse")):
        return True  # though it shows only past the length of such a block
    if model not in _padded:
        alone, padded = (_greedy(model, [(1, 2, 3)], 2, pad=pad) for pad in (0, 3))
        apart = (alone.logits - padded.logits).abs()
        size, eps = float(alone.logits.abs().max().clamp_min(1.0)), torch.finfo(model.dtype).eps
        # What a recurrent state sees may be little at first.
        first = 16 * eps if getattr(model, "_is_stateful", False) else math.inf
        _padded[model] = not (
            bool(apart[0].max() <= first * size) and bool(apart.max() <= 4 * math.sqrt(eps) * size)
        )
    return _padded[model]


class _Greedy(NamedTuple):
    """tokens (B, T), and their logits (T, B, V)."""

    tokens: Tensor
    logits: Tensor


def _greedy(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], count: int, *, pad: int = 0
) -> _Greedy:
    """`count` tokens after each prompt by `generate`; `pad` more masked tokens on the left."""
    ids, mask = (F.pad(tensor, (pad, 0)).to(model.device) for tensor in _left_padded(prompts))
    settings = GenerationConfig(
        max_new_tokens=count, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    runs = running(model)
    with torch.no_grad(), _without_own_settings(runs):
        _forget(runs)
        made: Any = runs.generate(  # type: ignore[operator]
            ids, attention_mask=mask, generation_config=settings, synced_gpus=False
        )
    return _Greedy(made.sequences[:, ids.shape[1] :], torch.stack(made.logits).float())


def _left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids and their mask (B, T), padded with token 0."""
    width = max(map(len, prompts))
    ids = torch.zeros((len(prompts), width), dtype=torch.long, device="cpu")
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, width - len(prompt) :] = 1
    return ids, mask


def _forget(model: PreTrainedModel) -> None:
    """Drop states that a model keeps on its modules (RecurrentGemma): a prompt of one token would
    continue the last answer."""
    for module in model.modules():
        if getattr(module, "conv1d_state", None) is not None:
            module.__dict__["conv1d_state"] = None


def check_generation(model: PreTrainedModel) -> float:
    """Compare `generate` with the forward that scores and trains, on random prompts.

    Returns:
        the largest difference of a token's log-prob, in nats.
    Raises:
        ModelError: they differ by more than rounding, or one of them fails.
    """
    limit = positions_in(model.config)
    if limit is not None and limit <= _NEW_TOKENS:
        return 0.0
    prompts = [row.tolist() for row in random_rows(model, _LENGTHS, room=_NEW_TOKENS)]
    family, runs, apart, size = model.config.model_type, running(model), 0.0, 1.0
    try:
        together = [[prompt] for prompt in prompts] if _padding_enters(model) else [prompts]
        for group in together:
            made = _greedy(model, group, _NEW_TOKENS)
            for i, prompt in enumerate(group):
                ids = torch.tensor([[*prompt, *made.tokens[i].tolist()]], device=model.device)
                with torch.no_grad():
                    full = runs(input_ids=ids, use_cache=False).logits[0].float()
                full = full[len(prompt) - 1 : -1].log_softmax(-1)
                new = ids[0, len(prompt) :, None]
                gap = (made.logits[:, i].log_softmax(-1) - full).gather(1, new)
                finite = full[full > -math.inf]  # some families exclude tokens of their vocabulary
                apart = max(apart, float(gap.abs().max()))
                size = max(size, float(finite.abs().max()))
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError) as error:
        raise ModelError(
            f"family {family!r} must generate by transformers' generate; got "
            f"{type(error).__name__}: {first_line(error)}. {_OTHER}"
        ) from error
    if not apart <= 4 * math.sqrt(torch.finfo(model.dtype).eps) * size:
        raise ModelError(
            f"family {family!r} must generate by the probabilities that its forward "
            f"computes; got a difference of {apart:.3g} nats from transformers' generate. {_OTHER}"
        )
    return apart


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
    _forget(model)
    cache = _new_cache(model)
    ids, border = list(request.prompt), rope_border(model)
    new = len(ids)
    draw_next = _Sampler([request], model.device)
    while not request.ended:
        if border is not None and len(ids) == border + 1:  # cached keys have other rotations
            cache, new = _new_cache(model), len(ids)
        new_ids = torch.tensor([ids[-new:]], device=model.device)
        with torch.no_grad(), _last_logits_only(model):
            output = model(new_ids, use_cache=True, **cache, **_places(model, ids, new))
        logits = output.logits[:, -1]
        cache = cache or {
            name: found
            for name in _cache_names(model)
            if (found := getattr(output, name, None)) is not None
        }
        draw, new = draw_next.draw(logits), 1
        if bool(draw.sampled_logprobs.isnan()):
            request.length += 1
            request.ended = request.failed = True
            return
        ids.append(int(draw.tokens))
        if request.top >= 0:
            numbers = observe(logits, draw.tokens, request.top, request.sampler.num_ids)
            request.observed += read_observed(ids[-1:], numbers, [request.top])
        _see(request, ids[-1], stop_token_ids)
        yield ids[-1]


def _new_cache(model: PreTrainedModel) -> dict[str, Any]:
    """The argument for an empty cache; none for a family that makes one of its own kind."""
    if not model._supports_default_dynamic_cache():  # type: ignore[operator]
        return {}
    return {_cache_names(model)[0]: DynamicCache(config=model.config)}


def _cache_names(model: PreTrainedModel) -> Sequence[str]:
    """What the family's forward, and then its output, call the cache: `cache` from transformers
    5.24 on, which warns of the names from before. Older ones say that of recurrent layers first."""
    names = ("cache", "cache_params", "past_key_values")
    return [name for name in names if name in _arguments(model)] or ["past_key_values"]


def _places(model: PreTrainedModel, ids: Sequence[int], new: int) -> dict[str, Tensor]:
    """The argument for the positions of the last `new` tokens, if the model has one: not every
    cache knows how many tokens it has."""
    if "position_ids" not in _arguments(model):
        return {}
    return {"position_ids": torch.arange(len(ids) - new, len(ids), device=model.device)[None]}


def _arguments(model: PreTrainedModel) -> Collection[str]:
    return inspect.signature(type(model).forward).parameters


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
        allowed = allowed_tokens(self.requests, logits.shape[1], logits.device)
        draw = sampler.draw(logits, self._keys, numbers, counts, allowed)
        if allowed is not None:
            take_drawn(self.requests, draw.tokens)
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
