"""Prompts in, Rollout out.

Answers run side by side over block KV memory (`session`), or, where a family's attention cannot be
reached, through Hugging Face's `generate` (`compatible`). What is drawn is the same either way up
to rounding: it follows from the seed, the step and each answer's number alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from tandem.config.schema import SamplingConfig
from tandem.errors import GenerationError
from tandem.generation import hf_generate
from tandem.generation.blocks import (
    affordable_blocks,
    affordable_slots,
    blocks_for,
    blocks_wanted,
    most_needed,
    state_bytes,
)
from tandem.generation.collected import rollout_of, text_of
from tandem.generation.conversing import ConversationRow, Conversed, Conversing
from tandem.generation.detokenizer import AnswerText
from tandem.generation.following import Followed, Following
from tandem.generation.keeping import StateKeeper
from tandem.generation.native_runner import NativeRunner
from tandem.generation.record import Record
from tandem.generation.runner import kv_dtype
from tandem.generation.sampler import Draw, Sampler, sequence_key
from tandem.generation.scheduler import Request, state_slots
from tandem.generation.session import Session
from tandem.generation.snapshots import spare_slots
from tandem.generation.stops import Stops
from tandem.models.source import positions_in
from tandem.models.twin import decodes, kv_shapes, rope_border
from tandem.ops.logits import rows_at_once
from tandem.ops.sizes import PREFILL_TOKENS
from tandem.types import PromptRow, Rollout


@torch.inference_mode(mode=False)  # else a rollout could not be trained on
@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[PromptRow],
    sampling: SamplingConfig,
    stops: Stops,
    *,
    seed: int = 0,
    step: int = 0,
    prompt_numbers: Sequence[int] | None = None,
    batch_size: int = 64,
    kv_blocks: int | None = None,
    share_prompts: bool = True,
    refill: int | None = None,
    prefill_tokens: int = PREFILL_TOKENS,
    chunk_tokens: int | None = None,
    agreed_blocks: Callable[[int], int] = int,
    by_hugging_face: bool = False,
    following: Following | None = None,
    conversing: Conversing | None = None,
    keeper: StateKeeper | None = None,
) -> Rollout:
    """Answer each prompt `sampling.samples_per_prompt` times.

    Args:
        prompts: P prompts of any lengths, from `Renderer.prompt`.
        stops: `Stops.of(renderer)`.
        seed, step: of the run; with the prompt's number and the sample's they key every draw.
        prompt_numbers: P numbers that name the prompts whatever batch or rank they are in;
            their positions here if None. Two equal numbers draw with the same randomness.
        batch_size: most answers side by side, if `rows_together` allows them; when one ends,
            another comes in.
        kv_blocks: blocks of KV memory, each of `steps.BLOCK_TOKENS` tokens; None takes what is
            needed, or what there is room for. With fewer, answers wait.
        share_prompts: run what prompts and samples begin with alike once, in memory they share.
        refill: free rows that are worth letting others in; None takes an eighth of batch_size.
        prefill_tokens: most tokens of prompts that are run at once; a longer one runs in parts.
        chunk_tokens: most tokens of prompts run between two tokens of live answers; None: any.
        agreed_blocks: what to make of the blocks that there is room for, where several ranks run
            the same answers and must let them in alike.
        by_hugging_face: through Hugging Face's `generate`, whatever the family: to compare.
        following: names prompts to answer after these, while answers end; their numbers count on.
            Only for families that `decodes` knows, and without a `keeper` of tokens' states.
        conversing: says what answers hear, as long as their conversations go on; likewise.
    Returns:
        P * samples rows, the samples of a prompt side by side, on the model's device; P counts
        those that followed. With `conversing` their prompts are `ConversationRow`s. None of the
        last ten arguments but these two changes any of it (on a CPU with the C++ operations, to
        the last bit; through Hugging Face up to rounding).
    Raises:
        GenerationError: a prompt is empty, a prompt or a logit bias names tokens that the model
            does not have, prompt and answer exceed the model's positions, or there is no memory
            for the longest of them.
        NumericsError: nothing could be drawn, because a logit was NaN or every token forbidden.
    """
    _check_prompts(model, prompts, sampling.max_new_tokens)
    sampler = Sampler(sampling, stops.stop_token_ids, model.device, vocabulary_size(model))
    batch_size = rows_together(model, batch_size)
    numbers = range(len(prompts)) if prompt_numbers is None else prompt_numbers
    made = _RequestMaker(model, sampler, sampling, stops, seed, step, numbers)
    by_prompt = [made.requests(row, place) for place, row in enumerate(prompts)]
    joining = made.joining(prompts, by_prompt, following, conversing)
    if not decodes(model) or by_hugging_face:
        draws = _drawn_compatibly(model, by_prompt, stops, batch_size, joining)
        return made.rollout(prompts, by_prompt, draws)
    groups = by_prompt if share_prompts else [[r] for group in by_prompt for r in group]
    spare = _spare_slots(model, groups, batch_size, joining) if share_prompts else 0
    if kv_blocks is None:
        slots = state_slots(batch_size, spare)
        kv_blocks = agreed_blocks(_kv_blocks(model, groups, batch_size, joining, slots))
    draws = _drawn_side_by_side(
        model, groups, stops, joining, slots=batch_size, num_blocks=kv_blocks, refill=refill,
        prefill_tokens=prefill_tokens, chunk_tokens=chunk_tokens, share_prefixes=share_prompts,
        spare_slots=spare, keeper=None if joining else keeper,
    )  # fmt: skip
    return made.rollout(prompts, by_prompt, draws, joining, keeper)


@dataclass(frozen=True, slots=True)
class _RequestMaker:
    """Prompts to requests, and ended requests to answers."""

    model: PreTrainedModel
    sampler: Sampler
    sampling: SamplingConfig
    stops: Stops
    seed: int
    step: int
    numbers: Sequence[int]

    def requests(self, row: PromptRow, place: int) -> list[Request]:
        """One per sample of the prompt at that place; the numbers of prompts that follow count
        on."""
        samples, limit = self.sampling.samples_per_prompt, self.sampling.max_new_tokens
        beyond = place - len(self.numbers)
        if beyond >= 0:
            _check_prompts(self.model, [row], limit)
        number = self.numbers[place] if beyond < 0 else max(self.numbers) + 1 + beyond
        return [self._request(place * samples + i, row, (number, i)) for i in range(samples)]

    def later(self, row: ConversationRow, place: int, number: int) -> Request:
        """That of a conversation's next answer; `place` counts conversations, `number` requests."""
        _check_prompts(self.model, [row], self.sampling.max_new_tokens)
        prompt, sample = divmod(place, self.sampling.samples_per_prompt)
        names = self.numbers[prompt], sample, row.num_answers - 1
        return self._request(number, row, names)

    def _request(self, number: int, row: PromptRow, names: tuple[int, ...]) -> Request:
        """`names`: what keys its randomness beside seed and step."""
        return Request(
            number,
            row.token_ids,
            sequence_key(self.seed, self.step, *names),
            self.sampler,
            self.sampling.max_new_tokens,
            watched_text(self.stops, self.sampling),
        )

    def joining(
        self,
        prompts: Sequence[PromptRow],
        groups: Sequence[list[Request]],
        following: Following | None,
        conversing: Conversing | None,
    ) -> Followed | Conversed | None:
        """What joins these requests while they run."""
        if following is not None:
            return Followed(following, prompts, groups, self.requests, self.answers)
        if conversing is not None:
            return Conversed(conversing, prompts, groups, self.later, self.text)
        return None

    def rollout(
        self,
        prompts: Sequence[PromptRow],
        groups: Sequence[list[Request]],
        draws: Draw,
        joining: Followed | Conversed | None = None,
        keeper: StateKeeper | None = None,
    ) -> Rollout:
        """The answers to prompts, and to those that joined; draws are by the requests' numbers."""
        samples = self.sampling.samples_per_prompt
        if isinstance(joining, Conversed):
            rows, chains = joining.rows, joining.chains
            draws = draws.at([request.number for chain in chains for request in chain])
            return rollout_of(rows, chains, draws, self.stops, samples)
        if joining is not None:
            prompts, groups = joining.prompts, joining.groups
        owners = [row for row in prompts for _ in range(samples)]
        chains = [[request] for group in groups for request in group]
        return rollout_of(owners, chains, draws, self.stops, samples, keeper)

    def text(self, request: Request, token_ids: list[int]) -> str:
        """An ended answer's text."""
        return text_of(request, token_ids, self.stops)

    def answers(
        self, row: PromptRow, requests: list[Request], token_ids: list[list[int]]
    ) -> Rollout:
        """A prompt's answers of which the tokens alone are known."""
        limit, device = self.sampling.max_new_tokens, self.model.device
        tokens = torch.tensor([ids + [0] * (limit - len(ids)) for ids in token_ids], device=device)
        nothing = torch.zeros(tokens.shape, device=device)
        draws = Draw(tokens, nothing, nothing, nothing)
        return self.rollout([row], [requests], draws)


def watched_text(stops: Stops, sampling: SamplingConfig) -> AnswerText | None:
    """What looks out for stop strings in one answer; None where there are none."""
    if not sampling.stop_strings:
        return None
    return AnswerText(stops.decode, sampling.stop_strings, sampling.min_new_tokens)


def max_positions(model: PreTrainedModel) -> int | None:
    """Most tokens that prompt and answer may have together; None where there is no limit."""
    return positions_in(model.config)


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many tokens the model has."""
    size: int = model.config.get_text_config().vocab_size
    return size


def rows_together(model: PreTrainedModel, wanted: int, free: int | None = None) -> int:
    """Answers that run side by side: those wanted, or as many as logits and states may be held of.

    A sampler's numbers are float32 whatever the model computes in.

    Args:
        free: bytes that states are measured from; what is free if None.
    """
    each = state_bytes(kv_shapes(model), kv_dtype(model)) if decodes(model) else 0
    rows = min(wanted, rows_at_once(vocabulary_size(model), torch.float32, model.device))
    return affordable_slots(rows, each, model.device, free)


def check_token_ids(size: int, token_ids: Sequence[int], where: str) -> None:
    """Refuse what no embedding is there for, of a vocabulary of this size.

    Raises:
        GenerationError: an id that the model does not have; `where` names the prompt.
    """
    for token in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token < size:
            raise GenerationError(
                f"{where}: token ids must be from 0 to {size - 1}, the model's; got {token}. "
                "Tokenize with the model's own tokenizer."
            )


def _kv_blocks(
    model: PreTrainedModel,
    groups: list[list[Request]],
    slots: int,
    joining: Followed | Conversed | None,
    state_slots: int,
) -> int:
    """Blocks of KV memory for the requests, as far as there is room beside `state_slots`, and for
    the longest prompt that may join. Conversations grow: half of that is wanted for each."""
    lengths = [len(group[0].prompt) for group in groups]
    longest = 0 if joining is None else joining.longest
    limit, samples = groups[0][0].limit, len(groups[0])
    wanted = blocks_wanted(lengths, limit, samples, slots)
    if isinstance(joining, Conversed):
        grown = [(n + max(n, longest)) // 2 for n in lengths for _ in range(samples)]
        wanted = max(wanted, blocks_wanted(grown, limit, 1, slots))
    return affordable_blocks(
        kv_shapes(model),
        needed=max(wanted, most_needed([longest], limit, samples)),
        largest=most_needed([*lengths, longest], limit, samples),
        dtype=kv_dtype(model),
        device=model.device,
        slots=state_slots,
    )


def _spare_slots(
    model: PreTrainedModel, groups: list[Any], slots: int, joining: Followed | Conversed | None
) -> int:
    """Slots for snapshots of states beside those of at most so many rows."""
    rows = min(slots, sum(map(len, groups)))
    if joining is None:
        return spare_slots(model, rows, parting=len(groups) - 1)
    return spare_slots(model, rows, keeps_answers=joining.keeps_answers)


def _drawn_side_by_side(
    model: PreTrainedModel,
    groups: list[list[Request]],
    stops: Stops,
    joining: Followed | Conversed | None,
    *,
    slots: int,
    keeper: StateKeeper | None,
    **how: Any,
) -> Draw:
    """All draws, (requests, limit); the requests know their ends. `how`: as `Session` takes it."""
    lengths = [len(group[0].prompt) for group in groups]
    if joining is not None:
        lengths.append(joining.longest)
    limit, samples = groups[0][0].limit, len(groups[0])
    record = Record(len(groups) * samples, limit)
    session = Session(
        model,
        stops.stop_token_ids,
        slots=min(slots, len(groups) * samples),
        table_width=blocks_for(max(lengths) + limit),
        record=record,
        keep_answers=joining is not None and joining.keeps_answers,
        **how,
    )
    if keeper is not None and isinstance(session.runner, NativeRunner):
        tokens = sum(len(group[0].prompt) + samples * (limit - 1) for group in groups)
        if states := keeper.begin(model, tokens, len(groups) * samples, limit):
            session.keep(keeper, states)
    try:
        # The longest first: while the last answers end, what is left is short.
        for group in sorted(groups, key=lambda group: -len(group[0].prompt)):
            session.submit(group)
        if joining is None:
            session.run()
        while joining is not None and session.busy:
            for group in joining.after(session.step()):
                session.submit(group)
            if not session.busy:
                for group in joining.at_end():
                    session.submit(group)
    finally:
        session.close()
    if joining is not None:
        record.num_answers = joining.num_answers
    return record.collected()


def _drawn_compatibly(
    model: PreTrainedModel,
    groups: list[list[Request]],
    stops: Stops,
    batch_size: int,
    joining: Followed | Conversed | None,
) -> Draw:
    """As `_drawn_side_by_side`, in batches of prompts of like length.

    One by one where a row's rope would follow the longest of its batch.

    Raises:
        GenerationError: others are to join, which they cannot.
    """
    if joining is not None:
        raise GenerationError(
            "rollouts that others join must run on Tandem's own decoder; got Hugging Face's "
            "generate. Set hybrid_engine, or choose a model of another family."
        )
    requests = [request for group in groups for request in group]
    if rope_border(model) is not None:
        batch_size = 1
    record = Record(len(requests), requests[0].limit)
    by_length = sorted(requests, key=lambda request: len(request.prompt))
    for i in range(0, len(by_length), batch_size):
        part = by_length[i : i + batch_size]
        draws = hf_generate.answer(model, part, stops.stop_token_ids)
        first = torch.tensor([record.place(request) for request in part])[:, None]
        places = first + torch.arange(draws.tokens.shape[1])
        record.keep(
            places.flatten().to(draws.tokens.device),
            Draw(
                draws.tokens.flatten(),
                draws.logprobs.flatten(),
                draws.sampled_logprobs.flatten(),
                draws.entropy.flatten(),
            ),
        )
    return record.collected()


def _check_prompts(model: PreTrainedModel, prompts: Sequence[PromptRow], new_tokens: int) -> None:
    if not prompts:
        raise GenerationError("generate must get at least one prompt; got none.")
    limit, size = max_positions(model), vocabulary_size(model)
    for row in prompts:
        if len(row) == 0:
            raise GenerationError(f"{row.source}: a prompt must have tokens; got none.")
        check_token_ids(size, row.token_ids, str(row.source))
        if limit is not None and len(row) + new_tokens > limit:
            raise GenerationError(
                f"{row.source}: prompt and answer must fit the model's {limit} positions; got "
                f"{len(row)} + {new_tokens} tokens. Lower dataset.max_prompt_tokens or "
                "sampling.max_new_tokens."
            )
