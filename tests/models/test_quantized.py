"""Weights as integers: how many bytes, what is alive when, casts, pieces over ranks."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tandem.config.engine import engine_settings
from tandem.config.schema import (
    LoraConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    SamplingConfig,
)
from tandem.engine.forward import response_logprobs, whole_weights
from tandem.engine.learner import Learner
from tandem.engine.placement import shard_model
from tandem.engine.shard_plan import shard_plan
from tandem.errors import ModelError
from tandem.generation.generator import generate
from tandem.generation.stops import Stops
from tandem.models import frozen
from tandem.models.frozen import freeze_quantized
from tandem.models.lora import add_lora, lora_parameters
from tandem.models.quantized import PackedWeight
from tandem.models.recompute import enable_gradient_checkpointing
from tandem.models.shared import share_base
from tandem.models.twin import supports_packing
from tandem.ops import blockwise, native
from tandem.parallel.dtensor import local, whole
from tandem.parallel.world import World
from tandem.types import PromptRow, Source

from ..ranks import on_ranks
from .families import merged_state_dict, ragged_batch, scaled, tiny_model
from .test_frozen import all_equal, kinds, logprobs, own_logits, packed_weights, pair

BYTES = {"int8": 1 + 4 / 256, "nf4": 0.5 + 2 / 64}


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize(
    ("dim", "spans"),
    [(0, [(1, 3)]), (0, [(0, 1), (3, 4), (6, 8)]), (1, [(256, 768)]), (1, [(0, 256), (512, 768)])],
)
def test_a_part_has_the_numbers_of_the_whole(
    kind: str, dim: int, spans: list[tuple[int, int]]
) -> None:
    weight = torch.randn(8, 768, generator=torch.Generator().manual_seed(0))
    packed = PackedWeight(weight, kind)
    part = packed.part(dim, spans, lambda tensor: tensor)
    held = torch.tensor([i for first, last in spans for i in range(first, last)])
    assert torch.equal(part.dequantized(), packed.dequantized().index_select(dim, held))
    assert part.packed.nbytes + part.scales.nbytes == BYTES[kind] * part.numel()


@pytest.mark.parametrize(
    ("kind", "dim", "span", "cut"),
    [("int8", 1, (0, 384), 384), ("nf4", 1, (32, 64), 32), ("nf4", 0, (0, 1), 96)],
)
def test_a_part_of_a_block_is_refused(kind: str, dim: int, span: tuple[int, int], cut: int) -> None:
    columns = 96 if dim == 0 else 768
    packed = PackedWeight(torch.ones(8, columns), kind)
    block = {"int8": 256, "nf4": 64}[kind]
    message = f"whole blocks of {block}; got a weight of 8 x {columns} cut at number {cut}. Use a"
    with pytest.raises(ModelError, match=message):
        packed.part(dim, [span], lambda tensor: tensor)


@pytest.mark.parametrize("shape", [(16, 64), (5, 7), (3,), (1, 1)])
def test_numbers_that_the_integers_have_come_back_exactly(shape: tuple[int, ...]) -> None:
    count = torch.Size(shape).numel()
    numbers = torch.arange(count).remainder(255).sub(127.0)
    numbers[::256] = 127.0  # every block of 256 has the largest integer, so its scale is 2^-5
    weight = (numbers / 32).view(shape)
    packed = PackedWeight(weight, "int8")
    assert torch.equal(packed.dequantized(), weight)
    signs = torch.where(torch.arange(count) % 3 == 0, 1.0, -1.0).view(shape) * 0.5
    assert torch.equal(PackedWeight(signs, "nf4").dequantized(), signs)
    assert torch.equal(PackedWeight(signs.half(), "nf4").dequantized(), signs.half())


@pytest.mark.parametrize(("kind", "error"), [("int8", 0.01), ("nf4", 0.12)])
def test_bytes_and_error_per_weight(kind: str, error: float) -> None:
    weight = torch.randn(300, 512, generator=torch.Generator().manual_seed(0))
    packed = PackedWeight(weight, kind)
    size = sum(p.numel() * p.element_size() for p in packed.parameters())
    assert size == pytest.approx(BYTES[kind] * weight.numel(), rel=1e-3)
    assert packed.numel() == weight.numel()
    assert (packed.dequantized() - weight).norm() < error * weight.norm()
    assert all(not p.is_floating_point() for p in packed.parameters())


class Unpacked:
    """Watches every weight that is dequantized, by its memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[StorageWeakRef] = []
        self.most = 0
        function = blockwise.dequantize

        def watched(*arguments: Any) -> Tensor:
            weight = function(*arguments)
            self.seen.append(StorageWeakRef(weight.untyped_storage()))
            self.most = max(self.most, self.alive())
            return weight

        monkeypatch.setattr(blockwise, "dequantize", watched)

    def alive(self) -> int:
        return sum(not weight.expired() for weight in self.seen)


@kinds
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_weights_of_half_a_block_are_alive_at_a_time(
    kind: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, full = pair(tiny_model("llama"), kind)
    if checkpointing:
        enable_gradient_checkpointing(quantized.train())
    assert supports_packing(quantized)  # found out once, by a forward
    unpacked = Unpacked(monkeypatch)
    loss = logprobs(quantized).sum()
    layers, whole = len(packed_weights(quantized)), native.available()
    # The head's product over few tokens reads its integers part by part.
    forward = layers - (1 if whole else 0)
    assert len(unpacked.seen) == forward
    assert unpacked.alive() == 0, "between forward and backward nothing is kept"
    loss.backward()
    again = layers - 1 if checkpointing else 0  # the head is not in a checkpoint
    # Module by module, no gradient goes through the first layer's q, k and v; in whole blocks all
    # weights behind attention are unpacked together.
    assert len(unpacked.seen) == forward + again + layers - (0 if whole else 3)
    assert unpacked.most == (4 if whole else 1)
    assert unpacked.alive() == 0
    logprobs(full).sum().backward()
    for ours, theirs in zip(lora_parameters(quantized), lora_parameters(full), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


@kinds
@pytest.mark.parametrize("rank", [0, 2])
def test_full_weights_are_gone(kind: str, rank: int) -> None:
    model = tiny_model("llama").requires_grad_(False)
    if rank:
        add_lora(model, LoraConfig(rank=rank), seed=0)
    logprobs(model)  # a twin is built, which is of another tree afterwards
    names = {f"{n}.weight" for n, _ in frozen._quantizable(model)}
    watched = [
        StorageWeakRef(p.untyped_storage()) for n, p in model.named_parameters() if n in names
    ]
    before = sum(p.numel() for n, p in model.named_parameters() if n in names)
    freeze_quantized(model, kind)
    gc.collect()
    assert len(watched) == len(names) > 0
    assert all(weight.expired() for weight in watched)
    size = sum(p.numel() * p.element_size() for w in packed_weights(model) for p in w.parameters())
    assert size < before * BYTES[kind] * 1.1  # blocks that are not full


@kinds
def test_casts_and_copies_leave_the_integers(kind: str) -> None:
    quantized, _ = pair(tiny_model("llama"), kind)
    before = [p.clone() for w in packed_weights(quantized) for p in w.parameters()]
    other = copy.deepcopy(quantized)
    assert torch.equal(logprobs(other), logprobs(quantized))
    other.bfloat16()
    after = [p for w in packed_weights(other) for p in w.parameters()]
    assert all_equal(before, after)
    assert scaled(logprobs(other), logprobs(quantized), 0.2)


def test_a_bias_that_trains_gets_its_gradient() -> None:
    quantized, full = pair(tiny_model("gpt2"), "int8", rank=0)
    found = []
    for model in (quantized, full):
        bias = model.get_submodule("transformer.h.0.attn.c_attn").bias.requires_grad_(True)
        own_logits(model).square().sum().backward()
        assert bias.grad is not None
        found.append(bias.grad)
    torch.testing.assert_close(*found)


def trained_on_ranks(
    world: World, kind: str, dtype: torch.dtype, hpz: bool = False
) -> tuple[list[float], dict[str, Tensor], float]:
    """Losses of two steps, the merged weights and the share of packed bytes that lie here."""
    quantized, _ = pair(tiny_model("llama"), kind)
    total = sum(p.numel() for w in packed_weights(quantized) for p in w.parameters())
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    config = RunConfig(dtype=name, parallel=ParallelConfig(zero_hpz=hpz))
    shard_model(quantized, shard_plan(3, engine_settings(config), world, trained=True), world)
    settings = OptimizerConfig(learning_rate=1e-2, lora_learning_rate=1e-2, warmup=0)
    learner = Learner("actor", quantized, settings, num_steps=2, dtype=dtype)
    losses = []
    for step in range(2):
        batch = ragged_batch((9, 5, 12, 3), seed=step)
        mine = batch.select(torch.arange(len(batch))[world.rank :: world.size])
        loss = -response_logprobs(quantized, mine)[0].sum()
        losses.append(world.all_reduce_sum({"loss": float(loss.detach())})["loss"])
        learner.backward(loss, 10.0)
        learner.step()
    here = [local(p) for w in packed_weights(quantized) for p in w.parameters()]
    merged = {name: whole(weight).clone() for name, weight in merged_state_dict(quantized).items()}
    return losses, merged, sum(p.numel() for p in here) / total


@kinds
def test_it_travels_in_pieces(kind: str) -> None:
    losses, merged, _ = trained_on_ranks(World(), kind, torch.float32)
    for theirs, weights, share in on_ranks(2, trained_on_ranks, kind, torch.float32):
        assert theirs == pytest.approx(losses, rel=1e-5)
        assert share < 0.53, "a rank has its piece of the integers"
        for name, weight in merged.items():
            assert weights[name].dtype == weight.dtype
            assert (weights[name] - weight).abs().mean() < 2e-5, name


def test_travelling_in_bf16_rounds_no_scale() -> None:
    losses, _, _ = trained_on_ranks(World(), "int8", torch.bfloat16)
    for theirs, _, _ in on_ranks(
        4, trained_on_ranks, "int8", torch.bfloat16, True, ranks_per_node=2
    ):
        assert theirs == pytest.approx(losses, rel=3e-3)


def generated_on_ranks(world: World, kind: str) -> tuple[Tensor, Tensor, list[str]]:
    """Tokens and log-probs of a split model whose weights are whole, and what it refuses."""
    quantized, full = pair(tiny_model("llama"), kind)
    for model in (quantized, full):
        shard_model(
            model,
            shard_plan(3, engine_settings(RunConfig(dtype="fp32")), world, trained=True),
            world,
        )
    rows = [PromptRow(tuple(range(4, 4 + n)), (), {}, Source("x", "x", n)) for n in (5, 9)]
    stops = Stops((2,), 0, lambda ids: " ".join(map(str, ids)))
    with whole_weights(quantized):
        made = generate(quantized, rows, SamplingConfig(max_new_tokens=8), stops, seed=1, step=1)
    refusals = []
    if world.size > 1:
        for call in (lambda: freeze_quantized(full, kind), lambda: share_base(full, quantized)):
            with pytest.raises(ModelError) as refused:
                call()
            refusals.append(str(refused.value))
    return made.batch.token_ids, made.rollout_logprobs, refusals


def test_gathered_integers_generate_as_one_process() -> None:
    tokens, logprobs, _ = generated_on_ranks(World(), "nf4")
    for theirs, theirs_logprobs, refusals in on_ranks(2, generated_on_ranks, "nf4"):
        assert torch.equal(theirs, tokens)
        assert torch.equal(theirs_logprobs, logprobs)
        assert "which is split over ranks. Quantize it before" in refusals[0]
        assert "which is sharded already" in refusals[1]


@kinds
@pytest.mark.parametrize("shape", [(7, 33), (3, 256), (5, 1), (2, 3, 40), (130,)])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_filled_piece_by_piece_it_is_the_weight_quantized(
    kind: str, shape: tuple[int, ...], parts: int
) -> None:
    weight = torch.randn(shape)
    expected = PackedWeight(weight, kind)
    for part in range(parts):
        empty = PackedWeight(weight.to("meta"), kind)
        assert empty.packed.is_meta
        assert (empty.packed.shape, empty.scales.shape) == (
            expected.packed.shape,
            expected.scales.shape,
        )
        here: dict[int, tuple[Tensor, int]] = {}
        for own in (empty.packed, empty.scales):
            size = -(-len(own) // parts)
            first = min(part * size, len(own))
            here[id(own)] = torch.empty(min(size, len(own) - first), dtype=torch.uint8), first
        assert empty.fill(
            lambda first, last: weight[first:last], lambda own, here=here: here[id(own)]
        )
        for own, whole_one in ((empty.packed, expected.packed), (empty.scales, expected.scales)):
            piece, first = here[id(own)]
            assert torch.equal(piece, whole_one[first : first + len(piece)])


def test_filling_says_what_is_not_finite() -> None:
    weight = torch.randn(4, 64)
    weight[3, 5] = torch.nan
    empty = PackedWeight(weight.to("meta"), "int8")
    here = {
        id(own): torch.empty(own.shape, dtype=own.dtype) for own in (empty.packed, empty.scales)
    }
    assert not empty.fill(lambda first, last: weight[first:last], lambda own: (here[id(own)], 0))
