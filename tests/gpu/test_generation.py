"""Rollouts on a GPU: real captures, replays that keep their addresses, no casts, agreement."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.config.schema import SamplingConfig
from tandem.generation import gpu_runner
from tandem.generation.generator import generate
from tandem.generation.gpu_runner import GraphRunner
from tandem.generation.runner import TwinRunner, new_memory
from tandem.models.selfcheck import check_twin
from tandem.models.twin import twin_of
from tandem.ops import gpu
from tandem.types import Rollout
from tests.generation.gpu_sessions import (
    STOPS,
    found_by_address,
    in_buckets,
    prompts,
    rollout_of,
)
from tests.generation.rollouts import new_wide
from tests.gpu.conftest import DEVICE, IS_DRY, needs_gpu
from tests.models.families import tiny_model

FAMILIES = ("llama", "qwen3", "gemma2", "opt", "gpt2")


def placed(family: str = "llama") -> PreTrainedModel:
    """bf16, on the device; its heads are wide enough for the kernels."""
    model = new_wide(family) if family in ("llama", "gpt2") else tiny_model(family)
    torch.nn.Module.to(model, DEVICE, torch.bfloat16)
    return model.eval()


def rollout(model: PreTrainedModel, **how: int) -> Rollout:
    with torch.no_grad():
        return rollout_of(model, **how)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a dry run sessions decode by stand-ins for graphs; a GPU does so by itself."""
    if IS_DRY:
        found_by_address(monkeypatch)
        in_buckets(monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
def test_replays_give_what_single_steps_give(family: str) -> None:
    model = placed(family)
    steps = []
    for make in (TwinRunner, GraphRunner):
        memory = new_memory(model, 4)
        runner = make(model, memory)
        steps.append(_decoded(runner))
        runner.close()
    torch.testing.assert_close(steps[0], steps[1], rtol=0, atol=0.05)
    assert gpu_runner._kept[model].recorder.refused == {}, "the step was captured"


def _decoded(runner: TwinRunner) -> Tensor:
    """Logits of three steps of three rows."""
    tables = torch.tensor([[2], [1], [0]], dtype=torch.int32, device=DEVICE)
    steps = []
    with torch.no_grad():
        runner.prefill(torch.arange(4, 18, device=DEVICE), [9, 4, 1], tables)
        positions = torch.tensor([9, 4, 1], device=DEVICE)
        for token in range(5, 8):
            ids = torch.tensor([token, token + 1, token + 2], device=DEVICE)
            steps.append(runner.decode(ids, positions, tables).clone())
            positions = positions + 1
    return torch.stack(steps)


@pytest.mark.skipif(not IS_DRY and not gpu.available(), reason="keeps recordings with kernels")
def test_updates_in_place_record_nothing_again(recorded: None) -> None:
    model = placed()
    first = rollout(model)
    kept = gpu_runner._kept[model]
    before = {key: step._forward for key, step in kept._steps.items()}
    assert before
    with torch.no_grad():
        model.lm_head.weight.mul_(-1.0)
    second = rollout(model)
    after = {key: step._forward for key, step in kept._steps.items()}
    assert all(after[key] is call for key, call in before.items())
    assert second.responses != first.responses, "the new weights were read"


@needs_gpu
def test_a_bucket_is_recorded_in_a_second() -> None:
    """The stated time of docs/gpu.md for tiny models, after the kernels have been compiled."""
    rollout(placed())
    model = placed()
    rollout(model)
    count, seconds = gpu_runner.recorded_so_far(model)
    assert count > 0
    assert seconds / count < 1.0


@needs_gpu
def test_reserved_memory_is_flat_over_a_hundred_rollouts() -> None:
    model = placed()
    rollout(model)
    rollout(model)
    reserved = torch.cuda.memory_reserved()
    for _ in range(100):
        rollout(model)
        with torch.no_grad():
            model.lm_head.weight.mul_(0.999)
    assert torch.cuda.memory_reserved() == reserved


@pytest.mark.parametrize("rule", [{}, {"top_k": 9, "top_p": 0.9}, {"min_new_tokens": 9}])
def test_outputs_beyond_the_tokenizer_are_not_drawn(rule: dict[str, float], recorded: None) -> None:
    """They are the likeliest by far: with the bound as without, one replay draws."""
    model = placed()
    with torch.no_grad():
        model.lm_head.weight[80::2] *= 40.0
        model.lm_head.weight[81::2] = -model.lm_head.weight[80:-1:2]
    stops = replace(STOPS, num_ids=80)
    sampling = SamplingConfig(max_new_tokens=12, **rule)
    made = [generate(model, prompts(5, 9), sampling, stops, seed=seed) for seed in range(4)]
    for rollout in made:
        mask = rollout.batch.response_mask
        assert int(rollout.batch.token_ids[mask].max()) < 80
        beyond = (rollout.sampled_logprobs - rollout.rollout_logprobs)[mask]
        assert float(beyond.min()) > 1.0, "of nats"
    assert gpu_runner._kept[model].recorder.refused == {}
    assert gpu_runner.recorded_so_far(model)[0] >= 2, "a step, and a draw"


def test_a_rollout_copies_no_weight(recorded: None) -> None:
    """bf16 weights are read where they are trained: the twin has the same addresses and types."""
    model = placed()
    addresses = {p.data_ptr() for p in model.parameters()}
    rollout(model)
    twin = twin_of(model)
    assert {p.data_ptr() for p in twin.parameters()} <= addresses
    assert {p.dtype for p in twin.parameters()} == {torch.bfloat16}


@contextmanager
def _no_host_waits() -> Iterator[None]:
    """Within, anything that waits for the device raises; on a CPU nothing waits."""
    if IS_DRY:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_replayed_step_does_not_wait_for_the_device() -> None:
    model = placed()
    runner = GraphRunner(model, new_memory(model, 4))
    _decoded(runner)
    ids = torch.tensor([5, 6, 7], device=DEVICE)
    positions = torch.tensor([12, 7, 4], device=DEVICE)
    tables = torch.tensor([[2], [1], [0]], dtype=torch.int32, device=DEVICE)
    with torch.no_grad(), _no_host_waits():
        for _ in range(3):
            runner.decode(ids, positions, tables)
            positions = positions + 1
    runner.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_agrees_with_training(family: str) -> None:
    found = check_twin(placed(family))
    assert found.gap < 2e-2
    assert found.largest_gap < 0.3


def test_the_same_seed_gives_the_same_answers(recorded: None) -> None:
    model = placed()
    again = copy.deepcopy(model)
    one, other = rollout(model), rollout(again)
    assert one.responses == other.responses
    assert torch.equal(one.rollout_logprobs, other.rollout_logprobs)
