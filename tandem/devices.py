"""What the values of `device` and `dtype` mean on this machine, for training and for answering."""

from __future__ import annotations

import os

import torch

from tandem.errors import ModelError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """The device a knob names; auto takes a GPU if there is one.

    Raises:
        ModelError: cuda was asked for and is not there.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "--device must be available; got cuda, but no GPU was found. Use --device cpu."
        )
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type to train in that a knob names; auto is bf16 on a GPU and fp32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]


def ask_for_determinism(device: torch.device, *, strict: bool) -> None:
    """On a GPU, choose algorithms that give the same bits each time, in the whole process.

    On a CPU nothing changes: there the same processor gives the same bits anyway.

    Args:
        strict: an operation without such an algorithm raises RuntimeError, instead of warning.
    """
    if device.type != "cuda":
        return
    # cuBLAS reads it when its first handle is made; with other workspaces sums may differ.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    # Nothing of ours reads memory that it has not written, and filling it takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
