"""A critic with a rank of its own, and checkpointing of one role."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from tandem import make_engine
from tandem.config.engine import engine_settings
from tandem.config.load import build_config, check_config
from tandem.config.lora import LoraConfig, TrainedRole
from tandem.errors import ConfigError, ModelError
from tandem.memory.model import layout_of, trained_parameters
from tandem.memory.shape import shape_of
from tandem.models.lora import is_adapted, lora_layers
from tandem.models.quantized import PackedWeight
from tests.tiny import tiny_config
from tests.training.runs import ran, ran_with_stops

BRIEF = {"sft__max_steps": 2, "reward__max_steps": 2, "ppo__steps": 2}


def parameters(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("critic", "own"), [(-1, 3), (0, 0), (2, 2), (3, 3)])
def test_each_role_has_its_rank(critic: int, own: int, tmp_path: Path, tiny_model: str) -> None:
    config = build_config({"lora": {"rank": 3, "critic_rank": critic}, "ppo": {"steps": 1}})
    engine = make_engine(config, tiny_model)
    assert {layer.rank for _, layer in lora_layers(engine.actor)} == {3}
    assert engine.critic is not None
    assert is_adapted(engine.critic) == bool(own)
    assert {layer.rank for _, layer in lora_layers(engine.critic)} == ({own} if own else set())
    trained = sum(p.numel() for p in engine.critic.parameters() if p.requires_grad)
    settings = engine_settings(config)
    layout = layout_of(settings, 1, "critic", on_cpu=True, half=False)
    shape = shape_of(engine.critic.config, scalar=True)
    assert trained == trained_parameters(shape, layout), "as the forecast counts"
    assert layout_of(settings, 1, "actor", on_cpu=True, half=False).lora_rank == 3


def test_a_whole_critic_beside_a_policy_of_adapters(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    knobs = {"lora__rank": 2, "lora__critic_rank": 0, **BRIEF}
    config = tiny_config(tmp_path / "run", tiny_model, preferences, **knobs)
    run = ran(config)
    assert (run / "ppo/actor/adapter").is_dir()
    assert not (run / "reward/adapter").exists(), "the reward model was trained whole"
    base, sft, reward = Path(tiny_model), parameters(run / "sft"), parameters(run / "reward")
    plain = parameters(base)
    assert torch.equal(sft["model.norm.weight"], plain["model.norm.weight"]), "adapters alone"
    assert not torch.equal(reward["model.norm.weight"], plain["model.norm.weight"])
    AutoModelForSequenceClassification.from_pretrained(run / "reward")
    # Stopped within PPO and continued: the same weights.
    ran_with_stops(config, tmp_path / "again", [("ppo", 2)])
    for folder in ("reward", "ppo/actor"):
        ours, theirs = parameters(tmp_path / "again" / folder), parameters(run / folder)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_critic_of_adapters_beside_a_whole_policy(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    knobs = {"lora__critic_rank": 2, **BRIEF}
    run = ran(tiny_config(tmp_path / "run", tiny_model, preferences, **knobs))
    assert (run / "reward/adapter").is_dir()
    assert not (run / "ppo/actor/adapter").exists()
    assert not torch.equal(
        parameters(run / "ppo/actor")["model.norm.weight"],
        parameters(run / "sft")["model.norm.weight"],
    )


def test_quantized_weights_leave_a_whole_critic_as_it_is(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    knobs = {"lora__rank": 2, "lora__critic_rank": 0, "parallel__frozen_weights": "int8", **BRIEF}
    config = tiny_config(tmp_path / "run", tiny_model, preferences, **knobs)
    run = ran(config)
    engine = make_engine(config, run / "sft", reward_model=run / "reward")
    assert engine.critic is not None
    assert engine.scorer is not None

    def quantized(model: torch.nn.Module) -> bool:
        return any(isinstance(module, PackedWeight) for module in model.modules())

    (judge,) = engine.scorer.models
    assert quantized(engine.actor)
    assert quantized(judge), "a frozen reward model"
    assert not quantized(engine.critic)
    saved = parameters(run / "reward")
    for name, value in engine.critic.named_parameters():
        assert torch.equal(value, saved[name]), "it starts from the whole reward model"
        assert value.requires_grad


@pytest.fixture(scope="module")
def plain_actor(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: str, preferences: str
) -> dict[str, Tensor]:
    """The policy of a run without checkpointing."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    return parameters(ran(tiny_config(folder, tiny_model, preferences, **BRIEF)) / "ppo/actor")


@pytest.mark.parametrize("roles", ["all", "actor", "critic"])
def test_checkpointing_of_one_role_changes_no_number(
    roles: str,
    tmp_path: Path,
    tiny_model: str,
    preferences: str,
    plain_actor: dict[str, Tensor],
) -> None:
    knobs = {"gradient_checkpointing": True, "recompute_roles": roles}
    config = tiny_config(tmp_path / "run", tiny_model, preferences, **BRIEF, **knobs)
    engine = make_engine(config, tiny_model)
    assert engine.critic is not None
    settings = engine_settings(config)
    models: dict[TrainedRole, PreTrainedModel] = {"actor": engine.actor, "critic": engine.critic}
    for role, model in models.items():
        recomputes = any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
        assert recomputes == (roles in ("all", role))
        layout = layout_of(settings, 1, role, on_cpu=True, half=False)
        assert layout.checkpointing == recomputes
    found = parameters(ran(config) / "ppo/actor")
    for name, expected in plain_actor.items():
        torch.testing.assert_close(found[name], expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"recompute_roles": "actor"}, "recompute_roles must be all without"),
        (
            {"lora": {"rank": 2, "critic_rank": 0}, "parallel": {"shared_base": True}},
            "shared_base must find adapters on actor and critic alike",
        ),
        (
            {"lora": {"rank": 2, "critic_rank": 3}, "parallel": {"shared_base": True}},
            "lora.critic_rank must be lora.rank with parallel.shared_base",
        ),
        (
            {"lora": {"rank": 2, "critic_rank": 3}, "parallel": {"frozen_weights": "nf4"}},
            "lora.critic_rank must be lora.rank or 0 with parallel.frozen_weights",
        ),
        ({"lora": {"train_tokens": ["control"]}}, "must go with adapters"),
        ({"lora": {"critic_rank": -2}}, "critic_rank"),
    ],
)
def test_what_excludes_itself(knobs: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(build_config({"actor_model": "x", "data": ["y"], **knobs}))


def test_a_rank_of_the_critic_is_no_matter_of_earlier_stages(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["sft"], lora__rank=2, **BRIEF
    )
    ran(config)
    lines: list[str] = []
    lora = LoraConfig(rank=2, critic_rank=0)
    run = ran(replace(config, stages=("sft", "reward"), lora=lora), lines=lines)
    assert any(line.startswith("sft: finished before") for line in lines)
    assert not (run / "reward/adapter").exists()


def test_the_advice_on_a_critic_s_adapters_leaves_the_policy_s_rank(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    changes = {"stages": ["reward"], "lora__rank": 3, "reward__max_steps": 1}
    adapter = ran(tiny_config(tmp_path / "judge", tiny_model, preferences, **changes))
    values = {"critic_model": str(adapter / "reward" / "adapter"), "ppo": {"steps": 1}}
    with pytest.raises(ModelError, match=r"--lora-rank and .* Use --lora\.critic-rank 3 "):
        make_engine(build_config({**values, "lora": {"rank": 2}}), tiny_model)
    advised = {"lora": {"rank": 2, "critic_rank": 3}}
    engine = make_engine(build_config({**values, **advised}), tiny_model)
    assert engine.critic is not None
    assert {layer.rank for _, layer in lora_layers(engine.critic)} == {3}
    assert {layer.rank for _, layer in lora_layers(engine.actor)} == {2}
