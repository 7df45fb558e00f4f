"""An optimizer on the host against torch's own, one process against two, and closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from transformers import LlamaForCausalLM

from tandem.errors import CheckpointError, ModelError
from tandem.parallel.dtensor import local, part_of, whole
from tandem.parallel.lanes import StreamLane, Waiting
from tandem.parallel.masters import MasterAdamW
from tandem.parallel.shard import ShardPlan, Shards, shard, shards_of
from tandem.parallel.world import World
from tests.tiny import tiny_llama

CPU = torch.device("cpu")
BETAS = (0.9, 0.95)
CLIP = 0.3
VOCABULARY = 67


class LateLane(StreamLane):
    """Does nothing until it is waited for, as a stream that is busy elsewhere."""

    def __init__(self, device: torch.device, max_bytes: int) -> None:
        super().__init__(device, max_bytes)
        self.most_bytes = self.sent = 0

    def _begin(self, target: Tensor, source: Tensor) -> Waiting:
        assert target.dtype == source.dtype, "bytes travel in the dtype of the device"
        target.fill_(float("nan"))
        self.most_bytes = max(self.most_bytes, self._bytes + target.nbytes)
        self.sent += target.nbytes
        return lambda: target.copy_(source)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with decay, the rest without, at two learning rates."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": matrices, "weight_decay": 0.1, "lr": 1e-3, "peak_lr": 1e-3},
        {"params": others, "weight_decay": 0.0, "lr": 3e-3, "peak_lr": 3e-3},
    ]


def tokens(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (8, 12), generator=generator)


def loss_sum(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits.float()
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
    )


def trained_by_torch(steps: int) -> tuple[LlamaForCausalLM, torch.optim.AdamW, list[float]]:
    """Two micro-batches a step, clip, fused AdamW; a falling learning rate."""
    model = tiny_llama(VOCABULARY)
    optimizer = torch.optim.AdamW(groups_of(model), betas=BETAS, fused=True)
    norms = []
    for step in range(steps):
        for part in tokens(step).split(4):
            (loss_sum(model, part) / 88).backward()
        gradients = [p.grad for p in ordered(model) if p.grad is not None]
        norms.append(float(nn.utils.get_total_norm(gradients)))
        # As engine.optimizer.Learner clips.
        torch._foreach_mul_(gradients, min(1.0, CLIP / (norms[-1] + 1e-6)))
        lower(optimizer.param_groups, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, norms


def lower(groups: list[dict[str, Any]], step: int) -> None:
    for group in groups:
        group["lr"] = group["peak_lr"] / (1 + step)


def clip(optimizer: MasterAdamW, max_norm: float, shards: Shards | None = None) -> float:
    """Scale the gradients down as a learner does; their norm before."""
    gradients = optimizer.collect()
    norm, _ = (shards or shards_of(nn.Module())).gradient_norm(gradients)
    if max_norm < norm + 1e-6:
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))
    return norm


def train_on_host(
    model: LlamaForCausalLM, optimizer: MasterAdamW, steps: range, *, clips_in_step: bool = False
) -> list[float]:
    """As `trained_by_torch`; the clip is a pass of its own, or the step's."""
    norms = []
    for step in steps:
        for part in tokens(step).split(4):
            (loss_sum(model, part) / 88).backward()
            assert all(p.grad is None for p in model.parameters()), "a gradient stayed"
        norms.append(clip(optimizer, math.inf if clips_in_step else CLIP))
        lower(optimizer.param_groups, step)
        optimizer.step(min(1.0, CLIP / (norms[-1] + 1e-6)) if clips_in_step else 1.0)
        optimizer.zero_grad()
    return norms


def ordered(model: nn.Module) -> list[nn.Parameter]:
    return [p for group in groups_of(model) for p in group["params"]]


@pytest.mark.parametrize("bucket_bytes", [1, 4096 * 3, 2**26])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("sums_on_device", [False, True])
def test_float32_numbers_are_those_of_torch_bit_for_bit(
    bucket_bytes: int, late: bool, sums_on_device: bool
) -> None:
    expected, theirs, norms = trained_by_torch(4)
    model = tiny_llama(VOCABULARY)
    ours = MasterAdamW(
        groups_of(model),
        betas=BETAS,
        sums_on_device=sums_on_device,
        bucket_bytes=bucket_bytes,
        lane=LateLane if late else None,
    )
    assert train_on_host(model, ours, range(4), clips_in_step=late) == norms
    assert min(norms) > CLIP, "every step clips"
    for p, q in zip(ordered(model), ordered(expected), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(ours.state[p]["master"], q)
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(ours.state[p][name], theirs.state[q][name]), name


def test_sums_of_the_device_travel_one_bucket_ahead_of_adamw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each way a bucket is under way while another is computed, and no more than that."""
    events: list[str] = []

    class Telling(LateLane):
        def _begin(self, target: Tensor, source: Tensor) -> Waiting:
            events.append("begin")
            return super()._begin(target, source)

    lanes: list[LateLane] = []

    def make(device: torch.device, max_bytes: int) -> LateLane:
        lanes.append(LateLane(device, max_bytes) if lanes else Telling(device, max_bytes))
        return lanes[-1]

    weights = [nn.Parameter(torch.ones(1024)) for _ in range(4)]
    optimizer = MasterAdamW(
        [{"params": weights, "lr": 0.1, "weight_decay": 0.0}],
        betas=BETAS, device=CPU, sums_on_device=True, bucket_bytes=4096, lane=make,
    )  # fmt: skip
    torch.cat(weights).sum().backward()
    assert not events, "nothing travels before the step"
    own = torch.optim.AdamW.step

    def told(adam: torch.optim.AdamW, *given: Any, **how: Any) -> Any:
        events.append("adamw")
        return own(adam, *given, **how)

    monkeypatch.setattr(torch.optim.AdamW, "step", told)
    optimizer.step()
    assert events == ["begin", "begin", *["adamw", "begin"] * 2, "adamw", "adamw"]
    assert [lane.sent for lane in lanes] == [4 * 4096, 4 * 4096]
    assert lanes[0].most_bytes == 4096


def test_a_gradient_that_is_not_finite_is_left_alone() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = MasterAdamW([group(weight, 0.1)], betas=BETAS)
    (weight * torch.tensor([1.0, float("inf"), 2.0])).sum().backward()
    assert optimizer.collect()[0].tolist() == [1.0, float("inf"), 2.0]
    optimizer.zero_grad()
    assert optimizer.collect() == []
    assert weight.tolist() == [1.0, 1.0, 1.0]


def group(weight: nn.Parameter, lr: float) -> dict[str, Any]:
    return {"params": [weight], "lr": lr, "weight_decay": 0.0}


def test_weights_travel_in_their_own_dtype_within_the_bound() -> None:
    lanes: list[LateLane] = []

    def make(device: torch.device, max_bytes: int) -> LateLane:
        lanes.append(LateLane(device, max_bytes))
        return lanes[-1]

    model = tiny_llama(VOCABULARY).bfloat16()
    optimizer = MasterAdamW(groups_of(model), betas=BETAS, bucket_bytes=4096 * 2, lane=make)
    (loss_sum(model, tokens(0)) / 88).backward()
    optimizer.step()
    num_bytes = 2 * sum(p.numel() for p in model.parameters())
    for lane in lanes:
        assert lane.sent == num_bytes
        assert lane.most_bytes <= 4096 * 2 + 2048 * 2, "no more than the bound and one slice"
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("share", [0.01, 0.6])
def test_masters_divided_between_host_and_device_give_the_same_bits(share: float) -> None:
    """Only the share of the host travels, and it is the last weights'."""
    expected, _, norms = trained_by_torch(3)
    lanes: list[LateLane] = []

    def make(device: torch.device, max_bytes: int) -> LateLane:
        lanes.append(LateLane(device, max_bytes))
        return lanes[-1]

    model = tiny_llama(VOCABULARY)
    ours = MasterAdamW(
        groups_of(model),
        betas=BETAS,
        device=CPU,
        host_share=share,
        bucket_bytes=4096 * 3,
        lane=make,
    )
    assert train_on_host(model, ours, range(3)) == norms
    for p, q in zip(ordered(model), ordered(expected), strict=True):
        assert torch.equal(p, q)
    travels = [ours.state[p].travels for p in ordered(model)]
    assert travels == sorted(travels)
    moved = sum(p.numel() for p in model.parameters() if ours.state[p].travels)
    total = sum(p.numel() for p in model.parameters())
    assert 0 < moved < total
    assert share * total <= moved + max(p.numel() for p in model.parameters())
    assert lanes[1].sent == 4 * moved * 3
    own = [p.data_ptr() == ours.masters[p].data_ptr() for p in ordered(model)]
    assert own == [not there for there in travels]


def test_half_precision_masters_divided_are_those_of_the_host() -> None:
    found = []
    for share in (1.0, 0.5):
        model = tiny_llama(VOCABULARY).bfloat16()
        optimizer = MasterAdamW(
            groups_of(model), betas=BETAS, device=CPU, host_share=share, states="8bit",
            lane=LateLane,
        )  # fmt: skip
        train_on_host(model, optimizer, range(2))
        found.append([*ordered(model), *(optimizer.masters[p] for p in ordered(model))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_float32_masters_keep_what_bfloat16_would_lose() -> None:
    """A constant gradient moves AdamW by lr a step; bfloat16 around 1 moves by 2^-8 or not."""
    lr, steps = 1e-4, 64
    alone, ours = (nn.Parameter(torch.ones(5, dtype=torch.bfloat16)) for _ in range(2))
    theirs = torch.optim.AdamW([alone], lr=lr, weight_decay=0.0, fused=True)
    host = MasterAdamW([group(ours, lr)], betas=(0.9, 0.999))
    for _ in range(steps):
        for weight, optimizer in ((alone, theirs), (ours, host)):
            weight.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert alone.tolist() == [1.0] * 5
    master = host.state[ours]["master"]
    assert torch.allclose(master, torch.tensor(1 - steps * lr), rtol=0, atol=2e-6)
    assert torch.equal(ours, master.bfloat16())
    assert ours.dtype == torch.bfloat16
    assert ours[0] == 1 - 2 * 2**-8, "1 - 0.0064, to the nearest"


def test_micro_batches_add_up_in_float32() -> None:
    """256 + 1 is 256 in bfloat16; eight such ones are lost there and not here."""
    weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = MasterAdamW([group(weight, 0.1)], betas=BETAS)
    for slope in (256.0, *[1.0] * 8):
        (weight * slope).sum().backward()
    assert optimizer.collect()[0].tolist() == [264.0, 264.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_state_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    def start() -> tuple[LlamaForCausalLM, MasterAdamW]:
        model = tiny_llama(VOCABULARY)
        # The masters hold what the cast weights no longer do.
        optimizer = MasterAdamW(groups_of(model), betas=BETAS, bucket_bytes=4096)
        return model.to(dtype), optimizer

    model, optimizer = start()
    train_on_host(model, optimizer, range(3))
    weights = [p.detach().clone() for p in ordered(model)]
    saved = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in ordered(model)]
    train_on_host(model, optimizer, range(3, 5))

    again, second = start()
    for p, weight, state in zip(ordered(again), weights, saved, strict=True):
        p.data.copy_(weight)
        for name, value in state.items():
            second.state[p][name] = value
    train_on_host(again, second, range(3, 5))
    for p, q in zip(ordered(again), ordered(model), strict=True):
        assert torch.equal(p, q)
        for name in ("step", "exp_avg", "exp_avg_sq", "master"):
            assert torch.equal(second.state[p][name], optimizer.state[q][name]), name


def test_a_weight_without_gradient_stays_and_counts_no_step() -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    groups = [{"params": [used, unused], "lr": 0.1, "weight_decay": 0.5}]
    optimizer = MasterAdamW(groups, betas=BETAS)
    used.sum().backward()
    optimizer.step()
    assert unused.tolist() == [1.0, 1.0, 1.0]
    assert [float(optimizer.state[p]["step"]) for p in (used, unused)] == [1.0, 0.0]


def test_a_forgotten_gradient_that_still_travels_is_not_added_to_the_next() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = MasterAdamW([group(weight, 0.1)], betas=BETAS, lane=LateLane)
    for slope in (5.0, 7.0):
        optimizer.zero_grad()
        (weight * slope).sum().backward()
    assert optimizer.collect()[0].tolist() == [7.0, 7.0, 7.0]


def test_an_optimizer_that_is_gone_takes_no_gradient() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = MasterAdamW([group(weight, 0.1)], betas=BETAS)
    weight.sum().backward()
    assert weight.grad is None
    del optimizer
    weight.sum().backward()
    assert weight.grad is not None


def test_what_cannot_be_done_is_said() -> None:
    with pytest.raises(ModelError, match="must be contiguous"):
        MasterAdamW([group(nn.Parameter(torch.ones(3, 4).t()), 0.1)], betas=BETAS)
    weight = nn.Parameter(torch.ones(3))
    optimizer = MasterAdamW([group(weight, 0.1)], betas=BETAS)
    with pytest.raises(CheckpointError, match=r"got master of shape \(2,\)"):
        optimizer.state[weight]["master"] = torch.ones(2)
    with pytest.raises(CheckpointError, match="got momentum of shape"):
        optimizer.state[weight]["momentum"] = torch.ones(3)


def _rank(rank: int, size: int, folder: Path, job: Callable[[World], Any]) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    try:
        torch.save(job(World(rank, size, size, CPU)), folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def by_ranks(job: Callable[[World], Any], size: int, folder: Path) -> list[Any]:
    """What every rank's `job` returned."""
    start_processes(_rank, args=(size, folder, job), nprocs=size, start_method="fork")
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


def train_spread(world: World, stage: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Three steps over all ranks: losses, norms, whole weights and whole masters."""
    model = tiny_llama(VOCABULARY).to(dtype)
    shards = shard(model, list(model.model.layers), ShardPlan(stage=stage), world)
    optimizer = MasterAdamW(
        groups_of(model),
        betas=BETAS,
        sums_on_device=shards.sums_gradients,
        bucket_bytes=4096,
        lane=LateLane,
    )
    losses, norms = [], []
    for step in range(3):
        parts = world.share(tokens(step).split(2))
        total = torch.zeros((), dtype=torch.float64)
        for number, part in enumerate(parts):
            shards.before_backward(last=number == len(parts) - 1)
            loss = loss_sum(model, part)
            (loss / 88).backward()
            total += loss.detach()
        shards.reshard()
        if shards.sums_gradients:
            optimizer.collect_sums(shards.sum_gradients)
        world.all_reduce_(total)
        losses.append(float(total))
        norms.append(clip(optimizer, CLIP, shards))
        optimizer.step()
        assert all(p.grad is None for p in model.parameters()), "a gradient stayed on the device"
        optimizer.zero_grad()
    for p in ordered(model):
        assert isinstance(p, DTensor) == shards.is_split
        for value in optimizer.state[p].values():
            again = part_of(whole(value), p) if value.dim() else value
            assert torch.equal(again, local(value)), "what is saved lies as what is loaded"
    return {
        "losses": losses,
        "norms": norms,
        "weights": [whole(p.detach()) for p in ordered(model)],
        "masters": [whole(optimizer.state[p]["master"]) for p in ordered(model)],
    }


def _all_stages(world: World) -> dict[str, Any]:
    results = {f"fp32 stage {stage}": train_spread(world, stage) for stage in range(4)}
    return {**results, "bf16 stage 3": train_spread(world, 3, torch.bfloat16)}


def relative(values: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))


def test_two_ranks_train_as_one_process(tmp_path: Path) -> None:
    alone = train_spread(World(), 0)
    half = train_spread(World(), 0, torch.bfloat16)
    for results in by_ranks(_all_stages, 2, tmp_path):
        for name, result in results.items():
            expected = half if name.startswith("bf16") else alone
            # bfloat16: the forward's own rounding, in sums of another order.
            bound = 2e-3 if name.startswith("bf16") else 1e-6
            assert relative(result["losses"], expected["losses"]) < bound, name
            assert relative(result["norms"], expected["norms"]) < bound, name
            for weight, master in zip(result["weights"], result["masters"], strict=True):
                assert torch.equal(weight, master.to(weight.dtype)), name
        for name in ("fp32 stage 1", "fp32 stage 3"):
            for weight, whole_one in zip(results[name]["weights"], alone["weights"], strict=True):
                assert torch.allclose(weight, whole_one, rtol=0, atol=1e-4), name


def _uneven(world: World) -> dict[str, Any]:
    """A layer of one row over two ranks: the second rank's piece is empty."""
    layer = nn.Linear(6, 1)
    nn.init.ones_(layer.weight)
    shard(layer, (), ShardPlan(stage=3), world)
    optimizer = MasterAdamW([group(layer.weight, 0.25)], betas=BETAS)
    layer(torch.ones(1, 6)).sum().backward()
    norm = clip(optimizer, 10.0, shards_of(layer))
    optimizer.step()
    return {
        "held": local(layer.weight).numel(),
        "norm": norm,
        "step": float(optimizer.state[layer.weight]["step"]),
        "weight": whole(layer.weight.detach()),
    }


def test_a_rank_with_an_empty_piece_keeps_up(tmp_path: Path) -> None:
    first, second = by_ranks(_uneven, 2, tmp_path)
    assert (first["held"], second["held"]) == (6, 0)
    for result in (first, second):
        assert result["norm"] == pytest.approx(2 * 6**0.5)  # both ranks saw the same row
        assert result["step"] == 1.0
        assert torch.allclose(result["weight"], torch.full((1, 6), 0.75))
