"""Where layers keep states: what prompts begin with alike, and earlier turns, from a snapshot."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tandem.config.schema import SamplingConfig
from tandem.engine.forward import response_logprobs
from tandem.errors import GenerationError
from tandem.generation import blocks
from tandem.generation.blocks import BlockPool, state_bytes
from tandem.generation.generator import generate
from tandem.generation.gpu_runner import GraphRunner
from tandem.generation.prefixes import PrefixPool
from tandem.generation.request import Request
from tandem.generation.sampler import Sampler, sequence_key
from tandem.generation.scheduler import Entering, Scheduler, state_slots
from tandem.generation.session import Session
from tandem.generation.snapshots import Snapshots, spare_slots
from tandem.generation.streaming import Conversations, Turns
from tandem.models.twin import kv_shapes
from tandem.ops import native
from tandem.types import Rollout
from tests.generation import test_conversing
from tests.generation.cuda_stand_ins import stand_in
from tests.generation.rollouts import CPU, STOPS, assert_same, bitwise
from tests.generation.test_prefixes import (
    ALIKE,
    GREEDY,
    conversation,
    counted,
    rows_of,
    scaled_in_place,
    tokens_of,
)
from tests.generation.test_states import hybrid
from tests.models.families import tiny_model

DRAWING = Sampler(SamplingConfig(), STOPS.stop_token_ids, CPU, 99)


def requests_of(*prompts: tuple[int, ...], limit: int = 20, first: int = 0) -> list[Request]:
    """One for each, numbered from `first`, with observed log-probs."""
    return [
        Request(i, prompt, sequence_key(1, 1, i, 0), DRAWING, limit, top=0)
        for i, prompt in enumerate(prompts, first)
    ]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=60))
def test_a_snapshots_slot_is_free_when_nobody_needs_it(moves: list[tuple[int, int]]) -> None:
    """Against a slow account of who holds which slot."""
    slots = BlockPool(4)
    snapshots = Snapshots(slots, 3)
    written: list[int] = []  # held by who writes or reads
    known: dict[int, int] = {}
    for move, block in moves:
        if move == 0:
            has_room = snapshots.can_take
            slot = snapshots.take()
            assert has_room == (slot >= 0)
            known = {b: s for b, s in known.items() if s != slot}  # the oldest went for it
            written += [slot] if slot >= 0 else []
        elif move == 1 and written and written[-1] not in known.values():
            known.setdefault(block, written[-1])
            snapshots.know(block, written[-1])
        elif move == 2 and block in known:
            assert snapshots.hold(block) == known[block]
            written.append(known[block])
        elif move == 3 and written:
            snapshots.release(written.pop(block % len(written)))
        elif move == 4:
            known.pop(block, None)
            snapshots.forget(block)
        assert [block for block in range(8) if snapshots.has(block)] == sorted(known)
        used = {*written, *known.values()}
        assert (snapshots.num_used, slots.num_free) == (len(used), 4 - len(used))
        assert slots.num_free  # the one that is a sequence's
    assert snapshots.reach([0, 1, 2, 3]) == max((b + 1 for b in known if b < 4), default=0)


def test_the_oldest_use_goes_first_and_answers_take_half_of_the_slots() -> None:
    snapshots = Snapshots(BlockPool(4), 4)
    for block in (10, 11, 12, 13):
        snapshots.know(block, slot := snapshots.take())
        snapshots.release(slot)
    snapshots.release(snapshots.hold(10))
    trails = [snapshots.begin_trail() for _ in range(3)]
    assert trails[2] == -1
    assert [b for b in (10, 11, 12, 13) if snapshots.has(b)] == [10, 13]
    snapshots.know(20, trails[0])
    snapshots.end_trail(trails[0])
    assert snapshots.has(20)
    assert snapshots.begin_trail() >= 0


def scheduled(spare: int, slots: int = 8, **how: Any) -> tuple[Scheduler, Snapshots]:
    states = BlockPool(state_slots(slots, spare))
    snapshots = Snapshots(states, spare)
    scheduler = Scheduler(PrefixPool(60, snapshots), slots, refill=1, states=states, **how)
    return scheduler, snapshots


def admitted(scheduler: Scheduler, requests: list[Request]) -> Entering:
    for request in requests:
        scheduler.submit([request])
    entering = scheduler.admit(0)
    assert entering is not None
    return entering


def test_prompts_that_come_together_begin_where_an_earlier_one_leaves_a_snapshot() -> None:
    scheduler, snapshots = scheduled(spare=2)
    entering = admitted(scheduler, requests_of(*ALIKE))
    first, second, alone, third, fourth = entering.prompts
    # 48 tokens are the same in two, of the same prompt 48 too, and 32 short of the last one's end.
    assert [stop.end for stop in first.stops] == [32, 48]
    assert [group.computed for group in entering.prompts] == [0, 48, 0, 48, 32]
    assert [group.source for group in (second, third, fourth)] == [
        first.stops[1].slot,
        first.stops[1].slot,
        first.stops[0].slot,
    ]
    assert (first.source, alone.source, alone.stops) == (-1, -1, [])
    assert snapshots.num_known == 2
    # With one slot the fourth finds none: it runs its beginning again, in blocks of its own.
    scheduler, _ = scheduled(spare=1)
    *_, last = admitted(scheduler, requests_of(*ALIKE)).prompts
    assert (last.computed, last.source, last.stops) == (0, -1, [])
    assert not {*last.blocks} & {*scheduler.pool.find(ALIKE[0])}


def test_blocks_that_nobody_holds_are_run_again_where_they_are() -> None:
    scheduler, snapshots = scheduled(spare=2)
    prompt = tokens_of(1, 70)
    [request] = requests_of(prompt)
    [entry] = admitted(scheduler, [request]).entries
    before = request.blocks[:4]
    scheduler.leave(entry.request)
    entering = admitted(scheduler, requests_of((*prompt[:64], 9, 9), first=1))
    [group] = entering.prompts
    assert group.blocks[:4] == before
    assert (group.computed, [stop.end for stop in group.stops]) == (0, [64])
    assert snapshots.has(before[3])
    assert scheduler.pool.num_free == 60 - len(entering.entries[0].request.blocks)


@bitwise
@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2", "bamba", "lfm2"])
@pytest.mark.parametrize(
    ("how", "ran"),
    [
        ({}, [[32, 20], [16, 8], [32, 11, 2]]),
        ({"batch_size": 2, "refill": 1, "chunk_tokens": 16, "kv_blocks": 16}, None),
    ],
)
def test_prompts_that_begin_alike_are_answered_alike(
    family: str, how: dict[str, Any], ran: list[list[int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, with fewer tokens run; the second way evicts, and lets in one after the other."""
    sampling = SamplingConfig(max_new_tokens=30, samples_per_prompt=2)

    def made(**how: Any) -> Rollout:
        return generate(hybrid(family), rows_of(*ALIKE), sampling, STOPS, seed=3, **how)

    apart = made(share_prompts=False)
    seen = counted(monkeypatch)
    assert_same(made(**how), apart)
    assert seen == ran or not ran
    assert sum(map(sum, seen)) <= sum(map(len, ALIKE)) - 48


@bitwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_numbers_are_the_training_forwards_to_the_bit(dtype: torch.dtype) -> None:
    model = hybrid("qwen3_5_text", dtype)
    sampling = SamplingConfig(max_new_tokens=20, samples_per_prompt=2)
    rollout = generate(model, rows_of(*ALIKE), sampling, STOPS, seed=3, batch_size=5)
    mask = rollout.batch.response_mask
    scored, _ = response_logprobs(model, rollout.batch)
    assert torch.equal(rollout.rollout_logprobs[mask], scored[mask])


def test_the_plain_torch_paths_and_recorded_steps_mean_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Recorded in padded batches, with stand-ins for CUDA's graphs, and looked at late."""
    model, sampling = hybrid("bamba"), SamplingConfig(max_new_tokens=20, top_k=1)
    first = generate(model, rows_of(*ALIKE), sampling, STOPS, share_prompts=False)
    with monkeypatch.context() as plain:
        plain.setattr(native, "available", lambda: False)
        found = generate(model, rows_of(*ALIKE), sampling, STOPS)
        assert found.responses == first.responses
    stand_in(monkeypatch)
    monkeypatch.setattr(
        "tandem.generation.session.make_runner", lambda m, memory, _: GraphRunner(m, memory)
    )
    for how in ({"batch_size": 3}, {}):
        assert generate(model, rows_of(*ALIKE), sampling, STOPS, **how).responses == first.responses


@bitwise
@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2"])
def test_a_conversations_next_turn_begins_behind_the_answer(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hybrid(family)
    with Conversations(model, STOPS, max_tokens=256, share_prefixes=False) as apart:
        plain = conversation(apart, 4)
        assert apart.prefix_counts.shared_tokens == 0
    seen = counted(monkeypatch)
    turns = Turns(model, STOPS)
    assert conversation(turns, 4) == plain
    counts = turns.prefix_counts
    new = counts.prompt_tokens - counts.shared_tokens
    assert new == sum(map(sum, seen)) < 40 + 4 * (25 + 16 + 16)  # and what fills no block
    # Said again, as after an edit: from the last whole block of the prompt.
    history = (*tokens_of(4, 40), *plain[0], *tokens_of(10, 25))
    seen.clear()
    assert list(turns.stream(history, GREEDY, seed=6)) == plain[1]
    turns.close()
    seen.clear()
    again = [list(turns.stream(tokens_of(4, 40), GREEDY, seed=5)) for _ in range(2)]
    assert again == [plain[0]] * 2
    assert seen == [[32], [8], [8]]
    turns.close()


@bitwise
@pytest.mark.parametrize("how", [{}, {"batch_size": 2}, {"chunk_tokens": 16, "kv_blocks": 12}])
def test_a_rollouts_conversations_go_on_from_their_answers(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, says = hybrid("qwen3_5_text"), test_conversing.Says
    rows = rows_of(*(tokens_of(i, 10 + 9 * i) for i in range(4)))
    sampling = SamplingConfig(max_new_tokens=30, samples_per_prompt=2)
    stops = test_conversing.STOPS

    def made(**how: Any) -> Rollout:
        talk = says(longest=100, slow=2)
        return generate(model, rows, sampling, stops, seed=7, conversing=talk, **how)

    seen = counted(monkeypatch)
    apart = made(share_prompts=False)
    whole = sum(map(sum, seen))
    seen.clear()
    assert_same(made(**how), apart)
    assert sum(map(sum, seen)) < 0.85 * whole


def observed(session: Session, requests: list[Request]) -> list[tuple[list[int], list[float]]]:
    """Run all to their ends: tokens and log-probs of each."""
    said: dict[Request, list[int]] = {}
    while session.busy:
        for drawn in session.step():
            for request, token in zip(drawn.requests, drawn.token_ids, strict=True):
                said.setdefault(request, []).append(token)
    return [(said[r], [one.logprob for one in r.observed][: len(said[r])]) for r in requests]


def session_with(model: PreTrainedModel, **how: Any) -> tuple[Session, Snapshots]:
    sized = {"slots": 4, "num_blocks": 40, "table_width": 12, "refill": 1, "spare_slots": 4, **how}
    session = Session(model, STOPS.stop_token_ids, **sized)
    snapshots = session._scheduler.pool.snapshots
    assert snapshots is not None
    return session, snapshots


def alone(model: PreTrainedModel, request: Request) -> tuple[list[int], list[float]]:
    """The same answer without anything shared."""
    again = Request(0, request.prompt, request.key, DRAWING, request.limit, top=0)
    session = Session(model, STOPS.stop_token_ids, slots=1, num_blocks=16, table_width=16)
    session.submit([again])
    [found] = observed(session, [again])
    session.close()
    return found


def test_a_prompt_that_others_wait_for_is_run_though_it_is_cancelled() -> None:
    session, snapshots = session_with(hybrid("bamba"), chunk_tokens=16)
    short, first, second = requests_of(tokens_of(1, 5), tokens_of(2, 80), tokens_of(2, 79))
    for request in (short, first, second):
        session.submit([request])
        if request is short:
            session.step()
    session.step()
    writer = session._prompts.groups[0]
    assert writer.prompt == first.prompt
    assert [stop.end for stop in writer.stops] == [64]
    session.cancel(first)
    assert writer in session._prompts.groups
    assert observed(session, [short, second])[1] == alone(hybrid("bamba"), second)
    assert snapshots.num_used == snapshots.num_known == 1
    assert session.num_free_blocks == 40


def test_a_cancelled_prompt_leaves_no_snapshot_that_was_not_written() -> None:
    session, snapshots = session_with(hybrid("bamba"), chunk_tokens=16, keep_answers=True)
    short, first, second = requests_of(tokens_of(1, 5), tokens_of(2, 80), tokens_of(2, 79))
    session.submit([short])
    session.step()
    session.submit([first])
    session.step()
    assert snapshots.num_known == 1  # behind its 80 tokens, of which 16 have been run
    session.cancel(first)
    assert snapshots.num_known == snapshots.num_used == 0
    session.submit([second])
    assert observed(session, [short, second])[1] == alone(hybrid("bamba"), second)
    session.close()


@pytest.mark.parametrize("waits", [True, False])
def test_a_cancelled_prompt_that_ran_again_what_others_hold(waits: bool) -> None:
    """Who begins with its snapshot holds blocks of an earlier prompt, and none of its own."""
    session, snapshots = session_with(hybrid("bamba"), chunk_tokens=16)
    earlier, first, second = requests_of(tokens_of(2, 81), tokens_of(2, 80), tokens_of(2, 79))
    session.submit([earlier])
    while earlier.row < 0:
        session.step()
    session.submit([first])
    if waits:
        session.submit([second])
    session.step()
    writer = session._prompts.groups[0]
    assert (writer.prompt, writer.computed) == (first.prompt, 16)
    assert not {*writer.blocks} & {*earlier.blocks}
    session.cancel(first)
    assert (writer in session._prompts.groups) == waits
    assert snapshots.num_known == waits
    if not waits:
        session.submit([second])
    assert observed(session, [earlier, second])[1] == alone(hybrid("bamba"), second)
    assert (snapshots.num_used, session.num_free_blocks) == (1, 40)


def test_what_other_weights_computed_is_not_found() -> None:
    model = hybrid("lfm2")
    with Conversations(model, STOPS, max_tokens=256) as talk:

        def shared_by(*prompt: int) -> int:
            before = talk.prefix_counts.shared_tokens
            handle = talk.submit(prompt, GREEDY, seed=1)
            while not handle.ended:
                talk.step()
            return talk.prefix_counts.shared_tokens - before

        prompt = tokens_of(4, 40)
        assert [shared_by(*prompt) for _ in range(2)] == [0, 32]
        running = talk.submit(prompt, GREEDY, seed=2)
        talk.step()
        scaled_in_place(model)
        assert shared_by(*tokens_of(5, 40)) == 0
        while not running.ended:
            talk.step()
        assert shared_by(*prompt, *running.token_ids, 5) == 0  # it ran across the change
        assert shared_by(*tokens_of(5, 40)) == 32


# Trees of prompts and answers, cancelled, evicted, forgotten, in parts, looked at late.
@bitwise
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba"])
def test_whatever_comes_each_answer_is_the_one_it_has_alone(family: str, seed: int) -> None:
    model, chance = hybrid(family), random.Random(seed)
    num_blocks = (17, 24, 30, 80)[seed]
    session, snapshots = session_with(
        model,
        slots=(1, 2, 5, 8)[seed],
        spare_slots=(1, 2, 3, 12)[seed],
        num_blocks=num_blocks,
        chunk_tokens=(16, None)[seed % 2],
        prefill_tokens=(64, 4096)[seed % 2],
        keep_answers=seed != 1,
        late=seed > 1,
    )
    known, live, said = [tokens_of(seed, 50)], list[Request](), dict[Request, list[int]]()
    done: list[Request] = []
    for step in range(60):
        if chance.random() < 0.4 and len(live) < 8:
            base = chance.choice(known)
            base = base[: chance.choice([len(base), chance.randrange(1, len(base) + 1)])]
            prompt = (*base, *tokens_of(1000 * seed + step, chance.choice([1, 5, 20])))[:120]
            samples = requests_of(
                *[prompt] * chance.choice([1, 1, 3]),
                limit=chance.choice([1, 17, 40]),
                first=10 * step,
            )
            session.submit(samples)
            live += samples
            known.append(prompt)
        if live and chance.random() < 0.1:
            session.cancel(live.pop(chance.randrange(len(live))))
        if chance.random() < 0.03:
            session.forget_weights()
        for drawn in session.step():
            for request, token in zip(drawn.requests, drawn.token_ids, strict=True):
                said.setdefault(request, []).append(token)
        for request in [request for request in live if request.ended]:
            live.remove(request)
            done.append(request)
            known = [*known[-8:], (*request.prompt, *said[request])]
    for request in live:
        session.cancel(request)
    while session.busy:  # prompts that were cancelled while they ran
        session.step()
    assert session.num_free_blocks == num_blocks
    assert snapshots.num_used == snapshots.num_known
    assert session.prefix_counts.shared_tokens > 0
    for request in done:
        numbers = [one.logprob for one in request.observed][: len(said[request])]
        assert (said[request], numbers) == alone(model, request)
    session.close()


def test_slots_are_counted_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid("bamba")
    each = state_bytes(kv_shapes(model), torch.float32)
    roomy = 10_000 * each
    assert spare_slots(model, 64, free=roomy) == 4
    assert spare_slots(model, 64, parting=2, free=roomy) == 2
    assert spare_slots(model, 64, parting=0, free=roomy) == 0
    assert spare_slots(model, 1, keeps_answers=True, free=roomy) == 3
    assert spare_slots(model, 32, keeps_answers=True, free=roomy) == 68
    assert spare_slots(model, 64, free=4 * 66 * each) == 2  # a quarter is for states
    assert spare_slots(model, 64, free=40 * each) == 1
    assert spare_slots(tiny_model("llama"), 64, keeps_answers=True) == 0
    monkeypatch.setattr(blocks, "free_bytes", lambda device: 8 * each)
    made = Conversations(model, STOPS, slots=1, max_tokens=32, kv_blocks=2)
    assert made._session is not None
    assert made._session._memory.num_slots == 1 + 1 + 1 + 1  # the last, of rows that only pad
    made.close()
    with pytest.raises(GenerationError, match="less 0 MiB"):
        Conversations(model, STOPS, slots=1, max_tokens=10**6)


@pytest.mark.parametrize("tokens", [10, 13])
@pytest.mark.parametrize("cancelled", [slice(0, 2), slice(1, 2)], ids=["both", "who waits"])
def test_samples_that_leave_while_their_prompt_runs_keep_its_slot_till_it_has_run(
    tokens: int, cancelled: slice
) -> None:
    """An answer beside it takes a slot for its trail just then."""
    model = hybrid("bamba")
    drawn = random.Random(tokens)
    first, long = ([drawn.randrange(5, 90) for _ in range(n)] for n in (tokens, 96))
    more = [drawn.randrange(5, 90) for _ in range(5)]
    sampling = SamplingConfig(max_new_tokens=20)

    def alone(prompt: list[int], seed: int) -> list[int]:
        with Conversations(model, STOPS, slots=2, max_tokens=250, share_prefixes=False) as talk:
            handle = talk.submit(prompt, sampling, seed=seed)
            while talk.busy:
                talk.step()
            return list(handle.token_ids)

    with Conversations(model, STOPS, slots=2, max_tokens=250, chunk_tokens=16) as talk:
        beside = talk.submit(first, sampling, seed=1)
        talk.step()
        samples = talk.submit_samples(long, sampling, seed=2, samples=2)
        talk.step()
        for handle in samples[cancelled]:
            talk.cancel(handle)
        while talk.busy:
            talk.step()
        turn = [*first, *beside.token_ids, *more]
        later = [talk.submit(turn, sampling, seed=3), talk.submit([*long, *more], sampling, seed=4)]
        while talk.busy:
            talk.step()
    assert list(beside.token_ids) == alone(first, 1)
    assert list(later[0].token_ids) == alone(turn, 3)
    assert list(later[1].token_ids) == alone([*long, *more], 4)
