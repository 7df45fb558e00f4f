"""What a model folder claims: held against what lies in it. Hostile folders: tests/battery."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tandem.errors import ModelError
from tandem.models.eos import load_stop_ids
from tandem.models.load import load_causal_lm, load_tokenizer
from tandem.models.source import locate
from tandem.models.validate_checkpoint import check_finite, check_folder, check_weights

from .families import saved, tiny_model


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def check(folder: Path) -> None:
    check_weights(folder, AutoConfig.from_pretrained(folder), trust_remote_code=False)


def test_every_family_is_what_it_claims(family: str, tmp_path: Path) -> None:
    model_folder = saved(tiny_model(family), tmp_path / "model")
    check_folder(model_folder)
    check(model_folder)


def test_files_in_several_pieces_are_what_they_claim(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    check_folder(tmp_path)
    check(tmp_path)


@pytest.mark.parametrize(
    "file", ["../a.safetensors", "/a.safetensors", "a.bin", "b\\\\a.safetensors", 3, ".safetensors"]
)
def test_an_index_names_weights_of_its_own_folder(file: Any, folder: Path) -> None:
    index = {"weight_map": {"fine": "model.safetensors", "x": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="must name safetensors files of its own folder; got"):
        locate(folder)


@pytest.mark.parametrize("eos", ["2", 1.5, -1, [2, None], True, 2**40])
def test_stop_tokens_are_token_ids(eos: Any, folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ModelError, match="must give eos_token_id as token ids; got"):
        check_folder(folder)


def test_generation_settings_are_such(folder: Path) -> None:
    settings = {"eos_token_id": 2, "cache_implementation": "evil"}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    for load in (load_stop_ids, load_causal_lm, load_tokenizer):
        with pytest.raises(ModelError, match=r"must be settings that transformers takes; got"):
            load(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "any"])
def test_a_pipe_is_not_waited_on(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for load in (load_causal_lm, load_tokenizer):
        with pytest.raises(ModelError, match=f"{name}' must be a regular file; got a pipe"):
            load(folder)


def test_links_to_files_are_files(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "blob")
    (folder / "model.safetensors").symlink_to(folder.parent / "blob")
    (folder / "nothing").symlink_to(folder.parent / "nothing")
    load_causal_lm(folder)


@pytest.mark.parametrize("changes", [{"num_labels": 3 * 10**7}, {"x": {"num_labels": 1e30}}])
def test_labels_are_few(changes: dict[str, Any], folder: Path) -> None:
    edit(folder, **changes)
    for load in (load_causal_lm, load_tokenizer):
        with pytest.raises(ModelError, match=r"at most 65536 labels; got num_labels=[13]"):
            load(folder)


def test_a_config_is_small(folder: Path) -> None:
    with (folder / "config.json").open("ab") as file:
        file.truncate(2**27)
    with pytest.raises(ModelError, match="must have at most 67108864 bytes; got 1342"):
        load_causal_lm(folder)


@pytest.mark.parametrize("eos", [2, [2, 3], None])
def test_good_stop_tokens_pass(eos: Any, folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    check_folder(folder)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 where the files hold"),
        ({"vocab_size": 10**9}, "values where the files hold"),
        ({"intermediate_size": 10**9}, "values where the files hold"),
        ({"hidden_size": -4}, "a model that can be built; got RuntimeError"),
        ({"quantization_config": {"quant_method": "gptq"}}, "must be stored unquantized"),
        ({"_attn_implementation": "someone/kernel"}, "must name no code of the hub's"),
    ],
)
def test_claims_that_do_not_hold(changes: dict[str, Any], found: str, folder: Path) -> None:
    edit(folder, **changes)
    with pytest.raises(ModelError) as error:
        load_causal_lm(folder)
    assert found in str(error.value)
    assert str(error.value).isprintable()


def test_weights_are_floating_point(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"floating point; got I8 in model\.norm\.weight"):
        check(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_are_finite(value: float) -> None:
    model = tiny_model("llama")
    check_finite(model, "m")
    with torch.no_grad():
        model.model.norm.weight[3] = value
    with pytest.raises(
        ModelError, match=r"must be finite; got NaN or infinity in model.norm.weight"
    ):
        check_finite(model, "m")


def test_large_finite_weights_whose_sum_overflows_pass() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(3e38)
    check_finite(model, "m")
