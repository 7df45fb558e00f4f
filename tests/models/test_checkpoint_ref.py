"""What a folder stands for: a model, or an adapter on its base."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config.lora import LoraConfig
from tandem.errors import ModelError
from tandem.models.checkpoint_ref import CheckpointRef, checkpoint_ref_of, same_base
from tandem.models.load import load_causal_lm
from tandem.models.lora import add_lora
from tandem.models.save import save_model
from tandem.models.scalar import load_scalar_model

from .families import saved, tiny_model, tokenizer


@pytest.mark.parametrize("is_scalar", [False, True])
def test_merged_weights_or_their_adapter(tmp_path: Path, is_scalar: bool) -> None:
    base = saved(tiny_model("llama"), tmp_path / "base")
    model = load_scalar_model(base, seed=0) if is_scalar else load_causal_lm(base)
    add_lora(model, LoraConfig(rank=2), seed=0)
    save_model(model, tokenizer(), tmp_path / "trained")
    merged, adapter = str(tmp_path / "trained"), str(tmp_path / "trained" / "adapter")
    assert checkpoint_ref_of(merged) == CheckpointRef(merged)
    expected = CheckpointRef(str(base), adapter, is_scalar)
    assert checkpoint_ref_of(merged, unmerged=True) == checkpoint_ref_of(adapter) == expected
    assert checkpoint_ref_of(str(base), unmerged=True) == CheckpointRef(str(base))
    base.rename(tmp_path / "moved")
    with pytest.raises(ModelError, match=r"no such folder.*It is the base of the adapter"):
        checkpoint_ref_of(merged, unmerged=True)
    assert checkpoint_ref_of(merged) == CheckpointRef(merged)


def test_one_folder_has_several_names(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert same_base(str(tmp_path / "a"), str(tmp_path / "b"))
    assert same_base("some/hub-name", "some/hub-name")
    assert not same_base("some/hub-name", str(tmp_path / "a"))
