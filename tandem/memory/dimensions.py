"""The properties of a model that decide its memory and its speed, in closed form from its config.

No torch: a plan answers before torch is imported. `shape.shape_of` counts the same on the meta
device, for every family; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

GATED_KEEPS, RELU_KEEPS, OTHER_KEEPS, GELU_KEEPS = 3, 1, 2, 5
"""Tensors of the inner width that an MLP keeps per token for its backward pass.

Gated: the gate, the other projection and their product. Others: the output of the activation, and
its input unless that follows from it; of GPT-2's tanh GELU, which is written out in torch, every
part.
"""

WHOLE_BLOCKS = ("llama", "mistral", "qwen2", "gemma")
"""Families whose blocks a CPU computes as three operations, if their MLP has no biases."""


@dataclass(frozen=True)
class Shape:
    """A model in the numbers that memory depends on.

    parameters: all weights, tied ones once. blocks: those of each decoder block.
    linears: (in, out) of every layer that may get an adapter or be quantized.
    largest: elements of the largest single weight. vocabulary: rows of the embedding.
    untied_head: elements of a vocabulary head with a weight of its own; else 0.
    query_width, kv_width: heads times their width; inner: the MLP's width.
    inner_kept: tensors of that width which an MLP keeps for its backward pass.
    is_scalar: a head of one output in place of the vocabulary's.
    whole_blocks: a CPU computes a block as three operations (models/cpu_blocks.py).
    mixed, mixed_floats: numbers per token that layers with a state keep for their backward pass,
    all layers together, in the type that computes and in float32. state, state_floats: numbers of
    their states per sequence, in the same two types. keyless: how many of these layers have no
    attention beside it.
    others: kinds of layers that are counted as attention's, but are not.
    is_sliceable: tensor-parallel generation has a plan for its layers. stacked: elements of weights
    not in `linears` that it slices, as experts in one tensor. cut: widths of linear layers that it
    slices, where they are not query_width and inner; divided: what else its ranks must divide.
    """

    parameters: int
    blocks: tuple[int, ...]
    linears: tuple[tuple[int, int], ...]
    largest: int
    layers: int
    width: int
    heads: int
    query_width: int
    kv_width: int
    inner: int
    inner_kept: int
    vocabulary: int
    untied_head: int
    is_scalar: bool
    whole_blocks: bool = False
    mixed: int = 0
    mixed_floats: int = 0
    state: int = 0
    state_floats: int = 0
    keyless: int = 0
    others: tuple[str, ...] = ()
    is_sliceable: bool = True
    stacked: int = 0
    cut: tuple[int, ...] = ()
    divided: tuple[int, ...] = ()

    @cached_property
    def linear_weights(self) -> int:
        """Elements of all weights in `linears`."""
        return sum(inputs * outputs for inputs, outputs in self.linears)

    @cached_property
    def kv_heads(self) -> int:
        """Heads of keys, and as many of values; several query heads may share one."""
        return max(1, self.heads * self.kv_width // self.query_width)

    def slices_into(self, parts: int, block: int = 1) -> bool:
        """Whether tensor-parallel generation can divide heads and widths among `parts` ranks, as
        `models.slice_plans.check_sliceable` asks; block: weights that have one scale."""
        if parts == 1 or not self.is_sliceable:
            return parts == 1
        widths = self.cut or (self.query_width, self.inner)
        is_even = not any(number % parts for number in (self.heads, *widths, *self.divided))
        are_whole = not any(width // parts % block for width in widths)
        shares_keys = not (self.kv_heads % parts and parts % self.kv_heads)
        return is_even and are_whole and shares_keys

    @property
    def sliced_widths(self) -> tuple[int, ...]:
        """What is divided in `slices_into`, heads and their width aside."""
        return (*(self.cut[1:] if self.cut else (self.inner,)), *self.divided)

    @cached_property
    def outside_blocks(self) -> int:
        """Parameters outside the blocks: embeddings, the last norm, the head."""
        return self.parameters - sum(self.blocks)

    @cached_property
    def largest_linear(self) -> int:
        """Elements of the largest weight in `linears`."""
        return max((inputs * outputs for inputs, outputs in self.linears), default=0)

    @cached_property
    def largest_unit(self) -> int:
        """Parameters of the largest block, or of what is outside of blocks if that is more."""
        return max([self.outside_blocks, *self.blocks])

    @cached_property
    def _edges(self) -> int:
        return sum(inputs + outputs for inputs, outputs in self.linears)

    def adapters(self, rank: int) -> int:
        """Parameters of adapters of this rank on every linear layer: rank * (in + out) each."""
        return rank * self._edges


def shape_from(config: Mapping[str, Any], *, scalar: bool = False) -> Shape | None:
    """The same as `shape_of`, from a config.json's content; None for a family without a formula.

    Args:
        scalar: with a head of one output, as critic and reward model have.
    """
    family = _FAMILIES.get(str(config.get("model_type", "")))
    return None if family is None else family(config, scalar)


def scaled(
    *, layers: int, width: int, inner: int, heads: int, kv_heads: int, vocabulary: int, tied: bool
) -> dict[str, Any]:
    """A config of a Llama with these sizes, for a model of which nothing else is known."""
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 1 << 20,
    }


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a family's formula gives.

    linears: (in, out) of one block's linear layers; more: its numbers in no matrix. outer: linear
    layers outside of blocks. embeddings, positions: of tokens and places; ends: the last norm.
    head, score: elements of the vocabulary's head, tied or not, and of a head of one output.
    """

    linears: tuple[tuple[int, int], ...]
    more: int
    embeddings: int
    ends: int
    head: int
    score: int
    heads: int
    kv_width: int
    query_width: int
    inner: int
    inner_kept: int
    whole_blocks: bool = False
    positions: int = 0
    outer: tuple[tuple[int, int], ...] = ()


def _shape(config: Mapping[str, Any], scalar: bool, parts: _Parts, layers: int) -> Shape:
    matrices = [inputs * outputs for inputs, outputs in parts.linears]
    block = sum(matrices) + parts.more
    vocabulary = int(config["vocab_size"])
    tied = bool(config.get("tie_word_embeddings", _TIED.get(str(config["model_type"]), True)))
    untied = 0 if scalar or tied else parts.head
    head = parts.score if scalar else untied
    outer = [inputs * outputs for inputs, outputs in parts.outer]
    outside = parts.embeddings + parts.positions + parts.ends + sum(outer)
    return Shape(
        parameters=outside + layers * block + head,
        blocks=(block,) * layers,
        linears=parts.linears * layers + parts.outer,
        largest=max(parts.embeddings, parts.positions, *matrices, *outer),
        layers=layers,
        width=int(config.get("hidden_size") or config["n_embd"]),
        heads=parts.heads,
        query_width=parts.query_width,
        kv_width=parts.kv_width,
        inner=parts.inner,
        inner_kept=parts.inner_kept,
        vocabulary=vocabulary,
        untied_head=untied,
        is_scalar=scalar,
        whole_blocks=parts.whole_blocks,
    )


def _llama(config: Mapping[str, Any], scalar: bool) -> Shape:
    """Llama, Mistral, Qwen 2 and 3: RMS norms, rotary attention, a gated MLP."""
    kind, width = config["model_type"], int(config["hidden_size"])
    heads, inner = int(config["num_attention_heads"]), int(config["intermediate_size"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_width = int(config.get("head_dim") or width // heads)
    query, keys = heads * head_width, kv_heads * head_width
    has_bias = kind == "qwen2" or bool(config.get("attention_bias", False))
    biases = has_bias * (query + 2 * keys)
    biases += bool(config.get("attention_bias", False) and kind != "qwen2") * width
    biases += bool(config.get("mlp_bias", False)) * (2 * inner + width)
    vocabulary = int(config["vocab_size"])
    parts = _Parts(
        linears=(
            *((width, query), (width, keys), (width, keys), (query, width)),
            *((width, inner), (width, inner), (inner, width)),
        ),
        more=2 * width + biases + (2 * head_width if kind == "qwen3" else 0),
        embeddings=vocabulary * width,
        ends=width,
        head=vocabulary * width,
        score=width,
        heads=heads,
        kv_width=keys,
        query_width=query,
        inner=inner,
        inner_kept=GATED_KEEPS,
        whole_blocks=kind in WHOLE_BLOCKS and not config.get("mlp_bias", False),
    )
    return _shape(config, scalar, parts, int(config["num_hidden_layers"]))


def _opt(config: Mapping[str, Any], scalar: bool) -> Shape:
    """OPT (arXiv:2205.01068): learned positions, biases everywhere, ReLU; the 350M projects its
    embeddings and has no last norm."""
    width, inner = int(config["hidden_size"]), int(config["ffn_dim"])
    vocabulary = int(config["vocab_size"])
    embedded = int(config.get("word_embed_proj_dim") or width)
    projections = ((width, embedded), (embedded, width)) if embedded != width else ()
    before = config.get("do_layer_norm_before", True)
    has_norm = before and not config.get("_remove_final_layer_norm", False)
    positions = (int(config.get("max_position_embeddings", 2048)) + 2) * width
    bias = bool(config.get("enable_bias", True))
    parts = _Parts(
        linears=((width, width),) * 4 + ((width, inner), (inner, width)),
        more=4 * width + bias * (5 * width + inner),
        embeddings=vocabulary * embedded,
        positions=positions,
        ends=2 * width if has_norm else 0,
        head=vocabulary * embedded,
        score=embedded,
        heads=int(config["num_attention_heads"]),
        kv_width=width,
        query_width=width,
        inner=inner,
        inner_kept=_kept(str(config.get("activation_function", "relu"))),
        outer=projections,
    )
    return _shape(config, scalar, parts, int(config["num_hidden_layers"]))


def _gpt2(config: Mapping[str, Any], scalar: bool) -> Shape:
    """GPT-2: learned positions, biases, GELU, one weight for queries, keys and values."""
    width = int(config["n_embd"])
    inner = int(config.get("n_inner") or 4 * width)
    vocabulary = int(config["vocab_size"])
    parts = _Parts(
        linears=((3 * width, width), (width, width), (inner, width), (width, inner)),
        more=4 * width + 5 * width + inner,
        embeddings=vocabulary * width,
        positions=int(config["n_positions"]) * width,
        ends=2 * width,
        head=vocabulary * width,
        score=width,
        heads=int(config["n_head"]),
        kv_width=width,
        query_width=width,
        inner=inner,
        inner_kept=_kept(str(config.get("activation_function", "gelu_new"))),
    )
    return _shape(config, scalar, parts, int(config["n_layer"]))


def _gpt_neox(config: Mapping[str, Any], scalar: bool) -> Shape:
    """GPT-NeoX and Pythia: rotary attention, biases, GELU, a head of its own."""
    width, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    vocabulary = int(config["vocab_size"])
    attention_bias = 4 * width if config.get("attention_bias", True) else 0
    parts = _Parts(
        linears=((width, 3 * width), (width, width), (width, inner), (inner, width)),
        more=4 * width + attention_bias + inner + width,
        embeddings=vocabulary * width,
        ends=2 * width,
        head=vocabulary * width,
        score=width,
        heads=int(config["num_attention_heads"]),
        kv_width=width,
        query_width=width,
        inner=inner,
        inner_kept=_kept(str(config.get("hidden_act", "gelu"))),
    )
    return _shape(config, scalar, parts, int(config["num_hidden_layers"]))


def _kept(activation: str) -> int:
    """Tensors of the inner width that an MLP without a gate keeps for its backward pass."""
    return {"relu": RELU_KEEPS, "gelu_new": GELU_KEEPS}.get(activation, OTHER_KEEPS)


_TIED = {"llama": False, "mistral": False, "qwen2": False, "qwen3": False, "gpt_neox": False}
"""Families' own value of tie_word_embeddings, where a config leaves it out; True for others."""

_FAMILIES: dict[str, Callable[[Mapping[str, Any], bool], Shape]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "opt": _opt,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
