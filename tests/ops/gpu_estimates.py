"""What one H200 should reach, by arithmetic on counts: the estimates of docs/gpu.md.

    python -m tests.ops.gpu_estimates

Kernels, bytes and operations are counted on the meta device, of the code as it is; the rates below
are assumptions. Nothing here has been measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from bench.models import SHAPES, model_config
from tandem.models.gpu_blocks import join_projections
from tandem.models.twin import base_forward, twin_of
from tandem.ops.attention_context import Decode, KVMemory, LayerShape, Packed, attending
from tests.models.test_gpu_blocks import addressed
from tests.ops.counting import Launches, on_meta

BANDWIDTH, PEAK = 4.2e12, 989e12
"""Bytes and bf16 operations a second of one H200."""
OF_LARGE, OF_SMALL, SMALL = 0.85, 0.70, 40e6
"""Share of the bandwidth in products of few rows by large weights; by weights of fewer bytes."""
OF_ATTENTION = 0.78
PER_KERNEL, GAP = 2.2e-6, 1e-6
"""Seconds of a small kernel, and between a large one and the next."""
PRODUCTS, ATTENTION, ELEMENTWISE = 650e12, 250e12, 3.4e12
"""Operations a second of products of many rows and of packed attention, and bytes a second of what
lies between them."""
HOST = 0.02
"""Seconds by which the host holds up a micro-batch."""
UPDATE_BYTES = 46
"""Of a weight: norm 4, clip 8, AdamW 28, rounding to bf16 6."""
META = torch.device("meta")
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm")
_ATTENTION = ("tandem.paged_attention_by_address", "torch_attn._varlen_attn")


class Traffic(Launches):
    """Within: operations and bytes of products, and bytes of all else but attention."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.num_bytes = 0
        self.weights: list[int] = []
        self.num_small = 0

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        before = self.total
        result = super().__torch_dispatch__(operation, types, args, kwargs)
        name = str(operation).rsplit(".", 1)[0]
        if self.total == before:
            return result
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name in _PRODUCTS:
            left, right = [x for x in args if isinstance(x, Tensor) and x.dim() > 1][-2:]
            self.flops += 2 * left.numel() * right.shape[-1]
            self.weights.append(right.nbytes)
        elif not name.startswith(_ATTENTION):
            self.num_small += 1
            made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            self.num_bytes += sum(x.nbytes for x in [*given, *made])
        return result


def model_of(name: str, layers: int) -> Any:
    config = model_config({**SHAPES[name], "num_hidden_layers": layers}, 4096)
    with META:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def decoded(name: str, layers: int, rows: int) -> Traffic:
    """One step."""
    model = model_of(name, layers).eval()
    heads = model.config.num_attention_heads
    shapes = [LayerShape(heads, model.config.hidden_size // heads, 128)] * layers
    memory = addressed(KVMemory(shapes, 8, dtype=torch.bfloat16, device=META))
    ids = torch.zeros((1, rows), dtype=torch.long, device=META)
    tables = torch.zeros((rows, 32), dtype=torch.int32, device=META)
    twin = twin_of(model)
    join_projections(model)
    with torch.no_grad(), attending(Decode(ids[0], tables, memory)), Traffic() as traffic:
        base_forward(twin, ids, ids)
    return traffic


def share_in_decoding(name: str, rows: int) -> float:
    """Of the bandwidth's limit: weights and the tokens so far read once."""
    limit, seconds = step_seconds(name, rows)
    return limit / seconds


def step_seconds(name: str, rows: int, context: int = 384) -> tuple[float, float]:
    """Of a decode step: the bandwidth's limit, and what is expected."""
    one, two = decoded(name, 1, rows), decoded(name, 2, rows)
    config, layers = model_config(SHAPES[name], 4096), SHAPES[name]["num_hidden_layers"]
    weights = two.weights[len(one.weights) :]
    head = 2 * config.vocab_size * config.hidden_size
    memory = 4 * config.hidden_size * layers * rows * context
    limit = (layers * sum(weights) + head + memory) / BANDWIDTH
    products = head / OF_LARGE + layers * sum(
        size / (OF_LARGE if size >= SMALL else OF_SMALL) for size in weights
    )
    small = two.num_small - one.num_small
    large = (two.total - one.total) - small
    between = layers * (small * PER_KERNEL + large * GAP) + 8 * PER_KERNEL  # ends, sampling
    return limit, (products + memory / OF_ATTENTION) / BANDWIDTH + between


@dataclass(frozen=True)
class Pass:
    """Seconds of a micro-batch through a model's blocks; operations of its products."""

    forward: float
    backward: float
    flops: float


def passes(name: str, tokens: int = 8192, length: int = 512) -> Pass:
    """One micro-batch of `tokens` in sequences of `length`, without the vocabulary."""
    seen = []
    for layers in (1, 2):
        model = model_of(name, layers).train()
        join_projections(model)
        ends = torch.zeros(tokens // length + 1, dtype=torch.int32, device=META)
        ids = torch.zeros((1, tokens), dtype=torch.long, device=META)
        with attending(Packed(ends, length)), Traffic() as forward:
            out = base_forward(twin_of(model), ids, ids)
        with Traffic() as backward:
            out.backward(torch.empty_like(out))
        seen.append((forward, backward))
    layers, width = SHAPES[name]["num_hidden_layers"], SHAPES[name]["hidden_size"]
    seconds, flops = [], 0
    for one, two, products in zip(*seen, (2, 5), strict=True):
        product, attention = two.flops - one.flops, products * width * tokens * length
        num_bytes = two.num_bytes - one.num_bytes
        if products > 2:  # a float32 sum is read and written for each weight
            num_bytes += 8 * product / (4 * tokens)
        each = product / PRODUCTS + attention / ATTENTION + num_bytes / ELEMENTWISE
        seconds.append(layers * each)
        flops += layers * (product + (attention if products == 2 else attention * 4 / 5))
    return Pass(*seconds, flops)


def head_flops(name: str, tokens: int) -> float:
    """Of the vocabulary's product."""
    return 2 * tokens * SHAPES[name]["hidden_size"] * SHAPES[name]["vocab_size"]


def num_weights(name: str) -> int:
    with META:
        return AutoModelForCausalLM.from_config(model_config(SHAPES[name], 4096)).num_parameters()


def training(name: str, tokens: int = 8192, length: int = 512, scored: float = 1.0) -> float:
    """Seconds of a micro-batch, without the update; `scored`: share of tokens with a log-prob."""
    found = passes(name, tokens, length)
    head = 4 * scored * head_flops(name, tokens) / PRODUCTS  # a tile of logits is made twice
    return found.forward + found.backward + head + HOST


def share_in_training(name: str, tokens: int = 8192) -> float:
    """Of the peak."""
    flops = passes(name, tokens).flops + 3 * head_flops(name, tokens)
    return flops / training(name, tokens) / PEAK


def update(name: str) -> float:
    """Seconds of the norm, the clip, and AdamW with float32 states on the device."""
    return UPDATE_BYTES * num_weights(name) / ELEMENTWISE


def pairs_per_second(actor: str = "opt-1.3b", critic: str = "opt-350m", pairs: int = 64) -> float:
    """One PPO step over 256 tokens in and 256 out: rollout, scores of four models, two updates."""
    micro_batches = pairs * 512 / 8192
    prefill = passes(actor, 8192, 256).forward * pairs * 256 / 8192
    rollout = prefill + 256 * step_seconds(actor, pairs)[1]
    forwards = 2 * passes(actor).forward + 2 * passes(critic).forward + 4 * HOST
    forwards += 2 * 0.5 * head_flops(actor, 8192) / PRODUCTS
    trains = training(actor, scored=0.5) + training(critic, scored=0.0)
    whole = rollout + micro_batches * (forwards + trains) + update(actor) + update(critic)
    return pairs / whole


def rows() -> Iterator[tuple[str, str]]:
    """The rows of docs/gpu.md, and their estimates."""
    for label, name in (("Llama-7B", "llama-7b"), ("OPT-1.3B", "opt-1.3b")):
        shares = [share_in_decoding(name, count) for count in (16, 64, 128)]
        told = " / ".join(f"{100 * share:.0f}" for share in shares)
        yield f"{label} decode at 16 / 64 / 128", f"{told} %"
    yield "7B training, 8,192 packed tokens", f"{100 * share_in_training('llama-7b'):.0f} %"
    yield "PPO step of 1.3B + 350M, 64 x (256 + 256)", f"{pairs_per_second():.0f}"


def main() -> None:
    with pytest.MonkeyPatch.context() as patch:
        on_meta(patch)
        for row, estimate in rows():
            print(f"{row}: {estimate}")


if __name__ == "__main__":
    main()
