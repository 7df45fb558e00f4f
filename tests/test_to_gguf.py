"""examples/to_gguf.py: the file holds the source's weights, and its logits (needs gguf)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import save_tiny_model

pytest.importorskip("gguf", reason="the example needs the gguf package")


def test_a_llama_folder_becomes_gguf_and_is_the_same_model(tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "examples/to_gguf.py"
    spec = importlib.util.spec_from_file_location("to_gguf", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["to_gguf"] = module
    spec.loader.exec_module(module)
    folder = save_tiny_model(tmp_path / "model")
    (tmp_path / "gguf").mkdir()
    assert module.main(folder, str(tmp_path / "gguf/model.gguf")) == 0
    ours = AutoModelForCausalLM.from_pretrained(folder).eval()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "gguf", gguf_file="model.gguf").eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
