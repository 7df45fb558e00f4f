"""Give this process the simulated GPU, before anything else imports torch."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path


def load(library: str) -> None:
    """From now on torch has one GPU.

    Args:
        library: the file that `build` made.
    """
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so"):
        ctypes.CDLL(str(Path(found.origin).parent / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    # torch asks once whether there is a GPU, on import; the library answers.
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)

    from tests.simulated_gpu import cuda, groups, kernels

    for part in (cuda, kernels, groups):
        part.install()
