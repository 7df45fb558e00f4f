"""Fixtures of the models room."""

from __future__ import annotations

from pathlib import Path

import pytest

from .families import FAMILIES, saved, tiny_model


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each supported family in turn."""
    return request.param


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny Llama with its tokenizer; tests copy it before they change it."""
    return saved(tiny_model("llama"), tmp_path_factory.mktemp("llama") / "model")
