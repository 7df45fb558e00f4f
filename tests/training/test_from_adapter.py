"""Runs whose model is the folder of a LoRA adapter, as PEFT and runs of ours leave it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.errors import ModelError
from tandem.models.load import load_causal_lm
from tandem.predict.models import config_of
from tests.ranks import on_ranks
from tests.tiny import tiny_config
from tests.training.runs import ran, records

LORA = {"rank": 4, "alpha": 8}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, tiny_model: str, preferences: str) -> Path:
    """The SFT stage of a run with adapters."""
    folder = tmp_path_factory.mktemp("tuned") / "run"
    config = tiny_config(
        folder, tiny_model, preferences, stages=["sft"], lora=LORA,
        sft__lora_learning_rate=1e-2,
    )  # fmt: skip
    return ran(config) / "sft"


@pytest.fixture
def plain_adapter(tuned: Path, tmp_path: Path) -> str:
    """The adapter as PEFT saves it: without a tokenizer."""
    folder = tmp_path / "peft"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(tuned / "adapter" / name, folder)
    return str(folder)


def test_a_run_goes_on_from_an_adapter(
    tuned: Path, plain_adapter: str, tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    """It begins where the adapter stands, and what it saves is the same base with it trained on."""
    config = tiny_config(
        tmp_path / "run", plain_adapter, preferences, stages=["sft", "dpo"], lora=LORA,
        sft__lora_learning_rate=1e-2,
    )  # fmt: skip
    run = ran(config)
    end = records(tuned.parent)[-1]["values"]["heldout_loss"]
    first = records(run)[0]["values"]
    assert first["heldout_loss"] == pytest.approx(end, abs=1e-5)
    dpo = next(r["values"] for r in records(run) if r["stage"] == "dpo" and "loss" in r["values"])
    assert dpo["loss"] == pytest.approx(math.log(2), abs=1e-6), "the reference is its start"
    written = json.loads((run / "sft/adapter/adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == tiny_model
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        start, live, merged = (
            load_causal_lm(path)(ids).logits
            for path in (plain_adapter, run / "sft/adapter", run / "sft")
        )
    assert torch.allclose(live, merged, atol=1e-4)
    assert (live - start).abs().max() > 1e-2, "it was trained"


def test_an_adapter_is_planned_as_its_base(plain_adapter: str, tiny_model: str) -> None:
    assert config_of(plain_adapter) == config_of(tiny_model)


def test_whole_layers_beside_the_adapters_are_refused_by_name(
    plain_adapter: str, tmp_path: Path, preferences: str
) -> None:
    file = Path(plain_adapter) / "adapter_model.safetensors"
    tensors = load_file(file) | {"base_model.model.lm_head.weight": torch.zeros(4, 4)}
    save_file(tensors, file)
    config = tiny_config(tmp_path / "run", plain_adapter, preferences, stages=["sft"], lora=LORA)
    with pytest.raises(ModelError, match=r"got the whole weight 'lm_head.weight'. PEFT's modules"):
        ran(config)


def test_two_ranks_go_on_from_an_adapter_as_one_does(
    plain_adapter: str, tmp_path: Path, preferences: str
) -> None:
    configs = [
        tiny_config(tmp_path / name, plain_adapter, preferences, stages=["sft"], lora=LORA)
        for name in ("one", "two")
    ]
    ran(configs[0])
    on_ranks(2, ran_on_rank, configs[1])
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        one, two = (load_causal_lm(tmp_path / name / "sft")(ids).logits for name in ("one", "two"))
    assert torch.allclose(one, two, atol=1e-3)


def ran_on_rank(world, config) -> None:  # type: ignore[no-untyped-def]
    ran(config, world)


@pytest.mark.parametrize(
    ("lora", "change", "message"),
    [
        ({}, {}, "Use --lora-rank 4 --lora.alpha 8, or start from a model without"),
        (LORA, {"base_model_name_or_path": "/nowhere/base"}, "/nowhere/base"),
    ],
)
def test_an_adapter_that_cannot_be_trained_on_is_refused(
    lora: dict[str, int],
    change: dict[str, object],
    message: str,
    plain_adapter: str,
    tmp_path: Path,
    preferences: str,
) -> None:
    file = Path(plain_adapter) / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    config = tiny_config(tmp_path / "run", plain_adapter, preferences, stages=["sft"], lora=lora)
    with pytest.raises(ModelError, match=message):
        ran(config)
