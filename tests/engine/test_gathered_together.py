"""A split model's gathered weights lie side by side while sessions last, and return before FSDP2
frees them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.config.engine import engine_settings
from tandem.config.schema import ParallelConfig, RunConfig
from tandem.engine.forward import generation_weights
from tandem.engine.placement import prepare_for_training, shard_model
from tandem.engine.shard_plan import shard_plan
from tandem.generation.gpu_runner import GraphRunner
from tandem.generation.runner import new_memory
from tandem.models.gpu_blocks import GatheredTogether, join_projections
from tandem.ops import gpu
from tandem.ops.joined import joined_view
from tandem.parallel.dtensor import whole
from tandem.parallel.world import World
from tests.generation.cuda_stand_ins import stand_in
from tests.models.families import tiny_model
from tests.ranks import on_ranks


def split_model(world: World) -> torch.nn.Module:
    settings = engine_settings(RunConfig(parallel=ParallelConfig(offload=("params",))))
    model = tiny_model("qwen2").eval()  # biases of q, k and v, none of gate and up
    prepare_for_training(model, settings, 0)
    shard_model(model, shard_plan(3, settings, world, trained=True), world)
    return model


def values(model: torch.nn.Module) -> list[Tensor]:
    return [whole(p.detach()).clone() for p in model.parameters()]


def groups_of(model: torch.nn.Module) -> list[list[Tensor]]:
    groups = []
    for layer in model.model.layers:  # type: ignore[union-attr]
        attention, mlp = layer.self_attn, layer.mlp
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        groups += [[part.weight for part in qkv], [part.bias for part in qkv]]
        groups.append([mlp.gate_proj.weight, mlp.up_proj.weight])
    return groups


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def rollouts(world: World) -> None:
    """Two rollouts with an update between them, each with two sessions."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        patch.setattr(gpu, "available", lambda: True)
        patch.setattr(gpu, "fuses", lambda x: True)
        model = split_model(world)
        for _ in range(2):
            before = values(model)
            with torch.no_grad(), generation_weights(model, None):  # type: ignore[arg-type]
                gathered = values(model)
                assert join_projections(model) == 0  # type: ignore[arg-type]
                sessions = [
                    GraphRunner(model, new_memory(model, 2))  # type: ignore[arg-type]
                    for _ in range(2)
                ]
                for runner in sessions:
                    assert all(joined_view(group) is not None for group in groups_of(model))
                    assert same(values(model), gathered)
                    runner.close()
                assert all(joined_view(group) is None for group in groups_of(model))
                assert same(values(model), gathered)
            assert same(values(model), before)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
            assert not same(values(model), before)


def test_gathered_weights_lie_side_by_side_while_sessions_last() -> None:
    on_ranks(2, rollouts)


def test_a_whole_model_is_left_to_join_in_place() -> None:
    together = GatheredTogether(tiny_model("qwen2"))
    assert together.num_groups == 0
    together.undo()
