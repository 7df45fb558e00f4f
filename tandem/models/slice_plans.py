"""Which parts of a family's weights each rank of tensor-parallel generation has (`slice_cuts`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from transformers import PreTrainedConfig

from tandem.errors import ModelError
from tandem.models.blocks import Heads, attention_heads
from tandem.models.quantized import BLOCKS
from tandem.models.rope import longrope_border
from tandem.models.slice_cuts import (
    Cut,
    by_key_heads,
    evenly,
    in_groups,
    in_halves,
    in_quarters,
    queries_and_shared_keys,
    queries_keys_values,
    queries_values_keys_in_quarters,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """How an architecture is sliced.

    columns: endings of the names of layers that are sliced along their outputs, and how. rows: of
    those that are sliced along their inputs. counts: attributes of the modules around them
    that count heads or their numbers, and config_counts those of their config. inner_width: the
    config's name for the width of the MLP's inner layer (where that is None, it is four times the
    width); empty: no block has a plain MLP. shared_width: names whose product is the width of an
    MLP beside experts.

    stacks: endings of the names of other weights, the dimension along which they are sliced, and
    how: experts in one tensor, numbers of heads. expert_width: the config's name for the width of
    an expert's inner layer. partial: endings of the names of the modules whose results are parts of
    a sum. once: of weights that one rank alone adds.
    norms: endings of the names of norms over all heads together.

    by_generate: the family runs by its own forward and Hugging Face's `generate`. biases: what its
    attention is called with by name that has a part for each head. head_runs: heads lie in so many
    runs, of each of which a rank has a share.
    """

    columns: Mapping[str, Cut]
    rows: Mapping[str, Cut]
    counts: tuple[str, ...] = ()
    config_counts: tuple[str, ...] = ()
    inner_width: str = "intermediate_size"
    shared_width: tuple[str, ...] = ()
    stacks: Mapping[str, tuple[int, Cut]] = field(default_factory=dict)
    expert_width: str = ""
    partial: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    norms: Mapping[str, Cut] = field(default_factory=dict)
    by_generate: bool = False
    biases: tuple[str, ...] = ()
    head_runs: int = 1


def _even(*names: str) -> dict[str, Cut]:
    return dict.fromkeys(names, evenly)


_SEPARATE: dict[str, Cut] = {"q_proj": evenly, "k_proj": by_key_heads, "v_proj": by_key_heads}
_ENDS = _even("self_attn.o_proj", "mlp.down_proj")
_LLAMA = SlicePlan(columns=_SEPARATE | _even("gate_proj", "up_proj"), rows=_ENDS)
_EXPERTS = replace(
    _LLAMA,
    rows=_even("self_attn.o_proj", ".down_proj"),
    stacks={"experts.gate_up_proj": (1, in_halves), "experts.down_proj": (2, evenly)},
    expert_width="moe_intermediate_size",
    partial=(".experts",),
)
"""Experts in one tensor, and plain MLPs in some blocks or beside them."""
_ALONE = replace(_EXPERTS, inner_width="", expert_width="intermediate_size")
_WITH_SHARED = replace(_EXPERTS, shared_width=("n_shared_experts", "moe_intermediate_size"))
_TURNED = {"experts.gate_up_proj": (2, in_halves), "experts.down_proj": (1, evenly)}
_HEAD_NORMS: dict[str, Cut] = {"q_norm": evenly, "k_norm": by_key_heads}
_SINKS = {"self_attn.sinks": (0, evenly)}
_LATENT = _even("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
"""Latent attention: what makes heads of a latent, which every rank has whole."""
_GRANITE_SHARED = replace(
    _ALONE,
    columns=_SEPARATE | {"shared_mlp.input_linear": in_halves},
    rows=_even("self_attn.o_proj", "shared_mlp.output_linear"),
    shared_width=("shared_intermediate_size",),
)
_PLANS = {
    **dict.fromkeys(
        (
            *("apertus", "arcee", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma2"),
            *("gemma3_text", "granite", "helium", "hunyuan_v1_dense", "hyperclovax", "jais2"),
            *("llama", "ministral", "ministral3", "mistral", "nemotron", "olmo", "qwen2", "qwen3"),
            *("seed_oss", "smollm3", "vaultgemma"),
        ),
        _LLAMA,
    ),
    **dict.fromkeys(("olmo2", "olmo3"), replace(_LLAMA, norms=_HEAD_NORMS)),
    **dict.fromkeys(("mixtral", "phimoe", "granitemoe"), _ALONE),
    **dict.fromkeys(("olmoe", "flex_olmo", "minimax_m2"), replace(_ALONE, norms=_HEAD_NORMS)),
    **dict.fromkeys(("qwen3_moe", "mellum"), _EXPERTS),
    **dict.fromkeys(
        ("kolibri1", "qwen2_moe"),
        replace(_EXPERTS, shared_width=("shared_expert_intermediate_size",)),
    ),
    "flint": replace(
        _EXPERTS,
        stacks={**_EXPERTS.stacks, **_SINKS},
        shared_width=("shared_expert_intermediate_size",),
    ),
    "cohere2_moe": replace(
        _ALONE,
        inner_width="prefix_dense_intermediate_size",
        shared_width=("num_shared_experts", "intermediate_size"),
    ),
    **dict.fromkeys(("glm4_moe", "dots1"), _WITH_SHARED),
    **dict.fromkeys(
        ("afmoe", "exaone_moe", "hy_v3"),
        replace(_WITH_SHARED, shared_width=("num_shared_experts", "moe_intermediate_size")),
    ),
    **dict.fromkeys(("minicpm3", "youtu"), replace(_LLAMA, columns=_LATENT)),
    **dict.fromkeys(
        ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
        replace(_WITH_SHARED, columns=_LATENT),
    ),
    "solar_open": replace(_WITH_SHARED, inner_width=""),
    "ernie4_5_moe": replace(
        _WITH_SHARED, shared_width=("moe_num_shared_experts", "moe_intermediate_size")
    ),
    "hunyuan_v1_moe": replace(_EXPERTS, expert_width="intermediate_size"),
    "granitemoeshared": _GRANITE_SHARED,
    "granitemoe_swa": replace(_GRANITE_SHARED, stacks={**_GRANITE_SHARED.stacks, **_SINKS}),
    "gpt_oss": replace(
        _ALONE,
        stacks={
            "experts.gate_up_proj": (2, evenly),  # gate and up in turn
            "experts.gate_up_proj_bias": (1, evenly),
            "experts.down_proj": (1, evenly),
        }
        | _SINKS,
        once=("experts.down_proj_bias",),
    ),
    "aria_text": replace(
        _ALONE,
        stacks=_TURNED,
        shared_width=("moe_num_shared_experts", "intermediate_size"),
    ),
    **dict.fromkeys(
        ("glm", "glm4"),
        SlicePlan(columns=_SEPARATE | {"gate_up_proj": in_halves}, rows=_ENDS),
    ),
    "phi3": SlicePlan(
        columns={"qkv_proj": queries_keys_values, "gate_up_proj": in_halves},
        rows=_ENDS,
        counts=("num_key_value_heads",),
        config_counts=("num_attention_heads",),
    ),
    "phi": SlicePlan(columns=_SEPARATE | {"fc1": evenly}, rows=_even("self_attn.dense", "mlp.fc2")),
    "starcoder2": SlicePlan(
        columns=_SEPARATE | {"mlp.c_fc": evenly}, rows=_even("self_attn.o_proj", "mlp.c_proj")
    ),
    "gpt_bigcode": SlicePlan(
        columns={"attn.c_attn": queries_and_shared_keys, "mlp.c_fc": evenly},
        rows=_even("attn.c_proj", "mlp.c_proj"),
        counts=("num_heads", "embed_dim"),
        inner_width="n_inner",
    ),
    "opt": SlicePlan(
        columns=_SEPARATE | {"fc1": evenly},
        rows=_even("out_proj", "fc2"),
        counts=("num_heads",),
        inner_width="ffn_dim",
    ),
    "gpt2": SlicePlan(
        columns={"attn.c_attn": queries_keys_values, "mlp.c_fc": evenly},
        rows=_even("attn.c_proj", "mlp.c_proj"),
        counts=("num_heads", "split_size"),
        inner_width="n_inner",
    ),
    "gpt_neox": SlicePlan(  # a head's query, key and value side by side
        columns=_even("attention.query_key_value", "mlp.dense_h_to_4h"),
        rows=_even("attention.dense", "mlp.dense_4h_to_h"),
    ),
    "bloom": SlicePlan(
        columns=_even("self_attention.query_key_value", "mlp.dense_h_to_4h"),
        rows=_even("self_attention.dense", "mlp.dense_4h_to_h"),
        counts=("num_heads",),
        inner_width="n_inner",
        by_generate=True,
        biases=("alibi",),
    ),
    "falcon": SlicePlan(
        columns={"self_attention.query_key_value": in_groups, "mlp.dense_h_to_4h": evenly},
        rows=_even("self_attention.dense", "mlp.dense_4h_to_h"),
        counts=("num_heads", "num_kv_heads"),
        inner_width="ffn_hidden_size",
        by_generate=True,
        biases=("alibi", "attention_mask"),  # which has alibi in it
    ),
    "mpt": SlicePlan(
        columns={"attn.Wqkv": queries_keys_values, "ffn.up_proj": evenly},
        rows=_even("attn.out_proj", "ffn.down_proj"),
        counts=("n_heads",),
        inner_width="n_inner",
        by_generate=True,
        biases=("position_bias",),
    ),
    "gptj": SlicePlan(
        columns=_even("q_proj", "k_proj", "v_proj", "mlp.fc_in"),
        rows=_even("attn.out_proj", "mlp.fc_out"),
        counts=("num_attention_heads",),
        inner_width="n_inner",
        by_generate=True,
    ),
    "codegen": SlicePlan(
        columns={"attn.qkv_proj": queries_values_keys_in_quarters, "mlp.fc_in": evenly},
        rows={"attn.out_proj": in_quarters, "mlp.fc_out": evenly},
        counts=("num_attention_heads",),
        inner_width="n_inner",
        by_generate=True,
        head_runs=4,
    ),
    "gpt_neo": SlicePlan(
        columns=_even("q_proj", "k_proj", "v_proj", "mlp.c_fc"),
        rows=_even("attention.out_proj", "mlp.c_proj"),
        counts=("num_heads",),
        by_generate=True,
    ),
}
_STATES = "whose layers keep states"
_REASONS = {
    **dict.fromkeys(
        (
            *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "lfm2", "lfm2_moe"),
            *("bamba", "mamba2", "granitemoehybrid", "falcon_h1", "nemotron_h"),
        ),
        _STATES,
    ),
    "longcat_flash": "whose experts that compute nothing every rank would add",
    "dbrx": "whose experts lie under each other in one matrix",
    "jetmoe": "whose heads are experts",
}
"""Why some have no plan: (..., which is one) of what an error says."""


def planned(plan: Mapping[str, T], name: str) -> T | None:
    """What a plan says of the module or weight of this name, by its ending."""
    return next((what for ending, what in plan.items() if name.endswith(ending)), None)


def slice_plan(config: PreTrainedConfig) -> SlicePlan:
    """The plan of a family that has one (`check_sliceable`)."""
    return _PLANS[config.get_text_config().model_type]


def has_slice_plan(config: PreTrainedConfig) -> bool:
    """Whether a family has a plan, and no longrope (`check_sliceable`)."""
    config = config.get_text_config()
    return config.model_type in _PLANS and longrope_border(config) is None


def heads_of(config: PreTrainedConfig) -> Heads:
    """Of a layer; in families with a plan all are alike."""
    config = config.get_text_config()
    heads = attention_heads(config)[0]
    if config.model_type != "falcon":
        return heads
    grouped = config.num_kv_heads if config.new_decoder_architecture else heads.queries
    is_one = config.multi_query and not config.new_decoder_architecture
    return replace(heads, keys=1 if is_one else grouped)


def divided(config: PreTrainedConfig) -> Iterator[tuple[str, int]]:
    """What the number of ranks must divide beside heads of keys, with its name."""
    config = config.get_text_config()
    plan, heads = _PLANS[config.model_type], heads_of(config)
    yield "attention heads", heads.queries
    if plan.head_runs > 1:
        yield f"attention heads in each of {plan.head_runs} runs", heads.queries // plan.head_runs
    yield from _inner_widths(config, plan)
    if plan.expert_width:
        yield f"experts' inner width ({plan.expert_width})", getattr(config, plan.expert_width)


def _inner_widths(config: PreTrainedConfig, plan: SlicePlan) -> Iterator[tuple[str, int]]:
    """Of linear layers outside of attention, where there are some."""
    if name := plan.inner_width:
        yield f"inner width ({name})", getattr(config, name, None) or 4 * config.hidden_size
    if plan.shared_width:
        width = math.prod(getattr(config, name) or 0 for name in plan.shared_width)
        yield f"shared experts' inner width ({' * '.join(plan.shared_width)})", width


def linear_widths(config: PreTrainedConfig) -> list[int]:
    """Of linear layers that are sliced, and where heads lie in runs, of a run: integers are cut
    between blocks."""
    config = config.get_text_config()
    plan, heads = _PLANS[config.model_type], heads_of(config)
    inner = [width for _, width in _inner_widths(config, plan)]
    width = getattr(config, "v_head_dim", None) or heads.width  # of values
    return [heads.queries // plan.head_runs * width, *inner]


def check_sliceable(config: PreTrainedConfig, parts: int, frozen: str = "") -> None:
    """Refuse a model that cannot be sliced into `parts`.

    Args:
        frozen: the kind of integers that its weights are, if they are (`quantized.KINDS`).
    Raises:
        ModelError: a family without a plan, heads or widths that `parts` does not divide, or not
            into whole blocks of integers, or longrope.
    """
    config = config.get_text_config()
    if config.model_type not in _PLANS:
        why = _REASONS.get(config.model_type, "")
        raise ModelError(
            f"tensor-parallel generation must have a plan for the family; got "
            f"{config.model_type!r}{why and f', {why}'}, plans are there for "
            f"{', '.join(sorted(_PLANS))}. Use --inference-tp-size 1."
        )
    heads = heads_of(config)
    for what, number in divided(config):
        if number % parts:
            raise ModelError(
                f"--inference-tp-size must divide the model's {what}; got {parts} for {number}. "
                "Use a divisor."
            )
    for width in linear_widths(config) if frozen and parts > 1 else ():
        if width // parts % BLOCKS[frozen]:
            raise ModelError(
                f"--inference-tp-size must cut widths between blocks of {BLOCKS[frozen]} {frozen} "
                f"weights; got {parts} for {width}. Use a smaller one, or --frozen-weights of "
                "smaller blocks (nf4) or none."
            )
    if (border := longrope_border(config)) is not None:
        raise ModelError(
            "tensor-parallel generation must keep what it computed of earlier tokens; got a model "
            f"of family {config.model_type!r} that recomputes it past {border} tokens (longrope). "
            "Use --inference-tp-size 1."
        )
    if heads.keys % parts and parts % heads.keys:
        raise ModelError(
            "--inference-tp-size must divide the model's key and value heads, or be a multiple of "
            f"them; got {parts} for {heads.keys}. Use such a number."
        )
