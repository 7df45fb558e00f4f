"""The formulas against counting: real models, autograd's saved tensors, ZeRO's table by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedConfig

from tandem.config.engine import engine_settings
from tandem.config.load import build_config
from tandem.config.lora import LoraConfig
from tandem.config.schema import RunConfig
from tandem.engine.checks import check_policy
from tandem.engine.forward import generation_weights, response_logprobs
from tandem.engine.placement import prepare_for_training, shard_model
from tandem.engine.shard_plan import shard_plan
from tandem.errors import ConfigError
from tandem.generation.runner import new_memory
from tandem.generation.scheduler import state_slots
from tandem.generation.snapshots import spare_slots
from tandem.memory.model import (
    Layout,
    layout_of,
    role_memory,
    trained_parameters,
    weight_bytes,
)
from tandem.memory.shape import Shape, shape_of
from tandem.memory.steps import PPOWork, ppo_memory, supervised_memory
from tandem.memory.work import activation_bytes, generation_bytes, kv_bytes, packed_bytes
from tandem.models.frozen import freeze_quantized
from tandem.models.load import new_causal_lm
from tandem.models.lora import add_lora
from tandem.models.twin import twin_of
from tandem.parallel.tensor import tensor_group
from tandem.parallel.world import World
from tandem.plan.run import plan_memory
from tests.models.decoders import decoder_config
from tests.models.families import config_of, ragged_batch, tiny_config, tiny_model, tiny_scalar
from tests.models.hybrid_families import HYBRIDS
from tests.ranks import on_ranks

SHAPE = Shape(
    parameters=1000,
    blocks=(400, 400),
    linears=((10, 30), (10, 10)),
    largest=200,
    layers=2,
    width=10,
    heads=4,
    query_width=10,
    kv_width=10,
    inner=30,
    inner_kept=3,
    vocabulary=20,
    untied_head=0,
    is_scalar=False,
)
FAMILIES = ("llama", "opt", "gpt2", "gpt_neox", "qwen2")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shape_counts_the_weights_of_a_real_model(family: str) -> None:
    shape, model = shape_of(tiny_config(family)), tiny_model(family)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.largest == max(p.numel() for p in model.parameters())
    assert 0 < shape.outside_blocks < shape.parameters
    scalar = shape_of(tiny_config(family), scalar=True)
    assert scalar.parameters == sum(p.numel() for p in tiny_scalar(family).parameters())
    assert scalar.untied_head == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_as_many_as_lora_adds(family: str) -> None:
    model = tiny_model(family)
    before = sum(p.numel() for p in model.parameters())
    add_lora(model, LoraConfig(rank=3), 0)
    added = sum(p.numel() for p in model.parameters()) - before
    assert shape_of(tiny_config(family)).adapters(3) == added


@pytest.mark.parametrize(
    ("family", "scalar"), [("llama", False), ("llama", True), ("qwen2", False)]
)
def test_rows_of_tokens_are_counted_beside_adapters(family: str, scalar: bool) -> None:
    model = (tiny_scalar if scalar else tiny_model)(family)
    add_lora(model, LoraConfig(rank=3), 0, tokens=(4, 9))
    shape = shape_of(tiny_config(family), scalar=scalar)
    layout = Layout(lora_rank=3, token_rows=2)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained_parameters(shape, layout) == trained
    assert weight_bytes(shape, layout) == 4 * sum(p.numel() for p in model.parameters())
    more = packed_bytes(shape, layout) - packed_bytes(shape, Layout(lora_rank=3))
    assert more == 4 * shape.vocabulary * shape.width, "decoding copies the embedding"


def test_tokens_are_counted_by_name() -> None:
    def counted(**lora: Any) -> int:
        settings = engine_settings(RunConfig(lora=LoraConfig(**lora)))
        return layout_of(settings, 1, "actor", on_cpu=True, half=False).token_rows

    assert counted(rank=4, train_tokens=("<a>", "<b>")) == 2
    assert counted(rank=4, train_tokens=("control", "<b>")) == 9
    assert counted(rank=4) == 0


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_quantized_weights_take_the_bytes_that_they_take(kind: Any) -> None:
    model = tiny_model("llama", hidden_size=64, intermediate_size=128, head_dim=16)
    config = model.config
    model.requires_grad_(False)
    freeze_quantized(model, kind)
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    layout = Layout(is_trained=False, frozen=kind)
    assert weight_bytes(shape_of(config), layout) == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "rank", "frozen"),
    [("llama", 0, ""), ("opt", 0, ""), ("gpt_neox", 0, ""), ("llama", 8, ""), ("llama", 8, "nf4")],
)
def test_activations_are_what_autograd_keeps(
    family: str, rank: int, frozen: Any, dtype: torch.dtype
) -> None:
    """By the slope over layers and tokens: no weight, no constant counts."""
    layers = {n: tiny_model(family, num_hidden_layers=n) for n in (1, 3)}
    for model in layers.values():
        if rank:
            add_lora(model, LoraConfig(rank=rank), 0)
        model.to(dtype)
        if frozen:
            freeze_quantized(model, frozen)
    half = dtype == torch.bfloat16
    layout = Layout(on_cpu=True, half=half, lora_rank=rank, frozen=frozen)
    lengths = {"few": (16,), "many": (48,)}
    kept = {
        (n, name): _saved_bytes(model, ragged_batch(rows))
        for n, model in layers.items()
        for name, rows in lengths.items()
    }
    slope = {name: (kept[3, name] - kept[1, name]) / 2 for name in lengths}
    shapes = {n: shape_of(tiny_config(family, num_hidden_layers=n)) for n in layers}
    expected = {
        n: activation_bytes(s, 48, layout) - activation_bytes(s, 16, layout)
        for n, s in shapes.items()
    }
    assert slope["many"] - slope["few"] == pytest.approx((expected[3] - expected[1]) / 2, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "bamba"])
def test_layers_with_a_state_are_counted_by_what_they_keep(family: str, dtype: torch.dtype) -> None:
    """By the slope over tokens and over four more layers, three of which have a state."""
    layout = Layout(on_cpu=True, half=dtype == torch.bfloat16)
    kept, expected = dict[tuple[int, int], int](), dict[tuple[int, int], float]()
    for layers in (4, 8):
        options = HYBRIDS[family] | {"num_hidden_layers": layers}
        if family == "bamba":
            options |= {"attn_layer_indices": [*range(1, layers, 4)]}
        else:
            state = "conv" if family == "lfm2" else "linear_attention"
            options |= {"layer_types": ([state] * 3 + ["full_attention"]) * (layers // 4)}
        config = config_of(family, **options)
        model = new_causal_lm(config, seed=1).to(dtype)
        for tokens in (16, 48):
            kept[layers, tokens] = _saved_bytes(model, ragged_batch((tokens,)))
            expected[layers, tokens] = activation_bytes(shape_of(config), tokens, layout)

    def slope(of: Mapping[tuple[int, int], float]) -> float:
        return of[8, 48] - of[8, 16] - of[4, 48] + of[4, 16]

    assert slope(kept) == pytest.approx(slope(expected), rel=0.25)


def test_states_are_what_a_rollout_allocates() -> None:
    model = new_causal_lm(config_of("bamba", **HYBRIDS["bamba"]), seed=1)
    slots = state_slots(5, spare_slots(model, 5))
    memory = new_memory(model, num_blocks=11, num_slots=slots)
    held = sum(tensor[:slots].nbytes for layer in memory.states for tensor in layer)
    shape = shape_of(model.config)
    assert kv_bytes(shape, 5, 0, Layout()) == held
    blocks = sum(tensor[:5].nbytes for layer in memory.layers for tensor in layer)
    assert kv_bytes(shape, 5, 16, Layout()) == held + blocks


def test_kv_memory_is_what_a_rollout_allocates() -> None:
    model = tiny_model("llama")
    memory = new_memory(model, num_blocks=11)  # and one for rows that only fill up
    held = sum(tensor.nbytes for layer in memory.layers for tensor in layer)
    blocks = kv_bytes(shape_of(model.config), 12, 1, Layout())
    assert blocks == held


@pytest.mark.parametrize(
    ("stage", "weights", "adamw", "gathered", "gradients"),
    [
        (0, 4000, 8000, None, 4000),
        (1, 1000, 2000, 4000, 4000),
        (2, 1000, 2000, 4000, 1000),
        (3, 1000, 2000, 4 * (200 + 800), 1000),
    ],
)
def test_zero_divides_what_its_stage_says(
    stage: int, weights: int, adamw: int, gathered: int | None, gradients: int
) -> None:
    """1,000 weights in float32 over four ranks, by hand."""
    role = role_memory(SHAPE, Layout(ranks=4, stage=stage))
    assert role.resting == {"weights": weights, "AdamW": adamw}
    assert role.working.get("gathered weights") == gathered
    assert role.backward["gradients"] == gradients
    assert role.host == {}


def test_replicas_divide_less() -> None:
    role = role_memory(SHAPE, Layout(ranks=4, replicas=2, stage=3))
    assert role.resting == {"weights": 2000, "AdamW": 4000}
    assert role.backward["gradients"] == 2000


def test_a_frozen_model_is_split_at_stage_3_alone() -> None:
    for stage, weights in ((2, 4000), (3, 1000)):
        frozen = role_memory(SHAPE, Layout(ranks=4, stage=stage, is_trained=False))
        assert (frozen.resting, frozen.backward) == ({"weights": weights}, {})


def test_lora_trains_adapters_alone() -> None:
    role = role_memory(SHAPE, Layout(lora_rank=2))
    adapters = 2 * (40 + 20)
    assert role.resting == {"weights": 4 * (1000 + adapters), "AdamW": 8 * adapters}
    assert role.backward["gradients"] == 4 * adapters


def test_offload_moves_states_to_the_host() -> None:
    layout = Layout(offload_optimizer=True, half=True)
    role = role_memory(SHAPE, layout)
    assert role.resting == {"weights": 2000}  # in the compute type: the masters are elsewhere
    assert role.host == {"AdamW": 8000, "masters": 4000, "gradients kept": 4000}
    assert "cast weights" not in role.working
    assert role.backward == {"gradient under way": 400}  # each goes down when it is done
    here = role_memory(SHAPE, replace(layout, on_cpu=True))
    assert here.resting == {"weights": 2000, "AdamW": 8000, "masters": 4000}
    assert here.host == {}
    assert here.backward == {"gradients": 4000, "gradient under way": 400}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(is_trained=False),
        Layout(lora_rank=2, optimizer_states="8bit"),
        Layout(ranks=4, stage=1, half=True),
        Layout(offload_optimizer=True, half=True),
        Layout(offload_optimizer=True, half=True, on_cpu=True),
        Layout(offload_optimizer=True, offload_share=0.75),
        Layout(offload_optimizer=True, offload_share=0.75, on_cpu=True),
        Layout(offload_params=True, offload_share=0.5),
    ],
)
def test_moments_are_those_at_rest_on_the_device(layout: Layout) -> None:
    role = role_memory(SHAPE, layout)
    assert role.moments == sum(size for name, size in role.resting.items() if "AdamW" in name)
    plan = supervised_memory(SHAPE, layout, tokens=10, answered=10, reference=True)
    assert plan.moments == role.moments  # the reference has none


def test_smaller_moments_and_gradients_that_stay() -> None:
    for states, size in (("bf16", 4000), ("8bit", 2000 * (1 + 4 / 256))):
        layout = Layout(half=True, optimizer_states=states)  # type: ignore[arg-type]
        assert role_memory(SHAPE, layout).resting["AdamW"] == size
    layout = Layout(offload_optimizer=True, half=True, offload_gradients=False)
    role = role_memory(SHAPE, layout)
    assert role.host == {"AdamW": 8000, "masters": 4000}
    assert role.backward["gradients"] == 4000


def test_offloaded_weights_lie_in_pieces_on_the_host_at_one_rank_too() -> None:
    role = role_memory(SHAPE, Layout(offload_params=True, offload_optimizer=True))
    assert role.resting == {}
    assert role.host == {"weights": 4000, "AdamW": 8000}
    assert role.working == {"gathered weights": 4 * (200 + 800)}


def test_half_precision_rests_in_two_bytes_beside_masters() -> None:
    full = role_memory(SHAPE, Layout(half=True, moving_average=True))
    assert full.resting == {
        "weights": 2000, "AdamW": 8000, "masters": 4000, "moving average": 4000
    }  # fmt: skip
    assert full.working == {}
    assert role_memory(SHAPE, Layout(half=True, is_trained=False)).resting == {"weights": 2000}
    pieces = role_memory(SHAPE, Layout(half=True, ranks=2, stage=2))
    assert pieces.resting == {"weights": 2000, "AdamW": 4000}  # float32, half of them
    adapters = 120
    adapted = role_memory(SHAPE, Layout(half=True, lora_rank=2))
    assert adapted.resting == {
        "weights": 2 * (1000 + adapters), "AdamW": 8 * adapters, "masters": 4 * adapters
    }  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "beside"),
    [
        (Layout(half=True, reference_rate=0.5), {"reference's average": 4000}),
        (Layout(half=True, reference_rate=1.0), {}),
        (Layout(reference_rate=0.5), {}),  # the reference is the mixture
        (Layout(ranks=2, stage=1, reference_rate=0.5), {"reference's average": 2000}),
        (Layout(ranks=2, stage=3, reference_rate=0.5), {}),
        (Layout(half=True, lora_rank=2, reference_rate=1.0), {"reference's adapters": 240}),
    ],
)
def test_a_reference_that_follows_the_policy(layout: Layout, beside: dict[str, float]) -> None:
    still = role_memory(SHAPE, replace(layout, reference_rate=0.0))
    assert role_memory(SHAPE, layout).resting == still.resting | beside


def test_a_shared_base_counts_once() -> None:
    layout = Layout(lora_rank=2, shares_base=True)
    work = PPOWork(rows=1, prompt=4, new=4, tokens=8, answered=4)
    scalar = replace(SHAPE, parameters=990, is_scalar=True)
    plan = ppo_memory(SHAPE, scalar, layout, layout, work)
    adapters = 4 * 120
    assert plan.resting["actor: weights"] == 4000 + adapters
    assert plan.resting["critic: weights"] == adapters + 40
    assert plan.resting["reward model: weights"] == adapters + 40
    assert "reference: weights" not in plan.resting


def test_slices_divide_the_linear_layers_while_generating() -> None:
    def weights(parts: int, shape: Shape = SHAPE) -> float:
        return generation_bytes(
            shape, Layout(), rows=1, prompt=1, new=1, packs=False, slices=parts
        )["slices"]

    assert weights(2) == 4 * (600 + 200)
    assert weights(4) == 4 * (600 + 100)
    # One head of keys and values, 5 wide: each rank holds all 2 x 10 x 5 weights of a layer.
    assert weights(4, replace(SHAPE, kv_width=5, query_width=20)) == 4 * (600 + 100 + 150)


def test_dpo_has_a_reference_only_without_lora() -> None:
    def resting(layout: Layout) -> float:
        plan = supervised_memory(SHAPE, layout, tokens=8, answered=4, reference=True)
        return plan.resting.get("reference: weights", 0.0)

    assert resting(Layout()) == 4000
    assert resting(Layout(lora_rank=2)) == 0


def test_a_run_is_read_off_its_knobs() -> None:
    llama = tiny_config("llama")
    plain = plan_memory(_config(), "ppo", llama)
    assert max(plain.phases, key=plain.peak) in ("generate", "train actor", "train critic")
    assert plain.host == {}  # it is the device
    split = plan_memory(_config(actor_zero_stage=3, critic_zero_stage=3), "ppo", llama, ranks=4)
    ratio = split.resting["actor: AdamW"] / plain.resting["actor: AdamW"]
    assert ratio == pytest.approx(1 / 4)
    assert split.resting["reference: weights"] * 4 == plain.resting["reference: weights"]
    reward = plan_memory(_config(), "reward", llama)
    assert reward.phases.keys() == {"train", "normalize"}
    with pytest.raises(ConfigError, match=r"stage must be one of sft, .*; got 'rl'"):
        plan_memory(_config(), "rl", llama)


def _config(**parallel: Any) -> RunConfig:
    return build_config({"device": "cpu", "parallel": parallel}, where="")


def _saved_bytes(model: Any, batch: Any) -> int:
    """Bytes of the storages that a forward keeps for its backward, weights left out."""
    model.eval()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs = response_logprobs(model, batch)[0]
    assert logprobs.requires_grad
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(
    ("layout", "packs", "expected"),
    [
        # Weights, and the packed copy that the check makes of linear weights and of the head.
        (Layout(on_cpu=True), True, 4000 + 4 * (400 + 200)),
        (Layout(on_cpu=True), False, 4000),
        # Rounded weights and what they were, then moments: more than the check's copy.
        (Layout(on_cpu=True, half=True), True, 2000 + 4000 + 8000),
        (Layout(on_cpu=True, half=True, is_trained=False), True, 2000 + 2 * (400 + 200)),
        # Adapters and their base; the base's masters do not exist.
        (Layout(on_cpu=True, lora_rank=2), False, 4 * 1120),
        # Half of all, gathered and packed; two blocks are in flight.
        (Layout(on_cpu=True, ranks=2, stage=3), True, 2000 + 4000 + 4 * (400 + 200) + 4 * 800),
        # Integers with their scales, and one weight's numbers at a time as they are read.
        (
            Layout(on_cpu=True, lora_rank=2, frozen="int8"), False,
            400 * (1 + 4 / 256) + 4 * (600 + 120) + 4 * 300,
        ),
    ],
)  # fmt: skip
def test_loading_holds_what_the_check_and_the_optimizer_make(
    layout: Layout, packs: bool, expected: float
) -> None:
    plan = supervised_memory(SHAPE, layout, tokens=8, answered=4, packs=packs)
    assert plan.peak("load") == round(expected)


def test_loading_gathers_what_the_policy_is_checked_with() -> None:
    def loaded(parts: int, critic: Shape = SHAPE, **more: Any) -> float:
        layout = Layout(ranks=4, stage=3, lora_rank=2, **more)
        work = PPOWork(rows=1, prompt=1, new=1, tokens=8, answered=4, slices=parts)
        plan = ppo_memory(SHAPE, replace(critic, is_scalar=True), layout, layout, work)
        return plan.loading["read or checked, then AdamW and masters"]

    whole = 4 * 1120
    assert loaded(1) == whole + 4 * (800 + 120)  # two blocks and their adapters are in flight
    # Slices of the linear weights, and blocks that the policy's own forward gathers: all here.
    assert loaded(2) == 4 * (600 + 200) + whole
    assert loaded(4) == 4 * (600 + 100) + whole
    # With more blocks than two it gathers them two at a time.
    shape = replace(SHAPE, blocks=(100,) * 8, layers=8)
    layout = Layout(ranks=4, stage=3, lora_rank=2)
    work = PPOWork(rows=1, prompt=1, new=1, tokens=8, answered=4, slices=4)
    plan = ppo_memory(shape, SHAPE, layout, layout, work)
    blocks = 4 * (200 + 2 * (800 + 120) / 8)
    assert plan.loading["read or checked, then AdamW and masters"] == 4 * (600 + 100) + blocks
    # Of critic and reward model nothing is tried, however large they are.
    huge = replace(SHAPE, parameters=100_000, blocks=(50_000, 49_000))
    assert loaded(1, huge) == loaded(1)
    scalar = supervised_memory(replace(huge, is_scalar=True), layout, tokens=8, answered=4)
    assert scalar.loading["read or checked, then AdamW and masters"] == 0


def held_while_checked(world: World, parts: int, kv_heads: int) -> tuple[int, int]:
    """The most bytes of whole weights and slices that there are at once in a policy's check, and
    those of a block of KV memory."""
    settings = engine_settings(_sliced(parts))
    model = new_causal_lm(_deep(kv_heads), 0)
    prepare_for_training(model, settings, 0)
    shard_model(model, shard_plan(3, settings, world, trained=True), world)
    most = 0

    def look(module: Any, *_: Any) -> None:
        nonlocal most
        if not type(module).__name__.endswith("DecoderLayer"):
            return
        weights = [*model.parameters(), *twin_of(model).parameters()]
        held = {id(p): p.nbytes for p in weights if not isinstance(p, DTensor)}
        most = max(most, sum(held.values()))

    with register_module_forward_hook(look):
        check_policy(model, tensor_group(world, parts))
    with generation_weights(model, tensor_group(world, parts)):
        memory = new_memory(model, num_blocks=0)
    return most, sum(tensor.nbytes for layer in memory.layers for tensor in layer)


def _deep(kv_heads: int) -> PreTrainedConfig:
    return tiny_config("llama", num_hidden_layers=6, num_key_value_heads=kv_heads)


def _sliced(parts: int) -> RunConfig:
    config = _config(actor_zero_stage=3, critic_zero_stage=3, inference_tp_size=parts)
    return replace(config, lora=LoraConfig(rank=2))


@pytest.mark.parametrize(
    ("ranks", "parts", "kv_heads"), [(2, 2, 4), (4, 2, 4), (4, 4, 4), (2, 2, 1), (4, 4, 2)]
)
def test_a_policy_in_slices_is_loaded_without_being_whole(
    ranks: int, parts: int, kv_heads: int
) -> None:
    config = _deep(kv_heads)
    shape = shape_of(config)
    plan = plan_memory(_sliced(parts), "ppo", config, ranks=ranks, device=torch.device("cpu"))
    counted = plan.loading["read or checked, then AdamW and masters"]
    # Counted is the next block too, which is under way on a GPU alone.
    block = 4 * (shape.blocks[0] + shape.adapters(2) / shape.layers)
    assert counted - block < 0.9 * 4 * shape.parameters
    keys = kv_bytes(shape, 1, 1, Layout(), parts)
    found = on_ranks(ranks, held_while_checked, parts, kv_heads)
    assert found == [(counted - block, keys)] * ranks


def held_in_slices(world: World, config: RunConfig, model_config: PreTrainedConfig) -> int:
    """Bytes of the weights that a rank generates with, without adapters."""
    settings = engine_settings(config)
    model = new_causal_lm(model_config, 0)
    prepare_for_training(model, settings, 0)
    shard_model(model, shard_plan(3, settings, world, trained=True), world)
    with generation_weights(model, tensor_group(world, world.size)):
        named = twin_of(model).named_parameters()
        return sum(p.nbytes for name, p in named if ".lora_" not in name)


@pytest.mark.parametrize("frozen", ["", "nf4"])
def test_slices_are_what_a_rank_holds(frozen: str) -> None:
    config = _sliced(2)
    config = replace(config, parallel=replace(config.parallel, frozen_weights=frozen))  # type: ignore[arg-type]
    wide = tiny_config(
        "llama", hidden_size=128, head_dim=32, intermediate_size=256, num_key_value_heads=1
    )
    plan = plan_memory(config, "ppo", wide, ranks=2, device=torch.device("cpu"))
    counted = plan.phases["generate"]["slices"]
    if frozen:
        counted -= 4 * shape_of(wide).adapters(2)
    assert on_ranks(2, held_in_slices, config, wide) == [counted] * 2


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "falcon", "bloom"])
def test_slices_of_experts_and_of_other_layers_are_counted(family: str) -> None:
    config = replace(_sliced(2), lora=LoraConfig(rank=0))
    model = decoder_config(family, **({"multi_query": False} if family == "falcon" else {}))
    counted = plan_memory(config, "ppo", model, ranks=2, device=torch.device("cpu"))
    biases = {"bloom": 2 * (3 * 32 + 128) // 2, "gpt_oss": 4 * (32 + 16 + 16) // 2}  # counted whole
    held = counted.phases["generate"]["slices"] - 4 * biases.get(family, 0)
    assert on_ranks(2, held_in_slices, config, model) == [held] * 2


def test_ranks_that_hold_slices_answer_together() -> None:
    def keys(parts: int) -> float:
        config = _sliced(parts)
        plan = plan_memory(config, "ppo", _deep(4), ranks=4, device=torch.device("cpu"))
        return plan.phases["generate"]["KV memory"]

    # Of 64 prompts 16 on each rank, 32 or 64 by all of a group, in a half or quarter of the heads.
    assert keys(2) == keys(1) == keys(4)
    few = replace(_sliced(4), generation_batch_size=16)
    plan = plan_memory(few, "ppo", _deep(4), ranks=4, device=torch.device("cpu"))
    assert plan.phases["generate"]["KV memory"] == keys(1) / 4


def test_an_untied_head_is_mapped_when_all_other_weights_have_memory() -> None:
    shape = replace(SHAPE, untied_head=200)
    plan = supervised_memory(shape, Layout(on_cpu=True), tokens=8, answered=4)
    assert plan.peak("load") == 4000 + 4 * 200
