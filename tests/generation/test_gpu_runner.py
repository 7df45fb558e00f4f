"""Decoding in buckets against the plain runner: the same bits, whatever is filled up or reused.

CUDA's graphs are stand-ins here (`cuda_stand_ins`): what a GPU replays is replayed on the CPU.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig

from tandem.config.schema import SamplingConfig
from tandem.generation import make_runner, sampler
from tandem.generation.batch_state import Part, Rows
from tandem.generation.generator import generate
from tandem.generation.gpu_graphs import NoWaiting
from tandem.generation.gpu_runner import GraphRunner
from tandem.generation.request import Request
from tandem.generation.runner import TwinRunner, new_memory
from tandem.generation.sampler import Sampler
from tandem.models.twin import twin_of
from tandem.ops import attention, native
from tests.generation.cuda_stand_ins import stand_in
from tests.generation.gpu_sessions import STOPS, adapted, decoded, in_buckets, prompts, rollout_of
from tests.generation.rollouts import assert_same, bitwise, new_wide
from tests.models.families import FAMILIES

CPU = torch.device("cpu")
MIXTURE = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "max_position_embeddings": 256,
    "experts_implementation": "eager",
}


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


SCHEDULES: dict[str, dict[str, Any]] = {
    "all at once": {},
    "alone": {"batch_size": 1},
    "three rows": {"batch_size": 3, "refill": 1},
    "short of memory": {"kv_blocks": 9},
}


@bitwise
@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("how", SCHEDULES)
@pytest.mark.parametrize("family", ["llama", "opt", "gemma2"])
def test_a_whole_generation_is_the_plain_runners(
    family: str,
    how: str,
    is_late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = new_wide(family)
    plain = rollout_of(model)
    seen = in_buckets(monkeypatch, late=is_late)
    assert_same(rollout_of(model, **SCHEDULES[how]), plain)
    assert seen.drawn > 20
    assert len(seen.recorded) == len(set(seen.recorded)), "nothing is recorded twice"
    assert not seen.refused()


@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_of_any_family_waits_for_the_host(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In plain torch, as on a GPU but for its attention; there, sums depend on the bucket."""
    monkeypatch.setattr(native, "available", lambda: False)
    model = new_wide(family)
    plain = rollout_of(model)
    seen = in_buckets(monkeypatch, late=True)
    rollout = rollout_of(model, batch_size=5)
    assert not seen.refused()
    assert seen.drawn > 20
    assert torch.equal(rollout.batch.token_ids, plain.batch.token_ids)
    apart = rollout.rollout_logprobs - plain.rollout_logprobs
    assert apart.abs().max() < 1e-4


@bitwise
@pytest.mark.parametrize("family", FAMILIES)
def test_no_part_of_a_prefill_waits_for_the_host(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole prompts, and parts of prompts that share blocks; only attention runs in C++."""
    rows = prompts(40, 40, 3, 20)
    rows[1] = replace(rows[1], token_ids=(*rows[0].token_ids[:35], *rows[1].token_ids[35:]))
    model = new_wide(family)
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(attention, "_native", lambda dtype: dtype == torch.float32)
    plain, seen = TwinRunner.prefill, []

    def watched(self: TwinRunner, *arguments: Any) -> Tensor:
        seen.append(arguments[3])
        with NoWaiting():
            return plain(self, *arguments)

    monkeypatch.setattr(TwinRunner, "prefill", watched)
    twin_of(model).config.pad_token_id = None  # as `GraphRunner` sets it
    sampling = SamplingConfig(max_new_tokens=4)
    for how in ({}, {"chunk_tokens": 16, "batch_size": 2}):
        generate(model, rows, sampling, STOPS, seed=1, **how)  # type: ignore[arg-type]
    starts = [start for part in seen for start in part]
    assert 0 in starts
    assert 32 in starts, "of the prompt that begins like another"


@bitwise
def test_what_cannot_be_recorded_runs_through_the_plain_runner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = AutoModelForCausalLM.from_config(MixtralConfig(**MIXTURE)).eval()
    plain = rollout_of(model)
    seen = in_buckets(monkeypatch)
    with pytest.warns(UserWarning, match="decoding without CUDA graphs, slower: aten") as warned:
        rollout = rollout_of(model, batch_size=5)
    assert len(warned) == 1
    assert torch.equal(rollout.batch.token_ids, plain.batch.token_ids)
    # Sums of its experts depend on the batch.
    torch.testing.assert_close(rollout.rollout_logprobs, plain.rollout_logprobs)
    assert seen.refused().keys() == {"forward"}
    assert seen.forwards() == 1
    assert seen.drawn <= 1


def likeliest_by_torch(probabilities: Tensor, width: int) -> Tensor:
    """As on a GPU; numpy's work would be on no tape."""
    return probabilities.sort(dim=-1).values.flip(-1)[:, :width]


@bitwise
@pytest.mark.parametrize(
    "knobs",
    [
        {"top_k": 30, "top_p": 0.9, "temperature": 0.7},
        {"min_new_tokens": 20, "logit_bias": ("2:3",), "min_p": 0.01},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.1},
        {"stop_strings": ("7", "33 4")},
    ],
    ids=lambda knobs: next(iter(knobs)),
)
def test_every_sampling_draws_what_the_rows_draw(
    knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "_likeliest", likeliest_by_torch)
    model = new_wide()
    plain = rollout_of(model, sampling=knobs)
    seen = in_buckets(monkeypatch, late=True)
    assert_same(rollout_of(model, sampling=knobs, batch_size=5), plain)
    assert (seen.drawn > 0) == ("repetition_penalty" not in knobs)
    assert not seen.refused()


@bitwise
def test_a_sampler_that_waits_draws_unrecorded_beside_a_recorded_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU the nucleus is looked for among the likeliest tokens first; a GPU sorts all."""
    monkeypatch.setattr(sampler, "_FIRST_LOOK", 8)
    model, knobs = new_wide(), {"top_p": 0.9}
    plain = rollout_of(model, sampling=knobs)
    seen = in_buckets(monkeypatch)
    with pytest.warns(UserWarning, match="decoding without CUDA graphs") as warned:
        assert_same(rollout_of(model, sampling=knobs, batch_size=5), plain)
    assert len(warned) == 1
    assert "forward" not in seen.refused()
    assert len(seen.refused()) == 1


@bitwise
def test_so_it_is_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_wide(dtype=torch.bfloat16)
    plain = rollout_of(model)
    in_buckets(monkeypatch)
    assert_same(rollout_of(model, batch_size=5), plain)


@bitwise
def test_adapters_decode_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    plain = rollout_of(model)
    in_buckets(monkeypatch)
    assert_same(rollout_of(model), plain)


@bitwise
def test_rows_that_fill_a_batch_up_touch_the_scratch_block_alone() -> None:
    model = new_wide()
    memories = [new_memory(model, 4), new_memory(model, 4)]
    for memory in memories:
        for tensor in (t for layer in memory.layers for t in layer):
            tensor.fill_(torch.nan)
    plain, runner = TwinRunner(model, memories[0]), GraphRunner(model, memories[1])
    assert torch.equal(decoded(plain, memories[0]), decoded(runner, memories[1]))
    scratch = memories[1].num_blocks - 1
    for plain_layer, layer in zip(memories[0].layers, memories[1].layers, strict=True):
        for expected, found in zip(plain_layer, layer, strict=True):
            assert found[:scratch].nan_to_num(7.0).equal(expected[:scratch].nan_to_num(7.0))
            assert not found[scratch].isnan().all()
    runner.close()


def test_only_its_own_logits_and_one_plain_sampler_are_drawn_for() -> None:
    model = new_wide()
    memory = new_memory(model, 3)
    runner = GraphRunner(model, memory)
    samplers = [Sampler(SamplingConfig(), (2,), CPU, 99), Sampler(SamplingConfig(), (2,), CPU, 99)]
    counting = Sampler(SamplingConfig(repetition_penalty=1.2), (2,), CPU, 99)

    def part_of(*chosen: Sampler) -> Part:
        rows = Rows(2, 1, CPU)
        requests = [Request(i, (5, 6), 77 + i, s, 9) for i, s in enumerate(chosen)]
        return rows.enter(requests, [0, 9])

    tables = torch.tensor([[2], [1]], dtype=torch.int32)
    with torch.no_grad():
        before = runner.prefill(torch.tensor([5, 6, 5, 6]), [2, 2], tables)
        part = part_of(samplers[0], samplers[0])
        assert runner.draw(before, part) is None
        logits = runner.decode(torch.tensor([8, 9]), torch.tensor([2, 2]), tables)
        drawn, expected = (
            runner.draw(logits, part),
            samplers[0].draw(logits, part.keys, part.token_numbers),
        )
        assert drawn is not None
        assert torch.equal(drawn.tokens, expected.tokens)
        assert torch.equal(drawn.entropy, expected.entropy)
        assert runner.draw(logits, part_of(*samplers)) is None
        assert runner.draw(logits, part_of(counting, counting)) is None
        assert runner.draw(logits.clone(), part) is None


def test_a_model_on_a_gpu_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_runner, "GraphRunner", lambda model, memory: (model, memory))
    model, memory = SimpleNamespace(device=torch.device("cuda")), object()
    assert make_runner.make_runner(model, memory, 99) == (model, memory)  # type: ignore[arg-type]
