"""Whether our Triton kernels compute on a device, decided in one place.

They are for NVIDIA GPUs. `TANDEM_GPU_KERNELS=off` switches all of them off; AMD's and Apple's GPUs
run plain torch. Either is printed once. The kernels have run in Triton's interpreter and through
its compiler, not yet on a GPU (docs/gpu_kernels.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tandem.ops import native

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
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    return ""


def contiguous(x: Tensor) -> Tensor:
    """x, copied if its numbers do not lie side by side."""
    return x if x.is_contiguous() else x.contiguous()


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


SumOf = Callable[[Tensor], Tensor | None]
_sums = WeakTensorKeyDictionary()


def keep_sum(weight: Tensor, sum_of: SumOf) -> None:
    """Let our kernels' backward add gradients of a weight (out, in) to a float32 sum of its shape.

    Args:
        sum_of: the weight's sum, zeros before the first gradient of a step; None: not any more.
    """
    _sums[weight] = sum_of


def gradient_sum(weight: Tensor) -> Tensor | None:
    """The sum that a weight's gradients are added to, if its optimizer keeps one beside it."""
    sum_of: SumOf | None = _sums.get(weight)
    return None if sum_of is None else sum_of(weight)


def weight_gradient(weight: Tensor, of_out: Tensor, x: Tensor) -> Tensor | None:
    """The gradient (out, in) of a weight from its output's (N, out) and its input (N, in).

    Where the weight has a `gradient_sum`, the product is added to that as it is written, neither
    held nor rounded, and None is returned.
    """
    total = gradient_sum(weight)
    if total is None:
        return of_out.t() @ x
    add_product_(total, of_out.t(), x)
    return None


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right in float32, in place, whatever the type of the two.

    A CUDA product adds to what is there as it writes; no product is held or rounded apart.
    """
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.device.type in ("cuda", "meta"):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
