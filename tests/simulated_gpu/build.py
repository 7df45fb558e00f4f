"""Build `device.cpp` for the torch that is installed: `python -m tests.simulated_gpu.build` prints
where the library is, and fails where there can be none."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import torch

from tandem.files import cache_folder
from tandem.ops import native

SOURCE = Path(__file__).with_name("device.cpp")


def library() -> Path:
    """The library's file, built if it is not there."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        sys.exit("this torch has GPUs of its own; a simulated one needs torch's CPU build")
    compiler = native.compiler()
    if compiler is None:
        sys.exit("no C++ compiler: apt install g++")
    root = Path(torch.__file__).parent
    command = [
        compiler, "-O1", "-std=c++20", "-fPIC", "-shared", "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}", str(SOURCE),
        f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}",
    ]  # fmt: skip
    key = "\0".join([*command, torch.__version__, SOURCE.read_text("utf-8")])
    name = f"simulated-gpu-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    made = cache_folder() / name
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        part = made.with_suffix(f".{os.getpid()}")
        if subprocess.run([*command, "-o", str(part)]).returncode:
            sys.exit(f"{compiler} could not build {SOURCE.name}; see above")
        part.replace(made)
    return made


if __name__ == "__main__":
    print(library())
