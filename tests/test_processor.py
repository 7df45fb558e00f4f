"""What each system tells of its processor."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem import processor

X86 = """\
processor	: 0
model name	: Example CPU @ 2.00GHz
cpu cores	: 4
flags		: fpu avx2 fma

processor	: 1
model name	: Example CPU @ 2.00GHz
cpu cores	: 4
flags		: fpu avx2 fma
"""
ARM = """\
processor	: 0
BogoMIPS	: 50.00
Features	: fp asimd atomics
CPU implementer	: 0x41
CPU part	: 0xd0c
"""
Told = Callable[[str], None]


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    processor.description.cache_clear()
    yield
    processor.description.cache_clear()


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    """Linux with this text in /proc/cpuinfo."""

    def tell(text: str) -> None:
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(sys, "platform", "linux")
        processor.description.cache_clear()

    return tell


def test_an_x86_processor_has_a_name_and_flags(told: Told) -> None:
    told(X86)
    assert processor.name() == "Example CPU @ 2.00GHz"
    assert processor.features() == {"fpu", "avx2", "fma"}
    assert len(processor.description().splitlines()) == 2, "not a line for every core"


X86_64 = """\
processor	: 0
vendor_id	: {vendor}
cpu family	: {family}
model		: {model}
model name	: AMD EPYC
stepping	: 1
flags		: fpu {flags}
"""


@pytest.mark.parametrize(
    ("vendor", "family", "model", "flags", "kind"),
    [
        ("AuthenticAMD", 25, 1, "avx2", "AMD EPYC: Zen 3 with AVX2"),
        ("AuthenticAMD", 25, 80, "avx2", "AMD EPYC: Zen 3 with AVX2"),
        ("AuthenticAMD", 25, 17, "avx2 avx512f", "AMD EPYC: Zen 4 with AVX-512"),
        ("AuthenticAMD", 25, 17, "avx2", "AMD EPYC: Zen 4 with AVX2"),
        ("AuthenticAMD", 25, 160, "avx2 avx512f", "AMD EPYC: Zen 4 with AVX-512"),
        ("AuthenticAMD", 26, 2, "avx2 avx512f", "AMD EPYC: Zen 5 with AVX-512"),
        ("AuthenticAMD", 27, 2, "avx2 avx512f", "AMD EPYC: family 27, model 2 with AVX-512"),
        ("GenuineIntel", 6, 143, "avx512f amx_bf16", "AMD EPYC: Sapphire Rapids with AMX"),
        ("GenuineIntel", 6, 1, "sse2", "AMD EPYC: family 6, model 1"),
    ],
)
def test_generations_of_one_name_are_told_apart(
    told: Told, vendor: str, family: int, model: int, flags: str, kind: str
) -> None:
    told(X86_64.format(vendor=vendor, family=family, model=model, flags=flags))
    assert processor.name() == "AMD EPYC"
    assert processor.kind() == kind


def test_a_processor_without_numbers_has_its_name_for_a_kind(told: Told) -> None:
    told(X86)
    assert processor.kind() == processor.name()


def test_an_arm_processor_has_numbers_for_a_name(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    told(ARM)
    assert processor.name() == "aarch64 (implementer 0x41, part 0xd0c)"
    assert processor.features() == {"fp", "asimd", "atomics"}
    before = processor.description()
    told(ARM.replace("0xd0c", "0xd40"))
    assert processor.description() != before, "a compiler makes other code for another part"


def test_a_system_that_tells_nothing_has_the_kind_of_machine(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    told("hart : 0\n")
    assert processor.name() == "riscv64"
    monkeypatch.setattr(processor, "_CPUINFO", Path("/nowhere/cpuinfo"))
    processor.description.cache_clear()
    assert processor.name() == "riscv64"
    assert processor.features() == set()


@pytest.mark.parametrize("answer", ["Apple M9\n", "", OSError("no such command")])
def test_macos_is_asked(monkeypatch: pytest.MonkeyPatch, answer: str | OSError) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if isinstance(answer, OSError):
            raise answer
        return subprocess.CompletedProcess(command, 0, stdout=answer)

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(subprocess, "run", run)
    assert processor.name() == ("Apple M9" if answer == "Apple M9\n" else "arm64")
    assert processor.features() == {"asimd"}


def test_cores_are_those_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5}, raising=False)
    assert processor.num_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert processor.num_cores() == 8
