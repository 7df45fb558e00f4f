"""What the GPU kernels are written in: Triton, if it is installed.

Modules of kernels can be imported without it, for their operations to be counted; none can be run.
"""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # torch without CUDA comes without it
    triton = tl = None

__all__ = ["jit", "padded", "tl", "triton"]


def jit(function: Any) -> Any:
    """Compile a function for the GPU when it is launched; as it is without Triton."""
    return function if triton is None else triton.jit(function)


def padded(width: int) -> int:
    """A power of two that tensor cores take."""
    return max(16, int(triton.next_power_of_2(width)))
