"""Losses on pairs that `dpo.loss_function` names: tried, trained with, and noted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tandem.config.load import check_config
from tandem.config.schema import RunConfig
from tandem.errors import CheckpointError, ConfigError
from tandem.named_functions import named_function
from tandem.objectives.preferences import AnswerLogprobs, given_pair_loss
from tandem.training.export import export
from tandem.training.policy_functions import try_pair_losses
from tests.tiny import tiny_config
from tests.training import letter_rewards
from tests.training.runs import StopError, ran, records, stop_at

LOSSES = """
import torch.nn.functional as F

def logistic(chosen, rejected, *, beta=0.1):
    return -F.logsigmoid(beta * (chosen.log_ratio - rejected.log_ratio))

def centered(chosen, rejected):
    margin = chosen.mean - rejected.mean
    return (margin - margin.mean()).square()

def detached(chosen, rejected):
    return (chosen.total - rejected.total).detach()

def total(chosen, rejected):
    return -(chosen.total - rejected.total).sum()

def number(chosen, rejected):
    return 1.0

def changes(chosen, rejected):
    chosen.reference.mul_(2)
    return -chosen.log_ratio + rejected.log_ratio

def divided(chosen, rejected):
    return chosen.log_ratio / rejected.log_ratio

def rooted(chosen, rejected):
    return (chosen.log_ratio - rejected.log_ratio).square().sqrt()

def broken(chosen, rejected):
    return chosen.logprobs
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(LOSSES, encoding="utf-8")
    return tmp_path / "mine.py"


def configured(folder: Path, model: str, data: str, **dpo: Any) -> RunConfig:
    config = tiny_config(folder, model, data, stages=["dpo"], dpo__max_steps=3)
    return replace(config, dpo=replace(config.dpo, **dpo), micro_batch_tokens=64)


def test_the_losses_by_hand() -> None:
    chosen = AnswerLogprobs(
        torch.tensor([-4.0, -6.0], requires_grad=True), torch.tensor([2, 3]),
        torch.tensor([-5.0, -5.5]),
    )  # fmt: skip
    rejected = AnswerLogprobs(
        torch.tensor([-7.0, -3.0]), torch.tensor([4, 1]), torch.tensor([-7.5, -4.0])
    )
    found = given_pair_loss(
        lambda c, r: (1 - c.log_ratio + r.log_ratio).clamp(min=0), chosen, rejected,
        beta=0.5, sft_coef=0.25,
    )  # fmt: skip
    # Log-ratios 1, -0.5 and 0.5, 1; hinges 0.5 and 2.5; log-probs of a chosen token -2 and -2.
    assert found.loss.item() == pytest.approx(0.5 + 2.5 + 0.25 * 4)
    assert float(found.accuracy) == 1
    assert float(found.chosen_reward) == pytest.approx(0.25)
    assert float(found.rejected_reward) == pytest.approx(0.75)
    found.loss.backward()
    assert chosen.total.grad is not None
    assert chosen.total.grad.tolist() == pytest.approx([-1 - 0.125, -1 - 0.25 / 3])


@pytest.mark.parametrize("sft_coef", [0.0, 0.5])
def test_a_function_that_is_dpos_loss_trains_as_dpo(
    tmp_path: Path, tiny_model: str, preferences: str, mine: Path, sft_coef: float
) -> None:
    known = {"sft_coef": sft_coef, "beta": 0.3}
    own = {**known, "loss_function": f"{mine}:logistic?beta=0.3"}
    lines: list[str] = []
    plain = ran(configured(tmp_path / "plain", tiny_model, preferences, **known))
    given = ran(configured(tmp_path / "own", tiny_model, preferences, **own), lines=lines)
    weights, expected = (load_file(f / "dpo/model.safetensors") for f in (given, plain))
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-6, rtol=1e-5)
    for one, other in zip(records(given), records(plain), strict=True):
        assert one["values"] == pytest.approx(other["values"], abs=1e-5)
    assert any(line.startswith(f"dpo: loss {mine}:logistic?beta=0.3, against") for line in lines)


def test_online_dpo_reads_it_too(
    tmp_path: Path, tiny_model: str, preferences: str, mine: Path
) -> None:
    reward = [f"{letter_rewards.__file__}:starts_early"]
    found = []
    for name, loss in (("plain", ""), ("own", f"{mine}:logistic")):
        config = tiny_config(
            tmp_path / name, tiny_model, preferences, stages=["online-dpo"], ppo__steps=2,
            ppo__reward_function=reward, sampling__samples_per_prompt=2,
        )  # fmt: skip
        folder = ran(replace(config, dpo=replace(config.dpo, loss_function=loss)))
        found.append(load_file(folder / "online-dpo/actor/model.safetensors"))
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("centered", "must give a pair the same loss whatever other pairs come with it"),
        ("detached", "must return losses with a gradient; got none"),
        ("total", r"must return a loss for each pair, \(2,\); got \(\)\. Return them as they"),
        ("number", "must return a tensor of floats .*; got float"),
        ("changes", "must leave its arguments as they are"),
        ("divided", r"must have finite losses; got \[-2.0, nan\] for made-up pairs"),
        ("rooted", r"must have finite gradients; got \[1.0, nan\]"),
        ("broken", "could not be used on two made-up pairs: AttributeError"),
    ],
)
def test_what_is_no_loss_of_pairs_is_refused(mine: Path, name: str, told: str) -> None:
    function = named_function(f"{mine}:{name}", "dpo.loss_function")
    with pytest.raises(ConfigError, match=told):
        try_pair_losses(function, "dpo.loss_function")
    try_pair_losses(lambda c, r: -F.logsigmoid(c.mean - r.mean), "dpo.loss_function")


def test_a_run_refuses_it_before_the_first_stage(
    tmp_path: Path, tiny_model: str, preferences: str, mine: Path
) -> None:
    config = configured(tmp_path / "run", tiny_model, preferences, loss_function=f"{mine}:centered")
    config = replace(config, stages=("sft", "dpo"))
    with pytest.raises(ConfigError, match=r"dpo\.loss_function .*mine\.py:centered must give"):
        ran(config)
    assert not (tmp_path / "run/sft").exists()


def test_knobs_of_the_loss_that_it_replaces_are_refused(
    tmp_path: Path, tiny_model: str, preferences: str, mine: Path
) -> None:
    config = configured(
        tmp_path / "run", tiny_model, preferences, loss_function=f"{mine}:logistic",
        loss="simpo",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"dpo\.loss must not be set where dpo\.loss_function"):
        check_config(config)


def test_a_run_does_not_go_on_with_a_changed_function(
    tmp_path: Path, tiny_model: str, preferences: str, mine: Path
) -> None:
    config = configured(tmp_path / "run", tiny_model, preferences, loss_function=f"{mine}:logistic")
    ran(config)
    mine.write_text(LOSSES.replace("beta=0.1", "beta=0.2"), encoding="utf-8")
    with pytest.raises(CheckpointError, match="the loss function"):
        ran(config)


def test_a_stopped_run_is_exported_from_another_folder(
    tmp_path: Path, tiny_model: str, preferences: str, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its relative name leads nowhere."""
    monkeypatch.chdir(mine.parent)
    config = configured(
        tmp_path / "run", tiny_model, preferences, loss_function=f"{mine.name}:logistic"
    )
    config = replace(config, save_every=1)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, "dpo", 3)
        with pytest.raises(StopError):
            ran(config)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    export(str(tmp_path / "run"), str(tmp_path / "out"), print_line=lambda line: None)
    assert list((tmp_path / "out").rglob("*.safetensors"))
