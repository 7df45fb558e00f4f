"""Whole runs of a tiny model: what is left behind, what continues, what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tandem import files
from tandem.config.load import check_config, load_config
from tandem.config.schema import RunConfig
from tandem.engine import rollouts
from tandem.errors import CheckpointError, ConfigError, DataError, ModelError
from tandem.metrics.log import read_metrics
from tandem.metrics.report import write_report
from tandem.models.load import load_causal_lm, load_tokenizer
from tandem.training import forecast, own_folder, run_stages
from tandem.training import run_folder as run_module
from tandem.training.run_folder import Run
from tandem.training.run_stages import train
from tandem.training.stage_data import prepare_rows
from tandem.types import Message
from tests.jsonl import read_jsonl, write_jsonl
from tests.tiny import tiny_config, write_preferences

from .runs import StopError, ran, stop_at

BRIEF: dict[str, object] = {
    "sft__max_steps": 1, "reward__max_steps": 1, "dpo__max_steps": 1, "ppo__steps": 1,
}  # fmt: skip
"""Where a test looks at what a run does with models, not at its steps."""


def save_with_another_template(model: str, folder: Path) -> str:
    """The same model, whose conversations are written in other tokens."""
    tokenizer = load_tokenizer(model)
    content = "+ message['content'] +"
    assert content in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(content, "+ 'So: ' " + content)
    load_causal_lm(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: str, preferences: str
) -> tuple[Path, RunConfig]:
    """A run of all three steps with EMA and mixture training."""
    folder = tmp_path_factory.mktemp("run") / "first"
    config = tiny_config(
        folder, tiny_model, preferences, ppo__ema=True, ppo__ptx_data=[preferences]
    )
    return ran(config), config


def test_every_model_is_a_folder_that_hugging_face_opens(
    finished: tuple[Path, RunConfig],
) -> None:
    run, _ = finished
    for name in ("sft", "ppo/actor", "ppo/ema"):
        model = AutoModelForCausalLM.from_pretrained(run / name)
        tokenizer = AutoTokenizer.from_pretrained(run / name)
        assert tokenizer.chat_template
        assert tokenizer.eos_token_id in model.generation_config.eos_token_id
    for name in ("reward", "ppo/critic"):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            run / name, output_loading_info=True
        )
        assert not info["missing_keys"]
        assert model.config.num_labels == 1
    assert AutoModelForSequenceClassification.from_pretrained(run / "reward").config.score_std > 0


def test_a_run_writes_down_everything(finished: tuple[Path, RunConfig]) -> None:
    run, config = finished
    assert load_config(run / "config.yaml") == config
    records = read_metrics(run)
    assert [(r.stage, r.step) for r in records] == [
        (stage, step) for stage in ("sft", "reward", "ppo") for step in range(4)
    ]
    ppo = records[-1].values
    for name in (
        "reward", "kl", "entropy", "clip_fraction", "explained_variance", "response_tokens",
        "eos_rate", "ratio_gap_before_update", "actor_grad_norm", "critic_grad_norm",
        "policy_loss", "value_loss", "ptx_loss", "heldout_reward", "heldout_reward_ema",
        "heldout_ptx_perplexity", "seconds/generate", "seconds/score", "seconds/train",
        "tokens_per_second/generate", "samples_per_second/train", "tflops/train",
        "peak_memory_bytes/train",
    ):  # fmt: skip
        assert name in ppo, name
    assert ppo["reward_clipped"] == 0
    penalty = config.ppo.missing_eos_penalty * (1 - ppo["eos_rate"])
    assert penalty > 0
    assert ppo["reward_before_penalty"] - ppo["reward"] == pytest.approx(penalty, abs=1e-5)
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert set(evaluation["models"]) == {"base", "sft", "ppo", "ema", "reward model"}
    assert set(evaluation["answers"][0]["answers"]) == {"base", "sft", "ppo", "ema"}
    assert "</html>" in (run / "report.html").read_text()
    ledger = json.loads((run / "data.json").read_text())["datasets"][0]
    assert ledger["rows"] == 120


def test_the_same_command_again_repeats_nothing(finished: tuple[Path, RunConfig]) -> None:
    run, config = finished
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*.safetensors")}
    lines: list[str] = []
    half_written = run / f".data.json.{2**22 + 1}"  # more than any process's number
    half_written.touch()
    ran(config, lines=lines)
    assert not half_written.exists()
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*.safetensors")} == before
    assert [line for line in lines if "finished before" in line] == [
        f"{step}: finished before, in {run / step}" for step in ("sft", "reward", "ppo")
    ]


def test_what_another_run_finished_in_the_meantime_is_not_repeated(
    tmp_path: Path, tiny_model: str, preferences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second command reads its rows while the first one ends, and gets the folder then."""
    config = tiny_config(tmp_path / "run", tiny_model, preferences, stages=["sft"], **BRIEF)
    opened = run_module.Run.open

    def late(run: run_module.Run, command: str) -> None:
        monkeypatch.setattr(run_module.Run, "open", opened)
        ran(config)
        opened(run, command)

    monkeypatch.setattr(run_module.Run, "open", late)
    lines: list[str] = []
    ran(config, lines=lines)
    assert f"sft: finished before, in {tmp_path / 'run/sft'}" in lines
    assert "sft: begins" not in lines


def test_a_finished_step_is_not_taken_for_one_of_other_knobs(
    finished: tuple[Path, RunConfig],
) -> None:
    run, config = finished
    other = replace(config, sft=replace(config.sft, learning_rate=5e-4))
    with pytest.raises(CheckpointError, match=r"changed: sft.learning_rate 0.001 -> 0.0005"):
        ran(other)
    shown = replace(config, ppo=replace(config.ppo, eval_every=2))
    ran(shown)  # what is only shown may change
    assert (run / "ppo").is_dir()


def test_a_finished_step_that_is_to_be_longer_is_told_how_to_go_on(
    finished: tuple[Path, RunConfig],
) -> None:
    run, config = finished
    longer = replace(config, ppo=replace(config.ppo, steps=4))
    with pytest.raises(CheckpointError) as raised:
        ran(longer)
    assert "cannot be made longer" in str(raised.value)
    assert f"give --actor-model {run / 'ppo' / 'actor'} in another --output-dir" in str(
        raised.value
    )
    other = replace(longer, ppo=replace(longer.ppo, kl_coef=0.5))
    with pytest.raises(CheckpointError) as raised:
        ran(other)
    assert "longer" not in str(raised.value)


def test_a_run_from_python_needs_no_command(finished: tuple[Path, RunConfig]) -> None:
    run, config = finished
    train(config, print_line=lambda line: None)
    again = (run / "command.txt").read_text().splitlines()[-1]
    assert again == f"tandem train --config {run / 'config.yaml'}"
    with pytest.raises(ConfigError, match=r"seed must be >= 0 .*; ppo.gamma must be"):
        train(replace(config, seed=-1, ppo=replace(config.ppo, gamma=2.0)))


def test_a_finished_step_is_not_taken_for_one_of_other_rows(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    data = tmp_path / "prefs.jsonl"
    lines = Path(preferences).read_text().splitlines()
    data.write_text("\n".join(lines[:100]))
    config = tiny_config(tmp_path / "run", tiny_model, str(data), stages=["sft"])
    ran(config)
    data.write_text("\n".join(lines))
    with pytest.raises(CheckpointError, match="changed: the rows of data"):
        ran(config)


def test_a_folder_of_the_users_is_not_taken_for_a_step(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    (tmp_path / "run" / "sft").mkdir(parents=True)
    config = tiny_config(tmp_path / "run", tiny_model, preferences, stages=["sft"])
    with pytest.raises(CheckpointError, match="would be lost"):
        ran(config)


def test_a_language_model_is_no_reward_model(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["ppo"], reward_model=tiny_model
    )
    with pytest.raises(ModelError, match="must have a scalar head already"):
        ran(config)


def test_a_refused_run_leaves_the_old_ones_configuration(
    tmp_path: Path, tiny_model: str, preferences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path / "run", tiny_model, preferences, stages=["sft"])
    with monkeypatch.context() as patch:
        stop_at(patch, "sft", 3)
        with pytest.raises(StopError):
            ran(config)
    with pytest.raises(CheckpointError, match="changed: seed 1234 -> 5"):
        ran(replace(config, seed=5))
    assert load_config(tmp_path / "run" / "config.yaml") == config


def test_ppo_across_the_border_of_a_longrope_stops_before_the_first_step(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    changed = json.loads((model / "config.json").read_text())
    width = changed["hidden_size"] // changed["num_attention_heads"] // 2
    changed["rope_parameters"] = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * width,
        "long_factor": [4.0] * width, "original_max_position_embeddings": 16,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(changed))
    config = tiny_config(tmp_path / "run", str(model), preferences)
    with pytest.raises(
        ConfigError, match=r"must stay within the 16 tokens past which this model's"
    ):
        ran(config)
    assert not (tmp_path / "run" / "sft").exists()


def test_rows_beyond_the_models_positions_stop_before_the_first_step(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = tiny_config(tmp_path / "run", tiny_model, preferences, sampling__max_new_tokens=250)
    with pytest.raises(ConfigError, match="must fit the model's 256 positions; got"):
        ran(config)
    config = tiny_config(tmp_path / "run", tiny_model, preferences, dataset__split=[1, 0, 1])
    with pytest.raises(ConfigError, match=r"reward must have at least one row; got none\. See the"):
        ran(config)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_no_model_is_told_before_data_are_read(
    tmp_path: Path, tiny_model: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "config.json").unlink()
    config = tiny_config(tmp_path / "run", str(folder), str(tmp_path / "gone.jsonl"))
    with pytest.raises(ModelError, match=r"must be a folder with config.json; got one that holds"):
        ran(config)


def test_a_stage_without_rows_names_the_columns_that_nothing_reads(
    tmp_path: Path, tiny_model: str
) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text("".join(f'{{"prompt": "Q{i}?", "reply": "yes"}}\n' for i in range(9)))
    config = tiny_config(tmp_path / "run", tiny_model, str(data), stages=["sft"], dataset__split=[])
    with pytest.raises(ConfigError) as error:
        ran(config)
    assert (
        "stage sft must have at least one row; got none. All 9 usable rows of a are prompts alone: "
        "no stage reads their column reply. Map the answer's column, as in "
        f"{data}::completion=reply"
    ) in str(error.value)


def test_dpo_pairs_are_in_the_policys_tokens_beside_a_reward_model_with_others(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    other = save_with_another_template(tiny_model, tmp_path / "other")
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, reward_model=other,
        stages=["sft", "reward", "dpo"], **BRIEF,
    )  # fmt: skip
    rows = prepare_rows(config, tiny_model, other)
    assert [len(p.chosen) for p in rows.pairs] != [len(p.chosen) for p in rows.dpo_pairs]
    prefix = rows.renderer.prompt([Message("user", "x")]).token_ids[:1]
    assert all(pair.chosen.token_ids[:1] == prefix for pair in rows.dpo_pairs)
    ran(config)


def test_the_first_prompts_stand_for_every_data_set(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    second = tmp_path / "second.jsonl"
    write_preferences(second, 120, seed=8)
    config = tiny_config(tmp_path / "run", tiny_model, preferences)
    config = replace(config, data=(preferences, str(second)))
    rows = prepare_rows(config, tiny_model, tiny_model)
    first = {prompt.source.dataset for prompt in rows.prompts[:16]}
    assert first == {"prefs", "second"}


def test_a_comparison_is_of_the_models_that_are_there(
    finished: tuple[Path, RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a stop within it, when an older one lies in the folder."""
    whole, config = finished
    shutil.copytree(whole, tmp_path / "run")
    before = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert "at the end of the run" in (tmp_path / "run" / "report.html").read_text()
    shutil.rmtree(tmp_path / "run" / "ppo")  # as the program's own message advises
    other = replace(config.ppo, kl_coef=0.9, actor=replace(config.ppo.actor, learning_rate=3e-2))
    config = replace(config, output_dir=str(tmp_path / "run"), ppo=other)
    with monkeypatch.context() as patch:

        def stopped(*arguments: object) -> None:
            raise StopError

        patch.setattr(run_stages, "compare", stopped)
        with pytest.raises(StopError):
            ran(config)
    page = write_report(tmp_path / "run").read_text()
    assert "evaluation.json compares models other than" in page
    assert "at the end of the run" not in page
    run = ran(config)
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert evaluation["models"]["sft"] == before["models"]["sft"]
    assert evaluation["models"]["ppo"] != before["models"]["ppo"]
    shown = json.loads((run / "evaluation.json").read_text())
    ran(replace(config, ppo=replace(config.ppo, eval_prompts=4)))
    assert json.loads((run / "evaluation.json").read_text()) != shown


def test_a_comparison_that_is_whole_is_not_made_again(
    finished: tuple[Path, RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, config = finished
    ran(config)

    def again(*arguments: object) -> None:
        raise AssertionError

    monkeypatch.setattr(run_stages, "compare", again)
    ran(config)


def test_a_stopped_run_continues_to_the_same_bits(
    finished: tuple[Path, RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run, stopped in each of its stages, twice at one step, and before the first save."""
    whole, config = finished
    config = replace(config, output_dir=str(tmp_path / "run"))
    lines: list[str] = []
    for stage, step in (("sft", 3), ("sft", 3), ("reward", 3), ("ppo", 1), ("ppo", 3)):
        with monkeypatch.context() as patch:
            stop_at(patch, stage, step)
            with pytest.raises(StopError):
                ran(config, lines=lines)
    run = ran(config, lines=lines)
    for stage, times in (("sft", 2), ("reward", 1), ("ppo", 1)):
        assert lines.count(f"{stage}: continuing after step 2 (checkpoint verified)") == times
    for name in ("sft", "reward", "ppo/actor", "ppo/critic", "ppo/ema"):
        ours = load_file(run / name / "model.safetensors")
        theirs = load_file(whole / name / "model.safetensors")
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name
    assert [(r.stage, r.step) for r in read_metrics(run)] == [
        (r.stage, r.step) for r in read_metrics(whole)
    ]


@pytest.mark.slow  # test_same has it too
def test_two_runs_with_one_seed_are_one_and_another_seed_is_another(
    finished: tuple[Path, RunConfig], tmp_path: Path
) -> None:
    whole, config = finished
    other = ran(replace(config, output_dir=str(tmp_path / "b"), seed=99))
    key = "model.embed_tokens.weight"
    first = load_file(whole / "ppo/actor/model.safetensors")[key]
    assert not torch.equal(first, load_file(other / "ppo/actor/model.safetensors")[key])


def test_lora_through_all_steps_with_gradient_checkpointing(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, lora__rank=4, gradient_checkpointing=True,
        ppo__ema=True, **BRIEF,
    )  # fmt: skip
    run = ran(config)
    for name in ("sft", "ppo/actor", "ppo/ema"):
        assert (run / name / "adapter" / "adapter_model.safetensors").exists()
        merged = AutoModelForCausalLM.from_pretrained(run / name)
        adapted = load_causal_lm(run / name / "adapter")
        ids = torch.randint(5, 50, (1, 9))
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, atol=1e-5, rtol=1e-4)


def test_dpo_in_place_of_steps_two_and_three(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = tiny_config(tmp_path / "run", tiny_model, preferences, stages=["sft", "dpo"])
    run = ran(config)
    first = read_metrics(run)[5].values  # dpo, step 1
    assert first["loss"] == pytest.approx(0.6931, abs=1e-3)  # the policy is the reference: log 2
    assert (run / "dpo" / "model.safetensors").exists()


def test_a_reward_function_alone_needs_no_reward_model(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def short(prompts, completions, **columns):\n"
        "    return [-len(c) / 10 if c else None for c in completions]\n"
    )
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["ppo"],
        ppo__reward_function=f"{rewards}:short",
    )  # fmt: skip
    run = ran(config)
    values = read_metrics(run)[-1].values
    assert values["heldout_reward"] < 0
    assert "reward_raw" not in values


def test_reward_model_with_another_tokenizer_is_scored_through_text(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    other = save_with_another_template(tiny_model, tmp_path / "other")
    config = tiny_config(tmp_path / "run", tiny_model, preferences, reward_model=other, **BRIEF)
    lines: list[str] = []
    run = ran(config, lines=lines)
    assert read_metrics(run)[-1].values["heldout_reward"] != 0
    assert (
        "ppo: reward model: another tokenizer or chat template than the policy's, so "
        "answers are scored as text; "
        "the critic starts from the policy, with a new head"
    ) in lines
    lines.clear()
    ran(tiny_config(tmp_path / "alike", tiny_model, preferences, **BRIEF), lines=lines)
    assert not any("another tokenizer" in line for line in lines)


def test_a_warm_up_that_leaves_the_policy_no_rollout_is_refused(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["ppo"], ppo__critic_warmup_steps=3,
        ppo__reward_function="tandem:length?limit=8", ppo__steps=3, ppo__prompts_per_step=40,
    )  # fmt: skip
    message = r"must be less than the stage's {} rollouts.*; got {}"
    with pytest.raises(ConfigError, match=message.format(3, 3)):
        check_config(config)
    one_pass = replace(config, ppo=replace(config.ppo, steps=0))
    check_config(one_pass)
    with pytest.raises(ConfigError, match=message.format(2, 3)):
        ran(one_pass)
    assert not (tmp_path / "run").exists(), "no stage began before it"
    ran(replace(config, ppo=replace(config.ppo, critic_warmup_steps=2)))


def test_a_reward_model_is_trained_without_a_policy(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = tiny_config(
        tmp_path / "run", "", preferences, stages=["reward"], reward_model=tiny_model
    )  # fmt: skip
    lines: list[str] = []
    run = ran(config, lines=lines)
    assert any("scores stay raw (no policy" in line for line in lines)
    assert lines[0] == f"reading {preferences}"
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert set(evaluation["models"]) == {"reward model"}
    assert evaluation["answers"] == []
    assert AutoModelForSequenceClassification.from_pretrained(run / "reward").config.num_labels == 1
    ran(config, lines=lines)
    assert f"reward: finished before, in {run / 'reward'}" in lines


def test_a_functions_numbers_are_clipped_only_on_request_which_the_start_says(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def long(prompts, completions, **columns):\n    return [20.0] * len(prompts)\n"
    )
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["ppo"],
        ppo__reward_function=f"{rewards}:long", ppo__steps=1,
    )  # fmt: skip
    lines: list[str] = []
    run = ran(config, lines=lines)
    assert not any("clipped" in line for line in lines)
    assert read_metrics(run)[-1].values["reward"] > 18
    bound = replace(
        config, output_dir=str(tmp_path / "bound"), ppo=replace(config.ppo, reward_clip=10.0)
    )
    run = ran(bound, lines=lines)
    assert (
        f"ppo: scores beyond +-10 are clipped, {rewards}:long's too (--ppo.reward-clip 0: none)"
        in lines
    )
    assert read_metrics(run)[-1].values["reward"] == 10


def test_what_is_missing_is_said_at_once(tmp_path: Path, tiny_model: str, preferences: str) -> None:
    config = tiny_config(tmp_path / "run", "", preferences)
    with pytest.raises(ConfigError, match="actor_model must name a model"):
        ran(replace(config, data=()))
    config = tiny_config(tmp_path / "run", tiny_model, preferences, stages=["ppo"])
    with pytest.raises(ConfigError, match="stage ppo must have a reward"):
        ran(config)
    assert not (tmp_path / "run").exists()
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "hi", "chosen": 3, "rejected": "x"}\n')
    with pytest.raises(DataError, match=r"bad.jsonl:1"):
        ran(replace(config, data=(str(bad),), stages=("sft",)))


def test_a_missing_tracker_is_said_before_data_are_read(
    tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = tiny_config(tmp_path / "run", tiny_model, "no-such-file.jsonl", log__wandb="mine")
    lines: list[str] = []
    with pytest.raises(ConfigError, match=r"log.wandb must be empty if wandb is not installed"):
        ran(config, lines=lines)
    assert not any("reading" in line for line in lines)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_a_folder_of_something_else_is_left_as_it_is(
    tmp_path: Path, tiny_model: str, preferences: str, name: str
) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(CheckpointError, match=f"with '{name}'"):
        ran(tiny_config(tmp_path, tiny_model, preferences))
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(name, "mine")]


def test_two_runs_do_not_write_in_one_folder(
    tmp_path: Path, tiny_model: str, preferences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_folder, "lock", lambda path: None)  # what another process makes of it
    with pytest.raises(CheckpointError, match="one run at a time; got another"):
        ran(tiny_config(tmp_path, tiny_model, preferences))
    assert not list(tmp_path.iterdir())


def test_a_lock_names_its_process_and_ends_with_it(tmp_path: Path) -> None:
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        _lock = own_folder.hold(tmp_path)
        os.write(tell, b"x")
        signal.pause()
    os.read(told, 1)
    with pytest.raises(CheckpointError, match=rf"\(process {child} on {socket.gethostname()}\)"):
        own_folder.hold(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with own_folder.hold(tmp_path):
        assert f"process {os.getpid()} on " in (tmp_path / ".lock").read_text("utf-8")


def test_a_run_at_home_is_written_and_read_at_home(
    tmp_path: Path, tiny_model: str, preferences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another run lies in the folder that a second reading of `~` would find."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    config = tiny_config(Path("~/run"), tiny_model, preferences, stages=["sft", "reward"])
    assert ran(config) == tmp_path / "home" / "run"
    assert not list((tmp_path / "work").iterdir())
    made_from = json.loads((tmp_path / "home/run/reward/MANIFEST.json").read_text())["facts"]
    entries = json.loads((tmp_path / "home/run/sft/MANIFEST.json").read_text())["files"]
    assert (
        made_from["made_from"]["the sft stage"]["model.safetensors"]
        == (entries["model.safetensors"]["sha256"])
    )


@pytest.mark.parametrize("knob", ["actor_model", "reward_model"])
@pytest.mark.parametrize("part", ["sft", "ppo/actor", "ppo/ema"])
def test_a_given_model_that_changed_since_it_was_saved_is_refused(
    finished: tuple[Path, RunConfig], tmp_path: Path, tiny_model: str, preferences: str,
    knob: str, part: str,
) -> None:  # fmt: skip
    whole, _ = finished
    shutil.copytree(whole, tmp_path / "run")
    weights = tmp_path / "run" / part / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 4
    weights.write_bytes(content)
    config = tiny_config(tmp_path / "new", tiny_model, preferences, stages=["sft"])
    config = replace(config, **{knob: str(tmp_path / "run" / part)})
    with pytest.raises(CheckpointError, match=r"model.safetensors must have the SHA-256 .*Copy"):
        ran(config)
    assert not (tmp_path / "new").exists()


def test_every_file_of_a_given_model_is_hashed_once(
    finished: tuple[Path, RunConfig], tmp_path: Path, preferences: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    whole, _ = finished
    read: list[str] = []
    sha256 = files.sha256

    def counted(path: Path) -> str:
        read.append(str(path))
        return sha256(path)

    monkeypatch.setattr(files, "sha256", counted)
    monkeypatch.setattr(files, "_SETTLED_SECONDS", -1.0)
    config = tiny_config(tmp_path / "new", str(whole / "sft"), preferences, stages=["sft"])
    ran(config)
    assert read.count(str(whole / "sft" / "model.safetensors")) == 1


def test_hugging_faces_generate_is_taken_for_every_answer_where_that_is_asked(
    tmp_path: Path, tiny_model: str, preferences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward model's normalization and the final comparison, too."""
    asked: list[bool] = []
    generate = rollouts.generate

    def spied(*arguments: Any, **options: Any) -> Any:
        asked.append(options["by_hugging_face"])
        return generate(*arguments, **options)

    monkeypatch.setattr(rollouts, "generate", spied)
    config = tiny_config(tmp_path / "run", tiny_model, preferences, **BRIEF)
    ran(replace(config, hybrid_engine=False))
    # Normalization, PPO's two evaluations and one step, and three models compared.
    assert asked == [True] * 7


def test_a_column_of_a_name_that_reward_functions_are_given_is_left_out_for_them(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    data, rewards = tmp_path / "data.jsonl", tmp_path / "rewards.py"
    rows = read_jsonl(preferences)
    data.write_text("".join(json.dumps(row | {"completions": 1}) + "\n" for row in rows))
    rewards.write_text(
        "def one(prompts, completions, **columns):\n"
        "    return [float(isinstance(c, str)) for c in completions]\n"
    )
    config = tiny_config(
        tmp_path / "run", tiny_model, str(data), stages=["ppo"], ppo__steps=1,
        ppo__reward_function=f"{rewards}:one",
    )  # fmt: skip
    lines: list[str] = []
    run = ran(config, lines=lines)
    assert any("reward functions get completions from Tandem" in line for line in lines)
    log = (run / "metrics.jsonl").read_text().splitlines()
    step = next(json.loads(line) for line in log if '"step": 1' in line)
    assert step["values"]["reward_mean/one"] == 1.0


def test_a_damaged_line_of_a_log_does_not_end_a_run(
    finished: tuple[Path, RunConfig], tmp_path: Path
) -> None:
    whole, config = finished
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "ppo")
    log = tmp_path / "run" / "metrics.jsonl"
    text = log.read_text()
    log.write_text("not JSON\n" + text)
    ran(replace(config, output_dir=str(tmp_path / "run")))
    assert (tmp_path / "run" / "metrics.jsonl.damaged").read_text() == "not JSON\n"
    assert "not JSON" not in log.read_text()
    assert len(read_metrics(tmp_path / "run")) == len(read_metrics(whole))


def test_a_damaged_finished_step_says_what_to_do(
    finished: tuple[Path, RunConfig], tmp_path: Path
) -> None:
    whole, config = finished
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "sft" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"sft/config.json must .*, or remove .*/run/sft"):
        ran(replace(config, output_dir=str(tmp_path / "run")))


def test_a_run_is_evaluated_on_data_of_its_own(tmp_path: Path, tiny_model: str) -> None:
    """Every stage, and with other such rows the finished stages are another run's."""
    own = write_preferences(tmp_path / "own.jsonl", num=12, seed=8)
    data = write_preferences(tmp_path / "prefs.jsonl")
    config = tiny_config(
        tmp_path / "run", tiny_model, data, stages=["sft", "dpo"], eval_data=[own],
        dataset={"split": [1, 1, 0]}, sft__max_steps=1, dpo__max_steps=1,
    )  # fmt: skip
    run = ran(config)
    ledger = json.loads((run / "data.json").read_text())["datasets"]
    assert [account["used"].get("heldout", 0) for account in ledger] == [0, 12]
    rows = prepare_rows(config, tiny_model, tiny_model)
    assert len(rows.heldout_sft) == len(rows.heldout_dpo_pairs) == 12
    metrics = (run / "metrics.jsonl").read_text()
    assert "heldout_loss" in metrics
    write_preferences(tmp_path / "own.jsonl", num=13, seed=8)
    with pytest.raises(CheckpointError, match="the rows of eval_data"):
        ran(config)
    with pytest.raises(ConfigError, match=r"dataset\.heldout must be left alone where eval_data"):
        ran(replace(config, dataset=replace(config.dataset, heldout=0.3)))


def test_evaluation_data_cannot_be_left_out_on_the_way(tmp_path: Path, tiny_model: str) -> None:
    """Its rows would be trained on, and others be held out that the first part has trained on."""
    own = write_preferences(tmp_path / "own.jsonl", num=12, seed=8)
    data = write_preferences(tmp_path / "prefs.jsonl")
    config = tiny_config(
        tmp_path / "run", tiny_model, data, stages=["sft"], eval_data=[own], sft__max_steps=1,
        dataset={"split": [1, 1, 0]},
    )  # fmt: skip
    ran(config)
    with pytest.raises(CheckpointError, match="the rows of eval_data"):
        ran(replace(config, eval_data=()))
    with pytest.raises(CheckpointError, match="the rows of eval_data"):
        ran(replace(config, eval_data=(), stages=("dpo",), dpo=replace(config.dpo, max_steps=1)))


def test_stages_one_by_one_have_the_same_graded_evaluation_data(
    tmp_path: Path, tiny_model: str
) -> None:
    """Also where the first does not depend on grades and the second does."""
    graded = [
        {"prompt": f"Say {i}.", "completion": f"{i}{end}", "score": len(end)}
        for i in range(6) for end in ("", "!")
    ]  # fmt: skip
    own = write_jsonl(tmp_path / "own.jsonl", graded)
    data = write_preferences(tmp_path / "prefs.jsonl")
    config = tiny_config(
        tmp_path / "run", tiny_model, data, stages=["sft"], eval_data=[own], sft__max_steps=1,
        reward__max_steps=1, dataset={"split": [1, 1, 0]},
    )  # fmt: skip
    ran(config)
    run = ran(replace(config, stages=("reward",)))
    assert all((run / stage / "config.json").is_file() for stage in ("sft", "reward"))


def test_a_run_killed_once_its_stage_is_finished_has_its_predictions(
    tmp_path: Path, tiny_model: str, preferences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path / "run", tiny_model, preferences, stages=["sft"], **BRIEF)
    finish = Run.finish

    def killed(run: Run, *arguments: Any) -> None:
        finish(run, *arguments)
        raise StopError

    with monkeypatch.context() as patch:
        patch.setattr(Run, "finish", killed)
        with pytest.raises(StopError):
            ran(config)
    ran(config)
    told = [line["phase"] for line in read_jsonl(tmp_path / "run/predictions.jsonl")]
    assert {"train", "stage"} <= {*told}
    assert len(told) == len({*told}), "once each"


@pytest.mark.parametrize("error", [OSError(28, "full"), ZeroDivisionError("division by zero")])
def test_predictions_that_cannot_be_recorded_cost_no_models(
    error: Exception, tmp_path: Path, tiny_model: str, preferences: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = tiny_config(tmp_path / "run", tiny_model, preferences, stages=["sft"], **BRIEF)
    monkeypatch.setattr(forecast, "add_outcomes", Mock(side_effect=error))
    lines: list[str] = []
    ran(config, lines=lines)
    assert (tmp_path / "run/sft/MANIFEST.json").is_file()
    assert any(line.startswith("sft: predictions not recorded: ") for line in lines)
