"""Moments in bf16 and 8 bits against slow references, closed forms and other layouts."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tandem.config.optimizer import OptimizerConfig
from tandem.config.parallel import OptimizerStates, ParallelConfig
from tandem.engine.learner import Learner
from tandem.ops import native
from tandem.parallel import moments
from tandem.parallel.dtensor import local, part_of, whole
from tandem.parallel.masters import MasterAdamW
from tandem.parallel.moments import (
    BLOCK,
    MOMENTS,
    Packing,
    exact_moments,
    from_8bit,
    kind_for,
    random_bits,
    to_8bit,
    to_bf16,
    zero_moments,
)
from tandem.parallel.shard import ShardPlan, shard
from tandem.parallel.world import World
from tests.ranks import on_ranks
from tests.tiny import tiny_llama

PACKED: list[OptimizerStates] = ["bf16", "8bit"]
SETTINGS = OptimizerConfig(learning_rate=1e-2, warmup=0.0, weight_decay=0.1)


def bits_by_hand(element: int, ordinal: int, step: int) -> int:
    """The hash in Python's integers."""
    x = (element + step) * 0x9E3779B1 + (ordinal + 1) * 0x85EBCA77
    for shift, factor in ((0, 1), (16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift if shift else 0)) * factor) % 2**32
    x ^= x >> 16
    return x - 2**32 if x >= 2**31 else x


def test_random_bits_are_those_of_the_slow_hash_wherever_one_begins() -> None:
    found = random_bits(50, 2**32 - 20, 3, torch.tensor(7.0)).tolist()
    assert found == [bits_by_hand(2**32 - 20 + i, 3, 7) for i in range(50)]
    assert random_bits(30, 2**32, 3, torch.tensor(7.0)).tolist() == found[20:]
    many = random_bits(2**16, 0, 0, torch.tensor(1.0))
    for part in (many & 0xFFFF, (many >> 16) & 0xFFFF):  # uniform: 5 standard errors
        assert float(part.double().mean()) == pytest.approx(32767.5, abs=5 * 18918 / 2**8)


def as_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def as_float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def test_bf16_goes_to_a_neighbor_and_is_right_in_the_mean() -> None:
    values = torch.randn(64) * torch.logspace(-20, 10, 64)
    bits = random_bits(64, 5, 0, torch.tensor(2.0))
    expected = [
        as_float((as_bits(v) + (b & 0xFFFF)) & 0xFFFF0000)
        for v, b in zip(values.tolist(), bits.tolist(), strict=True)
    ]
    assert to_bf16(values, bits).tolist() == expected
    number = torch.full((2**16,), 1 + 2**-10)  # an eighth of the way to 1 + 2^-7
    rounded = to_bf16(number, random_bits(2**16, 0, 0, torch.tensor(1.0))).float()
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    assert float(rounded.mean()) == pytest.approx(1 + 2**-10, abs=1e-4)


def slow_8bit(name: str, row: list[float], bits: list[int]) -> list[float]:
    """What is left of a row, number by number: both neighbors from a list, one chosen by chance."""
    signs = name == "exp_avg"
    lowest = 127 * 8 - (127 if signs else 255)
    grid = [as_float((lowest + i) << 20) for i in range(128 if signs else 256)]
    grid = [0.0, *grid[1:]] if signs else grid
    out = []
    for begin in range(0, len(row), BLOCK):
        part = row[begin : begin + BLOCK]
        scale = max(map(abs, part))
        for value, bit in zip(part, bits[begin : begin + BLOCK], strict=True):
            size = float(torch.tensor(abs(value)) / torch.tensor(max(scale, 2.0**-126)))
            above = next(i for i, g in enumerate(grid) if g >= size)
            if above and grid[above] != size:
                gap = grid[above] - grid[above - 1]
                up = (size - grid[above - 1]) / gap + (bit & 0xFFFF) / 65536 >= 1
                if above == 1 and signs:  # zero is no power of two: its own comparison
                    up = (bit & 0xFFFF) / 65536 * grid[1] < size
                above -= not up
            out.append(math.copysign(grid[above], value) * scale)
    return out


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_8_bits_are_those_of_the_slow_reference(name: str) -> None:
    rows, columns = 3, 300
    values = torch.randn(rows, columns) * torch.logspace(-7, 0, columns)
    values[2, :BLOCK] = 0
    values[1, 7] = 0
    if name == "exp_avg_sq":
        values = values.square()
    bits = random_bits(rows * columns, 0, 0, torch.tensor(3.0)).view(rows, columns)
    found = from_8bit(name, *to_8bit(name, values.clone(), bits))
    expected = [slow_8bit(name, v.tolist(), b.tolist()) for v, b in zip(values, bits, strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=0)
    # As close as three bits of mantissa are, but for what is below the smallest number.
    large = values.abs() > 2.0**-14 * values.abs().amax()
    assert float(((found - values) / values)[large].abs().max()) < 1 / 8


@pytest.mark.skipif(not native.available(), reason=native.why_not() or "available")
@pytest.mark.parametrize("shape", [(3, 300), (40, 16), (1, 256), (2, 1000), (0, 300)], ids=str)
def test_cpp_rounds_to_the_bits_of_plain_torch(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes, scales and bf16 of values of every size, and what is read back."""
    rows, columns = shape
    values = torch.randn(shape) * torch.logspace(-30, 3, columns)
    values[:, ::7] = 0
    values[1:2] = 0
    values[:, 5] = -0.0
    values[2:, 3] = 1e-42
    given = [values.flatten(), values.square().flatten()]
    packing = Packing(columns, 2**32 - 70, 5, torch.tensor(12345.0))
    found = []
    for is_native in (True, False):
        monkeypatch.setattr(moments, "_is_native", lambda _, is_native=is_native: is_native)
        halves = [torch.zeros(rows * columns, dtype=torch.bfloat16) for _ in range(2)]
        packing.to_bf16(given, halves)
        codes = [torch.zeros(rows * columns, dtype=torch.uint8) for _ in range(2)]
        scales = [torch.zeros(rows, -(-columns // BLOCK)) for _ in range(2)]
        packing.to_8bit(given, codes, scales)
        back = [
            from_8bit(name, code.view(shape), scale)
            for name, code, scale in zip(MOMENTS, codes, scales, strict=True)
        ]
        found.append([*halves, *codes, *scales, *back])
    for ours, plain in zip(*found, strict=True):
        assert torch.equal(ours.view(torch.uint8), plain.view(torch.uint8))
    assert columns < BLOCK or not rows or len(set(found[0][2].tolist())) > 30, "codes of all kinds"


@pytest.mark.skipif(not native.available(), reason=native.why_not() or "available")
def test_cpp_refuses_what_does_not_fit() -> None:
    codes, scales = torch.zeros(32, dtype=torch.uint8), torch.zeros(1)
    pack = torch.ops.tandem.pack_8bit_
    with pytest.raises(RuntimeError, match="must divide the elements; got 32"):
        pack(torch.ones(32), codes, scales, 20, 0, 0, 0, True)
    with pytest.raises(RuntimeError, match="scales must be 2 contiguous numbers"):
        pack(torch.ones(32), codes, scales, 16, 0, 0, 0, True)
    with pytest.raises(RuntimeError, match="values must be 32 contiguous numbers"):
        pack(torch.ones(32).double(), codes, torch.zeros(2), 16, 0, 0, 0, True)


@pytest.mark.parametrize("shape", [(0, 300), (0, 2, 40), (3, 2, 40)])
def test_saved_codes_are_read_on_a_rank_without_rows_too(shape: tuple[int, ...]) -> None:
    """A run may go on with moments of another kind where a rank has none of a small weight."""
    columns = math.prod(shape[1:])
    saved = {"step": torch.tensor(3.0)}
    for name in MOMENTS:
        saved[name] = torch.full(shape, 120, dtype=torch.uint8)
        saved[f"{name}_scale"] = torch.full((shape[0], -(-columns // BLOCK)), 2.0)
    found = exact_moments(saved)
    for name in MOMENTS:
        assert found[name].shape == shape
        assert found[name].dtype == torch.float32
        rows = from_8bit(name, saved[name].view(shape[0], columns), saved[f"{name}_scale"])
        assert torch.equal(found[name].view(shape[0], columns), rows)


def test_8_bits_are_right_in_the_mean_and_keep_the_largest_exactly() -> None:
    for name, at in (("exp_avg", -0.3), ("exp_avg", 1e-6), ("exp_avg_sq", 0.7)):
        values = torch.full((512, BLOCK), at)
        values[:, 0] = 1.5
        bits = random_bits(values.numel(), 0, 0, torch.tensor(1.0)).view_as(values)
        found = from_8bit(name, *to_8bit(name, values.clone(), bits))
        assert (found[:, 0] == 1.5).all()
        error = float(found[:, 1:].std()) / math.sqrt(512 * 255)
        assert float(found[:, 1:].double().mean()) == pytest.approx(at, abs=5 * error + 1e-7)


def test_no_rounded_update_is_beyond_adams_own() -> None:
    """|m| <= 2^-16 of the block's largest rounds up to at most the root of v's smallest number."""
    gradient = torch.logspace(-12, 0, BLOCK)[None]
    bits = torch.full_like(gradient, 0xFFFF, dtype=torch.int32)
    m = from_8bit("exp_avg", *to_8bit("exp_avg", gradient.clone(), bits))
    v = from_8bit("exp_avg_sq", *to_8bit("exp_avg_sq", gradient.square(), torch.zeros_like(bits)))
    assert float((m / v.sqrt()).max()) < 1.3


def test_bytes_are_those_of_the_formula() -> None:
    weight = torch.zeros(64, 1024)
    sizes: dict[OptimizerStates, float] = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 * (1 + 4 / 256)}
    for kind, size in sizes.items():
        tensors = zero_moments(kind, weight, weight.device)
        assert sum(t.nbytes for t in tensors.values()) == size * weight.numel(), kind
    assert kind_for("8bit", torch.Size([1024])) == "fp32"
    assert kind_for("8bit", torch.Size([1024, 8])) == "fp32"


def learner_of(model: nn.Module, states: OptimizerStates, *offload: str) -> Learner:
    parallel = ParallelConfig(optimizer_states=states, offload=offload)  # type: ignore[arg-type]
    return Learner("actor", model, SETTINGS, parallel=parallel)


def run(learner: Learner, steps: range) -> None:
    for step in steps:
        ids = torch.randint(0, 67, (4, 9), generator=torch.Generator().manual_seed(step))
        logits = learner.model(input_ids=ids, use_cache=False).logits.float()
        loss = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
        )
        learner.backward(loss, 32)
        learner.step()


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


def state_dict_of(learner: Learner) -> dict[str, Tensor]:
    return copied({n: whole(t) for n, t in learner.state_tensors().items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("states", PACKED)
def test_a_stopped_run_continues_bit_for_bit(states: OptimizerStates, dtype: torch.dtype) -> None:
    def start() -> Learner:
        parallel = ParallelConfig(optimizer_states=states)
        return Learner("actor", tiny_llama(67), SETTINGS, parallel=parallel, dtype=dtype)

    straight, first, second = start(), start(), start()
    run(straight, range(6))
    run(first, range(3))
    second.load_weights(copied(first.weights()))
    second.load_state_tensors(copied(first.state_tensors()))
    run(second, range(3, 6))
    one, other = straight.state_tensors(), second.state_tensors()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    for a, b in zip(straight.weights().values(), second.weights().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("states", PACKED)
def test_offload_and_bucket_size_change_no_number(states: OptimizerStates) -> None:
    runs = []
    for offload, bucket in (((), 2**26), (("optimizer",), 2**26), ((), 4096)):
        learner = learner_of(tiny_llama(67), states, *offload)
        if bucket != 2**26:
            groups = learner.optimizer.param_groups
            learner.optimizer = MasterAdamW(
                groups, betas=SETTINGS.betas, states=states, bucket_bytes=bucket
            )
        run(learner, range(3))
        runs.append(learner.state_tensors() | learner.weights())
    for other in runs[1:]:
        assert all(torch.equal(other[name], value) for name, value in runs[0].items())


@pytest.mark.parametrize("before", ["fp32", *PACKED])
@pytest.mark.parametrize("after", ["fp32", *PACKED])
def test_a_run_continues_with_other_states(before: OptimizerStates, after: OptimizerStates) -> None:
    first, second = learner_of(tiny_llama(67), before), learner_of(tiny_llama(67), after)
    run(first, range(3))
    second.load_weights(copied(first.weights()))
    second.load_state_tensors(copied(first.state_tensors()))
    for parameter, other in list(zip(first.parameters, second.parameters, strict=True))[:2]:
        exact, rounded = moments_of(first, parameter), moments_of(second, other)
        for name, value in exact.items():
            bound = 1 / 8 if "8bit" in (before, after) else 1 / 128
            close = (rounded[name] - value).abs() <= bound * value.abs() + 1e-12
            assert float(close.float().mean()) > 0.99, name
    run(second, range(3, 5))
    assert all(bool(w.isfinite().all()) for w in second.weights().values())


def moments_of(learner: Learner, parameter: nn.Parameter) -> dict[str, Tensor]:
    state: Any = learner.optimizer.state[parameter]
    names = ("exp_avg", "exp_avg_sq")
    if isinstance(learner.optimizer, MasterAdamW):
        parts: list[list[Tensor]] = [state.unpack(s) for s in state.slices]
        return {n: torch.cat([p[i] for p in parts]) for i, n in enumerate(names)}
    return {name: state[name].flatten() for name in names}


def _rounded_over(world: World, states: OptimizerStates, stage: int) -> dict[str, Tensor]:
    """One step of a fixed gradient, then the whole state."""
    model = tiny_llama(67)
    shard(model, list(model.model.layers), ShardPlan(stage=stage), world)
    learner = learner_of(model, states)
    generator = torch.Generator().manual_seed(0)
    for parameter in learner.parameters:
        gradient = torch.randn(parameter.shape, generator=generator)
        state: Any = learner.optimizer.state[parameter]
        piece = gradient if stage == 0 else _piece(gradient, parameter)
        state.gradient = piece.clone()
    learner.optimizer.step()
    learner.optimizer.zero_grad()
    return state_dict_of(learner)


def _piece(full: Tensor, like: Tensor) -> Tensor:
    return part_of(full, like).view_as(local(like))


@pytest.mark.parametrize("states", PACKED)
def test_ranks_that_split_the_rows_round_as_one(states: OptimizerStates) -> None:
    alone = _rounded_over(World(), states, 0)
    for found in on_ranks(2, _rounded_over, states, 3):
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            assert torch.equal(found[name], value), name


def _trained_over(world: World, states: OptimizerStates, stage: int) -> float:
    model = tiny_llama(67)
    shards = shard(model, list(model.model.layers), ShardPlan(stage=stage), world)
    learner = learner_of(model, states)
    total = 0.0
    for step in range(3):
        ids = torch.randint(0, 67, (4, 9), generator=torch.Generator().manual_seed(step))
        part = world.share(ids.split(2))[0] if world.size > 1 else ids
        shards.before_backward(last=True)
        logits = model(input_ids=part, use_cache=False).logits.float()
        loss = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="sum"
        )
        learner.backward(loss, 32)
        learner.step()
        total = world.all_reduce_sum({"loss": float(loss.detach())})["loss"]
    return total


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_trains_alike(stage: int) -> None:
    alone = _trained_over(World(), "8bit", 0)
    assert on_ranks(2, _trained_over, "8bit", stage) == pytest.approx([alone] * 2, rel=2e-3)


def test_learning_is_that_of_float32() -> None:
    """A regression that AdamW solves: the loss after 200 steps, within 10 % of float32's."""
    losses = {}
    data = torch.randn(256, 64)
    target = data @ torch.randn(64, 32) + 0.5 * torch.randn(256, 32)
    for states in ("fp32", *PACKED):
        torch.manual_seed(1)
        model = nn.Linear(64, 32)
        settings = OptimizerConfig(learning_rate=3e-2, warmup=0.0, max_grad_norm=1e9)
        parallel = ParallelConfig(optimizer_states=states)
        learner = Learner("a", model, settings, 200, parallel=parallel)
        for _ in range(200):
            loss = (model(data) - target).square().sum()
            learner.backward(loss, 256)
            learner.step()
        losses[states] = float(loss.detach()) / 256
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.1)
    assert losses["8bit"] == pytest.approx(losses["fp32"], rel=0.1)
