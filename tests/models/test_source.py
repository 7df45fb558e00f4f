"""Folders and hub names: what is found, and what every failure says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelInfo
from safetensors.torch import load_file, save_file

from tandem.errors import ModelError
from tandem.models import source
from tandem.models.load import load_causal_lm, load_tokenizer
from tandem.models.source import Located, adapter_base, locate, read_adapter_config

from .families import tiny_model


class _SilentHub:
    """A hub that cannot be reached."""

    def model_info(self, name: str, revision: str | None, timeout: float) -> None:
        raise ConnectionError("Name or service\n not known")


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "HfApi", _SilentHub)


def test_a_folder_is_found(folder: Path) -> None:
    located = locate(folder)
    assert located == Located(str(folder))
    assert located.folder == folder


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "a/b/c", "~nobody/model", ""])
def test_a_path_is_never_asked_of_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(source, "HfApi")
    with pytest.raises(ModelError, match=r"must be a folder with config.json; got no such folder"):
        locate(name)


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("name", ["{}/frst", "frst", "runs/frst"])
def test_a_mistyped_folder_is_answered_with_the_one_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for inner in ("first", "runs/first"):
        (tmp_path / inner).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"Did you mean .*first\?$"):
        locate(name.format(tmp_path))


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match="got a file"):
        locate(folder / "config.json")


@pytest.mark.usefixtures("no_hub")
def test_an_unreachable_hub_name_says_what_was_tried_in_one_line() -> None:
    with pytest.raises(ModelError, match="reachable hub name; got no folder") as caught:
        locate("nobody/nothing")
    assert "Name or service not known" in str(caught.value)
    assert "nobody/nothing" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_hub")
def test_an_unreachable_hub_leaves_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        source, "try_to_load_from_cache", lambda *_, **__: "cache/c0ffee/config.json"
    )
    assert locate("some/model") == Located("some/model", offline=True, commit="c0ffee")
    assert Located("some/model").folder is None


def test_a_hub_name_that_the_hub_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hub:
        def model_info(self, name: str, revision: str | None, timeout: float) -> ModelInfo:
            return ModelInfo(id=name, sha="c0ffee")

    monkeypatch.setattr(source, "HfApi", Hub)
    assert locate("some/model") == Located("some/model", commit="c0ffee")


def test_broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"must have a config.json that transformers reads"):
        load_causal_lm(folder)


def test_missing_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    for load in (load_causal_lm, load_tokenizer):
        if load is load_tokenizer:
            (folder / "tokenizer.json").unlink()
        with pytest.raises(ModelError, match=r"config.json; got one that holds \d+ others: "):
            load(folder)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    for load in (load_causal_lm, load_tokenizer):
        with pytest.raises(
            ModelError, match=r"folder with config.json; got an empty folder\. Give"
        ):
            load(tmp_path)


def test_a_folder_with_a_model_in_it(folder: Path, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    (outer / "notes.json").write_text("{}")
    folder.rename(outer / "hf")
    with pytest.raises(ModelError) as told:
        load_causal_lm(outer)
    assert str(told.value) == (
        f"model {str(outer)!r} must be a folder with config.json; got one that holds 2 others: hf, "
        f"notes.json. hf in it has a config.json: give {str(outer / 'hf')!r}."
    )


def test_unknown_family(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "no_such_family"}))
    with pytest.raises(ModelError, match="no_such_family"):
        load_causal_lm(folder)


def test_pickled_weights_are_refused_with_the_way_to_convert(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"must have safetensors weights; got pytorch_model.bin"):
        load_causal_lm(folder)
    with pytest.raises(ModelError, match="use_safetensors=False"):
        load_causal_lm(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"must hold \*.safetensors files; got none"):
        load_causal_lm(folder)


@pytest.mark.parametrize("kept", [0, 5, 1000, -7])
def test_truncated_weights(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match="must be complete safetensors files"):
        load_causal_lm(folder)


def test_a_tensor_of_the_wrong_shape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.zeros(31)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"sizes that config.json says; got model.norm.weight of"):
        load_causal_lm(folder)


def test_a_missing_shard(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(ModelError, match="must be complete safetensors files"):
        load_causal_lm(tmp_path)


@pytest.mark.parametrize(
    ("text", "found"), [("{", "must be JSON"), ("[]", "JSON object; got list")]
)
def test_broken_adapter_config(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ModelError, match=found):
        read_adapter_config(Located(str(tmp_path)))


def test_adapter_without_a_base(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="must name its base model"):
        adapter_base(Located(str(tmp_path)), {"base_model_name_or_path": None})


def test_adapter_on_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="must be a whole model"):
        adapter_base(Located(str(tmp_path)), {"base_model_name_or_path": str(tmp_path)})


def test_a_base_beside_the_adapter(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    found = adapter_base(Located(str(tmp_path / "adapter")), {"base_model_name_or_path": "../copy"})
    assert found.folder is not None
    assert found.folder.resolve() == folder
