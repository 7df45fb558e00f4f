"""Tests of a real GPU: `make test-gpu`, at most 6 minutes there (planned; not run on a GPU yet).

TANDEM_TEST_GPU says what runs: `on` these tests on a GPU; `dry`, the default, their logic on a CPU,
with stand-ins for CUDA's graphs and plain operations for its kernels; `off` skips them.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.generation.cuda_stand_ins import stand_in

MODE = os.environ.get("TANDEM_TEST_GPU", "dry")
IS_DRY = MODE == "dry"
DEVICE = torch.device("cpu" if IS_DRY else "cuda")
needs_gpu = pytest.mark.skipif(IS_DRY, reason="measures the device itself")


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if MODE not in ("on", "dry"):
        pytest.skip("on a GPU: make test-gpu; its logic on a CPU: TANDEM_TEST_GPU=dry, the default")
    if IS_DRY:
        stand_in(monkeypatch)
    elif not torch.cuda.is_available():
        pytest.skip("no GPU")
