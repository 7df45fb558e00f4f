"""A loop of one's own with checkpoints, log and report: stopped, continued, refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tandem import Callback, PPOTrainer, RunState, TrackedLoop, build_config, make_engine
from tandem.errors import CheckpointError, ConfigError
from tandem.metrics.answers import ANSWER_FILES
from tandem.metrics.log import read_metrics
from tandem.serve.named_model import notes_of
from tandem.training.comparing.eval_command import evaluate_run
from tandem.training.replay import replay
from tests.tiny import write_preferences

from .runs import answer_lines, records


def brevity(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    return [-len(text) / 100 for text in completions]


def quiet(line: str) -> None:
    """Print nothing."""


def made(model: str, folder: Path, seed: int = 7) -> PPOTrainer:
    knobs = {"prompts_per_step": 4, "minibatch_size": 4, "actor": {"learning_rate": 1e-3}}
    config = build_config(
        {"stages": ["ppo"], "ppo": knobs, "sampling": {"max_new_tokens": 6}, "seed": seed,
         "output_dir": str(folder), "save_every": 2, "log": {"tensorboard": False}}
    )  # fmt: skip
    return PPOTrainer(make_engine(config, model), config, num_steps=3, reward_function=brevity)


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, state: RunState) -> None:
        if state.step == self.step:
            state.stop("as asked")


def run(model: str, folder: Path, *, stop_at: int = 0, seed: int = 7) -> TrackedLoop:
    trainer = made(model, folder, seed)
    loop = TrackedLoop(trainer, 3, callbacks=[StopAt(stop_at)], print_line=quiet)
    prompts = [trainer.engine.renderer.prompt("What is rain?")] * 4
    for step in loop:
        experience = trainer.generate_experience(prompts, step=step)
        loop.log(trainer.train_rlhf(experience, step=step), experience)
    return loop


def test_a_stopped_loop_continues_as_if_nothing_had_happened(
    tmp_path: Path, tiny_model: str
) -> None:
    whole = run(tiny_model, tmp_path / "whole")
    stopped = run(tiny_model, tmp_path / "run", stop_at=1)
    assert stopped.stopped == "as asked (ppo step 1, which is saved)"
    assert [record.step for record in read_metrics(tmp_path / "run")] == [1]
    with pytest.raises(CheckpointError, match="seed 7 -> 8"):
        run(tiny_model, tmp_path / "run", seed=8)
    again = run(tiny_model, tmp_path / "run")
    assert not again.stopped
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    for name in ANSWER_FILES:
        lines = answer_lines(tmp_path / "run" / name)
        assert lines == answer_lines(tmp_path / "whole" / name), name
    for name in ("actor", "critic"):
        file = f"ppo/{name}/model.safetensors"
        assert (again.run.path / file).read_bytes() == (whole.run.path / file).read_bytes()
    assert (whole.run.path / "report.html").is_file()
    assert list(whole) == []  # it is finished


def test_commands_on_its_folder_do_not_wait_for_other_stages_nor_ask_for_data(
    tmp_path: Path, tiny_model: str
) -> None:
    folder = tmp_path / "run"
    config = build_config({"sampling": {"max_new_tokens": 4}, "output_dir": str(folder)})
    trainer = PPOTrainer(make_engine(config, tiny_model), config, reward_function=brevity)
    for _ in (loop := TrackedLoop(trainer, 1, print_line=quiet)):
        loop.log({})
    assert config.stages != ("ppo",)
    assert notes_of(str(folder)) == []
    with pytest.raises(CheckpointError, match="to be repeated; got a run without any"):
        replay(str(folder), 1)
    with pytest.raises(CheckpointError, match=r"to be evaluated; got .*eval --data FILE"):
        evaluate_run(str(folder), 0)


def test_its_models_are_evaluated_on_other_data(
    tmp_path: Path, tiny_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tiny_model, tmp_path / "run")
    data = write_preferences(tmp_path / "new.jsonl", num=3)
    evaluation = evaluate_run(str(tmp_path / "run"), 0, data=[str(data)])
    assert list(evaluation["models"]) == ["ppo"]
    assert evaluation["models"]["ppo"]["heldout_loss"] > 0
    assert evaluation["trained_on_unknown"] == "its prompts came from a program"
    named = evaluate_run(str(tmp_path / "run"), 1, data=[str(data)], base=tiny_model)
    assert list(named["models"]) == ["base", "ppo"]
    assert "its prompts came from a program" in capsys.readouterr().out


def test_the_answers_of_logged_experiences_are_recorded(tmp_path: Path, tiny_model: str) -> None:
    trainer = made(tiny_model, tmp_path / "run")
    prompts = [trainer.engine.renderer.prompt("What is rain?")] * 4
    scores: dict[int, list[float]] = {}
    loop = TrackedLoop(trainer, 3, print_line=quiet)
    for step in loop:
        experience = trainer.generate_experience(prompts, step=step)
        scores[step] = experience.scores.tolist()
        part = experience.select(torch.tensor([1, 0, 3, 2]))
        loop.log({}, {1: experience, 2: None, 3: part}[step])
    (answers,) = map(json.loads, answer_lines(tmp_path / "run" / "answers.jsonl"))
    assert (answers["stage"], answers["step"]) == ("ppo", 1), "2 was not given, 3 not whole"
    assert answers["reward"] == pytest.approx(scores[1], abs=1e-5)
    tokens = [json.loads(line) for line in answer_lines(tmp_path / "run" / "rollouts.jsonl")]
    assert [line["row"] for line in tokens] == [0, 1, 2, 3]
    assert [line["reward"] for line in tokens] == answers["reward"]
    assert all(len(line["tokens"]) == len(line["advantages"]) for line in tokens)


def test_a_step_that_is_not_logged_is_refused(tmp_path: Path, tiny_model: str) -> None:
    loop = TrackedLoop(made(tiny_model, tmp_path / "run"), 3, print_line=quiet)
    with pytest.raises(ConfigError, match=r"log must be called once per step"):
        loop.log({})
    with pytest.raises(ConfigError, match=r"step 1 must be logged; got none"):
        for _ in loop:
            pass
