"""Generation of Llama-like models on a CPU: one C++ call a step, on weights packed for the phase.

The call runs the very operations of the twin's modules, so its numbers are theirs to the last bit.
The packed weights are a copy that lives while the runner does. Quantized weights are copied
unpacked, which many answers read faster, or where memory is short read as they are, part by part.
Where there is no room for a copy of the others, and for every other model, the modules run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.generation.batch_state import Rows
from tandem.generation.runner import Advanced, TwinRunner
from tandem.generation.sampler import Draw
from tandem.models.computed import is_computed
from tandem.models.laid_out import LaidOutWeight
from tandem.models.lora import LoraLinear
from tandem.models.quantized import PackedWeight
from tandem.models.rope import STEADY_KINDS
from tandem.models.stored import StoredWeight
from tandem.models.token_layers import TokenEmbedding, TokenHead
from tandem.models.twin import twin_of
from tandem.models.twin_layers import (
    TwinEmbedding,
    TwinFrozenLinear,
    TwinGatedMLP,
    TwinLinear,
    TwinRMSNorm,
    TwinRotaryAttention,
    TwinTokenEmbedding,
    TwinTokenHead,
)
from tandem.ops import blockwise, dense, native
from tandem.ops.attention_context import KVMemory, Packed
from tandem.ops.sizes import SHARE_TO_PACK

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "ministral": "Ministral", "cwm": "Cwm",
            "qwen2": "Qwen2", "qwen3": "Qwen3"}  # fmt: skip
"""Model types that generate from packed weights on a CPU, and how their classes are called."""
_LAYER_CLASSES = {"input_layernorm": TwinRMSNorm, "post_attention_layernorm": TwinRMSNorm,
                  "self_attn": TwinRotaryAttention, "mlp": TwinGatedMLP}  # fmt: skip
_STEPS_AT_ONCE = 16
_PRODUCTS_AT_ONCE = 8 * 10**9  # a tenth of a second or two on a core with AVX-512


def runs_natively(model: PreTrainedModel, free: int) -> bool:
    """Whether this model decodes in one call, with `free` bytes for a copy of its weights."""
    twin: Any = twin_of(model)
    if (
        model.device.type != "cpu"
        or not _is_known(twin)
        or model.dtype not in (torch.float32, torch.bfloat16)
        or not native.available()
    ):
        return False
    layers, quantized = twin.model.layers, _quantized(twin)
    if not all(_is_plain(layer, model.dtype) for layer in layers):
        return False
    codes = {weight.layout.code for weight in quantized}
    if len(codes) > 1 or not all(
        blockwise.reads_rows(weight.shape[-1], weight.layout.code) for weight in quantized
    ):
        return False
    unpacked = {id(p) for module in quantized for p in module.parameters()}
    if any(p.dtype != model.dtype and id(p) not in unpacked for p in twin.parameters()):
        return False
    if _copied(twin) * model.dtype.itemsize > SHARE_TO_PACK * free:
        return False
    if not all(_lies_together(group) for layer in layers for group in projections(layer)):
        return False
    numbers = {_numbers(layer, twin.model.norm) for layer in layers}
    adapters = {adapter for layer in layers for adapter in _adapters(layer)}
    return (
        len(numbers) == 1
        and all(len(epsilons) == 1 for epsilons, *_ in numbers)
        and len(adapters) <= 1
    )


def _copied(twin: Any) -> int:
    """Weights that a runner has to copy: of linear layers that are neither laid out nor quantized,
    adapters, the head, the embedding where it has trained rows."""
    layers = [module for layer in twin.model.layers for module in _projections(layer)]
    acting = [layer.acting() for layer in layers if isinstance(layer, LoraLinear)]
    adapters = [part.weight for parts in acting if parts is not None for part in parts]
    plain = [layer for layer in layers if not isinstance(layer.weight, StoredWeight)]
    plain += [] if _reads_codes(twin.lm_head) else [twin.lm_head]
    weights = [layer.weight for layer in plain] + adapters
    if _replaces_rows(twin.model.embed_tokens):
        weights.append(twin.model.embed_tokens.weight)
    return sum(weight.numel() for weight in weights)


def unpacks(model: PreTrainedModel, free: int) -> bool:
    """Whether a runner copies quantized weights too, with `free` bytes for all that it copies: none
    of a model that only answers, whose place in memory is then theirs alone."""
    weights = _quantized(model)  # what is said of them, not of the twin's
    if any(weight.stays_packed for weight in weights):
        return False
    copied = _copied(twin_of(model)) + sum(weight.numel() for weight in weights)
    return copied * model.dtype.itemsize <= SHARE_TO_PACK * free


def _reads_codes(layer: Any) -> bool:
    """Whether a layer's weight is quantized, and can be read row by row."""
    weight = layer.weight
    return isinstance(weight, PackedWeight) and not _replaces_rows(layer)


def _replaces_rows(layer: Any) -> bool:
    """Whether trained rows act in an embedding or a head."""
    return isinstance(layer, TokenEmbedding | TokenHead) and layer.lora_tokens.acting() is not None


def _size(twin: Any) -> int:
    """All weights of a model, quantized ones as many as they stand for."""
    others = [m for m in twin.modules() if isinstance(m, StoredWeight)]
    integers = {id(p) for module in others for p in module.parameters()}
    plain = sum(p.numel() for p in twin.parameters() if id(p) not in integers)
    return plain + sum(module.numel() for module in others)


def _quantized(twin: Any) -> list[PackedWeight]:
    return [module for module in twin.modules() if isinstance(module, PackedWeight)]


def _is_known(twin: Any) -> bool:
    """Whether the model around the layers is one that was read, part by part, and unchanged.

    Classes are told by their modules' names, so that no family is imported to be compared with.
    """
    home = type(twin).__module__
    kind = home.rpartition(".modeling_")[2]
    family = FAMILIES.get(kind)
    is_read = family is not None and home == f"transformers.models.{kind}.modeling_{kind}"
    if not is_read or any("forward" in vars(module) for module in twin.modules()):
        return False

    def is_own(module: Any, suffix: str) -> bool:
        return (type(module).__module__, type(module).__qualname__) == (home, f"{family}{suffix}")

    base = twin.model
    return (
        is_own(twin, "ForCausalLM")
        and is_own(base, "Model")
        and is_own(base.rotary_emb, "RotaryEmbedding")
        and all(is_own(layer, "DecoderLayer") for layer in base.layers)
        and type(base.embed_tokens) in (TwinEmbedding, TwinTokenEmbedding)
        and _is_norm(base.norm)
        and type(twin.lm_head) in (TwinLinear, TwinFrozenLinear, TwinTokenHead)
        and getattr(base.rotary_emb, "rope_type", "default") in STEADY_KINDS
    )


def _is_norm(module: Any) -> bool:
    return type(module) is TwinRMSNorm and not module._unit_offset


def _is_plain(layer: Any, dtype: torch.dtype) -> bool:
    """A layer whose every part is one that the call computes (SiLU, no extras)."""
    attention, mlp = layer.self_attn, layer.mlp
    if {name: type(part) for name, part in layer._modules.items()} != _LAYER_CLASSES:
        return False
    norms = {"q_norm", "k_norm"} & set(attention._modules)
    return (
        all(is_computed(module, dtype) for module in _projections(layer))
        and all(_is_norm(attention._modules[name]) for name in norms)
        and set(attention._modules) - norms == {"q_proj", "k_proj", "v_proj", "o_proj"}
        and len(norms) != 1
        and not mlp._tanh
        and attention._softcap == 0.0
        and (attention.attention_dropout == 0.0 or not attention.training)
    )


def _adapters(layer: Any) -> Iterator[tuple[int, float]]:
    """Rank and scale of each adapter that acts in a layer."""
    for module in _projections(layer):
        if isinstance(module, LoraLinear) and module.acting() is not None:
            yield module.rank, module.scale


def _lies_together(layers: Sequence[Any]) -> bool:
    """Whether layers over one input are laid out as one weight, or none of them is."""
    weights = [layer.weight for layer in layers]
    laid_out = [weight for weight in weights if isinstance(weight, LaidOutWeight)]
    if not laid_out:
        return True
    return (
        len(laid_out) == len(weights)
        and all(weight.group is laid_out[0].group for weight in laid_out)
        and sum(weight.words.numel() for weight in laid_out) == laid_out[0].group.numel()
    )


def projections(layer: Any) -> list[list[Any]]:
    """A layer's linear layers; those over one input, whose weights are packed as one, together."""
    attention, mlp = layer.self_attn, layer.mlp
    return [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    ]


def _projections(layer: Any) -> list[Any]:
    return [module for group in projections(layer) for module in group]


def _numbers(layer: Any, last_norm: Any) -> tuple[Any, ...]:
    """What the call takes to be one number for all layers, the epsilons first."""
    attention = layer.self_attn
    own = [module for module in layer.modules() if type(module) is TwinRMSNorm]
    sizes = [(linear.in_features, linear.out_features) for linear in _projections(layer)]
    epsilons = frozenset(norm._eps for norm in [*own, last_norm])
    return epsilons, attention.scaling, attention.head_dim, *sizes


class NativeRunner(TwinRunner):
    """Prefill and decoding by `LlamaDecoder` of csrc/step.cpp."""

    def __init__(
        self, model: PreTrainedModel, memory: KVMemory, longest: int, *, unpacks: bool = True
    ) -> None:
        """Packs the weights, quantized ones if `unpacks`; no sequence may pass `longest` tokens."""
        super().__init__(model, memory)
        twin: Any = twin_of(model)
        self._size = _size(twin)
        base, first = twin.model, twin.model.layers[0]
        embedding = base.embed_tokens.weight.detach()
        if _replaces_rows(base.embed_tokens):
            embedding = base.embed_tokens.merged_weight()
        positions = torch.arange(longest + 1)[None]
        cos, sin = base.rotary_emb(embedding[:1][None], position_ids=positions)
        packing = _Packing(model.dtype, unpacks)
        weights = [part for layer in base.layers for part in _layer_parts(layer, packing)]
        weights += [base.norm.weight.detach(), *packing.of([twin.lm_head])]
        adapters = [adapter for layer in base.layers for adapter in _adapters(layer)]
        rank, adapter_scale = adapters[0] if adapters else (0, 0.0)
        attention = first.self_attn
        width = attention.head_dim
        shape = [
            attention.q_proj.out_features // width,
            attention.k_proj.out_features // width,
            width,
            first.mlp.gate_proj.out_features,
            twin.lm_head.out_features,
            rank,
        ]
        self._decoder = torch.classes.tandem.LlamaDecoder(
            embedding.contiguous(), cos[0].contiguous(), sin[0].contiguous(), weights,
            [keys for keys, _ in memory.layers], [values for _, values in memory.layers],
            shape, [layer.self_attn._window for layer in base.layers],
            base.norm._eps, attention.scaling, adapter_scale, *packing.stored(twin),
        )  # fmt: skip

    def keep(self, states: list[Tensor]) -> None:
        """Keep the states of every token from now on (`LlamaDecoder::keep`)."""
        self._decoder.keep(states)

    def decode(
        self, token_ids: Tensor, positions: Tensor, tables: Tensor, states: Tensor | None = None
    ) -> Tensor:
        """As `Runner` says; no layer keeps states."""
        logits: Tensor = self._decoder.step(token_ids, positions, tables)
        return logits

    def advance(self, rows: Rows, stop_token_ids: Collection[int], until: int) -> Advanced | None:
        """As `Runner` says: where one sampler draws for all rows, and `is_plain`."""
        sampler, live = rows.sampler, rows.live
        if sampler is None or not sampler.is_plain:
            return None
        sampling = sampler.sampling
        most = min(_STEPS_AT_ONCE, max(1, _PRODUCTS_AT_ONCE // (self._size * len(rows))))
        steps, ids, numbers, ended, left = self._decoder.advance(
            live.columns, live.tables, list(stop_token_ids), list(sampler.stop_token_ids),
            sampling.min_new_tokens, sampling.temperature, sampler.num_ids, most, until,
        )  # fmt: skip
        ran, places, tokens = ids.unbind()
        return Advanced(
            steps, ran, places, Draw(tokens, *numbers.unbind()),
            [(row, step, bool(finished)) for row, step, finished in ended.tolist()], left.tolist(),
        )  # fmt: skip

    def _prompts(self, token_ids: Tensor, positions: Tensor, lasts: Tensor, step: Packed) -> Tensor:
        before = step.before
        past = (None, None) if before is None else (before.tables, before.starts_at)
        logits: Tensor = self._decoder.prefill(
            token_ids, positions, lasts, step.cu_seqlens, step.block_tables, *past
        )
        return logits

    def close(self) -> None:
        """Frees the packed weights, and lets go of the memory."""
        del self._decoder


@dataclass(frozen=True, slots=True)
class _Packing:
    """Weights as `LlamaDecoder` takes them: packed, or as codes where `unpacks` is not set."""

    dtype: torch.dtype
    unpacks: bool

    def of(self, layers: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """The layers' weights as one packed weight, empty if they are codes, and their biases as
        one (empty without)."""
        biases = [
            torch.zeros(layer.out_features, dtype=self.dtype)
            if layer.bias is None
            else layer.bias.detach()
            for layer in layers
        ]
        has_bias = any(layer.bias is not None for layer in layers)
        bias = torch.cat(biases) if has_bias else torch.empty(0)
        own = layers[0].weight
        if isinstance(own, LaidOutWeight):
            return own.group, bias
        if all(self._stays(layer) for layer in layers):
            return torch.empty(0), bias
        weights = [_weight(layer, self.dtype) for layer in layers]
        return _pack(weights[0] if len(weights) == 1 else torch.cat(weights)), bias

    def stored(self, twin: Any) -> tuple[list[Tensor], list[int]]:
        """Codes and scales of each weight that stays codes, empty for the others; their kind and
        block. Nothing where none stays."""
        groups = [group for layer in twin.model.layers for group in projections(layer)]
        stored: list[Tensor] = []
        code = None
        for group in [*groups, [twin.lm_head]]:
            stays = all(self._stays(layer) for layer in group)
            for layer in group:
                weight = layer.weight
                if not stays:
                    stored += [torch.empty(0, dtype=torch.uint8), torch.empty(0)]
                    continue
                code = weight.layout.code
                stored += [weight.packed.detach(), weight.scales.detach().view(code.scale_dtype)]
        return ([], []) if code is None else (stored, [code.number, code.block])

    def _stays(self, layer: Any) -> bool:
        return not self.unpacks and _reads_codes(layer)


def _layer_parts(layer: Any, packing: _Packing) -> list[Tensor]:
    """In the order of `Part` in csrc/step.cpp, empty where the layer has none."""
    attention = layer.self_attn
    none = torch.empty(0)
    norms = [
        attention._modules[name].weight.detach() if name in attention._modules else none
        for name in ("q_norm", "k_norm")
    ]
    qkv, out, gate_up, down = projections(layer)
    return [
        layer.input_layernorm.weight.detach(),
        *packing.of(qkv),
        *norms,
        *packing.of(out),
        layer.post_attention_layernorm.weight.detach(),
        *packing.of(gate_up),
        *packing.of(down),
        *(part for layers in (qkv, out, gate_up, down) for part in _packed_adapters(layers)),
    ]


def _packed_adapters(layers: Sequence[Any]) -> list[Tensor]:
    """A of the adapters that act in layers over one input, packed as one weight, and B of each;
    empty where there is none."""
    none = torch.empty(0)
    acting = [layer.acting() if isinstance(layer, LoraLinear) else None for layer in layers]
    downs = [parts[0].weight.detach() for parts in acting if parts is not None]
    return [
        _pack(torch.cat(downs)) if downs else none,
        *(none if parts is None else _pack(parts[1].weight.detach()) for parts in acting),
    ]


def _weight(layer: Any, dtype: torch.dtype) -> Tensor:
    """A layer's weight, trained rows in it; a quantized one unpacked, as its product does."""
    weight = layer.weight
    if isinstance(weight, PackedWeight):
        weight = weight.layout.unpacked(weight.packed, weight.scales, dtype)
    return layer.lora_tokens.merged(weight) if _replaces_rows(layer) else weight.detach()


def _pack(weight: Tensor) -> Tensor:
    packed = dense.pack_weight(weight)
    native.prefer_large_pages(packed)
    return packed
