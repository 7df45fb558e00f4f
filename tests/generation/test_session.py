"""Continuous batching: the same answers, to the bit, whatever runs beside them and whenever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.config.schema import SamplingConfig
from tandem.errors import GenerationError
from tandem.generation import request_maker
from tandem.generation.blocks import blocks_for
from tandem.generation.generator import generate
from tandem.generation.make_runner import make_runner
from tandem.generation.native_runner import NativeRunner
from tandem.generation.record import Record
from tandem.generation.request import Request
from tandem.generation.sampler import Sampler, sequence_key
from tandem.generation.session import Session
from tandem.generation.stops import Stops
from tandem.models.lm_head import vocabulary_logits
from tandem.models.packed import predictor_states
from tandem.ops import dense, native
from tandem.ops.attention_context import KVMemory
from tandem.types import Rollout
from tests.generation.rollouts import (
    CPU,
    LENGTHS,
    SCHEDULES,
    STOPS,
    assert_same,
    bitwise,
    prompts,
    rollout_of,
    wide,
)
from tests.models.families import tiny_model


# What is scheduled is no matter of the family, but for the window of gemma2's attention.
@bitwise
@pytest.mark.parametrize(
    ("family", "how"),
    [
        pytest.param(
            family, how,
            marks=()
            if family in ("llama", "gemma2") or how in ("three rows", "parts beside decoding")
            else pytest.mark.slow,
        )
        for family in ("llama", "opt", "gemma2", "gpt2")
        for how in SCHEDULES
    ],
)  # fmt: skip
def test_no_schedule_changes_a_bit(family: str, how: str) -> None:
    model = wide(family)
    assert_same(rollout_of(model, LENGTHS), rollout_of(model, LENGTHS, **SCHEDULES[how]))


@bitwise
@pytest.mark.parametrize(
    "knobs",
    [
        {"top_p": 0.9, "top_k": 30},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.1},
        {"min_new_tokens": 20, "logit_bias": ("2:3",), "min_p": 0.01},
        {"stop_strings": ("7", "33 4")},
    ],
    ids=lambda knobs: next(iter(knobs)),
)
def test_no_schedule_changes_what_other_sampling_draws(knobs: dict[str, Any]) -> None:
    model = wide()
    first = rollout_of(model, LENGTHS, sampling=knobs)
    assert_same(first, rollout_of(model, LENGTHS, sampling=knobs, batch_size=3, refill=1))
    assert first.responses != rollout_of(model, LENGTHS).responses


@bitwise
def test_no_schedule_changes_a_bit_in_bfloat16() -> None:
    model = wide(dtype=torch.bfloat16)
    first = rollout_of(model, LENGTHS)
    for how in ("alone", "three rows", "no sharing"):
        assert_same(first, rollout_of(model, LENGTHS, **SCHEDULES[how]))


@bitwise
def test_an_answer_does_not_depend_on_its_neighbours_or_their_order() -> None:
    model = wide()
    rows = prompts(*LENGTHS)
    sampling = SamplingConfig(max_new_tokens=30)
    together = generate(model, rows, sampling, STOPS, seed=1, step=1)
    order = [4, 1, 6, 0]
    some = [rows[i] for i in order]
    apart = generate(model, some, sampling, STOPS, seed=1, step=1, prompt_numbers=order)
    for row, i in enumerate(order):
        n = int(together.batch.attention_mask[i].sum())
        assert apart.responses[row] == together.responses[i]
        assert torch.equal(apart.rollout_logprobs[row, :n], together.rollout_logprobs[i, :n])


@bitwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "opt", "qwen3", "gemma2"])
def test_the_numbers_are_the_training_forwards_to_the_bit(family: str, dtype: torch.dtype) -> None:
    model = wide(family, dtype)
    rollout = rollout_of(model, LENGTHS, sampling={"temperature": 0.8}, batch_size=5)
    batch = rollout.batch
    states = predictor_states(model, batch)
    logits = vocabulary_logits(model, states)
    logprobs, entropy = dense.token_logprobs(logits, batch.token_ids[batch.response_mask], 0.8)
    assert torch.equal(rollout.rollout_logprobs[batch.response_mask], logprobs)
    assert torch.equal(rollout.rollout_entropy[batch.response_mask], entropy)
    assert logprobs.requires_grad


def test_the_plain_torch_paths_mean_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide()
    first = rollout_of(model, LENGTHS, sampling={"temperature": 1e-3})
    monkeypatch.setattr(native, "available", lambda: False)
    plain = rollout_of(model, LENGTHS, sampling={"temperature": 1e-3}, batch_size=4)
    assert plain.responses == first.responses


@pytest.mark.parametrize("has_native", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_callers_autocast_changes_nothing(
    family: str, has_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights compute in the type that they rest in, in generation and in the training forward."""
    if not has_native:
        monkeypatch.setattr(native, "available", lambda: False)
    model = wide(family)

    def both() -> tuple[Rollout, Tensor]:
        rollout = rollout_of(model, LENGTHS)
        states = predictor_states(model, rollout.batch)
        return rollout, vocabulary_logits(model, states)

    rollout, logits = both()
    with torch.autocast("cpu", torch.bfloat16):
        within, same = both()
        same.sum().backward()
    assert_same(within, rollout)
    assert torch.equal(same, logits)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_first_tokens_follow_the_models_distribution() -> None:
    model = wide()
    rows, n = prompts(9), 4000
    sampling = SamplingConfig(max_new_tokens=1, samples_per_prompt=n, temperature=1.5)
    rollout = generate(model, rows, sampling, STOPS, seed=8, step=1)
    with torch.no_grad():
        logits = model(torch.tensor([rows[0].token_ids])).logits[0, -1]
    expected = torch.softmax(logits / 1.5, -1) * n
    drawn = rollout.batch.token_ids[rollout.batch.response_mask]
    found = drawn.bincount(minlength=len(expected)).float()
    often = expected >= 5
    terms = (found[often] - expected[often]) ** 2 / expected[often]
    rest = (found[~often].sum() - expected[~often].sum()) ** 2 / expected[~often].sum()
    degrees = int(often.sum())
    assert degrees > 20
    assert float(terms.sum() + rest) < degrees + 4 * (2 * degrees) ** 0.5


def session_of(
    model: PreTrainedModel,
    lengths: Sequence[int],
    limits: Sequence[int],
    min_new_tokens: int = 0,
    **how: Any,
) -> tuple[Session, list[Request], Record]:
    sampling = SamplingConfig(min_new_tokens=min_new_tokens)
    sampler = Sampler(sampling, STOPS.stop_token_ids, CPU, 99)
    requests = [
        Request(i, row.token_ids, sequence_key(1, 1, i, 0), sampler, limit)
        for i, (row, limit) in enumerate(zip(prompts(*lengths), limits, strict=True))
    ]
    record = Record(len(requests), max(limits))
    options = {"slots": 4, "num_blocks": 16, "table_width": 8, "refill": 1, **how}
    session = Session(model, STOPS.stop_token_ids, record=record, **options)
    for request in requests:
        session.submit([request])
    return session, requests, record


LIMITS = (30, 1, 12, 2, 25, 40, 1, 3)


@bitwise
def test_looking_one_step_late_changes_nothing() -> None:
    model = wide()
    lengths = (5, 33, 16, 1, 48, 20, 7, 9)
    seen = []
    for late in (False, True):
        session, requests, record = session_of(model, lengths, LIMITS, late=late)
        tokens: dict[int, list[int]] = {}
        while session.busy:
            for drawn in session.step():
                for request, token in zip(drawn.requests, drawn.token_ids, strict=True):
                    tokens.setdefault(request.number, []).append(token)
        assert session.num_free_blocks == 16
        collected = record.collected()
        for request in requests:
            assert request.length == len(tokens[request.number])
            kept = collected.tokens[request.number, : request.length].tolist()
            assert kept == tokens[request.number]
        seen.append([(tokens[r.number], r.finished, r.length) for r in requests])
    assert seen[0] == seen[1]
    assert {finished for _, finished, _ in seen[0]} == {True, False}
    assert all(length <= limit for (_, _, length), limit in zip(seen[0], LIMITS, strict=True))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"refill": 3, "num_blocks": 40, "slots": 5},  # three rows leave before others come in
        {"num_blocks": 6},  # memory for few of them at a time
        {"chunk_tokens": 16},
        {"late": True},
        {"min_new_tokens": 5, "refill": 2},
        {"prefill_tokens": 40, "slots": 8, "num_blocks": 60},  # prompts of a few rows at a time
    ],
)
def test_running_to_the_end_draws_what_single_steps_draw(
    family: str, dtype: torch.dtype, how: dict[str, Any]
) -> None:
    model, lengths = wide(family, dtype), (5, 33, 16, 1, 48, 20, 7, 9)
    seen = []
    for at_once in (False, True):
        session, requests, record = session_of(model, lengths, LIMITS, **how)
        while session.busy:
            if at_once:
                session.run()
            else:
                session.step()
        assert session.num_free_blocks == how.get("num_blocks", 16)
        assert all(request.row == -1 and not request.blocks for request in requests)
        draws = record.collected()
        numbers = (draws.tokens, draws.logprobs, draws.sampled_logprobs, draws.entropy)
        seen.append(
            [
                (
                    *(r.finished, r.length, r.begun),  # others come in at the same steps
                    *(of[r.number, : r.length].tolist() for of in numbers),
                )
                for r in requests
            ]
        )
    assert seen[0] == seen[1]
    ends = [(one[0], one[1] == limit) for one, limit in zip(seen[0], LIMITS, strict=True)]
    least = how.get("min_new_tokens", 0)
    assert all(one[1] >= min(least, limit) for one, limit in zip(seen[0], LIMITS, strict=True))
    assert least or {(True, False), (False, True)} <= set(ends)


@bitwise
def test_most_steps_of_a_rollout_are_taken_several_in_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    singles = []
    decode = NativeRunner.decode

    def counted(self: NativeRunner, *args: Tensor) -> Tensor:
        singles.append(1)
        return decode(self, *args)

    monkeypatch.setattr(NativeRunner, "decode", counted)
    model, answers = wide(), len(LENGTHS) * 2
    sampling = {"max_new_tokens": 60}
    rollout = rollout_of(model, LENGTHS, sampling=sampling)
    steps = int(rollout.batch.response_mask.sum(1).max()) - 1
    assert steps > 40
    assert len(singles) < steps / 4
    singles.clear()  # one end at a time lets another in, and then they are as many as the answers
    few = rollout_of(model, LENGTHS, sampling=sampling, batch_size=3, refill=1)
    assert len(singles) <= answers + steps
    assert_same(few, rollout)
    singles.clear()
    rollout_of(model, LENGTHS, sampling={**sampling, "min_new_tokens": 60})
    assert len(singles) < 60 / 4
    for knobs in ({"top_k": 5}, {"presence_penalty": 0.1}, {"stop_strings": ["zzz"]}):
        singles.clear()
        rollout_of(model, LENGTHS, sampling={**sampling, **knobs})
        assert len(singles) > steps / 4  # these are drawn, or looked at, a token at a time


@pytest.mark.parametrize("late", [False, True])
def test_cancelled_answers_free_their_memory_at_once_and_leave_the_others_be(late: bool) -> None:
    model = wide()
    lengths, limits = (20, 20, 20, 20, 20), (40,) * 5
    session, requests, record = session_of(model, lengths, limits, late=late, slots=3)
    for _ in range(4):
        session.step()
    held = 16 - session.num_free_blocks
    running = [r for r in requests if r.row >= 0]
    waiting = [r for r in requests if not r.blocks]
    session.cancel(running[0])
    assert 16 - session.num_free_blocks == held - blocks_for(60)
    session.cancel(waiting[-1])
    session.cancel(waiting[-1])
    while session.busy:
        session.step()
    assert session.num_free_blocks == 16
    whole, others, whole_record = session_of(model, lengths, limits)
    while whole.busy:
        whole.step()
    for one, other in zip(requests, others, strict=True):
        if one not in (running[0], waiting[-1]):
            assert one.length == other.length
            ours, theirs = record.collected(), whole_record.collected()
            n = one.length  # what was drawn past the end, one step late, is nothing
            torch.testing.assert_close(ours.tokens[one.number, :n], theirs.tokens[one.number, :n])


def test_rows_with_different_samplers_run_side_by_side() -> None:
    model = wide()
    configs = [
        SamplingConfig(),
        SamplingConfig(top_k=1),
        SamplingConfig(repetition_penalty=2.0, temperature=0.5),
    ]
    samplers = [Sampler(config, STOPS.stop_token_ids, CPU, 99) for config in configs]
    rows = prompts(9, 12, 4, 8, 3, 7)

    def answers(chosen: Sequence[int]) -> dict[int, list[int]]:
        session = Session(
            model, STOPS.stop_token_ids, slots=4, num_blocks=40, table_width=4, refill=1
        )
        for i in chosen:
            prompt, sampler = rows[i].token_ids, samplers[i % 3]
            session.submit([Request(i, prompt, sequence_key(1, 1, i, 0), sampler, 20 + i)])
        said: dict[int, list[int]] = {i: [] for i in chosen}
        while session.busy:
            for drawn in session.step():
                for request, token in zip(drawn.requests, drawn.token_ids, strict=True):
                    said[request.number].append(token)
        return said

    together = answers(range(6))
    assert together == {i: answers([i])[i] for i in range(6)}


def test_memory_is_allocated_for_the_phase_and_gone_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[KVMemory] = []
    original = KVMemory.__init__

    def watched(self: KVMemory, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(KVMemory, "__init__", watched)
    rollout_of(wide(), (20, 20), sampling={"samples_per_prompt": 3, "max_new_tokens": 20})
    (memory,) = made
    # Of each prompt one whole block is shared; each sample has two more, one waits to be copied.
    assert memory.num_blocks == 2 * (1 + 3 * 2 + 1) + 1
    assert memory.layers == []


def test_a_prompt_that_can_never_fit_is_refused() -> None:
    with pytest.raises(GenerationError, match="must hold a prompt of 48 tokens"):
        rollout_of(wide(), LENGTHS, kv_blocks=5)


def test_no_room_for_the_longest_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.generation.blocks.free_bytes", lambda device: 10_000)
    with pytest.raises(GenerationError, match="must hold the longest prompt and answer"):
        rollout_of(wide(), LENGTHS)


def test_the_runner_gives_the_models_own_logits() -> None:
    from tandem.generation.runner import new_memory

    for family in ("llama", "opt", "gpt_neox"):
        model = tiny_model(family)
        memory = new_memory(model, 4)
        runner = make_runner(model, memory, 32)
        ids = torch.arange(3, 20)
        tables = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
        with torch.no_grad():
            first = runner.prefill(torch.cat([ids[:11], ids[:5]]), [11, 5], tables)
            tokens, at = torch.stack([ids[11], ids[5]]), torch.tensor([11, 5])
            second = runner.decode(tokens, at, tables)
            own = model(ids[None]).logits[0]
        runner.close()
        torch.testing.assert_close(first, own[[10, 4]], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(second, own[[11, 5]], atol=1e-4, rtol=1e-4)


def test_stops_end_answers_and_the_text_is_cut() -> None:
    letters = Stops((2,), 2, lambda ids: "".join(chr(97 + i % 26) for i in ids))
    sampling = SamplingConfig(max_new_tokens=60, stop_strings=("ab", "q"), min_new_tokens=5)
    rows = prompts(*[9] * 12)
    cut = generate(wide(), rows, sampling, letters, seed=1, step=1)
    plain = SamplingConfig(max_new_tokens=60, min_new_tokens=5)
    whole = generate(wide(), rows, plain, letters, seed=1, step=1)
    ended = 0
    for i, (text, long) in enumerate(zip(cut.responses, whole.responses, strict=True)):
        places = [long.find(s, max(0, 5 - len(s))) for s in ("ab", "q")]
        ends = {at + len(s): at for at, s in zip(places, ("ab", "q"), strict=True) if at >= 0}
        expected = long[: ends[min(ends)]] if ends else long
        ended += bool(ends)
        assert text == expected
        num_tokens = int(cut.batch.response_mask[i].sum())
        if ends:
            assert bool(cut.finished[i])
            assert num_tokens == min(ends)
        n = 9 + num_tokens
        torch.testing.assert_close(cut.rollout_logprobs[i, :n], whole.rollout_logprobs[i, :n])
    assert ended > 0
    assert request_maker.watched_text(STOPS, plain) is None
