"""Tensor-parallel generation against the whole model: logits, texts, adapters, wrong plans."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tandem.config.engine import engine_settings
from tandem.config.lora import LoraConfig
from tandem.config.schema import ParallelConfig, RunConfig, SamplingConfig
from tandem.engine.checks import check_policy
from tandem.engine.forward import generation_weights, response_logprobs, scored
from tandem.engine.placement import prepare_for_training, shard_model
from tandem.engine.rollouts import shared_rollout
from tandem.engine.shard_plan import shard_plan
from tandem.errors import ConfigError, ModelError
from tandem.generation.stops import Stops
from tandem.models import slice_plans, tensor_parallel
from tandem.models.lora import lora_layers
from tandem.models.selfcheck import Agreement, check_twin
from tandem.models.twin import twin_of
from tandem.ops.spans import Spans
from tandem.parallel.dtensor import fill, whole
from tandem.parallel.tensor import TensorGroup, tensor_group
from tandem.parallel.world import World
from tandem.types import PromptRow, Source
from tests.models.families import EOS, PAD, config_of, ragged_batch, tiny_model
from tests.models.measure_decoders import tiny_decoder
from tests.ranks import on_ranks

STOPS = Stops((EOS,), PAD, lambda ids: " ".join(map(str, ids)))
SAMPLING = SamplingConfig(max_new_tokens=10, samples_per_prompt=2)


def prompts() -> list[PromptRow]:
    return [
        PromptRow(tuple(4 + (i * j) % 90 for j in range(n)), (), {}, Source("x", "x", i))
        for i, n in enumerate((3, 9, 4, 17, 2))
    ]


def generated(
    world: World, family: str, stage: int, parts: int, rank: int, replicas: int = 1
) -> tuple[Tensor, Tensor, Agreement, int, Tensor]:
    config = RunConfig(lora=LoraConfig(rank=rank), parallel=ParallelConfig(replicas=replicas))
    model = tiny_model(family).eval()
    prepare_for_training(model, engine_settings(config), 0)
    for _, layer in lora_layers(model):
        with torch.no_grad():
            layer.lora_B.weight.copy_(torch.ones_like(layer.lora_B.weight) * 0.03)
    shard_model(model, shard_plan(stage, engine_settings(config), world, trained=True), world)
    group = tensor_group(world, parts)
    before = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    with torch.no_grad(), generation_weights(model, group):
        agreement = check_twin(model, trains_elsewhere=group is not None)
        settings = replace(engine_settings(config), sampling=SAMPLING, seed=1)
        rollout = shared_rollout(model, prompts(), settings, STOPS, step=2, group=group)
        numbers = sum(p.numel() for p in twin_of(model).parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter.detach()), before[name]), name

    def forward(part):  # type: ignore[no-untyped-def]
        return (response_logprobs(model, part)[0],)

    (trained,) = scored(ragged_batch(), 100, forward, [model])
    return rollout.batch.token_ids, rollout.rollout_logprobs, agreement, numbers, trained


def test_slices_are_made_of_a_replica() -> None:
    ids, logprobs, *_ = generated(World(), "llama", 3, 1, 2)
    for found in on_ranks(4, generated, "llama", 3, 2, 2, 2, ranks_per_node=2):
        assert torch.equal(found[0], ids)
        assert torch.allclose(found[1], logprobs, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "stage", "rank"),
    [
        pytest.param("llama", 3, 0, marks=pytest.mark.slow),  # test_two_groups_of_two
        ("llama", 2, 2),
        ("llama", 0, 0),
        pytest.param("opt", 3, 0, marks=pytest.mark.slow),
        ("opt", 3, 2),
        ("gpt_neox", 2, 0),
        ("qwen2", 3, 0),
        ("gemma2", 3, 2),
        ("mistral", 3, 0),
    ],
)
def test_two_slices_say_what_the_whole_says(family: str, stage: int, rank: int) -> None:
    tokens, logprobs, _, numbers, trained = generated(World(), family, stage, 1, rank)
    for theirs in on_ranks(2, generated, family, stage, 2, rank):
        assert torch.equal(theirs[0], tokens)
        assert torch.allclose(theirs[1], logprobs, atol=2e-5)
        assert theirs[2].trustworthy
        assert theirs[3] < numbers  # embeddings and norms are whole, the rest is halved
        assert torch.allclose(theirs[4], trained, atol=2e-5)  # training goes on as before


def test_two_groups_of_two() -> None:
    tokens, logprobs, *_ = generated(World(), "llama", 3, 1, 0)
    for theirs in on_ranks(4, generated, "llama", 3, 2, 0):
        assert torch.equal(theirs[0], tokens)
        assert torch.allclose(theirs[1], logprobs, atol=2e-5)


def wrongly_planned(world: World) -> str:
    plan = slice_plans._PLANS["opt"]
    slice_plans._PLANS["opt"] = replace(plan, counts=())  # what torch's own plan forgets
    model = tiny_model("opt").eval()
    shard_model(model, shard_plan(3, engine_settings(RunConfig()), world, trained=True), world)
    try:
        with torch.no_grad(), generation_weights(model, tensor_group(world, 2)):
            check_twin(model, trains_elsewhere=True)
    except (ModelError, RuntimeError) as error:
        return str(error)
    return ""


def test_a_wrong_plan_stops_the_run() -> None:
    assert all(on_ranks(2, wrongly_planned))


def with_whole_slopes(world: World) -> str:
    plan = slice_plans._PLANS["bloom"]
    slice_plans._PLANS["bloom"] = replace(plan, biases=("alibi",))
    model = tiny_decoder("bloom")
    shard_model(model, shard_plan(3, engine_settings(RunConfig()), world, trained=True), world)
    with patch.object(tensor_parallel, "evenly", lambda *_: [[(0, 2)], [(0, 2)]]):
        try:
            check_policy(model, tensor_group(world, 2))
        except ModelError as error:
            return str(error)
    return ""


def test_slopes_of_other_heads_stop_the_run() -> None:
    told = on_ranks(2, with_whole_slopes)
    assert any(
        "the sliced forward of family 'bloom' must give its own forward's" in x for x in told
    )


def without_slices_of_norms(world: World) -> str:
    plan = slice_plans._PLANS["olmo2"]
    slice_plans._PLANS["olmo2"] = replace(plan, norms={})  # which are of all heads together
    model = tiny_decoder("olmo2")
    shard_model(model, shard_plan(3, engine_settings(RunConfig()), world, trained=True), world)
    try:
        check_policy(model, tensor_group(world, 2))
    except ModelError as error:
        return str(error)
    return ""


def test_slices_that_do_not_run_are_not_replaced_by_whole_weights() -> None:
    for told in on_ranks(2, without_slices_of_norms):
        assert "must decode from slices" in told
        assert "that does not: family 'olmo2' does not run on packed tokens (" in told


def test_integers_are_cut_between_blocks() -> None:
    config = tiny_model("llama").config
    config.head_dim, config.intermediate_size = 64, 512
    slice_plans.check_sliceable(config, 4, "nf4")
    slice_plans.check_sliceable(config, 1, "int8")
    with pytest.raises(ModelError, match="between blocks of 256 int8 weights; got 2 for 256"):
        slice_plans.check_sliceable(config, 2, "int8")
    config.intermediate_size = 224
    with pytest.raises(ModelError, match="between blocks of 64 nf4 weights; got 2 for 224"):
        slice_plans.check_sliceable(config, 2, "nf4")
    runs = config_of("codegen", n_embd=1024, n_head=16)  # whose heads lie in four runs
    slice_plans.check_sliceable(runs, 4, "nf4")
    with pytest.raises(ModelError, match="between blocks of 256 int8 weights; got 2 for 256"):
        slice_plans.check_sliceable(runs, 2, "int8")


def test_longrope_is_refused_from_the_config() -> None:
    config = tiny_model("llama").config
    config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 32}
    with pytest.raises(ModelError, match=r"past 32 tokens \(longrope\). Use --inference-tp-size 1"):
        slice_plans.check_sliceable(config, 2)


def refused(world: World, family: str, parts: int) -> str:
    model = tiny_model(family)
    try:
        slice_plans.check_sliceable(model.config, parts)
        TensorGroup(world, parts)
    except (ModelError, ConfigError) as error:
        return str(error)
    return ""


def test_what_cannot_be_sliced_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="must have a plan for the family; got 'xglm', plans"):
        slice_plans.check_sliceable(config_of("xglm"), 2)
    with pytest.raises(ModelError, match="got 'longcat_flash', whose experts that compute n"):
        slice_plans.check_sliceable(config_of("longcat_flash"), 2)
    with pytest.raises(ModelError, match="got 'lfm2', whose layers keep states, plans are there"):
        slice_plans.check_sliceable(config_of("lfm2"), 2)
    codegen = config_of("codegen", n_head=16)
    slice_plans.check_sliceable(codegen, 4)
    with pytest.raises(ModelError, match="attention heads in each of 4 runs; got 8 for 4"):
        slice_plans.check_sliceable(codegen, 8)
    experts = config_of("qwen2_moe", moe_intermediate_size=12, shared_expert_intermediate_size=16)
    with pytest.raises(ModelError, match=r"experts' inner width \(moe_int\w+\); got 8 for 12"):
        slice_plans.check_sliceable(experts, 8)
    experts.moe_intermediate_size, experts.shared_expert_intermediate_size = 16, 12
    with pytest.raises(
        ModelError, match=r"shared experts' inner width \(shared\w+\); got 8 for 12"
    ):
        slice_plans.check_sliceable(experts, 8)
    assert "attention heads; got 8 for 4" in refused(World(), "llama", 8)
    config = tiny_model("llama").config
    config.num_attention_heads, config.num_key_value_heads = 12, 3
    for parts in (1, 3, 6, 12):
        slice_plans.check_sliceable(config, parts)
    for parts in (2, 4):
        with pytest.raises(ModelError, match=rf"or be a multiple of them; got {parts} for 3\. "):
            slice_plans.check_sliceable(config, parts)
    for family, knob in (("llama", "intermediate_size"), ("opt", "ffn_dim")):
        config = tiny_model(family).config
        setattr(config, knob, 175)
        with pytest.raises(ModelError, match=rf"inner width \({knob}\); got 2 for 175"):
            slice_plans.check_sliceable(config, 2)
    assert all("inference_tp_size must divide" in text for text in on_ranks(3, refused, "llama", 2))


def cut(world: World, shape: tuple[int, ...], dim: int, spans: Spans) -> bool:
    full = torch.arange(float(torch.Size(shape).numel())).view(shape)
    module = torch.nn.Linear(1, 1)
    module.weight = torch.nn.Parameter(torch.zeros(shape))
    from tandem.parallel.shard import ShardPlan, shard

    shard(module, [], ShardPlan(stage=3), world)
    fill(module.weight, full)
    group = TensorGroup(world, len(spans))
    held = [i for first, last in spans[group.index] for i in range(first, last)]
    wanted = full.index_select(dim, torch.tensor(held))
    plain = group.slice(full, dim, spans)
    return torch.equal(group.slice(module.weight, dim, spans), wanted) and torch.equal(
        plain, wanted
    )


IN_HALVES = [[(0, 2), (4, 5)], [(2, 4), (5, 6)]]
SHARED = [[(0, 1), (4, 6)], [(1, 2), (4, 6)], [(2, 3), (4, 6)], [(3, 4), (4, 6)]]


# By the number of ranks: a weight's shape, the axis that is cut, and what each slice holds of it.
CUTS: dict[int, list[tuple[tuple[int, ...], int, Spans]]] = {
    4: [
        ((8, 6), 0, [[(0, 4)], [(4, 8)]]),
        ((8, 6), 1, [[(0, 3)], [(3, 6)]]),
        ((6, 4), 0, [[(0, 3)], [(3, 6)]]),
        ((2, 4), 1, [[(i, i + 1)] for i in range(4)]),
        ((6, 3), 0, IN_HALVES),
        ((3, 6), 1, IN_HALVES),
        ((6, 3), 0, SHARED),
        ((3, 6), 1, SHARED),
        ((2, 3), 0, [[(0, 1)], [(0, 1)], [(1, 2)], [(1, 2)]]),
        ((8, 6, 5), 1, IN_HALVES),
        ((3, 2, 6), 2, IN_HALVES),
        ((3, 4, 2), 1, [[(i, i + 1)] for i in range(4)]),
    ],
    2: [((10,), 0, [[(0, 5)], [(5, 10)]]), ((6,), 0, IN_HALVES)],
}


def wrongly_cut(world: World) -> list[tuple[tuple[int, ...], int, Spans]]:
    return [case for case in CUTS[world.size] if not cut(world, *case)]


@pytest.mark.parametrize("size", CUTS)
def test_a_slice_is_made_of_the_pieces(size: int) -> None:
    assert on_ranks(size, wrongly_cut) == [[]] * size
