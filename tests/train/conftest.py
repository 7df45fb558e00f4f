"""A tiny model and data set, made once."""

from __future__ import annotations

import pytest

from tests.tiny import save_tiny_model, write_preferences


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama's folder."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def preferences(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small file of preferences."""
    return write_preferences(tmp_path_factory.mktemp("data") / "prefs.jsonl")
