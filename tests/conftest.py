"""What many tests use: the optional folder of real data, and tiny models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_process_group_stays() -> Iterator[None]:
    """Offloaded weights at one rank make a group; a test's forked ranks must not inherit it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and models, named by TANDEM_SHARED or beside the repository."""
    here = Path(__file__).resolve().parents[1]
    folder = Path(os.environ.get("TANDEM_SHARED", here.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip("no folder of real data (set TANDEM_SHARED)")
    return folder / "data"
