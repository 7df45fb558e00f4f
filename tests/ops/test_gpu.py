"""Where our GPU kernels run, and what is said where they do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tandem.ops import gpu


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    gpu.available.cache_clear()
    yield
    gpu.available.cache_clear()


def test_the_switch_turns_them_off_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "find_spec", lambda name: object())
    assert gpu.available()
    monkeypatch.setenv("TANDEM_GPU_KERNELS", "off")
    gpu.available.cache_clear()
    assert not gpu.available()
    assert not gpu.available()
    said = capfd.readouterr().err
    assert said == (
        "tandem: TANDEM_GPU_KERNELS is off; the GPU runs plain torch, which is slower.\n"
    )


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
