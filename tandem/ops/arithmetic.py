"""What computes a run's numbers: two processes for which it is the same compute the same bits."""

from __future__ import annotations

import torch

from tandem.ops import gpu, native


def computed_by(device: torch.device) -> str:
    """In words, with torch's version: instruction set and matrix unit, or the GPU and whether our
    kernels run there. Builds the C++ operations."""
    if device.type == "cpu":
        by = native.arithmetic()
    else:
        by = torch.cuda.get_device_name(device) + (", plain torch" if gpu.why_not() else "")
    return f"{by}, torch {torch.__version__.partition('+')[0]}"
