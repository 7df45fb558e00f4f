"""A run that was stopped and continued is, on a CPU, the run that nothing stopped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.checkpoint.state import load_newest_state
from tandem.errors import CheckpointError, NumericsError
from tandem.training.ppo_trainer import PPOTrainer
from tests.tiny import save_tiny_model, tiny_config
from tests.training.runs import StopError, assert_equal_runs, ran, ran_with_stops, records, stop_at

STOPS = [("sft", 3), ("sft", 3), ("reward", 3), ("ppo", 1), ("ppo", 3)]
ONCE = [("sft", 3), ("reward", 3), ("ppo", 3)]
"""Twice at one step and before the first save: see test_run_stages, in fp32."""


@pytest.mark.parametrize(
    ("changes", "stops"),
    [
        # battery/test_kills has a run in bf16 that is killed.
        pytest.param({"dtype": "bf16"}, ONCE, id="bf16", marks=pytest.mark.slow),
        pytest.param(
            {"parallel__offload": ["optimizer"], "dtype": "bf16", "lora__rank": 2},
            ONCE,
            id="bf16, offloaded, adapters",
        ),
        pytest.param(
            {"parallel__offload": ["optimizer"], "dtype": "bf16"},
            STOPS,
            id="bf16, offloaded",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            # Not with PPO, whose forwards of one policy must agree.
            {"lora__rank": 2, "lora__dropout": 0.1, "stages": ["sft", "reward"]},
            [stop for stop in STOPS if stop[0] != "ppo"],
            id="adapters, dropout",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"parallel__offload": ["optimizer", "params"], "save_async": False},
            STOPS,
            id="everything offloaded, saved at once",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"dtype": "fp16", "ppo__prompts_per_step": 2, "ppo__minibatch_size": 2},
            STOPS,
            id="fp16",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_step_continues_to_the_same_bits(
    tmp_path: Path,
    tiny_model: str,
    preferences: str,
    changes: dict[str, object],
    stops: list[tuple[str, int]],
) -> None:
    config = tiny_config(
        tmp_path / "whole", tiny_model, preferences,
        ppo__ema=True, ppo__ptx_data=[preferences], ppo__kl_coef_target=0.01,
        ppo__critic_warmup_steps=1, **changes,
    )  # fmt: skip
    ran(config)
    lines = ran_with_stops(config, tmp_path / "stopped", stops)
    assert_equal_runs(tmp_path / "stopped", tmp_path / "whole")
    for stage in config.stages:
        assert f"{stage}: continuing after step 2 (checkpoint verified)" in lines
        assert not any("last bits differ" in line for line in lines)
        assert not (tmp_path / "stopped" / "checkpoints" / stage).exists()


@pytest.mark.parametrize("offload", [[], ["optimizer"]])
def test_a_checkpoint_in_half_precision_holds_masters_and_moments(
    tmp_path: Path, tiny_model: str, preferences: str, offload: list[str]
) -> None:
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["sft"], dtype="bf16", save_async=False,
        parallel__offload=offload,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, "sft", 3)
        with pytest.raises(StopError):
            ran(config)
    state, _ = load_newest_state(tmp_path / "run/checkpoints/sft")
    assert state is not None
    masters = {name: kept.whole() for name, kept in state.tensors["model"].items()}
    moments = {name: kept.whole() for name, kept in state.tensors["model_optimizer"].items()}
    for name, master in masters.items():
        assert master.dtype == torch.float32
        for kind in ("exp_avg", "exp_avg_sq"):
            moment = moments[f"{kind}.{name}"]
            assert moment.dtype == torch.float32
            assert moment.shape == master.shape
            # Finer than bf16: neither was rounded on its way.
            assert not torch.equal(moment, moment.bfloat16().float())
        assert not torch.equal(master, master.bfloat16().float()), name


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_dpo_continues_to_the_same_bits(
    tmp_path: Path, tiny_model: str, preferences: str, rank: int
) -> None:
    config = tiny_config(
        tmp_path / "whole", tiny_model, preferences, stages=["sft", "dpo"], lora__rank=rank
    )
    ran(config)
    ran_with_stops(config, tmp_path / "stopped", [("dpo", 1), ("dpo", 3), ("dpo", 3)])
    assert_equal_runs(tmp_path / "stopped", tmp_path / "whole")


def test_a_stop_after_the_last_save_measures_nothing_twice(
    tmp_path: Path, tiny_model: str, preferences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(
        tmp_path / "whole", tiny_model, preferences, save_every=1, dtype="bf16",
        parallel__offload=["optimizer"], sft__max_steps=2, reward__max_steps=2, ppo__steps=2,
    )  # fmt: skip
    ran(config)
    config = replace(config, output_dir=str(tmp_path / "stopped"))
    for stage in ("sft", "reward", "ppo"):
        with monkeypatch.context() as patch:
            patch.setattr("tandem.training.run_folder.Run.finish", stopping_at(stage))
            with pytest.raises(InterruptedError):
                ran(config)
    ran(config)
    assert_equal_runs(tmp_path / "stopped", tmp_path / "whole")


def stopping_at(stage: str) -> object:
    from tandem.training.run_folder import Run

    finish = Run.finish

    def stop(self: Run, step: str, *rest: object) -> None:
        if step == stage:
            self._savers[step].wait()
            raise InterruptedError
        finish(self, step, *rest)  # type: ignore[arg-type]

    return stop


@pytest.mark.slow  # test_same has them too
def test_other_intervals_change_nothing(tmp_path: Path, tiny_model: str, preferences: str) -> None:
    config = tiny_config(tmp_path / "a", tiny_model, preferences)
    ran(config)
    other = replace(config, output_dir=str(tmp_path / "b"), save_every=1, save_async=False)
    ran(other)
    assert_equal_runs(tmp_path / "b", tmp_path / "a")


def test_a_base_model_that_was_changed_since_is_refused(tmp_path: Path, preferences: str) -> None:
    model = save_tiny_model(tmp_path / "model")
    config = tiny_config(tmp_path / "run", model, preferences, stages=["sft"])
    ran(config)
    save_tiny_model(tmp_path / "model", seed=5)
    with pytest.raises(
        CheckpointError, match=r"changed: the files of actor_model \(model.safetensors\)"
    ):
        ran(config)


def test_a_checkpoint_says_what_made_it(tmp_path: Path, tiny_model: str, preferences: str) -> None:
    config = tiny_config(tmp_path / "run", tiny_model, preferences, stages=["sft"])
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, "sft", 3)
        with pytest.raises(StopError):
            ran(config)
    # The thread that writes ends by itself.
    folder = wait_for(tmp_path / "run/checkpoints/sft/step-000002")
    facts = json.loads((folder / "MANIFEST.json").read_text())["facts"]
    assert facts["step"] == 2
    assert facts["ranks"] == 1
    assert set(facts["versions"]) == {"tandem", "python", "torch", "transformers"}
    assert len(facts["config_sha256"]) == 64
    made_from = facts["numbers"]["made_from"]
    assert made_from["the rows of data"]
    assert made_from["the files of actor_model"]["tokenizer.json"]


def wait_for(path: Path) -> Path:
    import time

    for _ in range(500):
        if path.exists():
            return path
        time.sleep(0.01)
    raise AssertionError(path)


def test_a_model_that_went_wrong_stops_before_it_is_saved(
    tmp_path: Path, tiny_model: str, preferences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path / "run", tiny_model, preferences, save_every=1)
    train_rlhf = PPOTrainer.train_rlhf

    def spoiling(self: PPOTrainer, *arguments: Any, step: int, skip: Any) -> dict[str, float]:
        values = train_rlhf(self, *arguments, step=step, skip=skip)
        if step == 2:
            self.engine.critic_learner.parameters[0].data.view(-1)[0] = float("nan")
        return values

    with monkeypatch.context() as patch:
        patch.setattr(PPOTrainer, "train_rlhf", spoiling)
        with pytest.raises(NumericsError, match=r"others in critic/.* after step 2, which was not"):
            ran(config)
    assert [path.name for path in (tmp_path / "run/checkpoints/ppo").glob("step-*")] == [
        "step-000001"
    ]
    ran(config)
    assert [r["step"] for r in records(tmp_path / "run") if r["stage"] == "ppo"] == [0, 1, 2, 3]
