"""Runs on a quantized base, and on one base for all roles: their numbers, folders, and going on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tandem.config.guards import LogConfig
from tandem.config.schema import RunConfig
from tandem.errors import CheckpointError, ConfigError
from tandem.models.adapter import load_adapter
from tandem.models.frozen import freeze_quantized
from tandem.models.load import load_causal_lm
from tests.jsonl import read_jsonl
from tests.models.families import merged_state_dict
from tests.ranks import on_ranks
from tests.tiny import tiny_config
from tests.training.runs import StopError, ran, ranks_ran, stop_at

POLICIES = ("sft", "ppo/actor", "ppo/ema")
SCALARS = ("reward", "ppo/critic")
LOSSES = ("loss", "policy_loss", "value_loss", "heldout_loss", "entropy", "reward")


def configured(folder: Path, model: str, data: str, kind: str, **changes: object) -> RunConfig:
    config = tiny_config(
        folder, model, data, lora__rank=2, ppo__ema=True, parallel__frozen_weights=kind,
        sft__max_steps=1, reward__max_steps=1, dpo__max_steps=1, **changes,
    )  # fmt: skip
    return replace(config, log=LogConfig(tensorboard=False, print_samples_every=1))


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return read_jsonl(folder / name)


def assert_same_weights(ours: Path, theirs: Path, *parts: str) -> None:
    for part in parts:
        left = load_file(ours / part / "model.safetensors")
        right = load_file(theirs / part / "model.safetensors")
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in right), part


@pytest.fixture(scope="module")
def quantized(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: str, preferences: str
) -> tuple[Path, RunConfig]:
    """A run of all three steps over int8, by one process."""
    folder = tmp_path_factory.mktemp("frozen") / "run"
    config = configured(folder, tiny_model, preferences, "int8")
    ran(config)
    return folder, config


def assert_same_run(ours: Path, alone: Path) -> None:
    """Equal losses, and the same texts."""
    for left, right in zip(
        lines(ours, "metrics.jsonl"), lines(alone, "metrics.jsonl"), strict=True
    ):
        assert (left["stage"], left["step"]) == (right["stage"], right["step"])
        for name in LOSSES:
            if name in right["values"]:
                expected = pytest.approx(right["values"][name], rel=1e-5, abs=2e-6)
                assert left["values"][name] == expected, (left["stage"], left["step"], name)
        # A difference of log-probs of tens of nats per answer.
        kl = right["values"].get("kl", 0.0)
        assert left["values"].get("kl", 0.0) == pytest.approx(kl, abs=1e-4)
    texts = [
        [answer["text"] for answer in sample["answers"].values()]
        for sample in lines(ours, "samples.jsonl")
    ]
    assert texts == [
        [answer["text"] for answer in sample["answers"].values()]
        for sample in lines(alone, "samples.jsonl")
    ]
    assert len(texts) == 3


@pytest.mark.parametrize(
    ("kind", "size", "stage"),
    [
        ("int8", 2, 3),
        pytest.param("nf4", 2, 0, marks=pytest.mark.slow),
        pytest.param("nf4", 4, 3, marks=pytest.mark.slow),
        pytest.param("int8", 4, 2, marks=pytest.mark.slow),
    ],
)
def test_all_steps_over_ranks_are_those_of_one(
    tmp_path: Path,
    quantized: tuple[Path, RunConfig],
    tiny_model: str,
    preferences: str,
    kind: str,
    size: int,
    stage: int,
) -> None:
    alone = quantized[0]
    if kind == "nf4":
        alone = tmp_path / "alone"
        ran(configured(alone, tiny_model, preferences, kind))
    config = configured(tmp_path / "ranks", tiny_model, preferences, kind)
    stages = replace(config.parallel, actor_zero_stage=stage, critic_zero_stage=stage)
    on_ranks(size, ranks_ran, replace(config, parallel=stages))
    assert_same_run(tmp_path / "ranks", alone)
    AutoModelForCausalLM.from_pretrained(tmp_path / "ranks/ppo/actor")


def test_what_is_saved_is_the_base_as_it_computed_with_the_adapter(
    quantized: tuple[Path, RunConfig], tiny_model: str
) -> None:
    run, _ = quantized
    for name in (*POLICIES, *SCALARS):
        adapter = json.loads((run / name / "adapter/adapter_config.json").read_text())
        assert adapter["base_model_name_or_path"] == tiny_model, "one base in all steps"
    for name in POLICIES:
        model = load_causal_lm(tiny_model)
        load_adapter(model, run / name / "adapter")
        freeze_quantized(model, "int8")
        opened, info = AutoModelForCausalLM.from_pretrained(run / name, output_loading_info=True)
        assert not info["missing_keys"]
        state = opened.state_dict()
        for key, weight in merged_state_dict(model).items():
            assert torch.equal(state[key], weight), (name, key)
    for name in SCALARS:
        AutoModelForSequenceClassification.from_pretrained(run / name)
    first = next(r for r in lines(run, "metrics.jsonl") if (r["stage"], r["step"]) == ("ppo", 0))
    assert first["values"]["heldout_kl"] == 0, "the actor starts as its reference"


@pytest.mark.parametrize("kind", [pytest.param("", marks=pytest.mark.slow), "int8"])
def test_a_shared_base_is_a_matter_of_memory(
    tmp_path: Path,
    quantized: tuple[Path, RunConfig],
    tiny_model: str,
    preferences: str,
    kind: str,
) -> None:
    shared = configured(tmp_path / "one", tiny_model, preferences, kind, parallel__shared_base=True)
    if kind:
        ran(shared)
        assert_same_weights(tmp_path / "one", quantized[0], *POLICIES, *SCALARS)
        return
    stages = replace(shared.parallel, actor_zero_stage=0, critic_zero_stage=0)
    on_ranks(2, ranks_ran, replace(shared, parallel=stages))
    ran(replace(shared, output_dir=str(tmp_path / "alone")))
    assert_same_run(tmp_path / "one", tmp_path / "alone")


def test_a_stopped_run_goes_on_from_its_adapters(
    tmp_path: Path,
    quantized: tuple[Path, RunConfig],
    tiny_model: str,
    preferences: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = configured(tmp_path / "run", tiny_model, preferences, "int8")
    with monkeypatch.context() as patch:
        stop_at(patch, "ppo", 3)
        with pytest.raises(StopError):
            ran(config)
    saved = sorted((tmp_path / "run/checkpoints/ppo").rglob("*.safetensors"))
    assert saved
    for file in saved:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
        known = ("lora_A", "lora_B", "score.weight")
        assert all(any(part in n for part in known) for n in names if n.endswith("weight"))
    other = replace(config, parallel=replace(config.parallel, frozen_weights="nf4"))
    with pytest.raises(CheckpointError, match=r'parallel.frozen_weights "int8" -> "nf4"'):
        ran(other)
    on_two = replace(config, output_dir=str(tmp_path / "two"))
    (tmp_path / "two").symlink_to(tmp_path / "run")
    on_ranks(2, ranks_ran, on_two)
    assert_same_run(tmp_path / "run", quantized[0])


def test_dpo_against_the_policy_as_it_started(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    folder = tmp_path / "run"
    ran(configured(folder, tiny_model, preferences, "nf4", stages=["sft", "dpo"]))
    first = next(r for r in lines(folder, "metrics.jsonl") if (r["stage"], r["step"]) == ("dpo", 1))
    assert first["values"]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    AutoModelForCausalLM.from_pretrained(folder / "dpo")


def test_full_weights_cannot_be_quantized(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = configured(tmp_path / "run", tiny_model, preferences, "int8")
    with pytest.raises(ConfigError, match=r"frozen_weights must go with LoRA") as raised:
        ran(replace(config, lora=replace(config.lora, rank=0)))
    assert "\n" not in str(raised.value)
