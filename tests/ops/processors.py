"""Code of csrc built for several processors, among them such as this machine is not."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from tandem import processor
from tandem.files import cache_folder
from tandem.ops import native

ROOT = Path(__file__).resolve().parents[2]
LEVELS = {
    "x86-64-v2": {"sse4_2", "popcnt"},
    "x86-64-v3": {"avx2", "fma", "bmi2", "f16c"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "native -mno-avx512bf16": {"avx512_bf16"},
    # What a processor with AMX tells the compiler besides its AVX-512.
    "native -D__AMX_BF16__": {"avx512_bf16"},
}
IS_X86 = platform.machine() in ("x86_64", "AMD64")
HAS_AVX2 = LEVELS["x86-64-v3"] <= processor.features()
HAS_PAIRS = "avx512_bf16" in processor.features()

# AVX-512 written out for a processor with AVX2, without and with the pairs of AVX512_BF16.
EMULATION = Path(__file__).with_name("emulated_avx512.h")
# The header's digest is for what keeps a library by its flags.
EMULATED_AVX512 = (
    f"x86-64-v3 -include {shlex.quote(str(EMULATION))} "
    f"-DTANDEM_EMULATION=0x{hashlib.sha256(EMULATION.read_bytes()).hexdigest()[:8]}"
)
EMULATED_PAIRS = f"{EMULATED_AVX512} -DTANDEM_EMULATE_BF16"
# The code for Intel's matrix unit with the unit written out; it reads pairs.
EMULATED_AMX = f"{'native' if HAS_PAIRS else EMULATED_PAIRS} -DTANDEM_EMULATE_AMX"

needs_compiler = pytest.mark.skipif(
    native.compiler() is None or sys.platform == "win32", reason="no C++ compiler"
)


def at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def runs_here() -> list[str]:
    """Values of TANDEM_MARCH whose code this machine can run."""
    words = processor.features()
    levels = [march for march, needed in LEVELS.items() if needed <= words]
    return ["native", *levels, *([EMULATED_AVX512, EMULATED_PAIRS] if HAS_AVX2 else [])]


def named(march: str) -> str:
    """For the name of a test: without what only the compiler needs."""
    names = {EMULATED_AVX512: "avx512", EMULATED_PAIRS: "avx512bf16", EMULATED_AMX: "amx"}
    return names.get(march, march)


def flags_for(march: str) -> list[str]:
    """What native.py tells the compiler for a processor; optimized less, which takes less time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_MARCH", march)
        flags = native._flags()
    # The emulation's many small functions take GCC four times as long with -O1; its tiles, which
    # are multiplied number by number, are too slow without. A product and a sum become one rounding
    # with expensive optimizations alone.
    is_small = march in (EMULATED_AVX512, EMULATED_PAIRS)
    at = flags.index("-O3")
    flags[at : at + 1] = ["-Og"] if is_small else ["-O1", "-fexpensive-optimizations"]
    return [*flags, "-fvisibility=hidden", f"-I{native.SOURCES}"]


def compile_with(march: str, *arguments: str) -> None:
    command = [str(native.compiler()), *flags_for(march), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def sources(*more: Path) -> str:
    """The text of all of csrc, and of other files."""
    files = (*more, *sorted(native.SOURCES.iterdir()))
    return "".join(file.read_text() for file in files if file.suffix in (".h", ".cpp"))


def compile_once(march: str, file: Path, *arguments: str) -> None:
    """`compile_with`, of a file whose result nobody needs: that this compiler has compiled these
    sources so is kept beside the C++ operations."""
    command = [str(native.compiler()), "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    made_from = f"{command}{version}{flags_for(march)}{arguments}{file.name}{sources(file)}"
    key = hashlib.sha256(made_from.encode()).hexdigest()
    done = cache_folder() / f"{file.stem}-{key[:16]}.compiled"
    if not done.is_file():
        compile_with(march, *arguments, str(file), "-o", os.devnull)
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()


@cache
def built(march: str, harness: str, units: tuple[str, ...] = ()) -> ctypes.CDLL:
    """A file of this folder and `units`, for a processor, kept beside the C++ operations."""
    path = Path(__file__).with_name(harness)
    made_with = f"{native.compiler()}{units}{flags_for(march)}{processor.description()}"
    made_from = made_with + sources(path)
    key = hashlib.sha256(made_from.encode()).hexdigest()
    library = cache_folder() / f"{path.stem}-{key[:16]}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        files = [str(path), *(str(native.SOURCES / f"{name}.cpp") for name in units)]
        compile_with(march, *files, "-shared", "-o", str(made), *native._link_flags())
        os.replace(made, library)
    return ctypes.CDLL(str(library))
