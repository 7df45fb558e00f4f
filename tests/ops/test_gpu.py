"""Where our GPU kernels run, and what is said where they do not."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tandem.ops import gpu


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    for known in (gpu.available, gpu.launch_fault):
        known.cache_clear()
    yield
    for known in (gpu.available, gpu.launch_fault):
        known.cache_clear()


def with_triton(patch: pytest.MonkeyPatch, launched: Callable[[], bool]) -> None:
    """A GPU, and a Triton of which a first kernel does this."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(gpu, "find_spec", lambda name: object())
    patch.setitem(sys.modules, "tandem.ops.probe_gpu", SimpleNamespace(launched=launched))


def test_the_switch_turns_them_off_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with_triton(monkeypatch, lambda: True)
    assert gpu.available()
    monkeypatch.setenv("TANDEM_GPU_KERNELS", "off")
    gpu.available.cache_clear()
    assert not gpu.available()
    assert not gpu.available()
    said = capfd.readouterr().err
    assert said == (
        "tandem: TANDEM_GPU_KERNELS is off; the GPU runs plain torch, which is slower.\n"
    )


def test_a_triton_that_launches_nothing_is_not_used(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> bool:
        raise RuntimeError("Failed to find C compiler.")

    with_triton(monkeypatch, fail)
    assert not gpu.available()
    said = capfd.readouterr().err
    assert "RuntimeError: Failed to find C compiler." in said
    assert "apt install gcc python3-dev" in said
    assert "plain torch" in said
    gpu.launch_fault.cache_clear()
    with_triton(monkeypatch, lambda: False)
    assert "did not write" in gpu.why_not()


def test_amd_and_apple_run_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.why_not().endswith("none was found")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "for AMD's" in gpu.why_not()


def test_a_cpu_never_runs_them() -> None:
    assert not gpu.fuses(torch.ones(2))


def test_numbers_are_sent_as_they_are() -> None:
    made = gpu.sent([[1, 2], [3, 4]], torch.device("cpu"), torch.int32)
    assert made.dtype == torch.int32
    assert made.tolist() == [[1, 2], [3, 4]]


def test_every_launch_says_that_products_and_sums_are_fused() -> None:
    """Triton 3.9 warns where a launch does not, and 3.10 means to change what it does then."""
    launches = 0
    for file in sorted(Path(gpu.__file__).parent.glob("*_gpu.py")):
        source = file.read_text("utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launches += 1
                given = {keyword.arg for keyword in node.keywords}
                says = None in given and '"enable_fp_fusion": True' in source
                assert "enable_fp_fusion" in given or says, f"{file.name}:{node.lineno}"
    assert launches > 20
