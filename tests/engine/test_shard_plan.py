"""Layouts that cannot be, and adapters that cannot be trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.config.engine import engine_settings
from tandem.config.lora import LoraConfig
from tandem.config.schema import ParallelConfig, RunConfig
from tandem.engine.placement import Placement
from tandem.engine.shard_plan import check_layout
from tandem.errors import ConfigError, ModelError
from tandem.models.load import load_causal_lm
from tandem.models.lora import add_lora, lora_layers
from tandem.models.save import save_model
from tandem.parallel.world import World
from tests.tiny import save_tiny_model, tiny_tokenizer

LORA = LoraConfig(rank=2)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a policy that was trained with adapters."""
    folder = tmp_path_factory.mktemp("policy")
    model = load_causal_lm(save_tiny_model(folder / "base"))
    add_lora(model, LORA, seed=1)
    save_model(model, tiny_tokenizer(), folder / "sft")
    return str(folder / "sft")


def configured(kind: str, *, shared: bool = False, stage: int = 0, rank: int = 2) -> RunConfig:
    return RunConfig(
        lora=replace(LORA, rank=rank),
        parallel=ParallelConfig(
            actor_zero_stage=stage,
            critic_zero_stage=stage,
            frozen_weights=kind,  # type: ignore[arg-type]
            shared_base=shared,
        ),
    )


def test_knobs_that_do_not_go_together(policy: str) -> None:
    for config, message in (
        (configured("int8", rank=0), r"frozen_weights must go with LoRA.*lora.rank 0.*--lora-rank"),
        (configured("", shared=True, rank=0), r"shared_base must go with LoRA.*got lora.rank 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            Placement(engine_settings(config), World())
    with pytest.raises(ConfigError, match=r"ZeRO stage 0 over several ranks.*got stages 2 and 2"):
        check_layout(engine_settings(configured("", shared=True, stage=2)), World(0, 2))
    check_layout(engine_settings(configured("", shared=True, stage=2)), World())
    offloaded = configured("", shared=True)
    for what in ("params", "reward"):
        parallel = replace(offloaded.parallel, offload=(what,))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"must stay where.*got parallel.offload {what}"):
            check_layout(engine_settings(replace(offloaded, parallel=parallel)), World())


def test_adapters_that_are_carried_on_are_those_that_are_configured(policy: str) -> None:
    for lora, message in (
        (LoraConfig(rank=3), r"got rank 3, alpha 16 for rank 2, alpha 16. Use --lora-rank 2"),
        (replace(LORA, alpha=8.0), r"got rank 2, alpha 8 for rank 2, alpha 16"),
        (replace(LORA, targets=("q_proj",)), r"got q_proj, which differs at model.layers.0.mlp"),
    ):
        with pytest.raises(ModelError, match=message):
            Placement(engine_settings(replace(configured("int8"), lora=lora)), World()).policy(
                policy, trained=True
            )
    carried = Placement(engine_settings(configured("int8")), World()).policy(policy, trained=True)
    assert all(layer.start_a is None for _, layer in lora_layers(carried))


def test_a_base_that_is_gone(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base")
    model = load_causal_lm(base)
    add_lora(model, LORA, seed=0)
    save_model(model, tiny_tokenizer(), tmp_path / "sft")
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=r"no such folder.*base of the adapter '.*/sft/adapter'"):
        Placement(engine_settings(configured("int8")), World()).policy(
            str(tmp_path / "sft"), trained=True
        )
