"""Each family's slices against one process and Hugging Face's `generate`: key heads that several
ranks share, fused weights, adapters, and weights that a step has changed."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.config.engine import engine_settings
from tandem.config.lora import LoraConfig
from tandem.config.schema import OptimizerConfig, ParallelConfig, RunConfig, SamplingConfig
from tandem.engine.forward import rank_micro_batches_of, response_logprobs
from tandem.engine.learner import Learner
from tandem.engine.placement import prepare_for_training, shard_model
from tandem.engine.rollouts import generating, shared_rollout
from tandem.engine.shard_plan import shard_plan
from tandem.generation.hf_generate import check_generation
from tandem.generation.stops import Stops
from tandem.models import slice_plans
from tandem.models.lora import lora_layers
from tandem.models.selfcheck import Agreement, check_slices, check_twin
from tandem.models.tensor_parallel import ColumnLinear, RowLinear, SlicedNorm
from tandem.models.twin import decodes, kv_shapes, twin_of
from tandem.parallel.dtensor import local
from tandem.parallel.tensor import tensor_group
from tandem.parallel.world import World
from tandem.types import PromptRow, Source
from tests.models.families import EOS, FAMILIES, PAD, ragged_batch, tiny_model
from tests.models.measure_decoders import tiny_decoder
from tests.ranks import on_ranks

STOPS = Stops((EOS,), PAD, lambda ids: " ".join(map(str, ids)))
PROMPTS = [
    PromptRow(tuple(4 + (i * j) % 90 for j in range(n)), (), {}, Source("x", "x", i))
    for i, n in enumerate((3, 9, 4, 17, 2))
]
GREEDY = SamplingConfig(max_new_tokens=10, top_k=1)
ADAM = OptimizerConfig(learning_rate=5e-3, warmup=0)
SLICED = ColumnLinear | RowLinear | SlicedNorm
Changes = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Generated:
    """One generation phase: greedy answers and their log-probs, the check of the twin, each
    layer's key heads, the types of the slices' numbers, and what Hugging Face answers (alone)."""

    tokens: Tensor
    logprobs: Tensor
    agreement: Agreement
    key_heads: set[int]
    types: set[torch.dtype]
    hugging_face: list[tuple[int, ...]]


def generated(world: World, model: Any, config: RunConfig, parts: int) -> Generated:
    group = tensor_group(world, parts)
    settings = replace(engine_settings(config), sampling=GREEDY, seed=1)
    before = {name: local(p.detach()).clone() for name, p in model.named_parameters()}
    with generating(model, group):
        if decodes(model):
            agreement = check_twin(model, trains_elsewhere=group is not None)
        else:
            to_model = 0.0 if group is None else check_slices(model)
            agreement = Agreement(False, math.inf, check_generation(model), to_model)
        rollout = shared_rollout(model, PROMPTS, settings, STOPS, step=2, group=group)
        slices = [m for m in twin_of(model).modules() if isinstance(m, SLICED)]
        slices += [m for m in twin_of(model).modules() if type(m).__name__.endswith("Experts")]
        held = [weakref.ref(p) for part in slices for p in part.parameters()] if group else []
        types = {p.dtype for part in slices for p in part.parameters()}
        assert (len(held) > 0) == (group is not None)
        del slices
        heads = {shape.kv_heads for shape in kv_shapes(model)}
    for name, parameter in model.named_parameters():
        assert torch.equal(local(parameter.detach()), before[name]), name
    assert not any(slice_of() for slice_of in held), "slices are given back"
    asked = [] if world.size > 1 else [hugging_face(model, row) for row in PROMPTS]
    ids = rollout.batch.token_ids
    return Generated(ids, rollout.rollout_logprobs, agreement, heads, types, asked)


def hugging_face(model: Any, row: PromptRow) -> tuple[int, ...]:
    """Prompt and answer by transformers' own greedy search, in its own forward."""
    ids = torch.tensor([row.token_ids])
    made = model.eval().generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10,
        eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    return tuple(made[0].tolist())


def trained_and_generated(
    world: World, family: str, changes: Changes, stage: int, parts: int, rank: int, frozen: str
) -> list[Generated]:
    """Answers before and after a step of training."""
    parallel = ParallelConfig(frozen_weights=frozen)  # type: ignore[arg-type]
    config = RunConfig(lora=LoraConfig(rank=rank), parallel=parallel)
    settings = engine_settings(config)
    made = tiny_model if family in FAMILIES else tiny_decoder
    model = made(family, **dict(changes)).eval()
    prepare_for_training(model, settings, 0)
    for _, layer in lora_layers(model):
        with torch.no_grad():
            layer.lora_B.weight.copy_(torch.ones_like(layer.lora_B.weight) * 0.03)
    shard_model(model, shard_plan(stage, settings, world, trained=True), world)
    learner = Learner("actor", model, ADAM, 3, parallel=config.parallel)
    found = [generated(world, model, config, parts)]
    batch = ragged_batch((9, 5, 12, 3))
    for rows, part in rank_micro_batches_of(batch, 20, world):
        loss = -response_logprobs(model, batch.select(rows))[0].sum()
        learner.backward(loss, batch.num_response_tokens, weight=part.weight, is_last=part.is_last)
    learner.step()
    return [*found, generated(world, model, config, parts)]


@cache
def alone(family: str, changes: Changes, rank: int, frozen: str) -> list[Generated]:
    found = trained_and_generated(World(), family, changes, 0, 1, rank, frozen)
    assert not torch.equal(found[0].logprobs, found[1].logprobs), "a step that changes something"
    return found


def assert_same(
    family: str,
    changes: Changes,
    *,
    stage: int,
    parts: int,
    size: int = 0,
    rank: int = 0,
    frozen: str = "",
) -> list[list[Generated]]:
    """Every rank's answers are those of one process and of Hugging Face, before and after a step;
    what they made."""
    expected = alone(family, changes, rank, frozen)
    case = family, changes, stage, parts, rank, frozen
    made = on_ranks(size or parts, trained_and_generated, *case)
    for found in made:
        for ours, one, tolerance in zip(found, expected, (2e-5, 2e-4), strict=True):
            rows = [
                tuple(row[: len(told)].tolist())
                for row, told in zip(ours.tokens, one.hugging_face, strict=True)
            ]
            assert rows == one.hugging_face
            assert torch.equal(ours.tokens, one.tokens)
            assert torch.allclose(ours.logprobs, one.logprobs, atol=tolerance)
            assert ours.agreement.trustworthy or slice_plans._PLANS[family.split()[0]].by_generate
            assert ours.agreement.largest_gap < 1e-4
            assert ours.agreement.to_model < 1e-5
    return made


ONE_KEY_HEAD = (("num_key_value_heads", 1),)
EIGHT_OF_CODEGEN = (("n_embd", 64), ("n_head", 8))
EIGHT_HEADS = (("hidden_size", 64), ("num_attention_heads", 8), ("num_key_value_heads", 2))


@pytest.mark.parametrize(
    ("family", "changes", "stage", "parts", "rank"),
    [
        ("gemma", ONE_KEY_HEAD, 3, 2, 0),
        ("qwen2", ONE_KEY_HEAD, 2, 2, 2),  # biases
        ("qwen3", ONE_KEY_HEAD, 0, 2, 0),  # norms of heads
        ("llama", (), 3, 4, 2),  # two heads on four ranks
        ("llama", EIGHT_HEADS, 2, 4, 0),
    ],
)
def test_key_heads_that_several_ranks_read(
    family: str, changes: Changes, stage: int, parts: int, rank: int
) -> None:
    for found in assert_same(family, changes, stage=stage, parts=parts, rank=rank):
        assert all(phase.key_heads == {1} for phase in found)


def test_two_groups_of_two_share_one_key_head() -> None:
    assert_same("gemma", ONE_KEY_HEAD, stage=3, parts=2, size=4)


@pytest.mark.parametrize(
    ("family", "changes", "stage", "parts", "rank"),
    [
        ("gpt2", (), 3, 2, 0),
        ("gpt2", (), 2, 2, 2),
        ("gpt2", (("n_inner", 64),), 0, 4, 0),
        ("gpt_bigcode", (), 3, 4, 0),  # StarCoder's one key head
        ("gpt_bigcode", (), 2, 2, 2),
        ("gpt_bigcode heads", (), 3, 2, 2),
        ("phi3", (), 3, 2, 2),
        ("phi3", ONE_KEY_HEAD, 0, 2, 0),
        ("glm", (), 2, 2, 2),
    ],
)
def test_fused_weights_are_divided_part_by_part(
    family: str, changes: Changes, stage: int, parts: int, rank: int
) -> None:
    assert_same(family, changes, stage=stage, parts=parts, rank=rank)


SIX_HEADS = (("hidden_size", 48), ("n_head", 6))
"""Whose slopes for alibi are not powers of one number."""
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "changes", "stage", "parts", "rank"),
    [
        ("qwen3_moe", (), 3, 2, 2),
        pytest.param("qwen3_moe", (*ONE_KEY_HEAD, ("decoder_sparse_step", 2)), 2, 2, 0, marks=slow),
        ("mixtral", (("intermediate_size", 24),), 0, 4, 0),  # rows that begin at odd places
        pytest.param("mixtral", (("tie_word_embeddings", True),), 3, 2, 2, marks=slow),
        pytest.param("qwen2_moe", ONE_KEY_HEAD, 3, 2, 0, marks=slow),
        ("gpt_oss", (), 3, 4, 0),  # experts' biases, gate and up in turn, sinks
        pytest.param("deepseek_v3", (), 3, 2, 2, marks=slow),  # latent attention
        ("olmoe", (), 3, 4, 2),  # norms over heads of which several ranks have the same
        pytest.param("granitemoeshared", (), 0, 2, 2, marks=slow),
        pytest.param("aria_text", (), 2, 2, 0, marks=slow),
    ],
)
def test_experts_are_divided(
    family: str, changes: Changes, stage: int, parts: int, rank: int
) -> None:
    assert_same(family, changes, stage=stage, parts=parts, rank=rank)


GROUPED = ("new_decoder_architecture", True)
ALIBI = ("alibi", True)
HEADS = ("multi_query", False)


@pytest.mark.parametrize(
    ("family", "changes", "stage", "parts", "rank"),
    [
        ("bloom", SIX_HEADS, 3, 2, 2),
        pytest.param("bloom", (), 0, 4, 0, marks=slow),
        pytest.param("falcon", (), 3, 2, 0, marks=slow),
        ("falcon", (GROUPED, ("num_kv_heads", 2)), 2, 4, 0),
        pytest.param("falcon", (GROUPED, ("num_kv_heads", 2)), 3, 2, 0, marks=slow),
        ("falcon", (ALIBI, HEADS, ("parallel_attn", False)), 0, 2, 0),
        pytest.param("falcon", (ALIBI,), 3, 2, 0, marks=slow),
        pytest.param("falcon", (HEADS,), 3, 2, 0, marks=slow),
        pytest.param("mpt", (("d_model", 48), ("n_heads", 6)), 3, 2, 2, marks=slow),
        ("gptj", (), 3, 2, 2),
        ("codegen", EIGHT_OF_CODEGEN, 3, 2, 2),
        pytest.param("gpt_neo", (), 3, 2, 2, marks=slow),
    ],
)
def test_families_that_hugging_face_answers_for(
    family: str, changes: Changes, stage: int, parts: int, rank: int
) -> None:
    assert_same(family, changes, stage=stage, parts=parts, rank=rank)


@slow
@pytest.mark.parametrize(
    ("family", "rank"),
    [
        (name, 0 if name == "falcon" else n % 2 * 2)  # whose layers no adapter fits
        for n, name in enumerate(slice_plans._PLANS)
    ],
)
def test_every_family_with_a_plan(family: str, rank: int) -> None:
    changes = EIGHT_OF_CODEGEN if family == "codegen" else ()
    assert_same(family, changes, stage=3, parts=2, rank=rank)


WIDE = (("hidden_size", 128), ("head_dim", 32), ("intermediate_size", 256))
WIDER = (
    *(("hidden_size", 512), ("head_dim", 128), ("intermediate_size", 512)),
    ("initializer_range", 0.05),
)


@pytest.mark.parametrize(
    ("family", "changes", "stage", "parts", "frozen"),
    [
        ("llama", WIDE, 3, 2, "nf4"),
        ("llama", WIDER, 2, 2, "int8"),
        ("gemma", (*WIDE, *ONE_KEY_HEAD), 0, 2, "nf4"),
        ("gpt2", (("n_embd", 128),), 3, 2, "nf4"),
        ("qwen3_moe", WIDE, 3, 2, "nf4"),  # whose experts stay numbers
        ("gptj", (("n_embd", 128),), 3, 2, "nf4"),
    ],
)
def test_slices_of_integers_are_integers(
    family: str, changes: Changes, stage: int, parts: int, frozen: str
) -> None:
    made = assert_same(family, changes, stage=stage, parts=parts, rank=2, frozen=frozen)
    assert all(torch.uint8 in phase.types for found in made for phase in found)
