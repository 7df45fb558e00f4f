"""A reference that follows the policy, through whole stages, against plain Hugging Face models."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tandem import make_engine
from tandem.cli import main
from tandem.config.load import check_config
from tandem.config.schema import ParallelConfig, RunConfig
from tandem.config.stages import stage_of
from tandem.engine.learner import Learner
from tandem.engine.state import engine_state
from tandem.errors import CheckpointError, ConfigError
from tandem.memory.model import checkpoint_bytes, reference_bytes
from tandem.memory.shape import shape_of
from tandem.predict.memory import Device, Models, StageCase
from tandem.predict.rows import Rows
from tandem.predict.work import work_of
from tandem.training.stage_loop import StepLoop
from tandem.training.supervised import SupervisedTrainer
from tandem.types import Experience, TokenRow
from tests.ranks import on_ranks
from tests.tiny import tiny_config
from tests.training import letter_rewards
from tests.training.runs import (
    assert_equal_runs,
    assert_same_measures,
    ran,
    ran_with_stops,
    ranks_ran,
    records,
)
from tests.training.test_resume_ranks import ran_until

REWARD = f"{letter_rewards.__file__}:early_share"
RL: dict[str, dict[str, Any]] = {
    "ppo": {"ppo__reward_function": REWARD, "ppo__kl_coef": 0.2},
    "grpo": {
        "grpo__reward_function": REWARD, "grpo__kl": "k2-in-loss", "grpo__kl_coef": 0.2,
        "grpo__steps": 3, "grpo__prompts_per_step": 4, "grpo__minibatch_size": 4,
        "grpo__eval_prompts": 8, "sampling__samples_per_prompt": 2,
        "grpo__actor": {"learning_rate": 1e-3},
    },
    "online-dpo": {"ppo__reward_function": REWARD, "sampling__samples_per_prompt": 2},
}  # fmt: skip


def config_of(
    folder: Path, model: str, data: str, stage: str, every: int, rate: float = 1.0, **more: Any
) -> RunConfig:
    short = {"max_steps": 4, "epochs": 10, "batch_size": 8, "learning_rate": 1e-3,
             "lora_learning_rate": 1e-2, "schedule": "constant", "warmup": 0.0}  # fmt: skip
    changes = {
        "stages": [stage], "dataset__split": [], "dtype": "fp32", "dpo": short, "kto": dict(short),
        "reference": {"update_every": every, "update_rate": rate}, **RL.get(stage, {}), **more,
    }  # fmt: skip
    config = tiny_config(folder, model, data, **changes)
    check_config(config)
    return config


def of_step(folder: Path, name: str) -> dict[int, float]:
    return {r["step"]: r["values"][name] for r in records(folder) if name in r["values"]}


def size_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def answer_logprobs(model: Any, rows: Sequence[TokenRow]) -> Tensor:
    """Summed over each answer, row by row."""
    sums = []
    for row in rows:
        ids = torch.tensor([row.token_ids])
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
        sums.append(own[torch.tensor(row.response_mask[1:])].sum())
    return torch.stack(sums)


def slow_dpo(
    model: str, batches: Sequence[Sequence[Any]], config: RunConfig, every: int, rate: float
) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each step, and the trained weights, of two plain models in float64."""
    settings = config.dpo
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    reference = copy.deepcopy(policy)
    matrices = [p for p in policy.parameters() if p.dim() > 1]
    others = [p for p in policy.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        betas=settings.betas,
    )
    losses = []
    for number, pairs in enumerate(batches, start=1):
        chosen, rejected = [p.chosen for p in pairs], [p.rejected for p in pairs]
        with torch.no_grad():
            frozen = answer_logprobs(reference, chosen) - answer_logprobs(reference, rejected)
        difference = answer_logprobs(policy, chosen) - answer_logprobs(policy, rejected) - frozen
        loss = -torch.nn.functional.logsigmoid(0.1 * difference).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
        if every and number % every == 0:
            with torch.no_grad():
                for old, new in zip(reference.parameters(), policy.parameters(), strict=True):
                    old.copy_(rate * new + (1 - rate) * old)
    return losses, policy.state_dict()


@pytest.mark.parametrize(("every", "rate"), [(2, 1.0), (1, 0.4)])
def test_dpo_is_that_of_two_plain_models_in_a_slow_loop(
    tmp_path: Path, tiny_model: str, preferences: str, every: int, rate: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    batches: list[Sequence[Any]] = []
    take = SupervisedTrainer.step

    def taking(self: Any, step: int, rows: Sequence[Any], loop: StepLoop) -> dict[str, float]:
        batches.append(rows)
        return take(self, step, rows, loop)

    monkeypatch.setattr(SupervisedTrainer, "step", taking)
    config = config_of(tmp_path / "run", tiny_model, preferences, "dpo", every, rate)
    ran(config)
    losses, weights = slow_dpo(tiny_model, batches, config, every, rate)
    found = of_step(tmp_path / "run", "loss")
    assert [found[step] for step in (1, 2, 3, 4)] == pytest.approx(losses, abs=2e-6)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "run/dpo").state_dict()
    for name, weight in weights.items():
        assert float((ours[name] - weight).abs().mean()) < 1e-5, name
    still, _ = slow_dpo(tiny_model, batches, config, 0, rate)
    assert max(abs(a - b) for a, b in zip(still, losses, strict=True)) > 1e-3
    moves = of_step(tmp_path / "run", "reference_updates")
    assert moves == {step: float(step % every == 0) for step in (1, 2, 3, 4)}


@pytest.mark.parametrize(("stage", "every", "rate"), [
    ("ppo", 3, 1.0), ("grpo", 1, 0.3), ("online-dpo", 1, 1.0),
])  # fmt: skip
def test_rl_is_compared_with_the_mixture_of_plain_weights(
    tmp_path: Path, tiny_model: str, preferences: str, stage: str, every: int, rate: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The reference's log-probs of each rollout are those of a plain model that has the mixture of
    what the actor's weights were after its optimizer steps."""
    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    stepped, made = [0], 0
    apply, hear = Learner.apply, StepLoop.made

    def applying(self: Learner, *arguments: Any) -> None:
        apply(self, *arguments)
        if self.name == "actor":
            stepped[0] += 1
            if stepped[0] % every == 0:
                now = dict(self.model.named_parameters())
                with torch.no_grad():
                    for name, old in reference.named_parameters():
                        old.copy_(rate * now[name].double() + (1 - rate) * old)

    def hearing(self: StepLoop, experience: Experience) -> None:
        nonlocal made
        hear(self, experience)
        batch = experience.batch
        with torch.no_grad():
            logits = reference(batch.token_ids).logits[:, :-1]
        own = logits.log_softmax(-1).gather(-1, batch.token_ids[:, 1:, None])[..., 0]
        assert experience.ref_logprobs is not None
        mask = batch.response_mask[:, 1:]
        found = experience.ref_logprobs[:, 1:][mask].double()
        assert torch.allclose(found, own[mask], atol=1e-5)
        gap = (experience.old_logprobs - experience.ref_logprobs).abs().max()
        is_same = made == 0 or (rate == 1 and stepped[0] % every == 0)
        assert (float(gap) == 0.0) is is_same
        made += 1

    monkeypatch.setattr(Learner, "apply", applying)
    monkeypatch.setattr(StepLoop, "made", hearing)
    ran(config_of(tmp_path / "run", tiny_model, preferences, stage, every, rate))
    assert made == 3
    moves = of_step(tmp_path / "run", "reference_updates")
    assert sum(moves.values()) == stepped[0] // every > 1


@pytest.mark.parametrize("stage", ["dpo", "kto"])
@pytest.mark.parametrize("rank", [0, 2])
def test_implicit_rewards_begin_again_at_0_and_held_out_ones_do_not(
    tmp_path: Path, tiny_model: str, preferences: str, stage: str, rank: int
) -> None:
    folder = tmp_path / "run"
    more = {"lora__train_tokens": ["control"]} if rank else {}
    ran(config_of(folder, tiny_model, preferences, stage, 2, lora__rank=rank, **more))
    margins = of_step(folder, "implicit_reward_margin")
    assert margins[1] == margins[3] == 0.0
    assert 0.0 not in (margins[2], margins[4])
    if stage == "kto":
        assert of_step(folder, "kto_baseline")[3] == 0.0
    heldout = of_step(folder, "heldout_margin")
    assert heldout[0] == 0.0 != heldout[4]
    assert main(["eval", str(folder)]) == 0
    compared = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    assert compared["models"][stage]["heldout_margin"] == pytest.approx(heldout[4], rel=1e-4)


@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_a_move_before_an_evaluation_changes_none_of_its_figures(
    tmp_path: Path, tiny_model: str, preferences: str, stage: str
) -> None:
    """KTO's baseline too, which is above 0 where good answers weigh most."""
    short: dict[str, Any] = {"max_steps": 4, "epochs": 10, "batch_size": 8, "learning_rate": 1e-3}
    if stage == "kto":
        short |= {"desirable_weight": 10.0, "undesirable_weight": 0.01}
    for every in (0, 4):
        changes = {stage: short}
        ran(config_of(tmp_path / str(every), tiny_model, preferences, stage, every, **changes))
    still, moved = (records(tmp_path / str(every))[-1]["values"] for every in (0, 4))
    assert moved.pop("reference_updates") == 1.0
    assert moved == still
    assert still["heldout_loss"] != 0.0


@pytest.mark.parametrize("stage", ["dpo", "kto", "grpo"])
def test_two_ranks_at_stage_3_measure_what_one_does(
    tmp_path: Path, tiny_model: str, preferences: str, stage: str
) -> None:
    config = config_of(tmp_path / "one", tiny_model, preferences, stage, 2, 0.3)
    ran(config)
    split = ParallelConfig(actor_zero_stage=3, critic_zero_stage=3)
    on_ranks(2, ranks_ran, replace(config, parallel=split, output_dir=str(tmp_path / "two")))
    assert_same_measures(tmp_path / "two", tmp_path / "one")
    still = config_of(tmp_path / "still", tiny_model, preferences, stage, 0)
    ran(still)
    name = "kl" if stage == "grpo" else "implicit_reward_margin"
    one, other = (of_step(tmp_path / folder, name) for folder in ("one", "still"))
    assert any(abs(one[step] - other[step]) > 0.02 * abs(other[step]) for step in one)


@pytest.mark.parametrize(
    ("stage", "rate", "more"),
    [
        ("dpo", 0.3, {}),
        ("dpo", 1.0, {"lora__rank": 2, "dtype": "bf16"}),
        ("kto", 0.3, {"dtype": "bf16", "parallel__offload": ["reference"]}),
        ("grpo", 0.3, {"dtype": "bf16", "grpo__ema": True}),
        ("ppo", 1.0, {"dtype": "bf16"}),
        ("online-dpo", 0.3, {}),
    ],
)
def test_a_stopped_run_continues_to_the_same_bits(
    tmp_path: Path, tiny_model: str, preferences: str, stage: str, rate: float, more: dict[str, Any]
) -> None:
    config = config_of(tmp_path / "whole", tiny_model, preferences, stage, 1, rate, **more)
    ran(config)
    lines = ran_with_stops(config, tmp_path / "stopped", [(stage, 3), (stage, 3)])
    assert f"{stage}: continuing after step 2 (checkpoint verified)" in lines
    assert_equal_runs(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.parametrize("rate", [0.3, 1.0])
@pytest.mark.parametrize("stage", [1, 3])
def test_what_two_ranks_saved_continues_alone(
    tmp_path: Path, tiny_model: str, preferences: str, stage: int, rate: float
) -> None:
    """At stage 1 the mixture is in pieces beside a whole reference, alone it is the reference."""
    config = config_of(tmp_path / "alone", tiny_model, preferences, "dpo", 1, rate)
    ran(config)
    config = replace(config, output_dir=str(tmp_path / "moved"))
    split = ParallelConfig(actor_zero_stage=stage, critic_zero_stage=stage)
    on_ranks(2, ran_until, replace(config, parallel=split), "dpo", 3, 3)
    lines: list[str] = []
    ran(config, lines=lines)
    assert "dpo: continuing after step 2 (checkpoint verified)" in lines
    assert_same_measures(tmp_path / "moved", tmp_path / "alone")


@pytest.mark.parametrize(
    ("rate", "more", "is_beside"),
    [
        (0.3, {}, True),
        (1.0, {}, False),
        (0.3, {"grpo__ema": True}, True),
        (1.0, {"lora__rank": 4}, True),
        (0.3, {"dtype": "fp32"}, False),
    ],
)
def test_the_forecast_counts_what_a_checkpoint_and_the_reference_hold(
    tmp_path: Path, tiny_model: str, preferences: str, rate: float, more: dict[str, Any],
    is_beside: bool,
) -> None:  # fmt: skip
    """is_beside: the state is no part of a reference model, but memory of its own."""
    changes = {"dtype": "bf16", "parallel__offload": ["optimizer"], **more}  # with all its moments
    config = config_of(tmp_path, tiny_model, preferences, "grpo", 2, rate, **changes)
    engine = make_engine(config, tiny_model)
    shape, half = shape_of(engine.actor.config), config.dtype == "bf16"
    stage, device = stage_of("grpo"), Device(on_cpu=True, half=half)
    work = work_of(config, stage, 1, Rows())
    layout = StageCase(config, stage, Models(shape, shape), work, device, 1).policy
    parts = engine_state(engine)
    held = sum(size_of(tensor) for part in parts.values() for tensor in part.values())
    assert held == pytest.approx(checkpoint_bytes([(shape, layout)]), rel=0.01)
    own = sum(map(size_of, parts["reference"].values()))
    assert sum(reference_bytes(shape, layout).values()) == (own if is_beside else 0)


def test_other_moves_are_another_run(tmp_path: Path, tiny_model: str, preferences: str) -> None:
    config = config_of(tmp_path / "run", tiny_model, preferences, "dpo", 2)
    lines: list[str] = []
    ran(config, lines=lines)
    assert "dpo: the reference becomes the policy after every 2 optimizer steps" in lines
    with pytest.raises(CheckpointError, match=r"changed: .*reference\.update_every"):
        ran(config_of(tmp_path / "run", tiny_model, preferences, "dpo", 3))


def test_what_cannot_be_is_refused_before_a_stage(
    tmp_path: Path, tiny_model: str, preferences: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(stage: str, **more: Any) -> str:
        values = {"every": 2, "rate": 1.0, **more}
        with pytest.raises(ConfigError) as caught:
            config_of(tmp_path / "run", tiny_model, preferences, stage, **values)
        return str(caught.value)

    alone = "must be 0 where no stage compares the policy with where it started; got 2. Remove it"
    assert alone in refused("sft")
    assert alone in refused("dpo", dpo={"loss": "simpo"})
    assert alone in refused("grpo", grpo__kl="none", grpo__kl_coef=0.0)
    assert "must be 0 with reference_model" in refused("dpo", reference_model=tiny_model)
    assert "must be 0 with reference_model" in refused("distill", reference_model=tiny_model)
    assert "no adapter of that rank); got 0.5" in refused("dpo", rate=0.5, lora__rank=2)
    assert "must go with reference.update_every" in refused("dpo", every=0, rate=0.5)
    config = config_of(tmp_path / "run", tiny_model, preferences, "ppo", 2)
    for given in ({"reference": tiny_model}, {"has_reference": False}):
        with pytest.raises(ConfigError, match="must compare the actor with where it starts"):
            make_engine(config, tiny_model, **given)  # type: ignore[arg-type]
    assert main(["dpo", "--sync_ref_model", "true", "--actor-model", "x", "--data", "y"]) != 0
    assert "Use --reference.update-every" in capsys.readouterr().err
