"""The engine on quantized and on shared frozen weights, over ranks, against full and separate."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.config.engine import engine_settings
from tandem.config.lora import LoraConfig
from tandem.config.schema import ParallelConfig, RunConfig, SamplingConfig
from tandem.engine.forward import rank_micro_batches_of, token_values
from tandem.engine.hybrid import RLHFEngine
from tandem.engine.placement import Placement
from tandem.errors import ModelError
from tandem.models.frozen import freeze_quantized
from tandem.models.load import load_causal_lm
from tandem.models.lora import adapters_off, add_lora, lora_parameters
from tandem.models.meta_init import WeightFiles
from tandem.models.save import save_model
from tandem.models.scalar import load_scalar_model, set_normalization
from tandem.parallel.dtensor import local, whole
from tandem.parallel.world import World
from tandem.training.make_engine import make_engine
from tandem.types import PromptRow, Source
from tests.models.families import saved
from tests.models.families import tiny_model as a_model
from tests.ranks import on_ranks
from tests.tiny import save_tiny_model, tiny_tokenizer

LORA = LoraConfig(rank=2)
PROMPTS = [
    PromptRow(tuple(range(4, 4 + n)), (), {}, Source("test", "test", n)) for n in (5, 9, 3, 12)
]
Starts = tuple[str, str, str]


def moved(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Adapters that have learned something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lora_parameters(model):
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """A base, and folders of a policy and a reward model that were trained on it with adapters."""
    folder = tmp_path_factory.mktemp("starts")
    base, tokenizer = save_tiny_model(folder / "base"), tiny_tokenizer()
    policy = load_causal_lm(base)
    add_lora(policy, LORA, seed=1)
    save_model(moved(policy, 1), tokenizer, folder / "sft")
    scalar = load_scalar_model(base, seed=2)
    add_lora(scalar, LORA, seed=2)
    set_normalization(scalar, 0.5, 2.0)
    save_model(moved(scalar, 2), tokenizer, folder / "reward")
    return base, str(folder / "sft"), str(folder / "reward")


def configured(
    kind: str, *, shared: bool = False, stage: int = 0, rank: int = 2, dtype: str = "fp32"
) -> RunConfig:
    return RunConfig(
        dtype=dtype,  # type: ignore[arg-type]
        lora=replace(LORA, rank=rank),
        sampling=SamplingConfig(max_new_tokens=8, samples_per_prompt=2),
        ppo=replace(RunConfig().ppo, old_logprobs="forward"),
        parallel=ParallelConfig(
            actor_zero_stage=stage,
            critic_zero_stage=stage,
            frozen_weights=kind,  # type: ignore[arg-type]
            shared_base=shared,
        ),
    )


def engine_of(world: World, starts: Starts, config: RunConfig) -> RLHFEngine:
    _, policy, reward = starts
    if not (config.parallel.frozen_weights or config.parallel.shared_base):
        # What those load of themselves, instead of merged weights.
        policy, reward = f"{policy}/adapter", f"{reward}/adapter"
    return make_engine(actor=policy, reward_model=reward, config=config, world=world)


def a_step(world: World, starts: Starts, config: RunConfig) -> list[Tensor]:
    """Two rollouts, all four roles' numbers of each, and an update of actor and critic between."""
    engine = engine_of(world, starts, config)
    found: list[Tensor] = []
    for step in (1, 2):
        rollout = engine.rollout(PROMPTS, step=step)
        numbers = engine.policy_numbers(rollout)
        assert torch.equal(numbers.logprobs, rollout.rollout_logprobs), "sampled is scored"
        found += [rollout.batch.token_ids, numbers.logprobs, numbers.ref_logprobs, numbers.values]
        found.append(engine.scores(rollout))
        for rows, part in rank_micro_batches_of(rollout.batch, 40, world):
            batch = rollout.batch.select(rows)
            last = {"weight": part.weight, "is_last": part.is_last}
            logprobs, _ = engine.actor_logprobs(batch, with_entropy=False)
            engine.actor_learner.backward(-logprobs.sum(), 50.0, **last)
            loss = token_values(engine.critic, batch).square().sum()
            engine.critic_learner.backward(loss, 50.0, **last)
        for learner in (engine.actor_learner, engine.critic_learner):
            found.append(torch.tensor(learner.step()))
    return found


Alone = Callable[[str, str], list[Tensor]]


@pytest.fixture(scope="module")
def alone(starts: Starts) -> Alone:
    """The step of one process by kind and dtype, each made once."""
    return cache(lambda kind, dtype: a_step(World(), starts, configured(kind, dtype=dtype)))


@pytest.mark.parametrize(("size", "stage", "kind"), [(2, 1, "int8"), (2, 3, "nf4"), (3, 2, "int8")])
def test_ranks_have_the_numbers_of_one(
    starts: Starts, alone: Alone, kind: str, size: int, stage: int
) -> None:
    one = alone(kind, "fp32")
    for found in on_ranks(size, a_step, starts, configured(kind, stage=stage)):
        assert torch.equal(found[0], one[0]), "the same texts"
        assert all(torch.equal(a, b) for a, b in zip(found[1:3], one[1:3], strict=True))
        for ours, theirs in zip(found[3:], one[3:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("", "fp32"), ("int8", "fp32"), ("nf4", "fp32"), ("", "bf16"), ("nf4", "bf16")],
)
def test_a_shared_base_has_the_numbers_of_separate_ones(
    starts: Starts, alone: Alone, kind: str, dtype: str
) -> None:
    separate = alone(kind, dtype)
    shared = a_step(World(), starts, configured(kind, shared=True, dtype=dtype))
    assert all(torch.equal(a, b) for a, b in zip(shared, separate, strict=True))


def test_a_shared_base_over_ranks(starts: Starts) -> None:
    separate = on_ranks(2, a_step, starts, configured("int8"))
    shared = on_ranks(2, a_step, starts, configured("int8", shared=True))
    for ours, theirs in zip(shared, separate, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def frozen_bytes(engine: RLHFEngine) -> int:
    """Bytes of what no role trains, adapters and heads aside; each storage once."""
    assert engine.scorer is not None
    return sum(
        {
            p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
            for model in (engine.actor, engine.critic, engine.scorer.model)
            for n, p in model.named_parameters()
            if not any(part in n for part in ("lora_", "start_", "score"))
        }.values()
    )


@pytest.mark.parametrize("kind", ["", "int8", "nf4"])
def test_a_shared_base_is_held_and_read_once(
    starts: Starts, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    separate = frozen_bytes(engine_of(World(), starts, configured(kind)))
    gc.collect()
    read: list[str] = []
    rows = WeightFiles.rows

    def watched(self: WeightFiles, name: str, first: int, last: int) -> Tensor:
        read.append(name)
        return rows(self, name, first, last)

    monkeypatch.setattr(WeightFiles, "rows", watched)
    shared = frozen_bytes(engine_of(World(), starts, configured(kind, shared=True)))
    assert separate == 3 * shared
    assert len(read) == len(set(read)), "no file is read twice"


def test_the_reference_is_the_policy_as_it_started(starts: Starts) -> None:
    base, policy, _ = starts
    start = load_causal_lm(f"{policy}/adapter").requires_grad_(False)
    freeze_quantized(start, "nf4")
    actor = Placement(engine_settings(configured("nf4")), World()).policy(
        policy, trained=True, keeps_start=True
    )
    ids = torch.arange(4, 14)[None]
    with torch.no_grad():
        expected = start(ids).logits
        assert torch.equal(actor(ids).logits, expected)
        moved(actor, 7)
        assert not torch.equal(actor(ids).logits, expected)
        with adapters_off(actor):
            assert torch.equal(actor(ids).logits, expected)
    # Merged weights quantized again would be another policy.
    merged = load_causal_lm(policy).requires_grad_(False)
    freeze_quantized(merged, "nf4")
    assert not torch.allclose(merged(ids).logits, expected, atol=1e-3)
    assert actor.name_or_path == base


def pieces(world: World, folder: str, kind: str) -> tuple[dict[str, Tensor], int, int]:
    """A streamed model's whole weights, the most that was read at once, and what lies here."""
    most = [0]
    rows = WeightFiles.rows

    def watched(self: WeightFiles, name: str, first: int, last: int) -> Tensor:
        read = rows(self, name, first, last)
        most[0] = max(most[0], read.numel())
        return read

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightFiles, "rows", watched)
        model = Placement(engine_settings(configured(kind, stage=3)), world).policy(
            folder, trained=True, seed=0
        )
    here = sum(local(p).numel() * p.element_size() for p in model.parameters())
    return {n: whole(p.detach()).clone() for n, p in model.named_parameters()}, most[0], here


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_each_rank_reads_and_quantizes_its_own_rows(tmp_path: Path, family: str, kind: str) -> None:
    folder = str(saved(a_model(family), tmp_path))
    expected = load_causal_lm(folder)
    largest = max(p.numel() for p in expected.parameters())
    add_lora(expected, LORA, seed=0)
    freeze_quantized(expected, kind)
    total = sum(p.numel() * p.element_size() for p in expected.parameters())
    for weights, most, here in on_ranks(3, pieces, folder, kind):
        for name, weight in expected.named_parameters():
            assert torch.equal(weights[name], weight), name
        # A piece, and the rest of the blocks and rows that it begins and ends in.
        assert most <= largest / 3 + 2 * 256 + 2 * expected.config.hidden_size
        assert here < total / 3 * 1.1


def unsound(world: World, folder: str) -> str:
    with pytest.raises(ModelError) as raised:
        Placement(engine_settings(configured("int8", stage=3)), world).policy(folder, trained=True)
    return str(raised.value)


def test_every_rank_stops_at_a_weight_that_is_not_finite(tmp_path: Path) -> None:
    model = a_model("llama")
    with torch.no_grad():
        model.get_submodule("model.layers.1.mlp.down_proj").weight[-1, -1] = torch.inf
    model.save_pretrained(tmp_path)
    first, second = on_ranks(2, unsound, str(tmp_path))
    assert "must be finite; got NaN or infinity in a weight on another rank" in first
    assert "must be finite; got NaN or infinity in model.layers.1.mlp.down_proj.weight" in second


@pytest.mark.parametrize("name", ["params", "optimizer"])
def test_a_step_with_offload_is_the_same(starts: Starts, alone: Alone, name: str) -> None:
    plain = alone("int8", "fp32")
    config = configured("int8")
    parallel = replace(config.parallel, offload=(name,))  # type: ignore[arg-type]
    offloaded = a_step(World(), starts, replace(config, parallel=parallel))
    for ours, theirs in zip(offloaded, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_frozen_roles_in_host_memory(starts: Starts, alone: Alone) -> None:
    config = configured("nf4")
    parallel = replace(config.parallel, offload=("reward",))
    plain = alone("nf4", "fp32")
    offloaded = a_step(World(), starts, replace(config, parallel=parallel))
    assert all(torch.equal(a, b) for a, b in zip(offloaded, plain, strict=True))


def test_models_on_other_bases_share_none(starts: Starts, tmp_path: Path) -> None:
    base, _, reward = starts
    other = save_tiny_model(tmp_path / "other", seed=1)
    config = configured("", shared=True)
    with pytest.raises(ModelError, match=rf"one model under actor.*got '{base}' under '{reward}'"):
        make_engine(actor=other, reward_model=reward, config=config)
    actor, tokenizer = load_causal_lm(other), tiny_tokenizer()
    with pytest.raises(ModelError, match=r"whose values differ.*Leave --shared-base off"):
        make_engine(actor=actor, tokenizer=tokenizer, reward_model=reward, config=config)
    engine = make_engine(
        actor=load_causal_lm(base),
        tokenizer=tokenizer,
        reward_model=reward,
        config=config,
    )
    alone = frozen_bytes(engine)
    assert alone == frozen_bytes(engine_of(World(), starts, config)), "equal values are shared too"
