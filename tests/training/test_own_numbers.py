"""Numbers that a user's program logs beside the declared ones: from callbacks and own loops."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem import Callback, PPOTrainer, RunState, TrackedLoop, build_config, make_engine, train
from tandem.errors import ConfigError
from tandem.metrics.log import read_metrics
from tandem.training.replay import replay
from tests.tiny import tiny_config
from tests.training import letter_rewards


class Counting(Callback):
    """Logs a number at every moment."""

    def on_rollout(self, state: RunState) -> None:
        assert state.experience is not None
        state.log({"own/longest": float(state.experience.batch.response_mask.sum(1).max())})

    def on_step(self, state: RunState) -> None:
        state.log({"own/twice/the_step": 2 * state.step})

    def on_evaluate(self, state: RunState) -> None:
        state.log({"own/evaluated_at": state.step})


def quiet(line: str) -> None:
    """Print nothing."""


def test_a_callbacks_numbers_are_in_the_records_of_their_steps(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["sft", "grpo"], sft__max_steps=2,
        sft__eval_every=1, grpo__steps=2, grpo__eval_every=0, save_every=1,
        grpo__reward_function=[f"{letter_rewards.__file__}:starts_early"],
    )  # fmt: skip
    run = train(config, callbacks=[Counting()], print_line=quiet)
    found: dict[tuple[str, int], dict[str, float]] = {}
    for record in read_metrics(run.path):
        own = {n: value for n, value in record.values.items() if n.startswith("own/")}
        longest = own.pop("own/longest", None)
        assert longest == record.values.get("response_tokens_max")
        found[record.stage, record.step] = own
    assert found == {
        ("sft", 0): {"own/evaluated_at": 0},
        ("sft", 1): {"own/twice/the_step": 2, "own/evaluated_at": 1},
        ("sft", 2): {"own/twice/the_step": 4, "own/evaluated_at": 2},
        ("grpo", 0): {"own/evaluated_at": 0},
        ("grpo", 1): {"own/twice/the_step": 2},
        ("grpo", 2): {"own/twice/the_step": 4, "own/evaluated_at": 2},
    }
    assert "the_step" in (run.path / "report.html").read_text("utf-8")
    assert replay(str(run.path), 2) == 0, "a step repeated without the program has none of them"


class Saving(Callback):
    def on_save(self, state: RunState) -> None:
        state.log({"own/late": 1.0})


class Overwriting(Callback):
    def on_step(self, state: RunState) -> None:
        state.log({"loss": 0.0})


@pytest.mark.parametrize(
    ("callback", "told"),
    [
        (Saving(), "must be called in on_rollout, on_evaluate or on_step; got on_save"),
        (Overwriting(), r"must get names that begin with own/; got 'loss'\. Log 'own/loss'"),
    ],
)
def test_what_could_not_be_logged_is_refused(
    tmp_path: Path, tiny_model: str, preferences: str, callback: Callback, told: str
) -> None:
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["sft"], sft__max_steps=1, save_every=1
    )
    with pytest.raises(ConfigError, match=told):
        train(config, callbacks=[callback], print_line=quiet)


def test_a_loop_logs_its_own_numbers_and_is_told_how(tmp_path: Path, tiny_model: str) -> None:
    config = build_config(
        {"stages": ["ppo"], "ppo": {"prompts_per_step": 2, "minibatch_size": 2},
         "sampling": {"max_new_tokens": 4}, "output_dir": str(tmp_path / "run")}
    )  # fmt: skip
    engine = make_engine(config, tiny_model)
    trainer = PPOTrainer(engine, config, num_steps=2, reward_function=letter_rewards.starts_early)

    def logging() -> None:
        for step in (loop := TrackedLoop(trainer, 2, print_line=quiet)):
            loop.log({"own/novelty": 0.5} if step == 1 else {"novelty": 0.5})

    with pytest.raises(ConfigError, match="log 'own/novelty' or declare a Metric"):
        logging()
    (record,) = read_metrics(tmp_path / "run")
    assert record.values["own/novelty"] == 0.5
