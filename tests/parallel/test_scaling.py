"""The loss scale against a slow reference and closed forms, alone and over two ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

from tandem.errors import CheckpointError, ConfigError, NumericsError
from tandem.parallel.masters import MasterAdamW
from tandem.parallel.scaling import LossScaler
from tandem.parallel.world import World
from tests.tiny import tiny_llama


def slow_scale(history: list[bool], initial: float, interval: int, ceiling: float) -> float:
    """The scale after a history of overflows, replayed from its beginning by halves and doubles."""
    scale, good = initial, 0
    for overflow in history:
        good = 0 if overflow else good + 1
        if overflow and scale > 1:
            scale = scale / 2
        elif good and good % interval == 0:
            scale = min(ceiling, scale * 2)
            good = 0
    return scale


@pytest.mark.parametrize("seed", range(5))
def test_any_history_gives_the_scale_of_the_slow_reference(seed: int) -> None:
    draw = random.Random(seed)
    scaler = LossScaler(64.0, growth_interval=3, ceiling=256.0)
    history: list[bool] = []
    for _ in range(400):
        history.append(draw.random() < 0.1 * seed)
        scaler.update(history[-1])
        assert scaler.scale == slow_scale(history, 64.0, 3, 256.0)
        assert scaler.skipped == sum(history)
    assert 1.0 <= scaler.scale <= 256.0


def test_closed_forms_of_growth_and_fall() -> None:
    grows = LossScaler(8.0, growth_interval=5)
    for _ in range(5 * 7 + 4):
        grows.update(False)
    assert (grows.scale, grows.good_steps) == (8.0 * 2**7, 4)
    falls = LossScaler(2.0**16)
    for _ in range(20):
        falls.update(True)
    assert (falls.scale, falls.skipped, falls.skipped_in_a_row) == (1.0, 20, 20)
    falls.update(False)
    assert (falls.skipped, falls.skipped_in_a_row) == (20, 0)
    for _ in range(10**4):
        falls.update(False)
    assert falls.scale == 2.0**10


def test_an_overflow_begins_the_count_of_good_steps_anew() -> None:
    scaler = LossScaler(16.0, growth_interval=3)
    for overflow in (False, False, True, False, False):
        scaler.update(overflow)
    assert scaler.scale == 8.0
    scaler.update(False)
    assert scaler.scale == 16.0


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_bad_element_anywhere_is_an_overflow(bad: float, dtype: torch.dtype) -> None:
    gradients = [torch.ones(3, 4), torch.zeros(0, 5), torch.ones(7, dtype=dtype)]
    scaler = LossScaler()
    assert not scaler.overflowed(gradients)
    assert not scaler.overflowed([])
    for place in range(7):
        gradients[2].fill_(1)
        gradients[2][place] = bad
        assert scaler.overflowed(gradients)
        assert scaler.overflowed(gradients[::-1])


def test_large_finite_gradients_are_no_overflow() -> None:
    """Their sum of squares would not fit."""
    half = torch.full((1000,), 65504.0, dtype=torch.float16)
    single = torch.full((1000,), 3e38)
    assert not LossScaler().overflowed([half, single])


def test_scaling_by_a_power_of_two_rounds_nothing() -> None:
    values = torch.randn(1000)
    gradients = [values * 2.0**16, values[:10].double() * 2.0**16]
    LossScaler(2.0**16).unscale_(gradients)
    assert torch.equal(gradients[0], values)
    assert torch.equal(gradients[1].float(), values[:10])
    with pytest.raises(NumericsError, match="must be float32"):
        LossScaler().unscale_([torch.ones(2, dtype=torch.float16)])


def test_the_state_goes_on_exactly() -> None:
    history = [bool(i % 7 == 3) for i in range(100)]
    whole, first = (LossScaler(32.0, growth_interval=4) for _ in range(2))
    for overflow in history[:41]:
        first.update(overflow)
    second = LossScaler(2.0, growth_interval=4)
    second.load_state_tensors({name: t.clone() for name, t in first.state_tensors().items()})
    for overflow in history:
        whole.update(overflow)
    for overflow in history[41:]:
        second.update(overflow)
    assert whole.state_tensors() == second.state_tensors()


def test_numbers_that_cannot_be_are_refused() -> None:
    for arguments in ({"initial": 0.5}, {"initial": 2.0**30}, {"growth_interval": 0}, {"floor": 0}):
        with pytest.raises(ConfigError, match="the loss scale must keep"):
            LossScaler(**arguments)  # type: ignore[arg-type]
    state = LossScaler().state_tensors()
    with pytest.raises(CheckpointError, match="must hold a scale above 0"):
        LossScaler().load_state_tensors({"scale": state["scale"]})
    with pytest.raises(CheckpointError, match="must hold a scale above 0"):
        LossScaler().load_state_tensors({**state, "scale": torch.tensor(float("inf"))})


def _rank(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    world = World(rank, size, size)
    actor, critic = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    scaler = LossScaler(4.0, growth_interval=2)
    scales, skips = [], []
    # Each step: which rank and which model overflows.
    for step, where in enumerate([None, (1, "actor"), (0, "critic"), None, None, (1, "critic")]):
        actor.grad = torch.full((4,), scaler.scale * (step + 1))
        critic.grad = torch.full((4,), scaler.scale)
        if where is not None and where[0] == rank:
            bad = actor.grad if where[1] == "actor" else critic.grad
            bad[rank] = float("inf")
        # A rank may hold nothing of a model, and asks all the same.
        of_critic = [critic.grad] if rank == 0 or where == (1, "critic") else []
        overflow = scaler.overflowed([actor.grad, *of_critic], world.all_reduce_)
        if not overflow:
            for weight in (actor, critic):
                assert weight.grad is not None
                scaler.unscale_([weight.grad])
                weight.data -= weight.grad
        scaler.update(overflow)
        scales.append(scaler.scale)
        skips.append(overflow)
    result = {"actor": actor.detach(), "critic": critic.detach(), "scales": scales, "skips": skips}
    torch.save({**result, "skipped": scaler.skipped}, folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_an_overflow_in_either_model_on_either_rank_skips_both_on_both(tmp_path: Path) -> None:
    start_processes(_rank, args=(2, tmp_path), nprocs=2, start_method="fork")
    for rank in range(2):
        result: dict[str, Any] = torch.load(tmp_path / f"{rank}.pt")
        assert result["skips"] == [False, True, True, False, False, True]
        assert result["scales"] == [4.0, 2.0, 1.0, 1.0, 2.0, 1.0]
        assert result["skipped"] == 3
        # Steps 1, 4 and 5 were taken.
        assert result["actor"].tolist() == [1.0 - 10.0] * 4
        assert result["critic"].tolist() == [1.0 - 3.0] * 4


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits.float()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_float16_weights_train_with_float32_masters() -> None:
    """A scale far too large skips, falls, and then the losses are those of float32."""
    ids = torch.randint(0, 67, (8, 12), generator=torch.Generator().manual_seed(1))
    losses: dict[torch.dtype, list[float]] = {}
    for dtype in (torch.float32, torch.float16):
        model = tiny_llama(67)
        groups = [{"params": list(model.parameters()), "lr": 1e-3, "weight_decay": 0.0}]
        optimizer = MasterAdamW(groups, betas=(0.9, 0.95))
        model.to(dtype)
        scaler = LossScaler(2.0**24 if dtype == torch.float16 else 1.0, growth_interval=10**6)
        losses[dtype] = []
        while len(losses[dtype]) < 12:
            loss = _loss(model, ids)
            (loss * scaler.scale).backward()
            gradients = optimizer.collect()
            overflow = scaler.overflowed(gradients)
            before = [p.detach().clone() for p in model.parameters()]
            if not overflow:
                scaler.unscale_(gradients)
                norm = float(nn.utils.get_total_norm(gradients))
                torch._foreach_mul_(gradients, min(1.0, 1.0 / (norm + 1e-6)))
                optimizer.step()
                losses[dtype].append(float(loss.detach()))
            optimizer.zero_grad()
            scaler.update(overflow)
            unchanged = [torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
            assert all(unchanged) if overflow else not all(unchanged)
        assert bool(scaler.skipped) == (dtype == torch.float16)
    assert losses[torch.float16] == pytest.approx(losses[torch.float32], rel=5e-3)
    assert losses[torch.float16][-1] < losses[torch.float16][0] - 0.1


def test_small_gradients_vanish_without_a_scale_and_not_with_one() -> None:
    """float16 holds nothing below 6e-8."""
    for scale, expected in ((1.0, 0.0), (2.0**16, 2.0**-30)):
        weight = nn.Parameter(torch.ones((), dtype=torch.float16))
        scaler = LossScaler(scale)
        optimizer = MasterAdamW(
            [{"params": [weight], "lr": 0.1, "weight_decay": 0.0}], betas=(0.9, 0.9)
        )
        (weight.float() * 2.0**-30 * scaler.scale).backward()
        gradients = optimizer.collect()
        scaler.unscale_(gradients)
        assert gradients[0].item() == expected
