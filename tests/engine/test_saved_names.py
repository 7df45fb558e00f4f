"""A model that is split over ranks is saved under the names, and with the code, of a whole one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.config.engine import engine_settings
from tandem.config.schema import ParallelConfig, RunConfig
from tandem.engine.placement import Placement
from tandem.models.weight_files import model_units
from tandem.parallel.world import World
from tandem.training.saving import save_anywhere
from tests.models.families import FAMILIES, saved, tiny_model, tiny_scalar, tokenizer
from tests.ranks import on_ranks

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def placed(world: World, stage: int) -> Placement:
    parallel = ParallelConfig(actor_zero_stage=stage, critic_zero_stage=stage)
    return Placement(engine_settings(RunConfig(device="cpu", parallel=parallel)), world)


def names(world: World, stage: int) -> dict[str, list[list[str]]]:
    """The names in the files of each family's language model and scorer."""
    placement = placed(world, stage)
    found = {}
    for family in FAMILIES:
        models = [
            placement.policy(tiny_model(family), trained=True),
            placement.scalar(tiny_scalar(family), trained=True),
        ]
        found[family] = [
            sorted(name for unit in model_units(model, None) for name in unit.specs)
            for model in models
        ]
    return found


def test_every_family_has_one_set_of_names() -> None:
    alone = names(World(), 2)
    assert "embed_out.weight" in alone["gpt_neox"][0]
    assert on_ranks(2, names, 2) == [alone, alone]


def own_code(folder: Path) -> Path:
    """A tiny Llama that brings its code."""
    saved(tiny_model("llama"), folder)
    (folder / "own.py").write_text(CODE, encoding="utf-8")
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    changes = {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": code}
    path.write_text(json.dumps(config | changes), encoding="utf-8")
    return folder


def save_own(world: World, model: Path, folder: Path) -> None:
    placement = placed(world, 2)
    placement.settings = replace(placement.settings, trust_remote_code=True)
    save_anywhere(placement.policy(str(model), trained=True), tokenizer(), folder)


@pytest.mark.parametrize("size", [1, 2])
def test_a_models_own_code_is_saved_with_it(tmp_path: Path, size: int) -> None:
    model = own_code(tmp_path / "model")
    if size == 1:
        save_own(World(), model, tmp_path / "saved")
    else:
        on_ranks(size, save_own, model, tmp_path / "saved")
    config = json.loads((tmp_path / "saved/config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["OwnForCausalLM"]
    assert config["auto_map"]["AutoModelForCausalLM"] == "own.OwnForCausalLM"
    assert [path.name for path in (tmp_path / "saved").glob("*.py")] == ["own.py"]
