"""What sessions on a GPU keep for the next one, and what they give back: recordings, casts."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from tandem.errors import GenerationError
from tandem.generation import gpu_runner
from tandem.generation.gpu_runner import GraphRunner
from tandem.generation.gpu_weights import CastWeights
from tandem.generation.runner import TwinRunner, new_memory
from tandem.models.lora import lora_layers
from tandem.models.twin import shares_every_tensor, twin_of
from tandem.ops import paged_gpu
from tandem.ops.steps import KVMemory
from tests.generation.cuda_stand_ins import stand_in
from tests.generation.gpu_sessions import (
    Calls,
    adapted,
    assert_same,
    bitwise,
    decoded,
    in_buckets,
    rollout_of,
    wide,
)
from tests.models.families import FAMILIES


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


@bitwise
@pytest.mark.parametrize("family", FAMILIES)
def test_under_autocast_cast_weights_change_no_bit(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called, not replayed: a linear layer of C++ under autocast is on no tape."""
    monkeypatch.setattr(gpu_runner, "CudaRecorder", Calls)
    model = wide(family)
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    with torch.autocast("cpu", torch.bfloat16):
        plain = rollout_of(model, batch_size=5)
        in_buckets(monkeypatch)
        assert_same(rollout_of(model, batch_size=5), plain)
    assert shares_every_tensor(model)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])


class Addressed(KVMemory):
    """AddressedMemory's part on a CPU: layers that are those of what it points at."""

    def __init__(self, memory: KVMemory) -> None:
        self.target: KVMemory | None = memory

    def point_at(self, memory: KVMemory) -> None:
        self.target = memory

    def forget(self) -> None:
        self.target = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)


@bitwise
def test_recordings_outlive_a_session_until_a_weight_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = adapted(), Calls()
    first = rollout_of(model)
    in_buckets(monkeypatch)
    monkeypatch.setattr(gpu_runner, "CudaRecorder", lambda: calls)
    monkeypatch.setattr(paged_gpu, "AddressedMemory", Addressed)
    monkeypatch.setattr(gpu_runner, "_finds_by_address", lambda device: True)

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
    model = wide()
    seen = in_buckets(monkeypatch)
    rollouts, counts = [], []
    for _ in range(2):
        rollouts.append(rollout_of(model))
        counts.append(seen.forwards())
    assert_same(*rollouts)
    assert counts[1] == 2 * counts[0]
    assert not gpu_runner._kept[model]._steps


@bitwise
def test_what_rests_on_cast_weights_goes_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = wide(), Calls()
    monkeypatch.setattr(gpu_runner, "CudaRecorder", lambda: calls)
    in_buckets(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        one = rollout_of(model)
        kept = gpu_runner._kept[model]
        assert kept._weights is None
        assert not kept._steps
        count = calls.num_forwards
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        other = rollout_of(model)
    assert calls.num_forwards == 2 * count
    assert one.responses != other.responses, "the second session casts anew"


def test_weights_kept_as_integers_are_not_cast() -> None:
    model = wide()
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    layer.scales = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    twin = twin_of(model)
    own = dict(twin.named_parameters())
    with CastWeights(twin, torch.bfloat16).in_place():
        within = dict(twin.named_parameters())
    for name in ("weight", "scales"):
        name = f"model.layers.0.mlp.up_proj.{name}"
        assert within[name] is own[name]
    assert within["model.layers.1.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert dict(twin.named_parameters()).keys() == own.keys()


@bitwise
def test_sessions_side_by_side_keep_apart() -> None:
    model = wide()
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


def test_sessions_side_by_side_compute_in_one_type() -> None:
    model = wide()
    runner = GraphRunner(model, new_memory(model, 3))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(GenerationError, match=r"in one type; got torch\.bfloat16 beside none"),
    ):
        GraphRunner(model, new_memory(model, 3))
    del runner
    gc.collect()
    with torch.autocast("cpu", torch.bfloat16):
        GraphRunner(model, new_memory(model, 3)).close()


def test_what_is_kept_keeps_no_model() -> None:
    model = wide()
    GraphRunner(model, new_memory(model, 3)).close()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
