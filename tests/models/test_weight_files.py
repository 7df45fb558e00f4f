"""Weights written a file and a tensor at a time are the files that Hugging Face writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel

from tandem.config.lora import LoraConfig
from tandem.models.load import new_causal_lm
from tandem.models.lora import add_lora, lora_parameters
from tandem.models.save import save_model, saved_bytes
from tandem.models.weight_files import Writers, model_files, model_units, write_files

from .families import tiny_model, tokenizer


def all_weights(folder: Path) -> dict[str, Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def mixtral() -> PreTrainedModel:
    """Its experts are stacked in one tensor, and apart in files."""
    config = MixtralConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    return new_causal_lm(config, seed=1)


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt_neox", "mixtral"])
def test_several_files_hold_what_one_does(family: str, tmp_path: Path) -> None:
    model = mixtral() if family == "mixtral" else tiny_model(family)
    model.save_pretrained(tmp_path / "theirs")
    expected = all_weights(tmp_path / "theirs")
    save_model(model, tokenizer(), tmp_path / "ours", max_file_bytes=20_000)
    files = sorted(tmp_path.glob("ours/*.safetensors"))
    assert len(files) > 2
    assert files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    found = all_weights(tmp_path / "ours")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    index = json.loads((tmp_path / "ours/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(expected)
    size = sum(t.nbytes for t in expected.values())
    assert index["metadata"]["total_size"] == size == saved_bytes(model)
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    save_model(model, tokenizer(), tmp_path / "ours")
    assert [p.name for p in (tmp_path / "ours").glob("model*")] == ["model.safetensors"]


def test_files_are_dealt_to_ranks_that_gather_their_own_alone(tmp_path: Path) -> None:
    """Three ranks, one after another here: what each is given of a weight is noted."""
    model = tiny_model("llama")
    add_lora(model, LoraConfig(rank=2), seed=0)
    with torch.no_grad():
        for parameter in lora_parameters(model):
            parameter += 0.1
    save_model(model, tokenizer(), tmp_path / "alone", base_path="base")
    expected = load_file(tmp_path / "alone/model.safetensors")
    turns: list[list[int]] = []
    for rank in range(3):
        turns.append([])

        def gather(tensor: Tensor, to: int, rank: int = rank) -> Tensor | None:
            turns[-1].append(to)
            return tensor if to == rank else None

        files = model_files(model_units(model, None), 1, 20_000)
        write_files(tmp_path / "ranks", files, Writers(rank, 3, gather))
        names = {path.name for path in (tmp_path / "ranks").iterdir()}
        assert names == {f.name for i, f in enumerate(files) if i % 3 <= rank}
    assert turns[0] == turns[1] == turns[2], "every rank takes part alike"
    assert {0, 1, 2} == set(turns[0])
    found = all_weights(tmp_path / "ranks")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_rank_that_the_disk_refuses_still_takes_its_part(tmp_path: Path) -> None:
    model = tiny_model("llama")
    gathered = 0

    def gather(tensor: Tensor, to: int) -> Tensor:
        nonlocal gathered
        gathered += 1
        return tensor

    files = model_files(model_units(model, None), 1, 20_000)
    (tmp_path / files[1].name).mkdir()
    with pytest.raises(OSError, match=files[1].name):
        write_files(tmp_path, files, Writers(0, 1, gather))
    assert gathered == sum(len(unit.weights) for file in files for unit in file.units)
