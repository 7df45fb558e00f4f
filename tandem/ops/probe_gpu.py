# mypy: disable-error-code="no-untyped-def,unused-ignore"
"""A kernel that writes one number: whether Triton can build and launch any here."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def launched() -> bool:
    """Whether a kernel wrote what it was to write; raises what Triton or the driver raises."""
    number = torch.zeros(1, device="cuda")
    _write_one[(1,)](number, enable_fp_fusion=True)
    return number.item() == 1


@triton.jit
def _write_one(number):  # type: ignore[no-untyped-def]
    tl.store(number, 1.0)
