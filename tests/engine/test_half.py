"""Half precision: every role and layout computes with the same bits; masters, averages, saves."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from tandem.config.engine import engine_settings
from tandem.config.schema import OptimizerConfig, ParallelConfig, RunConfig, SamplingConfig
from tandem.engine import checks
from tandem.engine.checks import check_same_start
from tandem.engine.ema import MovingAverage
from tandem.engine.forward import rank_micro_batches_of, response_logprobs
from tandem.engine.joint_step import step_learners
from tandem.engine.learner import Learner
from tandem.engine.placement import Placement
from tandem.errors import NumericsError
from tandem.generation import session
from tandem.generation.runner import new_memory
from tandem.ops.attention_context import KVMemory
from tandem.ops.logits import BUDGET_BYTES
from tandem.parallel.dtensor import whole
from tandem.parallel.scaling import LossScaler
from tandem.parallel.world import World
from tandem.training.make_engine import make_engine
from tandem.training.saving import save_anywhere
from tests.generation.cuda_stand_ins import stand_in
from tests.generation.gpu_sessions import found_by_address, in_buckets, prompts
from tests.generation.rollouts import assert_same, bitwise
from tests.models.families import ragged_batch, tiny_model, tiny_scalar, tokenizer
from tests.ranks import on_ranks

LENGTHS = (9, 5, 12, 3, 7, 30, 4, 4, 11)
SETTINGS = OptimizerConfig(learning_rate=1e-3, max_grad_norm=0.5, warmup=0)
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Relative, after three steps: bf16 and fp16 gradients of a micro-batch are rounded before they are
# added up in float32, and other layouts cut micro-batches otherwise.
TOLERANCE = {"bf16": 1e-2, "fp16": 1e-3}
LAYOUTS = [(1, 0, ()), (1, 0, ("optimizer",)), (1, 0, ("params",)), *((2, s, ()) for s in range(4)),
           (2, 0, ("optimizer",)), (2, 2, ("optimizer",))]  # fmt: skip


def config_of(dtype: str, stage: int = 0, offload: tuple[str, ...] = (), **more: Any) -> RunConfig:
    parallel = ParallelConfig(
        actor_zero_stage=stage, critic_zero_stage=stage, offload=offload, **more
    )
    return RunConfig(dtype=dtype, parallel=parallel)


def policy(
    config: RunConfig, world: World, *, trained: bool, source: str | int | None = None
) -> PreTrainedModel:
    """A policy in its place, from a folder or of so many tokens."""
    if not isinstance(source, str):
        source = tiny_model("llama", **({} if source is None else {"vocab_size": source}))
    return Placement(engine_settings(config), world).policy(source, trained=trained, seed=5)


def trainee_of(model: PreTrainedModel, config: RunConfig) -> Learner:
    return Learner(
        "actor",
        model,
        SETTINGS,
        num_steps=3,
        parallel=config.parallel,
        dtype=TYPES[config.dtype],
        scaler=LossScaler(1024.0) if config.dtype == "fp16" else None,
    )


def step(learner: Learner, world: World, seed: int) -> float:
    batch = ragged_batch(LENGTHS, seed=seed)
    count, total = batch.num_response_tokens, 0.0
    for rows, part in rank_micro_batches_of(batch, 20, world):
        loss = -response_logprobs(learner.model, batch.select(rows))[0].sum()
        learner.backward(loss, count, weight=part.weight, is_last=part.is_last)
        total += part.weight * float(loss.detach())
    if learner.scaler is None:
        learner.step()
    else:
        assert step_learners([learner], learner.scaler) is not None
    return world.all_reduce_sum({"loss": total})["loss"] / count


def trained(
    world: World,
    dtype: str,
    stage: int,
    offload: tuple[str, ...],
    source: str | int | None = None,
    steps: int = 3,
) -> tuple[Any, ...]:
    """The gap to the reference before training, losses of all steps, and the masters."""
    config = config_of(dtype, stage, offload)
    actor = policy(config, world, trained=True, source=source)
    reference = policy(config, world, trained=False, source=source)
    learner = trainee_of(actor, config)
    gap = check_same_start(actor, reference)
    losses = [step(learner, world, seed) for seed in range(steps)]
    return gap, losses, {n: whole(w).float().clone() for n, w in learner.weights().items()}


@cache
def trained_alone(dtype: str) -> tuple[Any, ...]:
    """By one process with whole weights, which every layout is compared with; made once."""
    return trained(World(), dtype, 0, ())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("ranks", "stage", "offload"), LAYOUTS)
def test_every_layout_starts_alike_and_trains_alike(
    dtype: str, ranks: int, stage: int, offload: tuple[str, ...]
) -> None:
    _, expected, masters = trained_alone(dtype)
    if ranks == 1:
        found = [trained(World(), dtype, stage, offload)]
    else:
        found = on_ranks(ranks, trained, dtype, stage, offload)
    for gap, losses, weights in found:
        assert gap == 0.0
        assert losses[0] == pytest.approx(expected[0], rel=1e-6)
        assert losses == pytest.approx(expected, rel=TOLERANCE[dtype])
        for name, master in masters.items():
            # A step of AdamW is at most the learning rate; signs of tiny gradients may differ.
            assert float((weights[name] - master).abs().mean()) < 3e-4, name


@pytest.mark.parametrize(
    "vocabulary", [50_257, 128_256, pytest.param(151_936, marks=pytest.mark.slow)]
)
def test_real_vocabularies_start_alike_and_train_alike(
    vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows of logits at once, so that every micro-batch takes several chunks."""
    monkeypatch.setitem(BUDGET_BYTES, "cpu", 6 * 2 * vocabulary)
    _, expected, masters = trained(World(), "bf16", 0, (), vocabulary, 2)
    for gap, losses, weights in on_ranks(2, trained, "bf16", 2, (), vocabulary, 2):
        assert gap == 0.0
        assert losses == pytest.approx(expected, rel=1e-3)
        for name, master in masters.items():
            assert float((weights[name] - master).abs().mean()) < 3e-4, name


def without_masters(world: World, *arguments: Any) -> tuple[Any, ...]:
    """As `trained`, without the weights, which take long to hand over."""
    return trained(world, *arguments)[:2]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_real_model_starts_alike_and_trains_alike(dtype: str, smollm2: Path) -> None:
    expected = without_masters(World(), dtype, 0, (), str(smollm2), 2)
    assert expected[0] == 0.0
    for gap, losses in on_ranks(2, without_masters, dtype, 2, (), str(smollm2), 2):
        assert gap == 0.0
        assert losses == pytest.approx(expected[1], rel=1e-2 if dtype == "bf16" else 1e-5)


def gap_through_codes(world: World, stage: int) -> float:
    config = config_of("fp32", stage, zero_quantized_weights=True, zero_forced=True)
    actor = policy(config, world, trained=True)
    return check_same_start(actor, policy(config, world, trained=False))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_in_few_bits_are_the_same_for_the_reference(stage: int) -> None:
    assert on_ranks(2, gap_through_codes, stage) == [0.0, 0.0]


def test_another_reference_is_refused_by_its_first_layer() -> None:
    actor, other = tiny_model("llama"), tiny_model("llama")
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight[0, 0] += 0.5
    with pytest.raises(NumericsError, match=r"at most 0 nats.*the output of layer 1 differs first"):
        check_same_start(actor, other)
    assert checks.TOLERANCE["cpu"] == 0.0


@pytest.mark.parametrize("offload", [(), ("optimizer",)])
def test_the_average_is_of_the_masters(offload: tuple[str, ...]) -> None:
    """Updates far below what bf16 resolves: |EMA - closed form| against how far it moved."""
    config = config_of("bf16", 0, offload)
    model = policy(config, World(), trained=True)
    settings = replace(SETTINGS, learning_rate=1e-6)
    learner = Learner("actor", model, settings, 40, parallel=config.parallel, dtype=torch.bfloat16)
    average = MovingAverage(model, 0.9, learner.masters)
    start = {name: w.clone() for name, w in learner.weights().items()}
    expected = {name: w.double().clone() for name, w in start.items()}
    for seed in range(20):
        step(learner, World(), seed)
        average.update()
        for name, weight in learner.weights().items():
            expected[name] = 0.9 * expected[name] + 0.1 * weight.double()
    moved = torch.cat([(average.shadow[n].double() - start[n]).flatten() for n in start])
    should = torch.cat([(expected[n] - start[n]).flatten() for n in start])
    assert float(torch.cosine_similarity(moved, should, dim=0)) > 0.999


def test_weights_keep_their_addresses_and_their_bits() -> None:
    config = config_of("bf16")
    model = policy(config, World(), trained=True)
    before = [p.data_ptr() for p in model.parameters()]
    learner = trainee_of(model, config)
    average = MovingAverage(model, 0.5, learner.masters)
    for seed in range(2):
        step(learner, World(), seed)
        average.update()
    bits = [p.detach().clone() for p in model.parameters()]
    with average.applied():
        assert [p.data_ptr() for p in model.parameters()] == before
        assert any(not torch.equal(p, b) for p, b in zip(model.parameters(), bits, strict=True))
    with average.exact(), torch.no_grad():
        assert all(p.dtype == torch.float32 for p in model.parameters())
    with learner.exact():
        assert all(p.dtype == torch.float32 for p in model.parameters())
    assert [p.data_ptr() for p in model.parameters()] == before
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), bits, strict=True))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_a_module_in_memory_is_trained_like_a_folder(
    dtype: torch.dtype, compute: str, tmp_path: Path
) -> None:
    """A learning rate whose steps bf16 weights alone would lose moves nearly every weight."""
    tiny_model("llama").to(dtype).save_pretrained(tmp_path / "model")
    given = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert given.dtype == dtype
    config = config_of(compute)
    weights: list[dict[str, Tensor]] = []
    for source in (given, str(tmp_path / "model")):
        model = Placement(engine_settings(config), World()).policy(source, trained=True)
        settings = replace(SETTINGS, learning_rate=1e-5)
        learner = Learner("actor", model, settings, 5, dtype=TYPES[compute])
        start = {name: w.clone() for name, w in learner.weights().items()}
        assert {w.dtype for w in start.values()} == {torch.float32}
        for seed in range(5):
            step(learner, World(), seed)
        weights.append(dict(learner.weights()))
        moved = sum(int((w != start[n]).sum()) for n, w in weights[-1].items())
        assert moved > 0.9 * sum(w.numel() for w in start.values())
    assert all(torch.equal(weights[1][name], w) for name, w in weights[0].items())


@pytest.mark.parametrize(
    ("stored", "asked", "found"),
    [("bf16", "auto", "bf16"), ("fp16", "auto", "fp16"), ("fp32", "auto", "fp32"),
     ("bf16", "fp32", "fp32"), ("fp32", "bf16", "bf16")],
)  # fmt: skip
def test_a_model_is_saved_from_its_masters_in_the_type_asked_for(
    stored: str, asked: str, found: str, tmp_path: Path
) -> None:
    tiny_model("llama").to(TYPES[stored]).save_pretrained(tmp_path / "model")
    config = config_of("bf16")
    model = Placement(engine_settings(config), World()).policy(
        str(tmp_path / "model"), trained=True
    )
    learner = trainee_of(model, config)
    step(learner, World(), 0)
    save_anywhere(model, tokenizer(), tmp_path / "saved", learner.masters, asked)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {w.dtype for w in saved.values()} == {TYPES[found]}
    for name, master in learner.weights().items():
        assert torch.equal(saved[name], master.to(TYPES[found])), name
    assert LlamaForCausalLM.from_pretrained(tmp_path / "saved").dtype == TYPES[found]


@bitwise
def test_a_rollout_after_an_update_replays_what_was_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stand-ins replay CUDA graphs on a CPU, over bf16 weights that AdamW writes in place."""
    roles = make_engine(
        actor=tiny_model("llama"),
        reward_model=tiny_scalar("llama"),
        config=replace(
            config_of("bf16"),
            device="cpu",
            sampling=SamplingConfig(max_new_tokens=12, samples_per_prompt=2),
        ),
        tokenizer=tokenizer(),
        reward_tokenizer=tokenizer(),
    )
    rows = prompts(5, 20, 9)
    stand_in(monkeypatch)
    places: list[tuple[Tensor, Tensor]] = []

    def same_places(model: PreTrainedModel, num_blocks: int, num_slots: int) -> KVMemory:
        """A tape of operations knows no addresses: both rollouts get the same tensors."""
        memory = new_memory(model, num_blocks, num_slots)
        places[:] = places or memory.layers
        memory.layers = list(places)
        return memory

    recorded, rollouts = [], []
    for _ in range(2):
        with monkeypatch.context() as patch:
            seen = in_buckets(patch)
            found_by_address(patch)
            patch.setattr(session, "new_memory", same_places)
            rollouts.append(roles.rollout(rows, step=1))
        assert not seen.refused()
        assert seen.drawn > 0
        recorded.append(len(seen.recorded))
        assert_same(rollouts[-1], roles.rollout(rows, step=1))
        logprobs, _ = roles.actor_logprobs(rollouts[-1].batch, with_entropy=False)
        assert torch.equal(logprobs, rollouts[-1].rollout_logprobs)
        count = rollouts[-1].batch.num_response_tokens
        roles.actor_learner.backward(-logprobs.sum(), count)
        roles.actor_learner.step()
    assert recorded[0] > 2
    assert recorded[1] == 0
    assert not torch.equal(rollouts[0].rollout_logprobs, rollouts[1].rollout_logprobs)
