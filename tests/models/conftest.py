"""Fixtures of the models room."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .families import FAMILIES, saved, tiny_model


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each supported family in turn."""
    return request.param


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny Llama with its tokenizer."""
    return saved(tiny_model("llama"), tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture
def folder(llama_folder: Path, tmp_path: Path) -> Path:
    """A copy of it, which a test may change."""
    return Path(shutil.copytree(llama_folder, tmp_path / "copy"))
