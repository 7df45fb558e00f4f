"""This machine's processor: name, kind, what it can do, how many cores this process may use.

Linux tells it in a file, which on ARM has numbers and no name; macOS answers a command. Virtual
machines give several generations the same name ("AMD EPYC"): family and model tell them apart.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# What tells one kind of processor from another, for a compiler too: on x86, and on ARM.
_TELLING = ("model name", "flags", "features", "cpu implementer", "cpu part")
# Models of a family, by generation: arch/x86/kernel/cpu/amd.c and intel-family.h of Linux.
_GENERATIONS: dict[tuple[str, int], dict[str, tuple[Sequence[int], ...]]] = {
    ("AuthenticAMD", 23): {
        "Zen": (range(48), range(80, 96)),
        "Zen 2": (range(48, 80), range(96, 128), range(144, 146), range(160, 176)),
    },
    ("AuthenticAMD", 25): {
        "Zen 3": (range(16), range(32, 96)),
        "Zen 4": (range(16, 32), range(96, 176)),
    },
    ("AuthenticAMD", 26): {"Zen 5": (range(48), range(64, 80), range(96, 128))},
    ("GenuineIntel", 6): {
        "Haswell": ((63,),), "Broadwell": ((79,),), "Skylake": ((85,),), "Ice Lake": ((106, 108),),
        "Sapphire Rapids": ((143,),), "Granite Rapids": ((173, 174),), "Emerald Rapids": ((207,),),
    },
}  # fmt: skip
_WIDEST = {"amx_bf16": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}


@cache
def description() -> str:
    """All that tells this kind of processor from others, each as a line `what: which`."""
    if sys.platform == "darwin":
        words = "asimd" if platform.machine() == "arm64" else ""
        return f"model name: {_told_by_macos() or platform.machine()}\nfeatures: {words}"
    lines = _told_by_linux()
    if not lines:
        return f"model name: {platform.processor() or platform.machine()}"
    return "\n".join(sorted({line for line in lines if line.lower().startswith(_TELLING)}))


def name() -> str:
    """The processor's own name; on ARM under Linux, which has none, the numbers that stand for it;
    the kind of machine where the system tells neither."""
    found = _facts(description().splitlines())
    if named := found.get("model name"):
        return named
    if {"cpu implementer", "cpu part"} <= found.keys():
        numbers = f"implementer {found['cpu implementer']}, part {found['cpu part']}"
        return f"{platform.machine()} ({numbers})"
    return platform.machine()


def kind() -> str:
    """The name, and where the system tells them the generation and the widest instructions, which
    a virtual machine may hide: "AMD EPYC: Zen 4 with AVX-512"."""
    if not (generation := _generation()):
        return name()
    has = features()
    widest = next((text for word, text in _WIDEST.items() if word in has), "")
    return f"{name()}: {generation}" + (f" with {widest}" if widest else "")


def _generation() -> str:
    """Of an x86 processor; its numbers where they are not in the table."""
    found = _facts(_told_by_linux())
    try:
        family, model = int(found["cpu family"]), int(found["model"])
    except (KeyError, ValueError):
        return ""
    known = _GENERATIONS.get((found.get("vendor_id", ""), family), {})
    named = (text for text, models in known.items() if any(model in part for part in models))
    return next(named, f"family {family}, model {model}")


def _facts(lines: Iterable[str]) -> dict[str, str]:
    """What each line is of, and what it says."""
    parts = (line.partition(":") for line in lines)
    return {what.strip().lower(): which.strip() for what, _, which in parts}


def features() -> frozenset[str]:
    """The instruction sets that it has, as Linux spells them; none where the system lists none."""
    return frozenset(
        word
        for line in description().splitlines()
        if line.lower().startswith(("flags", "features"))
        for word in line.partition(":")[2].split()
    )


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _told_by_linux() -> list[str]:
    """The lines of its file; none on another system."""
    try:
        return _CPUINFO.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []


def _told_by_macos() -> str:
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
