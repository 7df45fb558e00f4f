"""What sessions on a GPU keep for the next one, and what they give back: recordings."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from tandem.generation import gpu_runner
from tandem.generation.gpu_runner import GraphRunner
from tandem.generation.runner import TwinRunner, new_memory
from tandem.models.lora import lora_layers
from tests.generation.cuda_stand_ins import Graph, stand_in
from tests.generation.gpu_sessions import (
    Calls,
    adapted,
    decoded,
    found_by_address,
    in_buckets,
    rollout_of,
)
from tests.generation.rollouts import assert_same, bitwise, new_wide


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


@bitwise
def test_recordings_outlive_a_session_until_a_weight_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = adapted(), Calls()
    first = rollout_of(model)
    in_buckets(monkeypatch)
    monkeypatch.setattr(gpu_runner, "CudaRecorder", lambda: calls)
    found_by_address(monkeypatch)

    def forwards(**how: Any) -> int:
        before = calls.num_forwards
        rollout_of(model, **how)
        return calls.num_forwards - before

    assert_same(rollout_of(model, batch_size=5), first)
    assert_same(rollout_of(model, batch_size=14), first)
    buckets = calls.num_forwards
    assert buckets > 1
    assert forwards(batch_size=5) == 0
    assert forwards(batch_size=14, kv_blocks=60) == 0, "other memory, the same recordings"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    assert forwards(batch_size=14) == 0, "a weight that changes in place is read where it is"
    assert rollout_of(model).responses != first.responses
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    assert forwards(batch_size=14) > 0
    for _, layer in lora_layers(model):
        layer.switch.on = False
    assert forwards(batch_size=14) > 0, "adapters off are another forward"


@bitwise
def test_without_triton_recordings_go_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_wide()
    seen = in_buckets(monkeypatch)
    rollouts, counts = [], []
    for _ in range(2):
        rollouts.append(rollout_of(model))
        counts.append(seen.forwards())
    assert_same(*rollouts)
    assert counts[1] == 2 * counts[0]
    assert not gpu_runner._kept[model]._steps


@bitwise
def test_sessions_side_by_side_keep_apart() -> None:
    model = new_wide()
    memories = [new_memory(model, 3), new_memory(model, 5)]
    expected = [
        decoded(TwinRunner(model, memory), memory, first)
        for memory, first in zip(memories, (5, 50), strict=True)
    ]
    runners = [GraphRunner(model, m) for m in memories]
    tables = torch.tensor([[2], [1], [0]], dtype=torch.int32)
    with torch.no_grad():
        for runner in runners:
            runner.prefill(torch.arange(4, 4 + 9 + 4 + 1), [9, 4, 1], tables)
        for i in range(3):
            for runner, first, logits in zip(runners, (5, 50), expected, strict=True):
                ids = torch.arange(first + i, first + i + 3)
                positions = torch.tensor([9, 4, 1]) + i
                assert torch.equal(runner.decode(ids, positions, tables), logits[i])
    runners[0].close()
    runners[0].close()
    assert torch.equal(decoded(runners[1], memories[1], 50), expected[1])


def test_what_is_kept_keeps_no_model() -> None:
    model = new_wide()
    GraphRunner(model, new_memory(model, 3)).close()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


class Reserved:
    """What the driver would see: bytes in the pools of recordings, by what is alive."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.captures = self.pools = self.returned = 0
        begin, handle = Graph.capture_begin, torch.cuda.graph_pool_handle
        alive: weakref.WeakSet[Graph] = weakref.WeakSet()
        self._alive = alive

        def counted(graph: Graph, pool: Any, capture_error_mode: str) -> None:
            self.captures += 1
            alive.add(graph)
            begin(graph, pool, capture_error_mode)
            Graph.by_pool[id(pool)].clear()  # the stand-in's list would keep dropped graphs alive

        def made() -> Any:
            self.pools += 1
            return handle()

        def returned() -> None:
            self.returned += 1

        patch.setattr(Graph, "capture_begin", counted)
        patch.setattr(torch.cuda, "graph_pool_handle", made)
        patch.setattr(torch.cuda, "empty_cache", returned)

    @property
    def num_bytes(self) -> int:
        gc.collect()
        return sum(made.nbytes for graph in self._alive for made in graph.tape.made)


@bitwise
@pytest.mark.parametrize("moves", [False, True])
def test_reserved_memory_is_flat_over_a_hundred_rollouts(
    monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    """In-place updates record nothing again; moved weights record anew in returned memory."""
    found_by_address(monkeypatch)
    reserved = Reserved(monkeypatch)
    model = new_wide()
    sizes = []
    for rollout in range(100 if not moves else 10):
        memory = new_memory(model, 4)
        runner = GraphRunner(model, memory)
        decoded(runner, memory, first=5 + rollout % 7)
        runner.close()
        if rollout < 3 or rollout % 9 == 0:
            sizes.append(reserved.num_bytes)
        with torch.no_grad():
            model.lm_head.weight.mul_(0.999)
        if moves:
            model.lm_head.weight.data = model.lm_head.weight.data.clone()
    assert sizes[0] > 0
    assert set(sizes) == {sizes[0]}
    expected = 10 if moves else 1
    assert (reserved.captures, reserved.pools) == (expected, expected)
    assert reserved.returned == expected - 1


@bitwise
def test_without_triton_a_pool_whose_graphs_are_gone_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch asserts that a shared pool is in use by a graph that is alive."""
    reserved = Reserved(monkeypatch)
    model = new_wide()
    for _ in range(2):
        memory = new_memory(model, 4)
        runner = GraphRunner(model, memory)
        decoded(runner, memory)
        runner.close()
    assert (reserved.captures, reserved.pools, reserved.returned) == (2, 2, 2)
    assert reserved.num_bytes == 0
