"""Which parts of a family's weights each rank of tensor-parallel generation holds.

A rank has an equal share of the query heads and of the inner width (arXiv:1909.08053), and the
key/value heads that its queries read: an equal share of them too, or, where there are fewer than
ranks, a copy of the one. What a fused weight joins is divided part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformers import PreTrainedConfig

from tandem.errors import ModelError
from tandem.models.blocks import Heads, attention_heads
from tandem.models.quantized import BLOCKS
from tandem.models.rope import longrope_border
from tandem.ops.spans import Spans

Cut = Callable[[int, Heads, int], Spans]
"""Takes the number of a weight's outputs, its layer's heads and the number of ranks."""


def evenly(size: int, heads: Heads, parts: int) -> Spans:
    """Equal shares in order: heads, each with all its rows, or an inner width."""
    share = size // parts
    return [[(i * share, (i + 1) * share)] for i in range(parts)]


def by_key_heads(size: int, heads: Heads, parts: int) -> Spans:
    """Keys or values: those that a rank's queries read."""
    width = size // heads.keys
    return [[(first * width, last * width)] for first, last in _key_heads(heads.keys, parts)]


def queries_keys_values(size: int, heads: Heads, parts: int) -> Spans:
    """All queries, then all keys, then all values, in one weight."""
    queries, keys = heads.queries, heads.keys
    width = size // (queries + 2 * keys)
    of_rank = zip(evenly(queries, heads, parts), _key_heads(keys, parts), strict=True)
    spans: list[list[tuple[int, int]]] = []
    for asking, (first, last) in of_rank:
        starts = queries, queries + keys
        held = [*asking, *((start + first, start + last) for start in starts)]
        spans.append([(width * start, width * end) for start, end in held])
    return spans


def queries_and_shared_keys(size: int, heads: Heads, parts: int) -> Spans:
    """StarCoder's: queries, then the one key and the one value; or each head's three in turn."""
    cut = queries_keys_values if heads.keys < heads.queries else evenly
    return cut(size, heads, parts)


def in_halves(size: int, heads: Heads, parts: int) -> Spans:
    """Two layers of one width, gate and up, in one weight: a share of either."""
    half = size // 2
    return [
        [(first, last), (half + first, half + last)]
        for [(first, last)] in evenly(half, heads, parts)
    ]


def _key_heads(keys: int, parts: int) -> list[tuple[int, int]]:
    """First and last of the key heads that each rank's queries read."""
    if keys >= parts:
        return [(i * keys // parts, (i + 1) * keys // parts) for i in range(parts)]
    return [(i * keys // parts, i * keys // parts + 1) for i in range(parts)]


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """How an architecture is sliced.

    columns: endings of the names of layers that are sliced along their outputs, and how. rows: of
    those that are sliced along their inputs, evenly. counts: attributes of the modules around them
    that count heads or their numbers, and config_counts those of their config. inner_width: the
    config's name for the width of the MLP's inner layer; where it is None, that is four times the
    width.
    """

    columns: Mapping[str, Cut]
    rows: tuple[str, ...]
    counts: tuple[str, ...] = ()
    config_counts: tuple[str, ...] = ()
    inner_width: str = "intermediate_size"


_SEPARATE: dict[str, Cut] = {"q_proj": evenly, "k_proj": by_key_heads, "v_proj": by_key_heads}
_ENDS = ("self_attn.o_proj", "mlp.down_proj")
_LLAMA = SlicePlan(
    columns=_SEPARATE | {"gate_proj": evenly, "up_proj": evenly},
    rows=_ENDS,
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
    "phi": SlicePlan(columns=_SEPARATE | {"fc1": evenly}, rows=("self_attn.dense", "mlp.fc2")),
    "starcoder2": SlicePlan(
        columns=_SEPARATE | {"mlp.c_fc": evenly}, rows=("self_attn.o_proj", "mlp.c_proj")
    ),
    "gpt_bigcode": SlicePlan(
        columns={"attn.c_attn": queries_and_shared_keys, "mlp.c_fc": evenly},
        rows=("attn.c_proj", "mlp.c_proj"),
        counts=("num_heads", "embed_dim"),
        inner_width="n_inner",
    ),
    "opt": SlicePlan(
        columns=_SEPARATE | {"fc1": evenly},
        rows=("out_proj", "fc2"),
        counts=("num_heads",),
        inner_width="ffn_dim",
    ),
    "gpt2": SlicePlan(
        columns={"attn.c_attn": queries_keys_values, "mlp.c_fc": evenly},
        rows=("attn.c_proj", "mlp.c_proj"),
        counts=("num_heads", "split_size"),
        inner_width="n_inner",
    ),
    "gpt_neox": SlicePlan(  # a head's query, key and value side by side
        columns={"attention.query_key_value": evenly, "mlp.dense_h_to_4h": evenly},
        rows=("attention.dense", "mlp.dense_4h_to_h"),
    ),
}


def slice_plan(config: PreTrainedConfig) -> SlicePlan:
    """The plan of a family that has one (`check_sliceable`)."""
    return _PLANS[config.get_text_config().model_type]


def has_slice_plan(config: PreTrainedConfig) -> bool:
    """Whether a family has a plan, and no longrope (`check_sliceable`)."""
    config = config.get_text_config()
    return config.model_type in _PLANS and longrope_border(config) is None


def heads_of(config: PreTrainedConfig) -> Heads:
    """Of a layer; in families with a plan all are alike."""
    return attention_heads(config.get_text_config())[0]


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
        raise ModelError(
            f"tensor-parallel generation must have a plan for the family; got "
            f"{config.model_type!r}, plans are there for {', '.join(sorted(_PLANS))}. Use "
            "--inference-tp-size 1."
        )
    heads, name = heads_of(config), _PLANS[config.model_type].inner_width
    inner = getattr(config, name) or 4 * config.hidden_size
    for what, number in (("attention heads", heads.queries), (f"inner width ({name})", inner)):
        if number % parts:
            raise ModelError(
                f"--inference-tp-size must divide the model's {what}; got {parts} for {number}. "
                "Use a divisor."
            )
    for width in (heads.queries * heads.width, inner) if frozen and parts > 1 else ():
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
