"""Several answers streamed at once with one KV memory, for chat and serving."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from transformers import PreTrainedModel

from tandem.config.schema import SamplingConfig
from tandem.errors import GenerationError, TandemError
from tandem.generation import hf_generate
from tandem.generation.blocks import affordable_blocks, blocks_for
from tandem.generation.collected import not_a_number
from tandem.generation.constrained import Constraint
from tandem.generation.limits import (
    answer_room,
    check_token_ids,
    max_positions,
    rows_together,
    vocabulary_size,
)
from tandem.generation.observed import TokenLogprobs
from tandem.generation.request import Request
from tandem.generation.request_maker import constraint_of, sampler_of, watched_text
from tandem.generation.runner import kv_dtype
from tandem.generation.sampler import Sampler, sequence_key
from tandem.generation.scheduler import PrefixCounts, state_slots
from tandem.generation.session import Session
from tandem.generation.snapshots import spare_slots
from tandem.generation.stops import Stops
from tandem.models.twin import decodes, kv_shapes
from tandem.models.versions import weights_of

CHUNK_TOKENS = 512
"""Tokens of prompts that run between two tokens of the answers that stream."""
DRAFT_ROWS = 32  # of a step, guessed tokens among them
_LEAST_KEPT = 1024
"""Tokens that a conversation's memory has room for at the least, where the model has as many."""
_KEPT_SAMPLERS = 64
"""Samplers that are kept for the next answer that is sampled alike."""


@dataclass(slots=True, eq=False)
class Handle:
    """An answer in progress.

    token_ids: so far, without a stop token. stop_token: the one that ended it, if one did.
    ended: nothing more will come. finished: a stop token or stop string ended it, not the limit
    and not `cancel`. error: set if no token could be sampled. logprobs: of the tokens so far, the
    stop token too, where they were asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    stop_token: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ended: bool = False
    finished: bool = False
    error: TandemError | None = None


class Conversations:
    """Answers that start, stream and end independently of each other.

    Each conversation has its own sampling and seed, and its text does not depend on the others.
    What prompts begin with alike is computed once, and so is what a conversation's next prompt
    repeats of its earlier turns, as long as memory has room for it and the weights stay the same.
    The model must not change between `step`s. Use it as a context manager, which frees the memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stops: Stops,
        *,
        slots: int = 8,
        max_tokens: int = 4096,
        kv_blocks: int | None = None,
        spare: int | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
        share_prefixes: bool = True,
        speculate: bool = True,
    ) -> None:
        """Memory is allocated now and kept until `close`.

        Args:
            slots: most answers at a time, if `rows_together` allows them; others wait.
            max_tokens: most tokens of one prompt and its answer together.
            kv_blocks: blocks of KV memory; None: what `slots` of the longest answers need, or what
                there is room for.
            spare: slots for snapshots of states, where layers keep any; None: those of use, or
                what there is room for.
            chunk_tokens: most tokens of prompts that run between two tokens of running answers.
            share_prefixes: compute once what prompts begin with alike.
            speculate: run guessed tokens beside the last ones; no answer changes by it.
        Raises:
            GenerationError: there is no room for one of the longest answers.
        """
        slots = rows_together(model, slots)
        self._model, self._stops = model, stops
        self._max_tokens = max_tokens
        self._handles: dict[Request, Handle] = {}
        self._streams: dict[Request, Iterator[int]] = {}
        self._samplers: OrderedDict[SamplingConfig, Sampler] = OrderedDict()
        self._session: Session | None = None
        if decodes(model):
            longest = blocks_for(max_tokens)
            if spare is None:
                spare = spare_slots(model, slots, keeps_answers=True) if share_prefixes else 0
            self._session = Session(
                model,
                stops.stop_token_ids,
                slots=slots,
                num_blocks=kv_blocks
                or affordable_blocks(
                    kv_shapes(model),
                    needed=slots * longest,
                    largest=longest,
                    dtype=kv_dtype(model),
                    device=model.device,
                    slots=state_slots(slots, spare),
                ),
                table_width=longest,
                refill=1,
                chunk_tokens=chunk_tokens,
                share_prefixes=share_prefixes,
                keep_answers=share_prefixes,
                spare_slots=spare,
                draft_rows=rows_together(model, DRAFT_ROWS) if speculate else 0,
            )
        self._weights = weights_of(model)

    def submit(
        self, prompt_ids: Sequence[int], sampling: SamplingConfig, *, seed: int, tools: str = ""
    ) -> Handle:
        """Queue an answer to a prompt; the next steps generate it.

        Args:
            tools: that the prompt lists, as JSON text; where `sampling` asks for a form, an answer
                may be calls of them instead.
        Raises:
            GenerationError: the prompt leaves no room for an answer, prompt or logit bias name
                tokens that the model does not have, or the answers' form cannot be followed. The
                other answers go on.
        """
        return self.submit_samples(prompt_ids, sampling, seed=seed, tools=tools)[0]

    def submit_samples(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        seed: int,
        samples: int = 1,
        top_logprobs: int = -1,
        constraint: Constraint | None = None,
        tools: str = "",
        predicted: Sequence[int] = (),
    ) -> list[Handle]:
        """As `submit`, for several answers to one prompt, which is run once for all of them.

        Args:
            top_logprobs: keep each token's log-prob and those of this many likeliest tokens in
                its place; -1: keep none.
            constraint: the form that each answer must have; None: that of `sampling` and `tools`.
            tools: as in `submit`.
            predicted: tokens that the answers are likely to have; they change none.
        Raises:
            GenerationError: as `submit`.
        """
        check_token_ids(vocabulary_size(self._model), prompt_ids, "the conversation")
        self._forget_if_changed()
        limit = answer_room(self._model, prompt_ids, sampling, self._max_tokens)
        constraint = constraint or constraint_of(self._stops, sampling, prompt_ids, tools)
        requests = [
            self._request(prompt_ids, sequence_key(seed, 0, 0, sample), sampling, limit)
            for sample in range(samples)
        ]
        for request in requests:
            request.top, request.predicted = top_logprobs, tuple(predicted)
            request.constraint = None if constraint is None else constraint.copy()
        if self._session is not None:
            self._session.submit(requests)
        else:
            for request in requests:
                tokens = hf_generate.stream(self._model, request, self._stops.stop_token_ids)
                self._streams[request] = tokens
        handles = [Handle(logprobs=request.observed) for request in requests]
        self._handles.update(zip(requests, handles, strict=True))
        return handles

    @property
    def num_free_blocks(self) -> int:
        """Blocks of KV memory that no answer holds; 0 where there are none."""
        return 0 if self._session is None else self._session.num_free_blocks

    @property
    def prefix_counts(self) -> PrefixCounts:
        """Tokens of the prompts that were let in, and how many of them were in memory already."""
        return PrefixCounts() if self._session is None else self._session.prefix_counts

    @property
    def busy(self) -> bool:
        """Whether any answer is in progress."""
        return bool(self._handles)

    def step(self) -> list[tuple[Handle, list[int]]]:
        """Generate one more token for every running answer.

        Returns:
            Each answer that got tokens or ended, with its new tokens (none if a stop token ended
            it). An answer with NaN logits has ended with an `error`; the others go on.
        """
        events: dict[Handle, list[int]] = {}
        for request, token in self._drawn():
            handle = self._handles.get(request)
            if handle is not None:
                new = events.setdefault(handle, [])
                if token in self._stops.stop_token_ids:
                    handle.stop_token = token
                else:
                    new.append(token)
                    handle.token_ids.append(token)
        for request, handle in list(self._handles.items()):
            if request.ended:
                handle.ended, handle.finished = True, request.finished
                if request.failed:
                    handle.error = not_a_number("the conversation", request)
                events.setdefault(handle, [])
                self._forget(request)
        return list(events.items())

    def cancel(self, handle: Handle) -> None:
        """End an answer now, and free its memory."""
        for request, other in list(self._handles.items()):
            if other is handle:
                if self._session is not None:
                    self._session.cancel(request)
                handle.ended = True
                self._forget(request)

    def close(self) -> None:
        """Cancel all answers and free the memory."""
        for handle in list(self._handles.values()):
            self.cancel(handle)
        if self._session is not None:
            self._session.close()
            self._session = None

    def __enter__(self) -> Conversations:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(
        self, prompt: Sequence[int], key: int, sampling: SamplingConfig, limit: int
    ) -> Request:
        sampler, text = self._sampler_of(sampling), watched_text(self._stops, sampling)
        return Request(0, tuple(prompt), key, sampler, limit, text)

    def _sampler_of(self, sampling: SamplingConfig) -> Sampler:
        """The sampler that answers sampled alike share, which are then drawn together."""
        rule = replace(
            sampling,
            max_new_tokens=1,
            samples_per_prompt=1,
            stop_strings=(),
            json_schema="",
            regex="",
        )
        if rule not in self._samplers:
            self._samplers[rule] = sampler_of(self._model, rule, self._stops)
        self._samplers.move_to_end(rule)
        while len(self._samplers) > _KEPT_SAMPLERS:
            self._samplers.popitem(last=False)
        return self._samplers[rule]

    def _drawn(self) -> Iterator[tuple[Request, int]]:
        if self._session is not None:
            for drawn in self._session.step():
                yield from zip(drawn.requests, drawn.token_ids, strict=True)
            return
        for request, tokens in list(self._streams.items()):
            for token in islice(tokens, 1):  # none if none could be sampled
                yield request, token

    def _forget_if_changed(self) -> None:
        """What was computed with other weights or other adapters is of no use."""
        weights = weights_of(self._model)
        if weights != self._weights and self._session is not None:
            self._session.forget_weights()
        self._weights = weights

    def _forget(self, request: Request) -> None:
        del self._handles[request]
        self._streams.pop(request, None)


class Turns:
    """One conversation's answers, one at a time, over memory that stays from turn to turn.

    Of each prompt only what earlier prompts and answers did not begin with is computed. When a
    prompt outgrows the memory, twice as much takes its place and the whole prompt is computed.
    """

    def __init__(self, model: PreTrainedModel, stops: Stops) -> None:
        """No memory is allocated yet."""
        self._model, self._stops = model, stops
        self._talk: Conversations | None = None
        self._room = 0  # in tokens

    @property
    def prefix_counts(self) -> PrefixCounts:
        """Tokens of prompts, and how many were in memory, since memory was allocated last."""
        return PrefixCounts() if self._talk is None else self._talk.prefix_counts

    def stream(
        self, prompt_ids: Sequence[int], sampling: SamplingConfig, *, seed: int, tools: str = ""
    ) -> Iterator[int]:
        """As `stream`; the memory is kept for the next prompt.

        Args:
            tools: as in `Conversations.submit`.
        Raises:
            GenerationError, NumericsError: as `stream`.
        """
        positions = max_positions(self._model)
        budget = answer_room(self._model, prompt_ids, sampling, positions)
        talk = self._with_room(len(prompt_ids) + budget, positions)
        limited = replace(sampling, max_new_tokens=budget)
        yield from _streamed(talk, prompt_ids, limited, seed, tools)

    def close(self) -> None:
        """Free the memory."""
        if self._talk is not None:
            self._talk.close()
        self._talk, self._room = None, 0

    def _with_room(self, tokens: int, positions: int | None) -> Conversations:
        if self._talk is None or tokens > self._room:
            self.close()
            wanted = max(2 * tokens, _LEAST_KEPT)
            wanted = wanted if positions is None else min(wanted, positions)
            try:
                talk = Conversations(self._model, self._stops, slots=1, max_tokens=wanted)
            except GenerationError:  # as much as this answer needs, then
                wanted = tokens
                talk = Conversations(self._model, self._stops, slots=1, max_tokens=wanted)
            self._talk, self._room = talk, wanted
        return self._talk


def stream(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    sampling: SamplingConfig,
    stops: Stops,
    *,
    seed: int,
) -> Iterator[int]:
    """Yield one answer's tokens as they are sampled, without its stop token.

    Closing the iterator ends the answer and frees its memory.

    Raises:
        GenerationError: prompt and answer exceed the model's positions, or prompt or logit bias
            name tokens that the model does not have.
        NumericsError: a logit was NaN, or every token forbidden.
    """
    budget = answer_room(model, prompt_ids, sampling, max_positions(model))
    most = len(prompt_ids) + budget
    with Conversations(model, stops, slots=1, max_tokens=most, share_prefixes=False) as talk:
        yield from _streamed(talk, prompt_ids, sampling, seed)


def _streamed(
    talk: Conversations,
    prompt_ids: Sequence[int],
    sampling: SamplingConfig,
    seed: int,
    tools: str = "",
) -> Iterator[int]:
    """One answer's tokens; closing the iterator ends the answer."""
    handle = talk.submit(prompt_ids, sampling, seed=seed, tools=tools)
    try:
        while not handle.ended:
            for _, token_ids in talk.step():
                yield from token_ids
    finally:
        talk.cancel(handle)
    if handle.error is not None:
        raise handle.error
