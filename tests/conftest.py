"""What many tests use: the optional folder of real data, and tiny models."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_and_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and models, named by TANDEM_SHARED or beside the repository."""
    here = Path(__file__).resolve().parents[1]
    folder = Path(os.environ.get("TANDEM_SHARED", here.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip("no folder of real data (set TANDEM_SHARED)")
    return folder / "data"
