"""How many floating-point operations a model's tokens cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tandem.models.blocks import attention_heads, decoder_blocks
from tandem.models.stored import StoredWeight


def sequence_flops(
    model: PreTrainedModel,
    lengths: Iterable[int],
    num_logits: int,
    *,
    backward: bool = False,
    unread: int = 0,
) -> float:
    """Floating-point operations of whole sequences.

        forward  = 2 N T + 2 V D L + 4 sum_tokens sum_layers A (c + 1) / 2
        backward = 2 N T + 2 N_trainable T + 2 * (the other terms)

    T: all tokens; L: those that go through the vocabulary head; N: parameters of the layers (no
    embeddings, no vocabulary head); A: heads times head width; c: the sequence's length, or a
    layer's sliding window if that is shorter.
    A causal query sees (c + 1) / 2 keys on average; the products with keys and with values take
    2 A operations per key each. The backward pass goes through every layer and also computes the
    gradients of those weights that are trained, which under LoRA are few.

    Args:
        lengths: tokens of each sequence.
        num_logits: L, of all sequences together.
        backward: add the backward pass (without recomputation).
        unread: tokens that the last block's MLP leaves out, as nobody asks for their states
            (`models.packed.narrows`).
    Source: arXiv:2001.08361 table 1 and arXiv:2204.02311 appendix B. Differs: attention is counted
    causally, as in the first, and frozen weights cost no weight gradient. For mixtures of experts
    it is an upper bound: all experts are counted.
    """
    outside = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = model.get_output_embeddings()
    head_size = 0
    if head is not None:
        outside.add(id(head.weight))
        head_size = head.weight.numel()
    weights, trained = _sizes(model, outside)
    layers = attention_heads(model.config.get_text_config())
    counts = Counter(lengths)
    tokens = sum(length * count for length, count in counts.items())
    products = sum(
        length * count * heads.queries * heads.width * (reach + 1) / 2
        for length, count in counts.items()
        for heads, reach in zip(layers, _reaches(model, length), strict=False)
    )
    others = 2 * head_size * num_logits + 4 * products
    forward = 2 * weights * tokens + others
    flops = forward + (2 * (weights + trained) * tokens + 2 * others if backward else 0)
    if unread:
        weights, trained = _sizes(decoder_blocks(model)[-1].mlp)
        flops -= 2 * weights * unread + (2 * (weights + trained) * unread if backward else 0)
    return float(flops)


def _sizes(part: Any, outside: Collection[int] = ()) -> tuple[int, int]:
    """Parameters of a module, all and the trained ones, without those of the ids `outside`."""
    weights = trained = 0
    seen = set(outside)
    for module in part.modules():
        # Parameters of its own, if it has any, are what it is kept as.
        if isinstance(module, StoredWeight):
            weights += 0 if id(module) in seen else module.numel()
            seen |= {id(module), *map(id, module.parameters())}
            continue
        for parameter in module._parameters.values():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            weights += parameter.numel()
            trained += parameter.numel() if parameter.requires_grad else 0
    return weights, trained


def _reaches(model: PreTrainedModel, length: int) -> list[int]:
    """How many tokens each layer's last query can see in a sequence of `length`."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    near = min(length, int(window or length))
    return [near if kind == "sliding_attention" else length for kind in kinds]
