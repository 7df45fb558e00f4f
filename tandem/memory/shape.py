"""The properties of a model that decide its memory, counted on the meta device."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from tandem.memory.dimensions import (
    GATED_KEEPS,
    GELU_KEEPS,
    OTHER_KEEPS,
    RELU_KEEPS,
    WHOLE_BLOCKS,
    Shape,
)
from tandem.models.blocks import attention_heads, decoder_blocks
from tandem.models.build import attention_for
from tandem.models.classifiers import require_classifier
from tandem.models.fused import mixer_size
from tandem.models.hf_logging import quiet
from tandem.models.load import embedding_rows
from tandem.models.lora import adaptable
from tandem.models.slice_plans import (
    divided,
    has_slice_plan,
    heads_of,
    linear_widths,
    planned,
    slice_plan,
)

__all__ = ["Shape", "shape_of"]


def shape_of(
    config: PreTrainedConfig, *, scalar: bool = False, trust_remote_code: bool = False
) -> Shape:
    """Count a model's weights exactly, from its config, without memory.

    Args:
        scalar: with a head of one output, as critic and reward model have.
        trust_remote_code: the config may bring its own Python code.
    """
    model = _on_meta(config, scalar, trust_remote_code)
    text = config.get_text_config()
    sizes = {id(p): p.numel() for p in model.parameters()}
    heads = attention_heads(text)
    inner, kept = _mlp(model, int(text.hidden_size))
    return Shape(
        parameters=sum(sizes.values()),
        blocks=tuple(sum(p.numel() for p in b.parameters()) for b in decoder_blocks(model)),
        linears=tuple(_in_out(model.get_submodule(name)) for name in adaptable(model)),
        largest=max(sizes.values()),
        layers=int(text.num_hidden_layers),
        width=int(text.hidden_size),
        heads=max(1, *(layer.queries for layer in heads)),
        query_width=max(max(1, layer.queries) * layer.width for layer in heads),
        kv_width=max(max(1, layer.keys) * layer.width for layer in heads),
        inner=inner,
        inner_kept=kept,
        vocabulary=embedding_rows(model),
        untied_head=_untied_head(model),
        is_scalar=scalar,
        whole_blocks=text.model_type in WHOLE_BLOCKS and not getattr(text, "mlp_bias", False),
        **_slicing(model, inner),
        **_mixers(model),
    )


def _slicing(model: PreTrainedModel, inner: int) -> dict[str, Any]:
    """What tensor-parallel generation divides, as far as linear layers and `inner` do not say."""
    text = model.config.get_text_config()
    if not has_slice_plan(text):
        return {"is_sliceable": False}
    plan, heads, linear = slice_plan(text), heads_of(text), tuple(linear_widths(text))
    is_usual = linear == (heads.queries * heads.width, inner)
    adapted = set(adaptable(model))
    stacked = sum(p.numel() for n, p in model.named_parameters() if planned(plan.stacks, n))
    stacked += sum(
        getattr(module, "weight").numel()  # noqa: B009, attributes have no static type
        for name, module in model.named_modules()
        if name not in adapted
        and any(planned(cuts, name) is not None for cuts in (plan.columns, plan.rows))
    )
    more = [number for _, number in divided(text) if number not in (heads.queries, *linear)]
    return {"stacked": stacked, "cut": () if is_usual else linear, "divided": tuple(more)}


def _mixers(model: PreTrainedModel) -> dict[str, Any]:
    """The layers with a state, where the twin computes them; else what kinds there are."""
    found = [
        (block, size)
        for block in decoder_blocks(model)
        for module in block.modules()
        if (size := mixer_size(module)) is not None
    ]
    if not found:
        return {"others": _other_layers(model)}
    return {
        "mixed": sum(size.kept for _, size in found),
        "mixed_floats": sum(size.kept_floats for _, size in found),
        "state": sum(math.prod(size.state.conv) for _, size in found),
        "state_floats": sum(math.prod(size.state.matrix) for _, size in found),
        "keyless": sum(not _attends(block) for block, _ in found),
    }


def _attends(block: nn.Module) -> bool:
    return any("attention" in type(module).__name__.lower() for module in block.modules())


def _other_layers(model: PreTrainedModel) -> tuple[str, ...]:
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    found = set(kinds) - {"full_attention", "sliding_attention", "chunked_attention"}
    if not kinds and getattr(model, "_is_stateful", False):
        found = {"recurrent"}
    return tuple(sorted(found))


def _on_meta(config: PreTrainedConfig, scalar: bool, trust_remote_code: bool) -> PreTrainedModel:
    config = copy.deepcopy(config)
    auto: Any = AutoModelForCausalLM
    if scalar:
        auto = AutoModelForSequenceClassification
        config.num_labels = 1
        require_classifier(config, config.model_type)
    with torch.device("meta"), quiet():
        model: PreTrainedModel = auto.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=attention_for(config),
            trust_remote_code=trust_remote_code,
        )
    model.tie_weights()
    return model


def _untied_head(model: PreTrainedModel) -> int:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is embedding.weight:
        return 0
    return int(head.weight.numel())


def _in_out(layer: nn.Module) -> tuple[int, int]:
    """(in, out) of a linear layer; of GPT-2's Conv1D, whose weight is transposed, (out, in)."""
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return int(weight.shape[1]), int(weight.shape[0])


def _mlp(model: PreTrainedModel, width: int) -> tuple[int, int]:
    """The inner width of a block's MLP, and how many tensors of it the backward pass needs."""
    block = decoder_blocks(model)[0]
    mixing = {
        id(part)
        for module in block.modules()
        if mixer_size(module) is not None
        for part in module.modules()
    }
    widest = max(
        (
            max(_in_out(m))
            for n, m in block.named_modules()
            if _is_mlp_layer(n, m) and id(m) not in mixing
        ),
        default=4 * width,
    )
    text = model.config.get_text_config()
    names = [name.rsplit(".", 1)[-1] for name, _ in block.named_modules()]
    if "gate_up_proj" in names:
        return widest // 2, GATED_KEEPS
    if any(name.startswith("gate_proj") for name in names) or {"w1", "w2", "w3"} <= {*names}:
        return widest, GATED_KEEPS
    keys = ("hidden_act", "activation_function", "hidden_activation")
    activation = next((str(value) for key in keys if (value := getattr(text, key, None))), "")
    kept = {"relu": RELU_KEEPS, "gelu_new": GELU_KEEPS}.get(activation, OTHER_KEEPS)
    return widest, kept


def _is_mlp_layer(name: str, module: nn.Module) -> bool:
    """A linear layer outside of attention."""
    weight = getattr(module, "weight", None)
    return (
        isinstance(weight, torch.Tensor) and weight.dim() == 2 and "attn" not in name.split(".")[0]
    ) and "attention" not in name
