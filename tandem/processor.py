"""This machine's processor: its name, what it can do, how many cores this process may use.

Linux tells it in a file, which on ARM has numbers and no name; macOS answers a command.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# What tells one kind of processor from another, for a compiler too: on x86, and on ARM.
_TELLING = ("model name", "flags", "features", "cpu implementer", "cpu part")


@cache
def description() -> str:
    """All that tells this kind of processor from others, each as a line `what: which`."""
    if sys.platform == "darwin":
        words = "asimd" if platform.machine() == "arm64" else ""
        return f"model name: {_told_by_macos() or platform.machine()}\nfeatures: {words}"
    try:
        lines = _CPUINFO.read_text("utf-8", "replace").splitlines()
    except OSError:
        return f"model name: {platform.processor() or platform.machine()}"
    return "\n".join(sorted({line for line in lines if line.lower().startswith(_TELLING)}))


def name() -> str:
    """The processor's own name; on ARM under Linux, which has none, the numbers that stand for it;
    the kind of machine where the system tells neither."""
    found = {}
    for line in description().splitlines():
        what, _, which = line.partition(":")
        found[what.strip().lower()] = which.strip()
    if named := found.get("model name"):
        return named
    if {"cpu implementer", "cpu part"} <= found.keys():
        numbers = f"implementer {found['cpu implementer']}, part {found['cpu part']}"
        return f"{platform.machine()} ({numbers})"
    return platform.machine()


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


def _told_by_macos() -> str:
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
