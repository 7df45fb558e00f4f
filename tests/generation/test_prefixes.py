"""Blocks found again by their tokens: by prompts that begin alike, by the next turn of a chat."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from tandem.config.schema import SamplingConfig
from tandem.generation.generator import generate
from tandem.generation.prefixes import PrefixPool
from tandem.generation.request import Request
from tandem.generation.runner import TwinRunner
from tandem.generation.sampler import Sampler, sequence_key
from tandem.generation.session import Session
from tandem.generation.streaming import Conversations, Turns
from tandem.ops import attention
from tandem.ops.attention_context import (
    AttentionSpec,
    Before,
    KVMemory,
    LayerShape,
    Packed,
)
from tandem.types import PromptRow, Rollout, Source
from tests.generation.rollouts import CPU, STOPS, assert_same, bitwise, wide
from tests.models.families import tiny_model

GREEDY = SamplingConfig(max_new_tokens=20, top_k=1)


def tokens_of(seed: int, count: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(4, 99, (count,), generator=generator).tolist())


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 70)), max_size=40))
def test_what_is_found_is_what_was_kept(moves: list[tuple[int, int]]) -> None:
    """Against a slow memory of what each block holds, over sequences of a tree of beginnings."""
    pool = PrefixPool(9)
    held: list[list[int]] = []
    contents: dict[int, tuple[int, ...]] = {}  # of a block: all tokens up to its end
    for branch, length in moves:
        tokens = (*range(min(length, 24)), *(100 * branch + i for i in range(max(0, length - 24))))
        found = pool.find(tokens)
        assert len(found) <= (len(tokens) - 1) // 16
        for i, block in enumerate(found):
            assert contents[block] == tokens[: 16 * (i + 1)]
        wanted = -(-len(tokens) // 16)
        while held and pool.num_free - pool.num_idle(found) < wanted - len(found):
            pool.release(held.pop(0))
        pool.share(found)
        blocks = [*found, *pool.take(wanted - len(found))]
        for i, block in enumerate(blocks[len(found) :], len(found)):
            contents[block] = tokens[: 16 * (i + 1)]
        pool.keep(tokens, blocks)
        held.append(blocks)
        holders = Counter(block for one in held for block in one)
        assert pool.num_free == 9 - len(holders)
    for blocks in held:
        pool.release(blocks)
    pool.forget_all()
    assert pool.num_known == 0
    assert sorted(pool.take(9)) == list(range(9))


def test_the_oldest_goes_first_and_its_end_before_its_beginning() -> None:
    pool = PrefixPool(4)
    for seed in (1, 2):
        blocks = pool.take(2)
        pool.keep(tokens_of(seed, 32), blocks)
        pool.release(blocks)
    assert pool.num_free == 4
    taken = pool.take(1)
    assert len(pool.find(tokens_of(1, 40))) == 1
    assert len(pool.find(tokens_of(2, 40))) == 2
    pool.release(taken)


SPECS = [
    AttentionSpec(0.25),
    AttentionSpec(0.25, window=20),
    AttentionSpec(0.25, softcap=3.0),
    AttentionSpec(0.25, sinks=torch.tensor([0.3, -0.2, 1.0, 0.0])),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 8, 20])
def test_attention_on_top_of_memory_is_that_of_whole_sequences(
    dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, starts = (37, 5, 64, 100), (16, 0, 48, 64)
    counts = [length - start for length, start in zip(lengths, starts, strict=True)]
    q, k, v = (
        [torch.randn(length, heads, width).to(dtype) for length in lengths] for heads in (4, 2, 2)
    )
    memory = KVMemory([LayerShape(2, width, width)], 30, dtype=dtype, device=CPU)
    for part in memory.layers[0]:
        part.fill_(torch.nan)  # what lies past a sequence's end must not be seen
    tables = torch.randperm(30)[:28].int().view(4, 7)
    packed = Packed.of_lengths(lengths, CPU)
    before = Before(tables, starts, counts, CPU)
    new = Packed.of_lengths(counts, CPU)
    step = Packed(new.cu_seqlens, 100, memory, before.tables_of_new(), before=before)

    def new_of(rows: Sequence[Tensor]) -> Tensor:
        return torch.cat([row[start:] for row, start in zip(rows, starts, strict=True)])

    for kind in SPECS:
        whole = attention.varlen_attention(torch.cat(q), torch.cat(k), torch.cat(v), packed, kind)
        wanted = new_of(whole.split(lengths))
        for is_native in (True, False):
            if not is_native:
                monkeypatch.setattr(attention, "_native", lambda _: False)
            attention.store_kv(torch.cat(k), torch.cat(v), memory, 0, tables, packed.cu_seqlens)
            for rows, place in ((k, 0), (v, 1)):  # the new tokens' are stored by the call itself
                assert len(rows) == 4, place
            found = attention.continued_attention(new_of(q), memory, 0, step, before, kind)
            loose = 2e-2 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(found, wanted, rtol=loose, atol=loose)
            if is_native and attention._native(dtype):
                assert torch.equal(found, wanted)
        monkeypatch.undo()


def rows_of(*prompts: tuple[int, ...]) -> list[PromptRow]:
    return [PromptRow(ids, (), {}, Source("test", "test", i + 1)) for i, ids in enumerate(prompts)]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The lengths of the parts of each prefill from now on."""
    seen: list[list[int]] = []
    plain = TwinRunner.prefill

    def prefill(self: TwinRunner, ids: Tensor, lengths: Sequence[int], *more: Any) -> Tensor:
        seen.append(list(lengths))
        return plain(self, ids, lengths, *more)

    monkeypatch.setattr(TwinRunner, "prefill", prefill)
    return seen


SHARED = tokens_of(7, 50)
ALIKE = (SHARED + tokens_of(1, 30), SHARED + tokens_of(2, 9), tokens_of(3, 20), SHARED, SHARED[:40])


@bitwise
@pytest.mark.parametrize("family", ["llama", "opt", "gemma2", "gpt2", "qwen3"])
@pytest.mark.parametrize(
    "how", [{}, {"batch_size": 2, "refill": 1, "chunk_tokens": 16, "kv_blocks": 16}]
)
def test_prompts_that_begin_alike_are_answered_alike(
    family: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, with fewer tokens run; the second way evicts what the first keeps."""
    sampling = SamplingConfig(max_new_tokens=30, samples_per_prompt=2)

    def made(**how: Any) -> Rollout:
        return generate(wide(family), rows_of(*ALIKE), sampling, STOPS, seed=3, **how)

    apart = made(share_prompts=False)
    seen = counted(monkeypatch)
    assert_same(made(**how), apart)
    assert sum(map(sum, seen)) < sum(map(len, ALIKE)) - 3 * 32
    assert len(seen) > 1 or not how


def session_with(model: PreTrainedModel, *prompts: tuple[int, ...], **how: Any) -> Any:
    sampler = Sampler(GREEDY, STOPS.stop_token_ids, CPU, 99)
    requests = [
        Request(i, prompt, sequence_key(1, 1, i, 0), sampler, 20)
        for i, prompt in enumerate(prompts)
    ]
    session = Session(model, (), slots=4, num_blocks=40, table_width=12, refill=1, **how)
    return session, requests


def test_live_rows_get_a_token_at_every_step_while_a_long_prompt_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, (short, long, last) = session_with(
        wide(), tokens_of(1, 5), tokens_of(2, 150), tokens_of(3, 6), chunk_tokens=32
    )
    session.submit([short])
    session.step()
    seen = counted(monkeypatch)
    session.submit([long])
    session.submit([last])
    tokens = 0
    while long.row < 0:
        drawn = session.step()
        tokens += sum(part.requests.count(short) for part in drawn)
        assert last.row >= 0  # it came in with the first part of the long one
    assert seen[0] == [16, 6]
    assert max(map(sum, seen)) <= 32
    assert tokens == len(seen) == 6  # one between any two parts
    while session.busy:
        session.step()
    assert [r.length for r in (short, long, last)] == [20] * 3
    assert session.num_free_blocks == 40


def test_a_cancelled_prompt_stops_running_unless_others_need_it() -> None:
    session, (short, long, other) = session_with(
        wide(), tokens_of(1, 5), tokens_of(2, 150), (*tokens_of(2, 150), 9, 9), chunk_tokens=16
    )
    session.submit([short])
    session.step()
    session.submit([long])
    session.step()
    held = 40 - session.num_free_blocks
    session.cancel(long)
    assert 40 - session.num_free_blocks == held - 11
    session.submit([other])  # it finds what was computed of the first, and no more
    session.step()
    assert session.prefix_counts.shared_tokens == 16
    again = Request(9, long.prompt, long.key, long.sampler, 20)
    session.submit([again])
    while other.row < 0:
        session.step()
    session.cancel(again)
    while session.busy:
        session.step()
    assert other.length == 20
    assert session.num_free_blocks == 40


@pytest.mark.parametrize("cancelled", [(0,), (2,), (1, 0), (2, 0, 1)])
@pytest.mark.parametrize("shared", [0, 16])
def test_a_short_prompts_samples_are_cancelled_one_by_one(
    cancelled: tuple[int, ...], shared: int
) -> None:
    """The prompt fills no block of its own that the samples could share while it waits to run."""
    session, (short, long) = session_with(
        wide(), tokens_of(1, 5), tokens_of(2, 150), chunk_tokens=16
    )
    session.submit([short])
    session.step()
    prompt = (*tokens_of(2, shared), *tokens_of(3, 7))
    samples = [Request(i, prompt, i, short.sampler, 20) for i in range(3)]
    session.submit([long])
    session.submit(samples[:2])
    session.submit(samples[2:])
    session.step()
    for i in cancelled:
        session.cancel(samples[i])
    for _ in range(200):
        session.step()
    assert not session.busy
    assert [r.length for r in samples] == [0 if i in cancelled else 20 for i in range(3)]
    assert (long.length, session.num_free_blocks) == (20, 40)


def test_no_prompt_waits_for_long_ones_nor_for_ever() -> None:
    """One long prompt alone takes 5 steps, the second 10; short ones come without an end."""
    first, second = tokens_of(1, 150), tokens_of(2, 150)
    session, (first, second) = session_with(wide(), first, second, chunk_tokens=32)
    session.submit([first])
    session.submit([second])
    came: dict[Request, int] = {}
    ended: dict[Request, int] = {}
    for step in range(1, 60):
        if step % 2 and step < 20:
            quick = Request(step, tokens_of(10 + step, 16), step, first.sampler, 1)
            session.submit([quick])
            came[quick] = step
        session.step()
        for request in [first, second, *came]:
            if request.begun >= 0:
                ended.setdefault(request, step)
    assert max(ended[quick] - came[quick] for quick in came) == 0
    assert ended[first] <= 2 * 5
    assert ended[second] <= 2 * 10
    assert not session.busy
    assert session.num_free_blocks == 40


def test_half_of_the_tokens_are_for_who_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one block go to either in turn."""
    session, (long, *quick) = session_with(
        wide(), tokens_of(1, 96), *(tokens_of(2 + i, 32) for i in range(3)), chunk_tokens=16
    )
    for request in (long, *quick):
        session.submit([request])
    seen = counted(monkeypatch)
    session.step()
    group, computed = session._prompts.groups[0], [16]
    while session.busy:
        session.step()
        computed.append(group.computed)
    assert seen == [[16]] * 12
    assert computed[:12] == [16, 16, 32, 32, 48, 48, 64, 64, 80, 96, 96, 96]


@pytest.mark.parametrize("waits", [0, 1])
def test_a_prompt_is_run_no_further_once_all_its_samples_are_cancelled(waits: int) -> None:
    """Whether all of them have come in, or one has no row yet."""
    session, (live, *_) = session_with(wide(), tokens_of(1, 5), chunk_tokens=16)
    others = [Request(i, tokens_of(9 + i, 5), i, live.sampler, 20) for i in range(waits)]
    samples = [Request(i, tokens_of(2, 150), i, live.sampler, 4) for i in (7, 8, 9)]
    for group in ([live], *([other] for other in others), samples):
        session.submit(group)
    session.step()
    session.step()
    assert session._prompts.groups
    for sample in samples:
        session.cancel(sample)
    assert not session._prompts.groups
    while session.busy:
        session.step()
    assert session.num_free_blocks == 40


@bitwise
@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_in_whatever_order_answers_are_those_alone(seed: int) -> None:
    """Prompts that begin alike, in parts, cancelled, with little memory."""
    model, chance = wide("llama"), random.Random(seed)
    session, _ = session_with(
        model, tokens_of(1, 5), chunk_tokens=(16, 48)[seed % 2], keep_answers=seed > 1
    )
    known, live, done = [tokens_of(seed, 100)], list[Request](), list[Request]()
    for step in range(80):
        if chance.random() < 0.4:
            base = chance.choice(known)
            base = base[: chance.choice([len(base), chance.randrange(1, len(base) + 1)])]
            prompt = (*base, *tokens_of(1000 * seed + step, chance.choice([1, 5, 40])))[:150]
            known = [*known[-6:], prompt]
            made = Sampler(SamplingConfig(), STOPS.stop_token_ids, CPU, 99)
            limit, many = chance.choice([1, 9, 30]), chance.choice([1, 1, 3])
            samples = [
                Request(i, prompt, sequence_key(1, step, i, 0), made, limit, top=0)
                for i in range(many)
            ]
            session.submit(samples)
            live += samples
        if live and chance.random() < 0.15:
            session.cancel(live.pop(chance.randrange(len(live))))
        session.step()
        done += [request for request in live if request.ended]
        live = [request for request in live if not request.ended]
    for request in live:
        session.cancel(request)
    while session.busy:
        session.step()
    assert session.num_free_blocks == 40
    assert len(done) > 8
    for request in done:
        alone, _ = session_with(model, share_prefixes=False)
        again = Request(0, request.prompt, request.key, request.sampler, request.limit, top=0)
        alone.submit([again])
        while alone.busy:
            alone.step()
        assert again.observed == request.observed


def conversation(talk: Any, turns: int, *, seed: int = 5) -> list[list[int]]:
    """Answers of turns that each begin with all before."""
    history: tuple[int, ...] = tokens_of(4, 40)
    answers = []
    for turn in range(turns):
        if isinstance(talk, Turns):
            answers.append(list(talk.stream(history, GREEDY, seed=seed + turn)))
        else:
            handle = talk.submit(history, GREEDY, seed=seed + turn)
            while not handle.ended:
                talk.step()
            answers.append(handle.token_ids)
        history += (*answers[-1], *tokens_of(10 + turn, 25))
    return answers


@bitwise
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_conversations_next_turn_begins_with_what_is_there(family: str) -> None:
    model = wide(family)
    with Conversations(model, STOPS, max_tokens=256, share_prefixes=False) as apart:
        plain = conversation(apart, 4)
        assert apart.prefix_counts.shared_tokens == 0
    with Conversations(model, STOPS, max_tokens=256) as talk:
        assert conversation(talk, 4) == plain
        counts = talk.prefix_counts
        new = counts.prompt_tokens - counts.shared_tokens
        assert new < 40 + 4 * (25 + 16 + 16)  # each turn's own, and what fills no block
    turns = Turns(model, STOPS)
    assert conversation(turns, 4) == plain
    assert turns.prefix_counts == counts
    turns.close()


def fused_step(model: PreTrainedModel) -> None:
    """Fused optimizers leave `_version` as it is."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def scaled_in_place(model: PreTrainedModel) -> None:
    next(model.parameters()).mul_(1.0)


@pytest.mark.parametrize("change", [scaled_in_place, fused_step])
def test_what_other_weights_computed_is_not_found(
    change: Callable[[PreTrainedModel], None],
) -> None:
    model = wide("opt")
    with Conversations(model, STOPS, max_tokens=256) as talk:
        conversation(talk, 1)
        conversation(talk, 1)
        assert talk.prefix_counts.shared_tokens == 32
        change(model)
        conversation(talk, 1)
        assert talk.prefix_counts.shared_tokens == 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_weights_answer_from_their_change_on(dtype: torch.dtype) -> None:
    """Runners may keep weights in a form of their own."""
    model = tiny_model("llama", max_position_embeddings=256).to(dtype).eval()
    turns, prompt = Turns(model, STOPS), tokens_of(4, 11)
    first = list(turns.stream(prompt, GREEDY, seed=1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.3)
    second = list(turns.stream(prompt, GREEDY, seed=1))
    turns.close()
    assert second == list(Turns(model, STOPS).stream(prompt, GREEDY, seed=1)) != first


def test_what_other_weights_began_is_not_kept_when_it_ends() -> None:
    model = wide("opt")
    with Conversations(model, STOPS, max_tokens=256) as talk:
        running = talk.submit(tokens_of(4, 40), GREEDY, seed=1)
        talk.step()
        with torch.no_grad():
            next(model.parameters()).mul_(1.0)
        other = talk.submit(tokens_of(5, 20), GREEDY, seed=1)
        while not (running.ended and other.ended):
            talk.step()
        talk.submit((*tokens_of(4, 40), *running.token_ids, 5), GREEDY, seed=1)
        talk.step()
        assert talk.prefix_counts.shared_tokens == 0
        talk.submit((*tokens_of(5, 20), 5), GREEDY, seed=1)
        talk.step()
        assert talk.prefix_counts.shared_tokens == 16


def test_a_cancelled_sample_of_a_short_prompt_leaves_the_others_be() -> None:
    """The samples wait behind a long prompt of the same step, and share no whole block."""
    session, (live, long, *_) = session_with(
        wide(), tokens_of(1, 5), tokens_of(2, 100), chunk_tokens=16
    )
    sampler = live.sampler
    samples = [Request(i, tokens_of(8, 6), i, sampler, 20) for i in (7, 8)]
    session.submit([live])
    session.step()
    for group in ([long], samples):
        session.submit(group)
    session.step()
    session.cancel(samples[1])
    while session.busy:
        session.step()
    assert [r.length for r in (live, long, samples[0])] == [20] * 3
    assert session.num_free_blocks == 40


def test_an_answer_that_other_weights_began_is_not_found() -> None:
    model = wide("opt")
    with Conversations(model, STOPS, max_tokens=256) as talk:
        begun = talk.submit(tokens_of(4, 40), GREEDY, seed=1)
        talk.step()
        scaled_in_place(model)
        other = talk.submit(tokens_of(5, 40), GREEDY, seed=1)
        while not (begun.ended and other.ended):
            talk.step()
        for seed, shared in ((4, 0), (5, 32)):
            before = talk.prefix_counts.shared_tokens
            talk.submit(tokens_of(seed, 40), GREEDY, seed=1)
            talk.step()
            assert talk.prefix_counts.shared_tokens - before == shared


def test_a_conversation_that_outgrows_its_memory_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.generation.streaming._LEAST_KEPT", 16)
    model = wide()
    turns = Turns(model, STOPS)
    grown = conversation(turns, 4)
    with Conversations(model, STOPS, max_tokens=256, share_prefixes=False) as apart:
        assert conversation(apart, 4) == grown
    turns.close()
