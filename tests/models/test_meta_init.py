"""Models filled from their files row by row, against from_pretrained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tandem.errors import ModelError
from tandem.models.adapter import save_adapter
from tandem.models.load import load_causal_lm
from tandem.models.lora import attach_adapters
from tandem.models.meta_init import empty_causal_lm, empty_scalar_model
from tandem.models.scalar import load_scalar_model
from tandem.parallel.dtensor import own_rows
from tandem.parallel.shard import give_memory
from tests.models.families import FAMILIES, saved, tiny_model, tiny_scalar

IDS = torch.tensor([[4, 9, 17, 5, 30]])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_filled_model_is_the_loaded_one(family: str, tmp_path: Path) -> None:
    folder = saved(tiny_model(family), tmp_path)
    empty = empty_causal_lm(folder)
    assert empty is not None
    assert all(parameter.is_meta for parameter in empty.model.parameters())
    marks = [name for parameter in empty.model.parameters() for name in vars(parameter)]
    assert not marks, "transformers would take them for initialized later"
    give_memory(empty.model, torch.device("cpu"))
    empty.fill(own_rows)
    loaded = load_causal_lm(folder)
    with torch.no_grad():
        assert torch.equal(empty.model(IDS).logits, loaded(IDS).logits)
    names = [name for name, _ in loaded.named_parameters()]
    assert [name for name, _ in empty.model.named_parameters()] == names
    ours, theirs = empty.model.generation_config, loaded.generation_config
    assert ours.eos_token_id == theirs.eos_token_id


def test_rows_come_from_several_files(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    empty = empty_causal_lm(tmp_path)
    assert empty is not None
    give_memory(empty.model, torch.device("cpu"))
    empty.fill(own_rows)
    for ours, theirs in zip(empty.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_half_precision_files_are_read_as_float32(tmp_path: Path) -> None:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    empty = empty_causal_lm(tmp_path)
    assert empty is not None
    give_memory(empty.model, torch.device("cpu"))
    empty.fill(own_rows)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for ours, theirs in zip(empty.model.parameters(), reference.parameters(), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)


def test_a_scalar_model_keeps_its_head_and_a_language_model_lacks_one(tmp_path: Path) -> None:
    scalar = empty_scalar_model(saved(tiny_scalar("llama"), tmp_path / "scalar"))
    assert scalar is not None
    assert scalar.missing == []
    give_memory(scalar.model, torch.device("cpu"))
    scalar.fill(own_rows)
    loaded = load_scalar_model(tmp_path / "scalar", seed=0)
    with torch.no_grad():
        assert torch.equal(scalar.model(IDS).logits, loaded(IDS).logits)
    without = empty_scalar_model(saved(tiny_model("llama"), tmp_path / "language"))
    assert without is not None
    assert without.missing == ["score.weight"]


def test_what_does_not_match_is_left_to_the_ordinary_road(tmp_path: Path) -> None:
    folder = saved(tiny_model("llama"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    assert empty_causal_lm(folder) is None
    adapted = tiny_model("llama")
    attach_adapters(adapted, ["model.layers.0.mlp.up_proj"], 2, 4.0, 0.0)
    save_adapter(adapted, tmp_path / "adapter", folder)
    assert empty_causal_lm(tmp_path / "adapter") is None


def test_weights_that_are_left_over_are_left_to_the_ordinary_road(tmp_path: Path) -> None:
    folder = saved(tiny_model("llama"), tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"extra": torch.zeros(3)}, folder / "model.safetensors")
    assert empty_causal_lm(folder) is None
    assert empty_scalar_model(folder) is None


def test_a_tied_weight_may_be_in_the_files_twice(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    folder = saved(model, tmp_path)
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    assert empty_causal_lm(folder) is not None


def test_a_head_of_other_numbers_is_kept_though_the_config_ties_it(tmp_path: Path) -> None:
    folder = saved(tiny_model("qwen2"), tmp_path / "tied")
    weights = load_file(folder / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    head[-3:] += 0.5
    save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors")
    empty = empty_causal_lm(folder)
    assert empty is not None
    give_memory(empty.model, torch.device("cpu"))
    empty.fill(own_rows)
    loaded = load_causal_lm(folder)
    for model in (empty.model, loaded):
        assert torch.equal(model.lm_head.weight, head)
        assert not model.config.tie_word_embeddings
    again = load_causal_lm(saved(empty.model, tmp_path / "again"))
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, loaded(IDS).logits)


def test_a_classifier_without_the_head_that_it_names_gets_no_new_one(tmp_path: Path) -> None:
    folder = saved(tiny_scalar("llama"), tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors")
    assert empty_scalar_model(folder) is None


def test_a_value_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_submodule("model.norm").weight[3] = torch.nan  # type: ignore[index, operator]
    model.save_pretrained(tmp_path)
    empty = empty_causal_lm(tmp_path)
    assert empty is not None
    give_memory(empty.model, torch.device("cpu"))
    assert empty.fill(own_rows) == "model.norm.weight"


def test_damaged_files_are_told(tmp_path: Path) -> None:
    folder = saved(tiny_model("llama"), tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match="complete safetensors"):
        empty_causal_lm(folder)
