"""What generation could cost at best: the best matrix product's rate, products alone, or memory."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from bench.models import DTYPES
from tandem.models.flops import sequence_flops
from tandem.ops import native
from tandem.ops.dense import linear, linear_packed, pack_weight
from tandem.ops.rates import one_thread

GEMM_SHAPES = ((512, 1024, 1024), (512, 512, 2048), (256, 2048, 512))
"""Rows, inputs and outputs of the products that the best rate is looked for among."""


def gemm_rate(dtype: str, repeats: int = 10) -> float:
    """The best FLOP/s per CPU second that any linear here reaches on this machine, now.

    Tried are torch's, oneDNN's and Tandem's, over GEMM_SHAPES; the best single call counts.
    """
    linears: list[Callable[[Tensor, Tensor], Tensor]] = [F.linear, linear]
    # oneDNN has no bf16 products for processors below AVX-512.
    knows = dtype != "bf16" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if torch.backends.mkldnn.is_available() and knows:
        linears.append(_onednn_linear)
    with one_thread():
        return max(_rate(function, dtype, repeats) for function in linears)


def _rate(function: Callable[[Tensor, Tensor], Tensor], dtype: str, repeats: int) -> float:
    best = 0.0
    generator = torch.Generator().manual_seed(0)
    for rows, inputs, outputs in GEMM_SHAPES:
        x = torch.randn((rows, inputs), generator=generator).to(DTYPES[dtype])
        weight = torch.randn((outputs, inputs), generator=generator).to(DTYPES[dtype])
        with torch.no_grad():
            function(x, weight)
            seconds = min(_cpu_seconds(function, x, weight) for _ in range(repeats))
        best = max(best, 2 * rows * inputs * outputs / seconds)
    return best


def _onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def _cpu_seconds(function: Callable[..., object], *operands: object) -> float:
    begin = time.process_time()
    function(*operands)
    return time.process_time() - begin


def real_flops(
    model: PreTrainedModel, prompt_lengths: Sequence[int], answer_lengths: Sequence[int]
) -> float:
    """Arithmetic of the real tokens alone: every prompt once, every answer's tokens once.

    Args:
        prompt_lengths: (P,) tokens. answer_lengths: (P * samples,) tokens, the samples of a prompt
            side by side; an answer's last token is drawn but never read.
    """

    def layers(length: int) -> float:
        return sequence_flops(model, [length], 0) if length else 0.0

    samples = len(answer_lengths) // len(prompt_lengths)
    head = sequence_flops(model, [1], 1) - sequence_flops(model, [1], 0)
    total = sum(map(layers, prompt_lengths))
    for i, length in enumerate(answer_lengths):
        prompt = prompt_lengths[i // samples]
        total += layers(prompt + length - 1) - layers(prompt) + length * head
    return total


PREFILL_ROWS = 512
"""Tokens of prompts that `product_seconds` multiplies at a time: products gain nothing by more."""


def decode_rows(answer_lengths: Sequence[int]) -> Counter[int]:
    """By number of answers side by side, how many steps decode that many, all starting together.

    An answer of n tokens takes n - 1 steps: its first is drawn after the prompt, its last is never
    read.
    """
    steps = range(1, max(answer_lengths, default=0))
    return Counter(sum(length > step for length in answer_lengths) for step in steps)


@torch.no_grad()
def product_seconds(
    model: PreTrainedModel,
    prompt_lengths: Sequence[int],
    answer_lengths: Sequence[int],
    repeats: int = 3,
) -> float:
    """CPU seconds of generation's matrix products alone, on weights packed ahead.

    A lower bound of Tandem's time with the products that it has: attention, norms, sampling and
    packing cost nothing, and of every number of rows the quickest of `repeats` passes counts. A
    pass runs all products of the model in turn, so that weights come from where they lie in
    decoding too: from memory, unless a cache holds all of them. Linear layers of one module that
    read equally many features are multiplied at once.

    Args:
        prompt_lengths: (P,) tokens. answer_lengths: (P * samples,) tokens.
    """
    head = model.get_output_embeddings()
    joined: dict[tuple[str, int], list[Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            key = name.rpartition(".")[0], module.in_features
            joined.setdefault(key, []).append(module.weight)
    layers = [_PackedProduct(torch.cat(weights)) for weights in joined.values()]
    logits = _PackedProduct(head.weight)

    def quickest(products: Sequence[_PackedProduct], rows: int) -> float:
        widths = {product.inputs for product in products}
        inputs = {width: torch.randn(rows, width).to(model.dtype) for width in widths}
        return min(_cpu_seconds(_multiply_all, products, inputs) for _ in range(repeats))

    tokens = sum(prompt_lengths)
    rows = min(tokens, PREFILL_ROWS)
    seconds = quickest(layers, rows) * tokens / rows + quickest([logits], len(prompt_lengths))
    for rows, steps in decode_rows(answer_lengths).items():
        seconds += steps * quickest([*layers, logits], rows)
    return seconds


class _PackedProduct:
    """Multiplies by a weight (out, in) as decoding does."""

    def __init__(self, weight: Tensor) -> None:
        self.outputs, self.inputs = weight.shape
        self.packed = pack_weight(weight.contiguous())
        native.prefer_large_pages(self.packed)

    def __call__(self, x: Tensor) -> Tensor:
        return linear_packed(x, self.packed, self.outputs, self.inputs)


def _multiply_all(products: Sequence[_PackedProduct], inputs: dict[int, Tensor]) -> None:
    for product in products:
        product(inputs[product.inputs])


def copy_bandwidth(device: str, repeats: int = 10) -> float:
    """Bytes per second that a copy of 1 GiB within the device's memory reads and writes."""
    source = torch.empty(2**28, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return 2 * source.numel() * source.element_size() / statistics.median(seconds)


def decode_bytes(model: PreTrainedModel, prompt: float, steps: int, answers: int) -> float:
    """Bytes that decoding must read: per step the weights once and every answer's keys and values.

    The embedding counts where it is also the vocabulary head.

    Args:
        prompt: mean tokens of a prompt. steps: after the first token of the answers, all as long.
    """
    config = model.config.get_text_config()
    head = model.get_output_embeddings().weight
    tables = {id(m.weight): m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    weights = sum(
        p.numel() * p.element_size() for p in model.parameters() if id(p) not in tables or p is head
    )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
    # Step k (from 1) attends to the prompt and k tokens of the answer.
    return float(steps * (weights + answers * (prompt + (steps + 1) / 2) * per_token))
