"""Data, models, callbacks and a torch module as reward, given from Python."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from torch import Tensor, nn

from tandem import Callback, RLHFEngine, RunState, build_config, train
from tandem.config.schema import RunConfig
from tandem.data.render import Renderer
from tandem.engine.module_scorer import ModuleScorer
from tandem.errors import CheckpointError, ConfigError, DataError, ModelError
from tandem.generation.blocks import kept_bytes
from tandem.metrics.log import read_metrics
from tandem.models.load import load_causal_lm, load_tokenizer
from tandem.parallel.world import World
from tandem.training.callbacks import require_callbacks
from tandem.training.given import with_given
from tandem.types import Message, Source
from tests.jsonl import read_jsonl
from tests.tiny import tiny_config

from .runs import assert_equal_runs


class CountOf(nn.Module):
    """Scores a sequence by how many of its ids are multiples of a number."""

    def __init__(self, number: int, *, wide: bool = False) -> None:
        super().__init__()
        self.register_buffer("number", torch.tensor(number))
        self.wide = wide

    def forward(self, token_ids: Tensor, attention_mask: Tensor) -> Tensor:
        found = ((token_ids % self.number == 0) & attention_mask.bool()).float()
        return found if self.wide else found.sum(dim=1)


class Heard(Callback):
    def __init__(self, stop_at: int = 0) -> None:
        self.calls: list[tuple[str, str, int]] = []
        self.folders: list[str] = []
        self.rewards: list[float] = []
        self.stop_at = stop_at

    def on_rollout(self, state: RunState) -> None:
        assert state.experience is not None
        self.rewards.append(float(state.experience.scores.mean()))
        self.calls.append(("rollout", state.stage, state.step))

    def on_step(self, state: RunState) -> None:
        assert next(state.trainer.trainer.engine.actor.parameters()) is not None  # type: ignore[attr-defined]
        assert "policy_loss" in state.metrics
        self.calls.append(("step", state.stage, state.step))
        if state.step == self.stop_at:
            state.stop("enough")

    def on_evaluate(self, state: RunState) -> None:
        assert "heldout_reward" in state.metrics
        self.calls.append(("evaluate", state.stage, state.step))

    def on_save(self, state: RunState) -> None:
        assert state.folder is not None
        self.folders.append(state.folder.relative_to(state.run.path).as_posix())


def bare(folder: Path, **changes: object) -> RunConfig:
    """The tiny configuration without model and data."""
    changes = {"stages": ["sft"], "sft__max_steps": 2, **changes}
    config = tiny_config(folder, "", "", **changes)
    return build_config({**_plain(config), "data": [], "actor_model": ""})


def _plain(config: RunConfig) -> dict[str, Any]:
    from tandem.config.load import plain_values

    values: dict[str, Any] = plain_values(config)
    return values


def quiet(line: str) -> None:
    """Print nothing."""


@pytest.fixture(scope="module")
def in_files(tmp_path_factory: pytest.TempPathFactory, tiny_model: str, preferences: str) -> Path:
    config = tiny_config(
        tmp_path_factory.mktemp("files") / "run", tiny_model, preferences, stages=["sft"],
        sft__max_steps=2,
    )  # fmt: skip
    return train(config, print_line=quiet).path


def test_what_is_given_in_memory_trains_as_from_files(
    tmp_path: Path, in_files: Path, tiny_model: str, preferences: str
) -> None:
    rows: Any = read_jsonl(preferences)
    model, tokenizer = load_causal_lm(tiny_model), load_tokenizer(tiny_model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    data = Dataset.from_list(rows)
    config = bare(tmp_path / "run")
    run = train(config, data=data, actor_model=model, tokenizer=tokenizer, print_line=quiet)
    assert (run.path / "sft/model.safetensors").read_bytes() == (
        in_files / "sft/model.safetensors"
    ).read_bytes()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    lines: list[str] = []
    again: dict[str, Any] = {"actor_model": model, "tokenizer": tokenizer}
    train(config, data=rows, **again, print_line=lines.append)
    assert any("sft: finished before" in line for line in lines)
    with pytest.raises(CheckpointError, match=r"data= must have the content that .*got other cont"):
        train(config, data=rows[1:], **again, print_line=quiet)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(CheckpointError, match=r"actor_model= must have the content that"):
        train(config, data=rows, **again, print_line=quiet)


def test_a_data_set_in_memory_is_kept_without_its_tables_nulls(
    tmp_path: Path, tiny_model: str
) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "q", "completion": [{"role": "assistant", "content": "", "tool_calls": [
            {"name": "f", "arguments": {name: "x"}}]}], "schemas": [{name: {"type": "y"}}]}
        for name in ("a", "b")
    ]  # fmt: skip
    config = tiny_config(tmp_path / "run", tiny_model, "", dataset__columns=["tools=schemas"])
    config = replace(config, data=())
    kept, _ = with_given(config, World(), data=Dataset.from_list(rows))
    assert read_jsonl(kept.data[0]) == rows


def test_numbers_of_numpy_and_torch_are_kept_as_numbers(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run", "model", "")
    config = replace(config, data=())
    row = {"prompt": "q", "chosen": "yes", "rejected": "no"}
    margins = [np.float32(0.5), np.array(2), torch.tensor(1.5), True, np.bool_(False)]
    rows = [{**row, "margin": margin} for margin in margins]
    table = Dataset.from_list([{**row, "margin": 0.5, "more": [1, 2]}]).with_format("numpy")
    kept, _ = with_given(config, World(), data=[rows, table])
    first, second = (Path(file).read_text().splitlines() for file in kept.data)
    assert [json.loads(line)["margin"] for line in first] == [0.5, 2, 1.5, True, False]
    assert [json.loads(line) for line in second] == [{**row, "margin": 0.5, "more": [1, 2]}]


def test_what_cannot_be_given_is_one_line(tmp_path: Path, tiny_model: str) -> None:
    config = bare(tmp_path / "run")
    model, tokenizer = load_causal_lm(tiny_model), load_tokenizer(tiny_model)
    rows = [{"prompt": "a", "chosen": "b"}]
    for match, error, given in (
        ("needs its tokenizer", ConfigError, {"actor_model": model}),
        ("must be rows; got a DatasetDict with 'train'", DataError,
         {"data": DatasetDict(train=Dataset.from_list(rows))}),
        ("at least one row", DataError, {"data": []}),
        (r"row 2, column 'when' must hold texts.*; got: an object of type object", DataError,
         {"data": [{"prompt": "a", "when": 1}, {"prompt": "a", "when": [object()]}]}),
        (r"got a dict with 'prompt'\. Give a list of dicts, or", DataError,
         {"data": {"prompt": ["a"]}}),
        (r"got a DataFrame\. Give data\.to_dict\('records'\)", DataError,
         {"data": Dataset.from_list(rows).to_pandas()}),
        ("row 2 must be a dict", DataError, {"data": [{"prompt": "a"}, 3]}),
        ("got the class Heard. Write e.g.", ConfigError, {"callbacks": [Heard]}),
        ("got the class Heard. Write e.g.", ConfigError, {"callbacks": Heard}),
        ("derived from Callback; got Heard", ConfigError, {"callbacks": Heard()}),
        ("a torch module must go with an RL stage", ConfigError, {"reward_model": CountOf(3)}),
        ("must be a transformers model", ModelError, {"actor_model": CountOf(3)}),
    ):  # fmt: skip
        with pytest.raises(error, match=match):  # type: ignore[arg-type]
            train(config, **given, print_line=quiet)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"must be a RunConfig; got dict\. Use build_config"):
        train({"actor_model": tiny_model})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"EngineSettings; got RunConfig\. Call make_engine\("):
        RLHFEngine(config, tiny_model)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="data must be given once"):
        train(bare(tmp_path / "run", output_dir="x").__class__(data=("a",)), data=rows)
    model.lm_head.forward = lambda x: x
    with pytest.raises(ModelError, match=r"'lm_head' with a forward set on its object"):
        train(config, actor_model=model, tokenizer=tokenizer, print_line=quiet)
    assert not (tmp_path / "run/command.txt").exists()


def test_a_torch_module_rewards_callbacks_hear_and_stop_and_a_run_continues(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    model, tokenizer = load_causal_lm(tiny_model), load_tokenizer(tiny_model)
    given: dict[str, Any] = {
        "data": preferences, "actor_model": model, "tokenizer": tokenizer, "print_line": quiet
    }  # fmt: skip
    knobs: dict[str, Any] = {"stages": ["grpo"], "grpo__steps": 3, "grpo__prompts_per_step": 4,
                             "grpo__eval_prompts": 4, "grpo__minibatch_size": 16}  # fmt: skip
    whole = train(bare(tmp_path / "whole", **knobs), reward_model=CountOf(3), **given)
    heard = Heard(stop_at=2)
    config = bare(tmp_path / "run", **knobs)
    run = train(config, reward_model=CountOf(3), callbacks=[heard], **given)
    assert run.stopped == "enough (grpo step 2, which is saved)"
    assert kept_bytes(torch.device("cpu")) < 2**20  # the rest is given back
    assert heard.calls == [
        ("evaluate", "grpo", 0), ("rollout", "grpo", 1), ("step", "grpo", 1),
        ("rollout", "grpo", 2), ("step", "grpo", 2),
    ]  # fmt: skip
    assert heard.folders == ["checkpoints/grpo/step-000002"]
    with pytest.raises(CheckpointError, match="the reward module"):
        train(config, reward_model=CountOf(4), **given)
    then = Heard()
    run = train(config, reward_model=CountOf(3), callbacks=[then], **given)
    assert not run.stopped
    assert [call for call in then.calls if call[0] == "step"] == [("step", "grpo", 3)]
    assert then.folders == ["grpo"]
    assert_equal_runs(run.path, whole.path)
    logged = [r.values["reward_raw"] for r in read_metrics(run.path) if r.step]
    assert max(logged) > 0


def test_a_reward_module_must_return_one_score_per_sequence(tiny_model: str) -> None:
    renderer = Renderer(load_tokenizer(tiny_model))
    source = Source("rows", "rows.jsonl", 1)
    turns = (Message("user", "What is rain?"),)
    rows = [
        renderer.conversation(turns, text, source) for text in ("Water.", "It falls from clouds.")
    ]
    count = CountOf(3)
    scores = ModuleScorer(count, renderer, World(), max_tokens=8).raw_rows(rows)
    assert scores.tolist() == [sum(i % 3 == 0 for i in row.token_ids) for row in rows]
    with pytest.raises(ModelError, match=r"CountOf must return one score per sequence, \(2,\) or"):
        ModuleScorer(CountOf(3, wide=True), renderer, World()).raw_rows(rows)


@pytest.mark.parametrize("wrong", [3, print, Callback, Callback(), [print]])
def test_callbacks_that_are_no_list_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"callbacks must be a list of objects .*; got "):
        require_callbacks(wrong)
    assert require_callbacks([]) == ()
