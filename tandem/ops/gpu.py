"""Whether our Triton kernels compute on a device, decided in one place.

They are for NVIDIA GPUs. `TANDEM_GPU_KERNELS=off` switches all of them off; AMD's and Apple's GPUs
run plain torch. Either is printed once. The kernels have run in Triton's interpreter and through
its compiler, not yet on a GPU (docs/gpu_kernels.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tandem.ops import native
from tandem.text import named_line

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fuses(x: Tensor) -> bool:
    """Whether our kernels compute on this tensor; on a CPU they never do."""
    return x.device.type in ("cuda", "mps") and x.dtype in _DTYPES and available()


@cache
def available() -> bool:
    """Whether this machine's GPU runs our kernels; if not, why is printed once."""
    reason = why_not()
    if reason:
        native.print_line(f"{reason}; the GPU runs plain torch, which is slower.\n")
    return not reason


def why_not() -> str:
    """Why the GPU does not run our kernels; empty if it does."""
    if os.environ.get("TANDEM_GPU_KERNELS", "on").lower() in ("off", "0", "no", "false"):
        return "TANDEM_GPU_KERNELS is off"
    if torch.version.hip is not None:
        return "the GPU kernels are for NVIDIA GPUs, and this torch is for AMD's"
    if not torch.cuda.is_available():
        return "the GPU kernels are for NVIDIA GPUs, and none was found"
    return launch_fault()


@cache
def launch_fault() -> str:
    """Why Triton launches no kernel on this machine's GPU; empty if it does.

    It is tried, because an installed Triton may be of no use: it compiles a launcher in C, and the
    GPU may be older than it knows.
    """
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    try:
        from tandem.ops.probe_gpu import launched  # imports Triton

        fault = "" if launched() else "a kernel did not write what it should"
    except torch.OutOfMemoryError:
        raise  # which says nothing of Triton
    except Exception as error:  # of Triton, of a compiler or of the driver
        fault = named_line(error)
    if not fault:
        return ""
    needs = "it needs a C compiler and Python's headers (apt install gcc python3-dev)"
    return f"Triton cannot run a kernel here ({fault}; {needs})"


def contiguous(x: Tensor) -> Tensor:
    """x, copied if its numbers do not lie side by side."""
    return x if x.is_contiguous() else x.contiguous()


def dense_heads(x: Tensor) -> Tensor:
    """x (N, H, D), copied if a token's heads do not lie side by side; tokens may lie apart."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def sent(
    numbers: Sequence[object], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Numbers of the host on a device; from pinned memory, so that the host does not wait."""
    made = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)


def sent_together(parts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Tensors of whole numbers on the host, of any shapes, as int64 on a device, in one transfer
    that the host does not wait for."""
    flat = torch.cat([part.reshape(-1).to(torch.int64) for part in parts])
    if device.type == "cuda":
        flat = flat.pin_memory()
    pieces = flat.to(device, non_blocking=True).split([part.numel() for part in parts])
    return tuple(piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True))


class SumOf(Protocol):
    """A weight's sum, and whether it was made just now, with whatever its memory holds; None: there
    is none any more."""

    def __call__(self, weight: Tensor) -> tuple[Tensor, bool] | None: ...


_sums = WeakTensorKeyDictionary()


def keep_sum(weight: Tensor, sum_of: SumOf) -> None:
    """Let our kernels' backward add gradients of a weight (out, in) to a float32 sum of its shape.

    Who asks for a sum that was made just now has to fill it.
    """
    _sums[weight] = sum_of


def drop_sum(weight: Tensor) -> None:
    """Let gradients of a weight be added to no sum any more."""
    _sums.pop(weight, None)


def keeps_sum(weight: Tensor) -> bool:
    """Whether a weight has a `gradient_sum`."""
    return weight in _sums


def gradient_sum(weight: Tensor) -> Tensor | None:
    """The sum that a weight's gradients are added to, if its optimizer keeps one beside it; zeros
    before the first gradient of a step."""
    total, is_new = _open_sum(weight)
    return total.zero_() if total is not None and is_new else total


def _open_sum(weight: Tensor) -> tuple[Tensor | None, bool]:
    sum_of: SumOf | None = _sums.get(weight)
    opened = None if sum_of is None else sum_of(weight)
    return (None, False) if opened is None else opened


def weight_gradient(weight: Tensor, of_out: Tensor, x: Tensor) -> Tensor | None:
    """The gradient (out, in) of a weight from its output's (N, out) and its input (N, in).

    Where the weight has a `gradient_sum`, the product is added to that as it is written, neither
    held nor rounded, and None is returned.
    """
    total, is_new = _open_sum(weight)
    if total is None:
        return of_out.t() @ x
    if is_new and not _adds_natively(total, x):
        total.zero_()
        is_new = False
    try:
        add_product_(total, of_out.t(), x, is_new=is_new)
    except BaseException:  # who goes on after it must not find what memory held
        if is_new:
            total.zero_()
        raise
    return None


class Sums(NamedTuple):
    """float32 sums that a backward adds several weights' gradients to, None where it returns them.

    are_new: a bit for each that holds nothing yet and has to be written over.
    """

    totals: Sequence[Tensor | None]
    are_new: int = 0

    def only(self, chosen: Sequence[bool]) -> Sums:
        """Those of the chosen weights."""
        totals = [total if this else None for total, this in zip(self.totals, chosen, strict=True)]
        return Sums(totals, self.are_new & sum(this << k for k, this in enumerate(chosen)))


@contextmanager
def opened_sums(weights: Sequence[Tensor], needed: Sequence[bool], adds: bool) -> Iterator[Sums]:
    """Within: the sums that a backward adds several weights' gradients to.

    Args:
        needed: which weights need a gradient. One that a hook wants to see goes into no sum.
        adds: False: give no sums, since the caller wants the gradients themselves.
    """
    totals: list[Tensor | None] = [None] * len(weights)
    are_new = 0
    try:
        for number, weight in enumerate(weights):
            if adds and needed[number] and not weight._backward_hooks:
                totals[number], is_new = _open_sum(weight)
                are_new |= is_new << number
        yield Sums(totals, are_new)
    except BaseException:  # who goes on after it must not find what memory held
        for number, total in enumerate(totals):
            if total is not None and are_new >> number & 1:
                total.zero_()
        raise


def _adds_natively(total: Tensor, factor: Tensor) -> bool:
    return (
        total.is_cpu
        and factor.dtype in (torch.float32, torch.bfloat16)
        and total.dtype == torch.float32
        and native.available()
    )


def add_product_(total: Tensor, left: Tensor, right: Tensor, *, is_new: bool = False) -> None:
    """total += left @ right in float32, in place, whatever the type of the two.

    A CUDA product adds to what is there as it writes, as our own on a CPU does; no product is held
    or rounded apart.

    Args:
        is_new: total's memory holds nothing yet and is written over; on a CPU only.
    """
    if _adds_natively(total, left):
        torch.ops.tandem.add_turned.default(total, left.t(), right, is_new)
    elif left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.device.type in ("cuda", "meta"):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
