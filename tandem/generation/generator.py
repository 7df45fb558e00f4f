"""Prompts in, Rollout out.

Answers run side by side over block KV memory (`session`), or, where a family's attention cannot be
reached, through Hugging Face's `generate` (`hf_generate`). What is drawn is the same either way up
to rounding: it follows from the seed, the step and each answer's number alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from tandem.config.schema import SamplingConfig
from tandem.errors import GenerationError
from tandem.generation import hf_generate
from tandem.generation.blocks import (
    affordable_blocks,
    blocks_for,
    blocks_wanted,
    most_needed,
)
from tandem.generation.conversing import Conversed, Conversing
from tandem.generation.following import Followed, Following
from tandem.generation.keeping import StateKeeper
from tandem.generation.limits import check_prompts, rows_together
from tandem.generation.native_runner import NativeRunner
from tandem.generation.record import Record
from tandem.generation.request import Request
from tandem.generation.request_maker import RequestMaker, sampler_of
from tandem.generation.runner import kv_dtype
from tandem.generation.sampler import Draw
from tandem.generation.scheduler import state_slots
from tandem.generation.session import Session
from tandem.generation.snapshots import spare_slots
from tandem.generation.stops import Stops
from tandem.models.twin import decodes, kv_shapes, rope_border
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
        kv_blocks: blocks of KV memory, of 16 tokens each; None takes what is needed, or what there
            is room for. With fewer, answers wait.
        share_prompts: compute shared prefixes of prompts and samples once, in memory they share.
        refill: free rows that are worth letting others in; None takes an eighth of batch_size.
        prefill_tokens: most tokens of prompts that are run at once; a longer one runs in parts.
        chunk_tokens: most tokens of prompts run between two tokens of live answers; None: any.
        agreed_blocks: the blocks that several ranks with the same answers use, by this one's.
        by_hugging_face: through Hugging Face's `generate`, whatever the family: to compare.
        following: names prompts to answer after these, while answers end; their numbers count on.
            Only for families that `decodes` knows, and without a `keeper` of tokens' states.
        conversing: says what answers hear while conversations go on; for the same families.
        keeper: keeps what the layers compute of every token, for the update to read.
    Returns:
        P * samples rows, the samples of a prompt side by side, on the model's device; P counts
        those that followed. With `conversing` their prompts are `ConversationRow`s. Of the
        arguments from `batch_size` on only `following` and `conversing` change any of it (on a
        CPU with the C++ operations, to the last bit; through Hugging Face up to rounding).
    Raises:
        GenerationError: a prompt is empty, a prompt or a logit bias names tokens that the model
            does not have, prompt and answer exceed the model's positions, there is no memory
            for the longest of them, or their form cannot be followed.
        NumericsError: nothing could be drawn, because a logit was NaN or every token forbidden.
    """
    check_prompts(model, prompts, sampling.max_new_tokens)
    sampler = sampler_of(model, sampling, stops)
    batch_size = rows_together(model, batch_size)
    numbers = range(len(prompts)) if prompt_numbers is None else prompt_numbers
    made = RequestMaker(model, sampler, sampling, stops, seed, step, numbers)
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
    """Slots for snapshots of states, beside those of the rows, of which `slots` run at most."""
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
