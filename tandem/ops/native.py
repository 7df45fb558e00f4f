"""Builds and loads the C++ operations on first use; says why where it cannot.

They are built once per processor, torch version and change of the sources, in a minute or two on
two cores, and kept in TANDEM_CACHE (default: the user's cache folder); where they are there, no
compiler is needed. Without them the plain torch paths run, and one line says why.

TANDEM_NATIVE=off uses the plain torch paths. TANDEM_MARCH names the processor to build for, as the
compiler's -march does, more flags behind it (`x86-64-v3`, `native -mno-avx512bf16`; default
native): for a cache that different processors share, and to see another's arithmetic. Numbers are
the same to the bit within one such instruction set, and equal to rounding between them.
TANDEM_AMX=off keeps products off Intel's matrix unit, TANDEM_AMX=bf16 those of float32.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tandem import processor
from tandem.files import cache_folder
from tandem.text import first_line

if sys.platform != "win32":
    import fcntl

SOURCES = Path(__file__).parent / "csrc"
# The longest first. Only one of them reads torch's headers, which take longer than any code here.
UNITS = (
    "torch_ops.cpp",
    "attention.cpp",
    "products_amx.cpp",
    "gemm.cpp",
    "recurrence.cpp",
    "coded.cpp",
    "tuning.cpp",
    "threads.cpp",
)
# As Linux spells them: what decides how fast products are, on x86 and on ARM.
INSTRUCTION_SETS = (
    "avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16",
)  # fmt: skip
_CPU_SECONDS = 150  # of a build, roughly; the longest unit is half of it
_ROOM_BYTES = 16 * 2**20  # of the library (3 MB with AVX2) and its objects, roughly
_COST = "plain torch runs instead: slower, and the same to rounding rather than to the bit"


def available() -> bool:
    """Whether the C++ operations are there (torch.ops.tandem); builds them at the first call."""
    return not why_not()


@cache
def op(name: str) -> Any:
    """A C++ operation, where they are `available`."""
    return getattr(torch.ops.tandem, name).default


@cache
def why_not() -> str:
    """Why the plain torch paths run instead of the C++ ones; empty where the C++ ones run."""
    if os.environ.get("TANDEM_NATIVE", "on").lower() in ("off", "0", "no", "false"):
        return "TANDEM_NATIVE is off"
    if sys.platform not in ("linux", "darwin"):
        return f"the C++ operations are not built on {sys.platform}"
    try:
        library = kept_library()
        if library is None:
            compiler = _compiler()
            if compiler is None:
                return _missing("no C++ compiler was found (set CXX, or install g++ or clang++)")
            named = os.environ.get("CXX")
            if named and not shutil.which(named):
                print_line(f"CXX names {named!r}, which is no command here; {compiler} builds.\n")
            library = _built(compiler)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return _missing(f"the C++ operations did not build: {first_line(error)}")
    try:
        torch.ops.load_library(str(library))
    except (OSError, RuntimeError) as error:
        # The library stays: the same compiler would take minutes in every run to fail again.
        why = first_line(error.__cause__ or error)  # torch's own line names the file alone
        return _missing(
            f"the C++ operations were built but do not load: {why} "
            f"(keep them in another folder with TANDEM_CACHE, or remove {library} and set CXX "
            "to another compiler)"
        )
    return ""


def _missing(reason: str) -> str:
    """The reason, which the user hears once too: nothing becomes slower in silence."""
    print_line(f"{reason}; {_COST}.\n")
    return reason


def print_line(text: str) -> None:
    """To the user, not to the run's own output; of a node's ranks the first speaks."""
    _say_more(f"tandem: {text}")


def _say_more(text: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError, ValueError):  # a closed stream must not stop a run
            print(text, end="", file=sys.stderr, flush=True)


def prefer_large_pages(*tensors: torch.Tensor) -> None:
    """Ask for pages of 2 MiB under what will be read here and there for long; CPU tensors only.

    Blocks of KV memory lie anywhere in it, and with pages of 4 KiB decoding waits for page tables.
    What the tensors hold stays; a system without such pages does nothing.
    """
    for tensor in tensors:
        if tensor.is_cpu and available():
            torch.ops.tandem.large_pages(tensor)


def compiler() -> str | None:
    """The C++ compiler that would build the operations, if there is one."""
    return _compiler()


def arithmetic() -> str:
    """Where the last bits of numbers on a CPU come from: two processes compute the same bits if
    this is the same text. Builds the operations.

    `AVX-512 with BF16, AMX for fp32 and bf16`, or `plain torch (AVX512)`.
    """
    if not available():
        return f"plain torch ({torch.backends.cpu.get_cpu_capability()})"
    text: str = torch.ops.tandem.arithmetic()
    return text


def instruction_sets() -> list[str]:
    """Which of the instruction sets that matter to the operations this processor has."""
    return [name for name in INSTRUCTION_SETS if name in processor.features()]


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    return next((path for name in (named, "g++", "clang++", "c++") if name
                 and (path := shutil.which(name))), None)  # fmt: skip


def kept_library() -> Path | None:
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
    The library is renamed into its place whole.

    Raises:
        RuntimeError: the compiler failed; what it said lies in a log beside the library.
    """
    name, cache = f"native-{_key()}", cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    log = cache / f"{name}.log"
    with _locked(cache / f"{name}.lock") as waited_since:
        built = kept_library()  # while this process waited
        if built is not None:
            return built
        if waited_since and log.is_file() and log.stat().st_mtime >= waited_since:
            raise RuntimeError(_failure(log.read_text(errors="replace"), log))
        _require_room(cache)
        with tempfile.TemporaryDirectory(dir=cache, prefix=f"build-{name}-") as folder:
            return _compiled(compiler, name, Path(folder), log)


def _require_room(cache: Path) -> None:
    """Refuse a disk that a build would find full after minutes, in every run again.

    Raises:
        OSError: it has less than the library and its objects take.
    """
    free = shutil.disk_usage(cache).free
    if free < _ROOM_BYTES:
        raise OSError(
            f"{cache} must have room for {_ROOM_BYTES:,} bytes; got {free:,} bytes free (free "
            "some, or set TANDEM_CACHE to another folder)"
        )


def _compiled(compiler: str, name: str, folder: Path, log: Path) -> Path:
    """The library, made in `folder` and moved beside `log`."""
    began = time.monotonic()
    about = _CPU_SECONDS // min(processor.num_cores(), 2)
    print_line(f"building the C++ operations, once for this machine, about {about} s ...")
    linked, objects = folder / "linked.so", [folder / f"{unit}.o" for unit in UNITS]
    flags = [*_flags(), *_names_flags(compiler)]
    try:
        for commands in (
            [
                [compiler, *flags, "-c", str(SOURCES / unit), "-o", str(target)]
                for unit, target in zip(UNITS, objects, strict=True)
            ],
            [[compiler, "-shared", "-o", str(linked), *map(str, objects), *_link_flags()]],
        ):
            output = _run(commands)
            if output:
                with suppress(OSError):  # of a full disk the first line tells as much
                    log.write_text(output)
                raise RuntimeError(_failure(output, log))
        library = log.parent / f"{name}-{_digest(linked.read_bytes())}.so"
        os.replace(linked, library)
        log.unlink(missing_ok=True)
    except BaseException:
        _say_more(f" failed after {time.monotonic() - began:.0f} s\n")
        raise
    _say_more(f" done in {time.monotonic() - began:.0f} s\n")
    return library


@contextmanager
def _locked(path: Path) -> Iterator[float]:
    """Alone among processes; gives when waiting began, 0.0 if nobody was waited for.

    The lock is the system's, so a builder that is killed leaves nothing that anyone waits for; what
    it left half done is removed. Where a file system has no locks, each builds for itself under a
    name of its own.
    """
    with path.open("w") as file:
        since = 0.0
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            since = time.time()
            print_line("another process builds the C++ operations; waiting for it ...\n")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield since
            return
        for left in path.parent.glob(f"build-{path.stem}-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield since


def _run(commands: list[list[str]]) -> str:
    """Run commands side by side; the command and the output of the first that fails, or nothing."""
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            running.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                )
            )
        outputs = [process.communicate()[0] for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return next(
        (
            f"{shlex.join(command)}\n{output.strip() or _silent(process.returncode)}\n"
            for command, process, output in zip(commands, running, outputs, strict=True)
            if process.returncode
        ),
        "",
    )


def _silent(code: int) -> str:
    """What to say of a command that failed and printed nothing."""
    return f"ended by signal {-code}, without a word" if code < 0 else "failed without a word"


def _flags() -> list[str]:
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include" / "torch" / "csrc" / "api" / "include"]
    march = shlex.split(os.environ.get("TANDEM_MARCH", "")) or ["native"]
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
    is_arm = platform.machine() in ("arm64", "aarch64")  # where -march says nothing of the model
    flags += [f"-m{'cpu' if is_arm and march[0] == 'native' else 'arch'}={march[0]}", *march[1:]]
    if is_arm:
        # GCC reads operands early there, which takes more registers than there are. clang has no
        # such step and ignores this.
        flags.append("-fno-schedule-insns")
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    return [*flags, *(f"-I{folder}" for folder in includes)]


def _names_flags(compiler: str) -> list[str]:
    """So that the library finds torch's functions by the names that they have there.

    From version 18 on (Apple's 17) clang gives some templates other names than GCC and the clang
    that torch 2.11 was built with; torch 2.12 has none of these among what is used here.
    """
    if torch.__version__ >= "2.12":
        return []
    about = subprocess.run([compiler, "--version"], capture_output=True, check=False)
    version = re.search(rb"clang version (\d+)", about.stdout)
    # An older one takes no version beyond its own.
    return ["-fclang-abi-compat=17"] if version and int(version[1]) >= 17 else []


def _link_flags() -> list[str]:
    folder = Path(torch.__file__).parent / "lib"
    flags = [f"-L{folder}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{folder}"]
    # The calls of torch's OpenMP runtime are found when the library is loaded: macOS must be told.
    return [*flags, "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else flags


def _key() -> str:
    """What the library depends on: sources, flags, torch, the processor's abilities.

    Not the compiler, which may be gone where the library is used.
    """
    flags = _flags()
    parts = [shlex.join(flags), torch.__version__]
    if any(flag.endswith("=native") for flag in flags):
        parts.append(processor.description())
    for file in sorted(SOURCES.iterdir()):
        if file.suffix in (".cpp", ".h"):
            parts += [file.name, file.read_text(encoding="utf-8")]
    return _digest("\0".join(parts).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _failure(output: str, log: Path) -> str:
    """One line of a compiler's output, and where all of it is."""
    lines = output.strip().splitlines()[1:]  # behind the command
    errors = [line for line in lines if "error" in line.lower()]
    first = (errors or lines or ["the compiler failed without a word"])[0].strip()
    return f"{first} ({log if log.is_file() else 'no log could be written'})"
