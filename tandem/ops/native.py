"""Builds and loads the C++ operations on first use; says why where it cannot.

Compiling takes about half a minute, once per machine, torch version and change of the sources. The
result is kept in TANDEM_CACHE (default: the user's cache folder), and no compiler is needed where
it is there. TANDEM_NATIVE=off uses the plain torch paths.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

if sys.platform != "win32":
    import fcntl

SOURCES = Path(__file__).parent / "csrc"


def available() -> bool:
    """Whether the C++ operations are there (torch.ops.tandem); builds them at the first call."""
    return not why_not()


@cache
def why_not() -> str:
    """Why the plain torch paths run instead of the C++ ones; empty where the C++ ones run."""
    if os.environ.get("TANDEM_NATIVE", "on").lower() in ("off", "0", "no", "false"):
        return "TANDEM_NATIVE is off"
    if sys.platform not in ("linux", "darwin"):
        return f"the C++ operations are not built on {sys.platform}"
    try:
        library = _kept()
        if library is None:
            compiler = _compiler()
            if compiler is None:
                return "no C++ compiler was found (set CXX, or install g++ or clang++)"
            library = _built(compiler)
        torch.ops.load_library(str(library))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"the C++ operations did not build: {_first_line(error)}"
    return ""


def prefer_large_pages(*tensors: torch.Tensor) -> None:
    """Ask for pages of 2 MiB under what will be read here and there for long; CPU tensors only.

    Blocks of KV memory lie anywhere in it, and with pages of 4 KiB decoding waits for page tables.
    What the tensors hold stays; a system without such pages does nothing.
    """
    for tensor in tensors:
        if tensor.is_cpu and available():
            torch.ops.tandem.large_pages(tensor)


def cache_folder() -> Path:
    """Where built libraries are kept."""
    chosen = os.environ.get("TANDEM_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    return next((path for name in (named, "g++", "clang++", "c++") if name
                 and (path := shutil.which(name))), None)  # fmt: skip


def _kept() -> Path | None:
    """The library of these sources for this machine, if it is in the cache and whole.

    Its name ends in the digest of what it holds: loading half a library would end the process
    without a word.
    """
    prefix = f"native-{_key()}-"
    return next(
        (
            library
            for library in sorted(cache_folder().glob(f"{prefix}*.so"))
            if library.is_file() and library.stem == prefix + _digest(library.read_bytes())
        ),
        None,
    )


def _built(compiler: str) -> Path:
    """The library of these sources for this machine, built if it is not there.

    Of processes that want it at once, such as the ranks of a run, one builds and the others wait.
    The lock is the system's, so a build that is killed leaves nothing that anyone waits for; and
    where a file system has no locks, building under a name of its own and renaming is enough.
    """
    name, cache = f"native-{_key()}", cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with (
        (cache / f"{name}.lock").open("w") as lock,
        tempfile.TemporaryDirectory(dir=cache, prefix="build-") as folder,
    ):
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        built = _kept()  # while this process waited
        if built is not None:
            return built
        objects = _compiled(compiler, _flags(), sorted(SOURCES.glob("*.cpp")), Path(folder))
        linked = Path(folder) / "linked.so"
        _run([compiler, "-shared", "-o", str(linked), *map(str, objects), *_link_flags()])
        library = cache / f"{name}-{_digest(linked.read_bytes())}.so"
        os.replace(linked, library)
    return library


def _compiled(compiler: str, flags: list[str], sources: list[Path], folder: Path) -> list[Path]:
    """One object per source, compiled side by side."""
    running = []
    for source in sources:
        target = folder / f"{source.stem}.o"
        command = [compiler, *flags, "-c", str(source), "-o", str(target)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        running.append((target, process))
    failed = [
        error
        for _, process in running
        for error in [process.communicate()[1].decode(errors="replace")]
        if process.returncode
    ]
    if failed:
        raise RuntimeError(_first_error(failed[0]))
    return [target for target, _ in running]


def _flags() -> list[str]:
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include" / "torch" / "csrc" / "api" / "include"]
    # Sums must not be reordered, so no -ffast-math; a product and a sum become one rounding.
    flags = [
        "-O3",
        "-std=c++20",
        "-fPIC",
        "-ffp-contract=fast",
        "-fno-math-errno",
        "-DNDEBUG",
        "-w",
    ]
    flags += ["-mcpu=native"] if platform.machine() in ("arm64", "aarch64") else ["-march=native"]
    if sys.platform == "linux":
        flags.append("-fopenmp")
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    includes.append(Path(sysconfig.get_paths()["include"]))
    return [*flags, *(f"-I{folder}" for folder in includes)]


def _link_flags() -> list[str]:
    folder = Path(torch.__file__).parent / "lib"
    flags = [f"-L{folder}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{folder}"]
    if sys.platform == "darwin":
        return [*flags, "-undefined", "dynamic_lookup"]
    # torch has brought its OpenMP threads into the process; a second runtime would fight them.
    return [*flags, "-fopenmp"]


def _key() -> str:
    """What the library depends on: sources, flags, torch, the processor's abilities.

    Not the compiler, which may be gone where the library is used.
    """
    parts = [shlex.join(_flags()), torch.__version__, _processor()]
    for file in sorted(SOURCES.iterdir()):
        if file.suffix in (".cpp", ".h"):
            parts += [file.name, file.read_text(encoding="utf-8")]
    return _digest("\0".join(parts).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text("utf-8", "replace").splitlines()
        chosen = [s for s in lines if s.lower().startswith(("model name", "flags", "features"))]
        return "\n".join(sorted(set(chosen)))
    return f"{platform.machine()} {platform.processor()}"


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise RuntimeError(_first_error(done.stderr))
    return done.stdout


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if "error" in line.lower()]
    return (lines or output.strip().splitlines() or ["the compiler failed without a word"])[0]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
