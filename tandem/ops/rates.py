"""How fast products and memory are on this processor, measured: for `tandem doctor` and a bench."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.ops import dense, native

Linear = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ProductRate:
    """GFLOP per CPU second, on one thread, of x (rows, inputs) by a weight (outputs, inputs).

    forward, training: Tandem's linear, alone and with both gradients. torch_forward,
    torch_training: torch's. cut: how Tandem's forward is cut (rows x columns of a tile,
    words of k at a time; csrc/tuning.h), empty
    without the C++ operations and for products too small to choose.
    """

    rows: int
    inputs: int
    outputs: int
    dtype: str
    forward: float
    training: float
    torch_forward: float
    torch_training: float
    cut: str


@contextmanager
def one_thread() -> Iterator[None]:
    """Measure a core's rate: what other threads spend is counted only when the system looks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def product_rate(
    rows: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    seconds: float = 0.15,
    from_memory: int = 0,
) -> ProductRate:
    """Measure one shape; Tandem's and torch's calls take turns, and each side's quickest counts.

    seconds: CPU seconds per figure, after a warm-up in which the C++ operations choose their cut.
    from_memory: bytes of weights and rows, at least, that the calls go through one after another,
    as over the layers of a model: more than the caches hold brings them from memory. 0: always the
    same ones.
    """
    with one_thread():
        return _measured(rows, inputs, outputs, dtype, seconds, from_memory)


def _measured(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, seconds: float, from_memory: int
) -> ProductRate:
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(size, generator=generator).to(dtype)
        for size in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    layers = -(-from_memory // (x.nbytes + weight.nbytes)) or 1
    flops = 2 * rows * inputs * outputs
    forward: list[Callable[[], object]] = []
    training: list[Callable[[], object]] = []
    operands = [(x.clone(), weight.clone()) for _ in range(layers)]
    for linear in (dense.linear, F.linear):
        leaves = [(a.clone().requires_grad_(), b.clone().requires_grad_()) for a, b in operands]
        forward.append(_call(linear, operands))
        training.append(_step(linear, leaves, grad))
    with torch.no_grad():
        ours, theirs = _quickest(forward, seconds, flops)
    ours_training, theirs_training = _quickest(training, seconds, 3 * flops)
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    return ProductRate(
        rows,
        inputs,
        outputs,
        name,
        flops / ours / 1e9,
        3 * flops / ours_training / 1e9,
        flops / theirs / 1e9,
        3 * flops / theirs_training / 1e9,
        _cut(name, rows, outputs, inputs),
    )


def memory_rate(megabytes: int = 256, repeats: int = 3) -> float:
    """Bytes per second that copying memory reads and writes, on torch's threads; the best copy."""
    source = torch.ones(megabytes * 2**18)
    target = torch.empty_like(source)
    target.copy_(source)  # the system hands out the pages
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - begin)
    return 2 * source.numel() * source.element_size() / best


def _call(linear: Linear, operands: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], object]:
    turns = cycle(operands)
    return lambda: linear(*next(turns))


def _step(
    linear: Linear, leaves: Sequence[tuple[Tensor, Tensor]], grad: Tensor
) -> Callable[[], object]:
    turns = cycle(leaves)

    def step() -> None:
        x, weight = next(turns)
        x.grad = None  # the weight's gradient is added up, as over micro-batches
        linear(x, weight).backward(grad)

    return step


# Calls after which every cut has been tried often enough (csrc/tuning.cpp), and their most seconds.
_WARM_CALLS, _WARM_SECONDS = 37, 1.0


def _quickest(
    calls: Sequence[Callable[[], object]], seconds: float, flops: float
) -> tuple[float, float]:
    """CPU seconds of the quickest run of each of two calls."""
    for call in calls:
        end = time.process_time() + _WARM_SECONDS
        for _ in range(_WARM_CALLS):
            call()
            if time.process_time() > end:
                break
    repeats = max(1, int(4e7 / flops))  # long enough for the clock
    best = [float("inf"), float("inf")]
    end = time.process_time() + 2 * seconds
    while time.process_time() < end:
        for number, call in enumerate(calls):
            begin = time.process_time()
            for _ in range(repeats):
                call()
            best[number] = min(best[number], (time.process_time() - begin) / repeats)
    return best[0], best[1]


def _cut(dtype: str, rows: int, outputs: int, inputs: int) -> str:
    """What csrc/tuning.cpp chose for a forward product."""
    if not native.available():
        return ""
    bucket = 1 << (rows - 1).bit_length()
    key = ["forward", dtype, str(bucket), str(outputs), str(inputs)]
    for line in torch.ops.tandem.product_choices().splitlines():
        words = line.split()
        if words[:5] == key:
            return _described(words[5:])
    return ""


def _described(cut: Sequence[str]) -> str:
    if cut == ["measuring"]:
        return "still measuring"
    words, columns, fetches, across, _ = (int(word) for word in cut)
    height = {64: 6, 48: 8, 32: 12, 16: 6}[columns]
    extra = ", across" if across else ", ahead" if fetches else ""
    return f"{height}x{columns}, {words}{extra}"
