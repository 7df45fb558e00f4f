"""A reference that follows the policy: in every layout the same bits, and a mixture in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.config.engine import engine_settings
from tandem.config.moving_reference import ReferenceConfig
from tandem.config.schema import LoraConfig, RunConfig
from tandem.engine.checks import check_same_start
from tandem.engine.forward import response_logprobs
from tandem.engine.moving_reference import MovingReference, moving_reference
from tandem.engine.placement import Placement, onload
from tandem.engine.reference import place_reference
from tandem.errors import NumericsError
from tandem.models.lora import adapters_off, lora_layers
from tandem.parallel.dtensor import whole
from tandem.parallel.world import World
from tests.engine.test_half import config_of, step, trainee_of
from tests.models.families import ragged_batch, tiny_model
from tests.ranks import on_ranks

RATE = 0.01


def moved(
    world: World, config: RunConfig, rate: float, *, rank: int = 0, steps: int = 4
) -> tuple[MovingReference, list[tuple[bool, bool]], list[dict[str, torch.Tensor]]]:
    """After each step whether the reference has moved, and whether it computes with the policy's
    bits; and the policy's exact weights."""
    moves = ReferenceConfig(update_every=2, update_rate=rate)
    settings = engine_settings(replace(config, reference=moves, lora=LoraConfig(rank=rank)))
    placement = Placement(settings, world)
    actor = placement.policy(tiny_model("llama"), trained=True, keeps_start=True)
    reference = None
    if rank == 0:
        reference = place_reference(placement, tiny_model("llama"))
    learner = trainee_of(actor, config)
    check_same_start(actor, reference)
    moving = moving_reference(settings, learner, reference)
    assert moving is not None
    found, weights = [], [exact(learner.weights())]
    for seed in range(steps):
        step(learner, world, seed)
        batch = ragged_batch((5, 7), seed=seed)
        with torch.no_grad():  # what a split reference has gathered must not outlive a move
            if reference is None:
                with adapters_off(actor):
                    response_logprobs(actor, batch)
            else:
                with onload(reference):
                    response_logprobs(reference, batch)
        has_moved = moving.follow()
        try:
            check_same_start(actor, reference)
            found.append((has_moved, True))
        except NumericsError:
            found.append((has_moved, False))
        weights.append(exact(learner.weights()))
    return moving, found, weights


def exact(weights: Any) -> dict[str, torch.Tensor]:
    return {name: whole(weight).double().clone() for name, weight in weights.items()}


def bits(world: World, *arguments: Any) -> list[tuple[bool, bool]]:
    *of_config, more, rank = arguments
    return moved(world, config_of(*of_config, **more), 1.0, rank=rank)[1]


QWZ = {"zero_quantized_weights": True, "zero_forced": True}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("ranks", "stage", "offload", "more"),
    [
        (1, 0, (), {}),
        (1, 0, ("optimizer", "reference"), {}),
        (1, 0, ("params", "reference"), {}),
        (2, 0, (), {}),
        (2, 1, (), QWZ),
        (2, 2, ("reference",), {}),
        (2, 3, (), {}),
        (2, 3, ("params", "reference"), {}),
        (2, 3, (), QWZ),
    ],
)
def test_a_reference_that_becomes_the_policy_computes_with_its_bits(
    dtype: str, ranks: int, stage: int, offload: tuple[str, ...], more: dict[str, Any]
) -> None:
    arguments = (dtype, stage, offload, more, 0)
    found = [bits(World(), *arguments)] if ranks == 1 else on_ranks(ranks, bits, *arguments)
    for each in found:
        assert each == [(False, False), (True, True)] * 2


def test_a_second_copy_of_the_pieces_within_a_node_is_not_read_on() -> None:
    found = on_ranks(4, bits, "fp32", 3, (), {"zero_hpz": True}, 0, ranks_per_node=2)
    assert found == [[(False, False), (True, True)] * 2] * 4


def continued(world: World) -> None:
    """Pieces of stage 3 are exact; a reference that is whole has what travels between ranks."""
    moving, _, _ = moved(world, config_of("bf16", 1, (), **QWZ), 1.0, steps=1)
    moving.load_state_tensors({n: whole(w) for n, w in moving._learner.weights().items()})
    check_same_start(moving._policy, moving._reference)


def test_what_stage_3_saved_is_rounded_as_the_policy_is() -> None:
    on_ranks(2, continued)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 1), (2, 3)])
def test_adapters_become_the_reference_s_own(dtype: str, ranks: int, stage: int) -> None:
    arguments = (dtype, stage, (), {}, 2)
    found = [bits(World(), *arguments)] if ranks == 1 else on_ranks(ranks, bits, *arguments)
    for each in found:
        assert each == [(False, False), (True, True)] * 2


def mixture(world: World, *arguments: Any) -> dict[str, tuple[torch.Tensor, ...]]:
    """Of each weight: where it began, the mixture, a slow loop's, and what the reference has."""
    moving, _, weights = moved(world, config_of(*arguments), RATE, steps=6)
    slow = weights[0]
    for number, now in enumerate(weights):
        if number and number % 2 == 0:
            slow = {n: RATE * now[n] + (1 - RATE) * slow[n] for n in slow}
    assert moving._reference is not None
    own = dict(moving._reference.named_parameters())
    state = {n: whole(tensor).double() for n, tensor in moving.state_tensors().items()}
    return {n: (weights[0][n], state[n], slow[n], whole(own[n].detach())) for n in slow}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("ranks", "stage", "offload"),
    [(1, 0, ()), (1, 0, ("optimizer", "reference")), (2, 1, ()), (2, 3, ())],
)
def test_a_mixture_is_that_of_a_slow_loop_in_float64(
    dtype: str, ranks: int, stage: int, offload: tuple[str, ...]
) -> None:
    """Each move is far below what bf16 resolves: only float32 adds them up."""
    arguments = (dtype, stage, offload)
    found = [mixture(World(), *arguments)] if ranks == 1 else on_ranks(ranks, mixture, *arguments)
    for each in found:
        for _, state, slow, own in each.values():
            assert torch.allclose(state, slow, rtol=0, atol=2e-7)
            assert torch.equal(own, state.to(own.dtype))
        far = torch.cat([(slow - start).flatten() for start, _, slow, _ in each.values()])
        near = torch.cat([(state - start).flatten() for start, state, _, _ in each.values()])
        assert float(far.abs().mean()) > 1e-5
        assert float(torch.cosine_similarity(near, far, dim=0)) > 0.99


def test_float32_needs_no_copy_of_the_mixture() -> None:
    moving, _, _ = moved(World(), config_of("fp32"), RATE, steps=2)
    assert moving._reference is not None
    own = dict(moving._reference.named_parameters())
    for name, tensor in moving.state_tensors().items():
        assert tensor.data_ptr() == own[name].data_ptr()
    half, _, _ = moved(World(), config_of("bf16"), RATE, steps=2)
    assert all(tensor.dtype == torch.float32 for tensor in half.state_tensors().values())
    hard, _, _ = moved(World(), config_of("bf16"), 1.0, steps=2)
    assert all(tensor.dtype == torch.bfloat16 for tensor in hard.state_tensors().values())


@pytest.mark.parametrize("rank", [0, 2])
def test_without_moves_new_adapters_keep_no_copy(rank: int) -> None:
    config = RunConfig(dtype="fp32", lora=LoraConfig(rank=rank))
    model = Placement(engine_settings(config), World()).policy(
        tiny_model("llama"), trained=True, keeps_start=True
    )
    assert all(layer.start_a is None for _, layer in lora_layers(model))
