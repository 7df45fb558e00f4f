"""ZeRO's stages and ZeRO++ through the engine, at 4 ranks as 2 nodes of 2: bytes, bits, losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from bench.traffic import Total, Traffic, counting_traffic
from tandem.config.engine import engine_settings
from tandem.config.lora import LoraConfig
from tandem.config.schema import OptimizerConfig, ParallelConfig, RunConfig
from tandem.engine.ema import MovingAverage
from tandem.engine.forward import rank_micro_batches_of, response_logprobs, whole_weights
from tandem.engine.joint_step import step_learners
from tandem.engine.learner import Learner
from tandem.engine.oom import MicroBatchBudget
from tandem.engine.placement import Placement
from tandem.engine.shard_plan import ZeroPlusPlus, check_layout, zero_plus_plus
from tandem.engine.update import rehearse
from tandem.errors import ConfigError
from tandem.memory.model import checkpoint_bytes, layout_of, role_memory
from tandem.memory.shape import shape_of
from tandem.ops.blockwise import INT8, dequantize, quantize
from tandem.parallel.dtensor import local, whole
from tandem.parallel.quantize import shard_numels, unit_parameters
from tandem.parallel.scaling import LossScaler
from tandem.parallel.shard import Shards, shards_of
from tandem.parallel.world import World
from tandem.training.saving import save_anywhere
from tests.models.families import ragged_batch, tiny_model, tokenizer
from tests.ranks import on_ranks

RANKS, PER_NODE = 4, 2
LENGTHS = (9, 5, 12, 3, 7, 30, 4, 4, 11)
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 128}
SETTINGS = OptimizerConfig(learning_rate=1e-2, max_grad_norm=0.5, warmup=0)
PLAIN = ParallelConfig(actor_zero_stage=3, critic_zero_stage=3)
QWZ = replace(PLAIN, zero_quantized_weights=True)
QGZ = replace(PLAIN, zero_quantized_gradients=True)
HPZ = replace(PLAIN, zero_hpz=True)
ALL = replace(QWZ, zero_quantized_gradients=True, zero_hpz=True)


def at_stage(parallel: ParallelConfig, stage: int) -> ParallelConfig:
    return replace(parallel, actor_zero_stage=stage, critic_zero_stage=stage)


@dataclass
class Training:
    """A tiny actor in training, as the engine lays it out."""

    world: World
    config: RunConfig
    model: PreTrainedModel
    learner: Learner

    def step(self, seed: int, micro_batch: int = 1000, traffic: Traffic | None = None) -> float:
        """One optimizer step over all rows; the loss over all ranks."""
        phase = (traffic or Traffic(PER_NODE)).phase
        batch = ragged_batch(LENGTHS, seed=seed)
        count, total = batch.num_response_tokens, 0.0
        for rows, part in rank_micro_batches_of(batch, micro_batch, self.world):
            with phase("forward"):
                loss = -response_logprobs(self.model, batch.select(rows))[0].sum()
            with phase("backward"):
                self.learner.backward(loss, count, weight=part.weight, is_last=part.is_last)
            total += part.weight * float(loss.detach())
        with phase("step"):
            if self.learner.scaler is None:
                self.learner.step()
            else:
                step_learners([self.learner], self.learner.scaler)
        return self.world.all_reduce_sum({"loss": total})["loss"] / count


def training(world: World, config: RunConfig, **changes: Any) -> Training:
    model = Placement(engine_settings(config), world).policy(
        tiny_model("llama", **changes), trained=True, seed=5
    )
    learner = Learner(
        "actor",
        model,
        replace(SETTINGS, lora_learning_rate=1e-2),
        num_steps=100,
        parallel=config.parallel,
        scaler=LossScaler() if config.dtype == "fp16" else None,
    )
    return Training(world, config, model, learner)


def gathered(model: PreTrainedModel) -> list[Tensor]:
    """The weights as forwards see them."""
    with whole_weights(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


def shares(world: World, shards: Shards) -> list[int]:
    """Numbers of each unit that a rank has, padding included."""
    return [sum(shard_numels(unit_parameters(unit), world.size)) for unit in shards.units]


@dataclass(frozen=True)
class Seen:
    """One optimizer step's collectives on one rank, and the numbers of each unit in its share."""

    totals: dict[tuple[str, str], Total]
    shares: list[int]
    num_micro_batches: int
    weights: int
    tensors: int

    def of(self, phase: str, kind: str) -> Total:
        return self.totals.get((phase, kind), Total())


def one_step(world: World, config: RunConfig, micro_batch: int) -> Seen:
    run = training(world, config, **WIDE)
    run.step(0)  # what is done once, as groups that are made, is over
    with counting_traffic(world.ranks_per_node) as traffic:
        run.step(1, micro_batch, traffic)
    assert not traffic.unknown
    units = shares(world, run.learner.shards) if run.learner.shards.is_split else []
    sizes = [p.numel() for p in run.model.parameters()]
    dealt = rank_micro_batches_of(ragged_batch(LENGTHS, seed=1), micro_batch, world)
    return Seen(traffic.totals(), units, len(dealt), sum(sizes), len(sizes))


def steps_of_every_stage(world: World) -> dict[tuple[int, int], Seen]:
    return {
        (stage, micro_batch): one_step(world, RunConfig(parallel=at_stage(PLAIN, stage)), size)
        for stage in range(4)
        for micro_batch, size in ((1, 1000), (3, 12))
    }


def test_every_stage_sends_what_theory_says() -> None:
    for by_stage in on_ranks(RANKS, steps_of_every_stage, ranks_per_node=PER_NODE):
        for (stage, accumulated), seen in by_stage.items():
            times = seen.num_micro_batches
            assert (times > 1) == (accumulated > 1)
            norm = seen.of("step", "all_reduce")
            if stage == 0:
                # All gradients in float32, once a step, 2 * 3/4 of them; one bucket.
                assert norm.count == 1
                assert norm.sent_bytes == 4 * seen.weights * 2 * 3 // 4
                assert not any(phase in ("forward", "backward") for phase, _ in seen.totals)
                continue
            gathers = {1: 1, 2: 1, 3: times}[stage]
            reduces = {1: 1, 2: times, 3: times}[stage]
            # The model's own unit comes first; it stays whole from forward to backward.
            model, blocks = 4 * sum(seen.shares), 4 * sum(seen.shares[1:])
            forward, backward = seen.of("forward", "all_gather"), seen.of("backward", "all_gather")
            assert forward.sent_bytes == 3 * gathers * model
            assert forward.inter_node_bytes == 2 * gathers * model
            assert backward.sent_bytes == (3 * times * blocks if stage == 3 else 0)
            reduced = seen.of("backward", "reduce_scatter")
            assert reduced.count == reduces * len(seen.shares)
            assert reduced.sent_bytes == 3 * reduces * model
            assert reduced.inter_node_bytes == 2 * reduces * model
            # The square, and of each tensor whether a rank has a gradient.
            assert (norm.count, norm.buffer_bytes) == (1, 8 * (1 + seen.tensors))


def steps_of_replicas(world: World) -> list[Seen]:
    return [
        one_step(world, RunConfig(parallel=replace(at_stage(PLAIN, stage), replicas=2)), 12)
        for stage in (1, 2, 3)
    ]


def test_a_replica_on_each_node_sends_between_them_one_sum_of_its_pieces_a_step() -> None:
    for by_stage in on_ranks(RANKS, steps_of_replicas, ranks_per_node=PER_NODE):
        for seen in by_stage:
            assert seen.num_micro_batches > 1
            for phase in ("forward", "backward"):
                assert seen.of(phase, "all_gather").inter_node_bytes == 0
                assert seen.of(phase, "reduce_scatter").inter_node_bytes == 0
            summed = seen.of("backward", "all_reduce")
            # In float32, of the half of the weights that lies on a rank; padded to equal pieces.
            assert seen.weights * 2 <= summed.buffer_bytes <= seen.weights * 2 * 1.1
            assert summed.inter_node_bytes == summed.sent_bytes == summed.buffer_bytes


def steps_of_every_part(world: World) -> dict[str, Seen]:
    parts = {"plain": PLAIN, "qwz": QWZ, "qgz": QGZ, "hpz": HPZ, "all": ALL}
    parts["all, 4 bits"] = replace(ALL, zero_gradient_bits=4)
    for stage in (1, 2):
        parts[f"plain {stage}"], parts[f"all {stage}"] = (
            at_stage(PLAIN, stage),
            at_stage(ALL, stage),
        )
    seen = {name: one_step(world, RunConfig(parallel=part), 1000) for name, part in parts.items()}
    seen["all, 3 micro-batches"] = one_step(world, RunConfig(parallel=ALL), 12)
    return seen


def test_every_part_of_zero_plus_plus_sends_fewer_bytes() -> None:
    for seen in on_ranks(RANKS, steps_of_every_part, ranks_per_node=PER_NODE):
        plain, hpz, every = seen["plain"], seen["hpz"], seen["all"]
        forward, backward = plain.of("forward", "all_gather"), plain.of("backward", "all_gather")
        reduced = plain.of("backward", "reduce_scatter")
        for name in ("qwz", "all"):
            assert forward.sent_bytes > 3.9 * seen[name].of("forward", "all_gather").sent_bytes
        assert backward.sent_bytes > 3.9 * seen["qwz"].of("backward", "all_gather").sent_bytes
        for one in (hpz, every):
            assert one.of("backward", "all_gather").sent_bytes > 0
            assert one.of("backward", "all_gather").inter_node_bytes == 0
        for one in (seen["qgz"], every, seen["all, 4 bits"]):
            assert one.of("backward", "reduce_scatter") == Total()
            sent = one.of("backward", "all_to_all")
            assert reduced.sent_bytes > 3.9 * sent.sent_bytes
            assert reduced.inter_node_bytes > 7.8 * sent.inter_node_bytes
        int4 = seen["all, 4 bits"].of("backward", "all_to_all")
        assert reduced.inter_node_bytes > 15 * int4.inter_node_bytes
        for stage in (1, 2):
            before, after = seen[f"plain {stage}"], seen[f"all {stage}"]
            for kind in ("all_gather", "reduce_scatter"):
                other = "all_to_all" if kind == "reduce_scatter" else kind
                sent = sum(before.of(phase, kind).sent_bytes for phase in ("forward", "backward"))
                fewer = sum(after.of(phase, other).sent_bytes for phase in ("forward", "backward"))
                assert sent > 3.9 * fewer > 0
        more = seen["all, 3 micro-batches"]
        per_reduction = every.of("backward", "all_to_all").sent_bytes
        sent = more.of("backward", "all_to_all").sent_bytes
        assert sent == more.num_micro_batches * per_reduction


CASES: dict[str, RunConfig] = {
    "plain": RunConfig(parallel=PLAIN),
    "qwz": RunConfig(parallel=QWZ),
    "qgz": RunConfig(parallel=QGZ),
    "hpz": RunConfig(parallel=HPZ),
    "all": RunConfig(parallel=ALL),
    "all, 4 bits": RunConfig(parallel=replace(ALL, zero_gradient_bits=4)),
    "all, stage 1": RunConfig(parallel=at_stage(ALL, 1)),
    "all, stage 2": RunConfig(parallel=at_stage(ALL, 2)),
    "all, weights on the host": RunConfig(parallel=replace(ALL, offload=("params",))),
    "all, masters on the host": RunConfig(parallel=replace(ALL, offload=("optimizer",))),
    "bf16": RunConfig(parallel=PLAIN, dtype="bf16"),
    "all, bf16": RunConfig(parallel=ALL, dtype="bf16"),
    "all, fp16": RunConfig(parallel=ALL, dtype="fp16"),
    "all, fp16, 4 bits": RunConfig(parallel=replace(ALL, zero_gradient_bits=4), dtype="fp16"),
    # Rank 2 over 4 ranks: two of them hold nothing of half of the adapters.
    "lora": RunConfig(parallel=PLAIN, lora=LoraConfig(rank=2)),
    "all, lora": RunConfig(parallel=ALL, lora=LoraConfig(rank=2)),
    "all, lora, 4 bits": RunConfig(
        parallel=replace(ALL, zero_gradient_bits=4), lora=LoraConfig(rank=2)
    ),
    "all, lora, bf16": RunConfig(parallel=ALL, lora=LoraConfig(rank=2), dtype="bf16"),
}


MORE = {"all, stage 1", "all, fp16, 4 bits", "all, lora, 4 bits", "all, lora, bf16"}
"""Cases whose stages, types, bits and adapters are in other cases too."""


def trained(world: World, names: Sequence[str]) -> dict[str, tuple[list[float], list[Tensor]]]:
    """Losses of two steps and the weights that forwards then see, by case."""
    found = {}
    for name in names:
        config = CASES[name]
        run = training(world, config)
        losses = [run.step(0, micro_batch) for micro_batch in (1000, 12)]
        found[name] = losses, gathered(run.model)
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in CASES if name not in MORE], id="most"),
        pytest.param(list(CASES), marks=pytest.mark.slow, id="all"),
    ],
)
def test_every_case_trains_and_every_rank_ends_with_the_same_bits(names: Sequence[str]) -> None:
    first, *others = on_ranks(RANKS, trained, names, ranks_per_node=PER_NODE)
    for name, (losses, weights) in first.items():
        plain, _ = first["lora" if "lora" in name else "plain"]
        assert losses == pytest.approx(plain, rel=0.03 if "bits" in name else 0.02), name
        assert losses[-1] < losses[0]
        for other in others:
            assert other[name][0] == losses
            for ours, theirs in zip(weights, other[name][1], strict=True):
                assert torch.equal(ours, theirs), name
    assert first["hpz"][0] == first["plain"][0]
    for name in ("qwz", "qgz"):
        assert first[name][0] != first["plain"][0]


def exact_masters(world: World, folder: str) -> list[bool]:
    """Masters, moving average and what is saved know nothing of how weights travel."""
    run = training(world, RunConfig(parallel=ALL))
    start = {name: whole(p.detach()).clone() for name, p in run.model.named_parameters()}
    average = MovingAverage(run.model, 0.5)
    run.step(0)
    average.update()
    average.update()
    moved = {name: whole(p.detach()) for name, p in run.model.named_parameters()}
    shadow = {name: whole(value) for name, value in average.state_tensors().items()}
    save_anywhere(run.model, tokenizer(), Path(folder))
    world.barrier()
    saved = load_file(Path(folder) / "model.safetensors")
    # Where it travelled it is what int8 makes of each rank's share of it.
    seen = {}
    with whole_weights(run.model):
        seen = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    rounded = {name: _as_int8(weight, world.size) for name, weight in moved.items()}
    return [
        all(torch.equal(saved[name], weight) for name, weight in moved.items()),
        all(
            torch.allclose(shadow[name], 0.25 * start[name] + 0.75 * moved[name], atol=1e-6)
            for name in shadow
        ),
        all(torch.equal(seen[name], rounded[name]) for name in seen),
        not any(torch.equal(seen[name], moved[name]) for name in seen if moved[name].dim() > 1),
    ]


def _as_int8(weight: Tensor, ranks: int) -> Tensor:
    """Row by row of the ranks' shares, as torch.chunk deals them."""
    rows = -(-weight.shape[0] // ranks)
    parts = [part.reshape(1, -1) for part in weight.split(rows)]
    read = [dequantize(*quantize(part, INT8), part.shape[1], INT8) for part in parts]
    return torch.cat([part.view(-1, *weight.shape[1:]) for part in read])


def test_only_what_travels_is_rounded(tmp_path: Path) -> None:
    found = on_ranks(RANKS, exact_masters, str(tmp_path / "model"), ranks_per_node=PER_NODE)
    assert found == [[True] * 4] * RANKS


def rehearsed(run: Training) -> None:
    """As a run does when it goes on from a checkpoint: it must leave no trace."""
    batch = ragged_batch(LENGTHS, seed=0)
    budget = MicroBatchBudget(engine_settings(run.config), run.world, None)
    rehearse(budget, run.learner, lambda tokens: -response_logprobs(run.model, batch)[0].sum())


def resumed(world: World) -> tuple[bool, bool, int]:
    """Four steps against two, a restart and two, which knows what feedback held back or not."""
    config = RunConfig(parallel=replace(ALL, zero_gradient_bits=4))
    run = training(world, config)

    def go(run: Training, steps: range) -> list[Tensor]:
        for step in steps:
            run.step(step)
        return gathered(run.model)

    def kept(shards: Shards) -> dict[str, Tensor]:
        assert shards.quantized is not None
        return {name: whole(t).clone() for name, t in shards.quantized.residuals().items()}

    go(run, range(2))
    state = {name: whole(t).clone() for name, t in run.learner.state_tensors().items()}
    weights = {name: whole(t).clone() for name, t in run.learner.weights().items()}
    residuals = kept(run.learner.shards)
    straight = go(run, range(2, 4))
    ends = []
    for known in (residuals, {}):
        again = training(world, config)
        again.learner.load_weights(weights)
        again.learner.load_state_tensors(state)
        quantized = shards_of(again.model).quantized
        assert quantized is not None
        quantized.restore(known)
        rehearsed(again)
        ends.append(go(again, range(2, 4)))
    same, forgetful = (
        all(torch.equal(a, b) for a, b in zip(straight, end, strict=True)) for end in ends
    )
    return same, forgetful, sum(t.nbytes for t in residuals.values())


def test_error_feedback_is_a_part_of_the_state() -> None:
    numel = sum(p.numel() for p in tiny_model("llama").parameters())
    for same, forgetful, num_bytes in on_ranks(RANKS, resumed, ranks_per_node=PER_NODE):
        assert same
        assert not forgetful
        # Over all ranks, and padded: 4 bytes of each weight for each place in a node.
        assert num_bytes == pytest.approx(4 * numel * PER_NODE, rel=0.02)


def feedback_bytes(world: World) -> tuple[int, float, float]:
    """This rank's error feedback after a step, beside what the forecast counts of memory and of a
    checkpoint on all ranks."""
    parallel = replace(ALL, zero_gradient_bits=4, zero_forced=True)
    parallel = replace(parallel, ranks_per_node=world.ranks_per_node)
    config = RunConfig(parallel=parallel, dtype="fp32")
    run = training(world, config)
    run.step(0)
    quantized = run.learner.shards.quantized
    assert quantized is not None
    own = sum(local(tensor).nbytes for tensor in quantized.residuals().values())
    shape = shape_of(run.model.config)
    settings = engine_settings(config)
    layout = layout_of(settings, world.size, "actor", on_cpu=True, half=False)
    assert not layout_of(settings, 1, "actor", on_cpu=True, half=False).feedback
    exact = replace(layout, feedback=0)
    counted = role_memory(shape, layout).resting["gradients' rounding errors"]
    saved, without = (checkpoint_bytes([(shape, each)], whole=True) for each in (layout, exact))
    assert role_memory(shape, exact).resting.keys() < role_memory(shape, layout).resting.keys()
    return own, counted, (saved - without) / world.size


@pytest.mark.parametrize(("ranks", "per_node"), [(RANKS, PER_NODE), (2, 2)])
def test_the_forecast_counts_error_feedback(ranks: int, per_node: int) -> None:
    for own, counted, saved in on_ranks(ranks, feedback_bytes, ranks_per_node=per_node):
        assert counted == saved
        assert counted == pytest.approx(own, rel=0.02)


def second_copy_bytes(world: World) -> tuple[int, float]:
    """What torch keeps of the blocks between forward and backward, beside the forecast's count."""
    config = RunConfig(parallel=HPZ, dtype="fp32")  # the nodes are the world's, not a knob's
    run = training(world, config, num_hidden_layers=3)
    loss = response_logprobs(run.model, ragged_batch(LENGTHS, seed=0))[0].sum()
    kept = 0
    for unit in run.learner.shards.units:
        group = unit._get_fsdp_state()._fsdp_param_group
        assert group is not None
        name = "_sharded_post_forward_param_data"
        pieces = [getattr(each, name, None) for each in group.fsdp_params]
        kept += sum(piece.nbytes for piece in pieces if piece is not None)
    loss.backward()
    shape, settings = shape_of(run.model.config), engine_settings(config)
    node = world.ranks_per_node
    layout = layout_of(settings, world.size, "actor", on_cpu=True, half=False, per_node=node)
    return kept, role_memory(shape, layout).working.get("second copy in the node", 0.0)


@pytest.mark.parametrize(("ranks", "per_node"), [(RANKS, PER_NODE), (2, 2)])
def test_the_forecast_counts_the_second_copy(ranks: int, per_node: int) -> None:
    for own, counted in on_ranks(ranks, second_copy_bytes, ranks_per_node=per_node):
        assert counted == pytest.approx(own, rel=0.02)
        assert (own > 0) == (per_node < ranks)


def held_back(world: World) -> list[float]:
    """The largest number that feedback holds back after each of some scaled steps."""
    run = training(world, RunConfig(parallel=replace(ALL, zero_gradient_bits=4), dtype="fp32"))
    run.learner.scaler = scaler = LossScaler(2.0**10, growth_interval=2)
    quantized, batch, found = run.learner.shards.quantized, ragged_batch(LENGTHS, seed=0), []
    assert quantized is not None
    for factor in (1.0, 1.0, 1.0, float("inf"), 1.0):
        loss = factor * -response_logprobs(run.model, batch)[0].sum()
        run.learner.backward(loss, batch.num_response_tokens)
        step_learners([run.learner], scaler)
        kept = quantized.residuals().values()
        found.append(max((float(local(part).abs().max()) for part in kept), default=0.0))
    assert scaler.scale == 2.0**10  # doubled once, halved once
    return found


def test_error_feedback_begins_again_with_another_loss_scale() -> None:
    for first, doubled, third, overflowed, last in on_ranks(2, held_back, ranks_per_node=1):
        assert doubled == overflowed == 0
        assert min(first, third, last) > 0


def overfitted(world: World, cases: list[ParallelConfig]) -> list[float]:
    last = []
    for parallel in cases:
        run = training(world, RunConfig(parallel=parallel))
        last.append([run.step(0) for _ in range(50)][-1])
    return last


@pytest.mark.slow
def test_fifty_steps_converge_as_without() -> None:
    cases = [PLAIN, QWZ, QGZ, ALL, replace(ALL, zero_gradient_bits=4)]
    found = on_ranks(RANKS, overfitted, cases, ranks_per_node=PER_NODE)
    plain, *others = found[0]
    assert found == [found[0]] * RANKS
    assert plain < 0.5
    for loss in others:
        assert loss == pytest.approx(plain, rel=0.1)


def nodes(ranks: int, per_node: int) -> World:
    return World(0, ranks, per_node)


@pytest.mark.parametrize(
    ("world", "parallel", "settings", "parts"),
    [
        (nodes(4, 2), ALL, ZeroPlusPlus(True, True, 8), ()),
        (nodes(4, 2), replace(ALL, zero_gradient_bits=4), ZeroPlusPlus(True, True, 4), ()),
        (nodes(4, 2), PLAIN, ZeroPlusPlus(), ()),
        (nodes(4, 2), at_stage(ALL, 2), ZeroPlusPlus(False, True, 8),
         ("parallel.zero_hpz switched off: it takes ZeRO stage 3", "at most 2")),
        (nodes(4, 2), at_stage(ALL, 0), ZeroPlusPlus(),
         ("parallel.zero_hpz switched", "it takes ZeRO stage 1, and the stages are at most 0")),
        (nodes(4, 4), ALL, ZeroPlusPlus(),
         ("all 4 ranks share one node", "--zero-forced keeps it on", "parallel.zero_hpz")),
        (nodes(4, 4), replace(ALL, zero_forced=True), ZeroPlusPlus(False, True, 8),
         ("parallel.zero_hpz switched off: all 4 ranks",)),
        (nodes(4, 1), ALL, ZeroPlusPlus(False, True, 8), ("zero_hpz switched off: a node of one",)),
        (nodes(1, 1), replace(ALL, zero_forced=True), ZeroPlusPlus(),
         ("parallel.zero_quantized_gradients switched off: one rank sends nothing",)),
    ],
)  # fmt: skip
def test_what_is_of_no_use_is_switched_off_and_said(
    world: World, parallel: ParallelConfig, settings: ZeroPlusPlus, parts: tuple[str, ...]
) -> None:
    found, line = zero_plus_plus(engine_settings(RunConfig(parallel=parallel)), world)
    assert found == settings
    assert bool(line) == bool(parts)
    assert "\n" not in line
    for part in parts:
        assert part in line


def test_the_stages_that_count_are_those_of_the_steps_that_run() -> None:
    parallel = replace(ALL, actor_zero_stage=3, critic_zero_stage=0)
    assert zero_plus_plus(
        engine_settings(RunConfig(stages=("reward",), parallel=parallel)), nodes(4, 2)
    )[1]
    assert not zero_plus_plus(
        engine_settings(RunConfig(stages=("sft",), parallel=parallel)), nodes(4, 2)
    )[1]
    on_host = replace(parallel, offload=("params",))  # offloaded weights lie in pieces always
    assert not zero_plus_plus(
        engine_settings(RunConfig(stages=("reward",), parallel=on_host)), nodes(4, 2)
    )[1]


@pytest.mark.parametrize(
    ("parallel", "part"),
    [
        (replace(PLAIN, zero_gradient_bits=4), "must go with parallel.zero_quantized_gradients"),
        (replace(ALL, inference_tp_size=2), "must go without tensor-parallel generation"),
    ],
)
def test_knobs_that_do_not_go_together_are_refused(parallel: ParallelConfig, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_layout(engine_settings(RunConfig(parallel=parallel)), nodes(4, 2))
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def forced(world: World) -> tuple[bool, bool]:
    """On one node: exact unless forced."""
    exact, quantized = (
        training(world, RunConfig(parallel=replace(ALL, zero_forced=on))) for on in (False, True)
    )
    masters = [local(p.detach()) for p in exact.model.parameters()]
    whole_masters = [whole(p.detach()) for p in exact.model.parameters()]
    assert masters[0].numel() < whole_masters[0].numel()
    quantized.step(0)
    return (
        all(torch.equal(a, b) for a, b in zip(gathered(exact.model), whole_masters, strict=True)),
        shards_of(quantized.model).quantized is not None,
    )


def test_one_node_quantizes_only_where_forced() -> None:
    assert on_ranks(2, forced) == [(True, True)] * 2
