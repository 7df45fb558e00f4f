"""What is refused before the first step, because a later one would refuse it."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MptConfig, XGLMConfig

from tandem.config.flags import parse_run_flags
from tandem.config.load import build_config, check_config
from tandem.config.lora import LoraConfig
from tandem.config.schema import ParallelConfig, RunConfig
from tandem.errors import ConfigError, DataError, ModelError
from tandem.parallel import watchdog
from tandem.parallel.world import World
from tandem.training import sft
from tandem.training.checks.preflight import (
    check_parallel,
    check_rows,
    idle_ranks,
    rates_for_large_models,
)
from tandem.training.run_folder import Run
from tandem.training.stage_data import StepRows, prepare_rows
from tests.jsonl import read_jsonl, write_jsonl
from tests.tiny import save_tiny_model, tiny_config, tiny_tokenizer
from tests.training.runs import ran

FOUR = World(size=4, ranks_per_node=4)


@pytest.mark.parametrize(
    ("world", "size", "line"),
    [
        (World(), 2, "must divide the ranks of a node; got 2 for 1 a node, 1 in all"),
        (FOUR, 3, "must divide the ranks of a node; got 3 for 4 a node"),
        (replace(FOUR, ranks_per_node=2), 4, "got 4 for 2 a node, 4 in all"),
        (World(0, 8, 8), 8, "must divide the model's attention heads; got 8 for 4"),
    ],
)
def test_slices_that_cannot_be(
    tmp_path: Path, tiny_model: str, preferences: str, world: World, size: int, line: str
) -> None:
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, parallel__inference_tp_size=size
    )
    with pytest.raises((ConfigError, ModelError), match=line):
        check_parallel(config, world, tiny_model)
    halves = replace(config.parallel, inference_tp_size=2)
    check_parallel(replace(config, parallel=halves), FOUR, tiny_model)
    integers = replace(halves, frozen_weights="nf4")
    adapted = replace(config, parallel=integers, lora=replace(config.lora, rank=2))
    with pytest.raises(ModelError, match="must cut widths between blocks of 64 nf4 weights"):
        check_parallel(adapted, FOUR, tiny_model)


def test_ranks_without_a_row_are_said_with_their_knob() -> None:
    many = World(size=64, ranks_per_node=8)
    config = RunConfig(stages=("sft", "ppo"))
    sft, ppo = idle_ranks(config, many)
    assert sft.startswith("sft: sft.batch_size 32 leaves 32 of 64 ranks without a row at a time")
    assert "ppo.minibatch_size 8 leaves 56 of 64 ranks" in ppo
    assert "Raise ppo.minibatch_size to a multiple of 64" in ppo
    sliced = replace(config, stages=("ppo",), parallel=ParallelConfig(inference_tp_size=2))
    assert "ppo.prompts_per_step 64 leaves 64 of 128 groups" in "".join(
        idle_ranks(sliced, World(size=256, ranks_per_node=8))
    )
    assert idle_ranks(config, World(size=8, ranks_per_node=8)) == []


@pytest.mark.parametrize(
    ("world", "knobs", "line"),
    [
        (FOUR, {"replicas": 3}, "must divide the ranks into groups of several; got 3 for 4"),
        (FOUR, {"replicas": 4}, r"got 4 for 4\. Use 1 or 2\.$"),
        (World(), {"replicas": 2}, r"got 2 for 1\. Use 1\.$"),
        (World(size=3, ranks_per_node=1), {"replicas": 3}, r"got 3 for 3\. Use 1\.$"),
        (World(size=12, ranks_per_node=6), {"replicas": 12}, r"for 12\. Use 1, 2, 4 or 6\.$"),
        (
            World(size=12, ranks_per_node=6),
            {"replicas": 3},
            "copies over 4 ranks where a node has 6",
        ),
        (FOUR, {"replicas": 2, "inference_tp_size": 4}, "must divide the ranks of a copy"),
        (FOUR, {"replicas": 2, "zero_hpz": True}, "replicas must be 1 with parallel.zero_hpz,"),
        (FOUR, {"replicas": 2, "zero_quantized_weights": True}, "parallel.zero_quantized_weights,"),
        (
            FOUR,
            {"replicas": 2, "zero_quantized_gradients": True},
            "zero_quantized_gradients, whose",
        ),
        (
            FOUR,
            {"replicas": 2, "actor_zero_stage": 0, "critic_zero_stage": 0},
            "must go with ZeRO stages above 0",
        ),
    ],
)
def test_replicas_that_cannot_be(world: World, knobs: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        check_parallel(RunConfig(parallel=ParallelConfig(**knobs)), world, "")


def test_a_family_without_a_plan_is_refused_before_any_step(
    tmp_path: Path, preferences: str
) -> None:
    XGLMConfig(d_model=32, attention_heads=4, num_layers=2).save_pretrained(tmp_path / "xglm")
    tiny_tokenizer().save_pretrained(tmp_path / "xglm")
    model = str(tmp_path / "xglm")
    config = tiny_config(tmp_path / "run", model, preferences, parallel__inference_tp_size=2)
    with pytest.raises(ModelError, match="must have a plan for the family; got 'xglm'"):
        check_parallel(config, FOUR, model)


def test_nothing_is_written_by_a_run_whose_slices_cannot_be(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    run = tmp_path / "run"
    config = tiny_config(run, tiny_model, preferences, parallel__inference_tp_size=2)
    with pytest.raises(ConfigError, match="must divide the ranks of a node"):
        ran(config)
    assert not (run / "config.yaml").exists()


def test_a_shared_base_needs_one_model_from_the_start(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    other = save_tiny_model(tmp_path / "other", seed=1)
    knobs: dict[str, object] = {"lora__rank": 2, "parallel__shared_base": True}
    config = tiny_config(tmp_path / "run", tiny_model, preferences, reward_model=other, **knobs)
    with pytest.raises(ConfigError, match="--shared-base must find one model under actor, critic"):
        check_parallel(config, World(), tiny_model)
    check_parallel(replace(config, reward_model=tiny_model), World(), tiny_model)
    check_parallel(replace(config, stages=("sft", "reward")), World(), tiny_model)
    critic = replace(config, reward_model="", critic_model=other)
    for refused in (critic, replace(config, stages=("sft", "grpo"))):
        with pytest.raises(ConfigError, match=f"got --(reward|critic)-model '{other}' and "):
            check_parallel(refused, World(), tiny_model)
    with pytest.raises(ConfigError, match="must go with ZeRO stage 0 over several ranks"):
        check_parallel(replace(config, reward_model=""), FOUR, tiny_model)


def test_scores_of_one_answer_have_no_spread(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    run = tmp_path / "run"
    config = tiny_config(run, tiny_model, preferences, reward__normalize_prompts=1)
    with pytest.raises(ConfigError, match="normalize_prompts must be 0 or find two prompts"):
        ran(config)
    assert not (run / "config.yaml").exists()


@pytest.mark.parametrize(
    ("column", "parameters", "part"),
    [
        ("prompts", "prompts, completions, **columns", ""),
        ("level", "prompts, completions, level, messages", ""),
        ("level", "completions, level", ""),
        ("level", "completions, completion_ids, **columns", ""),
        ("level", "completions, trainer_state, **columns", "which TRL's trainer alone has"),
        (
            "level",
            "prompts, completions, answer, **columns",
            "missing a required argument: 'answer'",
        ),
        ("level", "prompts, completions", ""),
        ("level", "prompts, completions, levels=0", r"\(level\); got: its parameter levels is no"),
    ],
)
def test_a_reward_function_that_cannot_be_called_is_refused_before_the_first_step(
    tmp_path: Path, tiny_model: str, column: str, parameters: str, part: str
) -> None:
    rows = [{"prompt": f"q{i}", "chosen": "a", "rejected": "b", column: i} for i in range(60)]
    data = tmp_path / "data.jsonl"
    write_jsonl(data, rows)
    file = tmp_path / "rewards.py"
    file.write_text(f"def score({parameters}):\n    return [0.0 for _ in completions]\n")
    config = tiny_config(
        tmp_path / "run", tiny_model, str(data), ppo__reward_function=f"{file}:score"
    )
    rows_of = prepare_rows(config, tiny_model, tiny_model)
    if part:
        with pytest.raises(ConfigError, match=part):
            check_rows(config, rows_of, tiny_model, tiny_model)
        with pytest.raises(ConfigError, match=part):
            ran(config)
        assert not (tmp_path / "run").exists()
    else:
        check_rows(config, rows_of, tiny_model, tiny_model)


@pytest.mark.parametrize(
    ("row", "column", "part"),
    [
        ({"ground_truth": "7"}, "ground_truth", ""),
        ({"reward_model": {"ground_truth": "7"}}, "reward_model.ground_truth", ""),
        ({"reward_model": {"ground_truth": "7"}}, "answer", ""),
        ({"ground_truth": "7"}, "answer", "missing a required argument: 'answer'. --scoring.answe"),
        ({"ground_truth": "7"}, "truth", r"got 'truth', which no row has .*: ground_truth\)"),
    ],
)
def test_functions_that_require_answer_get_it_from_the_answer_column(
    tmp_path: Path, tiny_model: str, row: dict[str, object], column: str, part: str
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"q{i}", **row}) + "\n" for i in range(30)))
    file = tmp_path / "rewards.py"
    file.write_text("def score(completions, answer, **columns):\n    return [0.0]\n")
    knobs = {"ppo__reward_function": f"{file}:score", "scoring__answer_column": column}
    config = tiny_config(tmp_path / "run", tiny_model, str(data), **knobs)
    config = replace(config, stages=("ppo",), dataset=replace(config.dataset, split=()))
    rows = prepare_rows(config, tiny_model, tiny_model)
    with pytest.raises(ConfigError, match=part) if part else nullcontext():
        check_rows(config, rows, tiny_model, tiny_model)


def test_only_rows_of_steps_that_run_must_fit_the_model(tmp_path: Path, tiny_model: str) -> None:
    """256 positions: rows of 400 tokens stop SFT, and PPO alone just does not measure on them."""
    rows = [
        {"prompt": f"q{i}", "chosen": "a b " * (150 if i % 2 else 3), "rejected": "c"}
        for i in range(80)
    ]
    data = tmp_path / "data.jsonl"
    write_jsonl(data, rows)
    config = tiny_config(
        tmp_path / "run", tiny_model, str(data), dataset__max_tokens=900, dataset__heldout=0.4
    )
    for step in ("sft", "reward", "dpo"):
        config = replace(config, stages=(step,), dataset=replace(config.dataset, split=()))
        prepared = prepare_rows(config, tiny_model, tiny_model)
        with pytest.raises(ConfigError, match=f"rows of stage {step} must fit the model's 256"):
            check_rows(config, prepared, tiny_model, tiny_model)
    config = replace(config, stages=("ppo",))
    prepared = prepare_rows(config, tiny_model, tiny_model)
    check_rows(config, prepared, tiny_model, tiny_model)
    assert prepared.heldout_sft
    assert prepared.heldout_pairs
    assert max(map(len, [*prepared.heldout_sft, *prepared.heldout_pairs])) <= 256
    (account,) = prepared.ledger.datasets.values()
    assert account.notes["longer than the model's positions (measuring)"] > 0
    assert account.balances()


def test_a_rank_that_goes_missing_while_models_load_is_placed_in_their_step(
    tmp_path: Path, tiny_model: str, preferences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[str] = []

    def loads(run: Run, rows: StepRows) -> None:
        noted.append(watchdog._phase)
        raise ModelError("the step ends here")

    watchdog.note("reward step 3")
    monkeypatch.setattr(sft, "prepare", loads)
    config = tiny_config(tmp_path / "run", tiny_model, preferences)
    with pytest.raises(ModelError, match="the step ends here"):
        ran(config)
    assert noted == ["sft"]


def test_a_small_model_at_the_default_rates_gets_a_note_with_rates_that_have_taught_one(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    given = build_config({"actor_model": tiny_model, "data": [preferences]})
    (line,) = rates_for_large_models(given, tiny_model, tiny_model)
    assert f"{tiny_model} has 0.0" in line
    flags = (
        "--sft.learning-rate 0.0001 --reward.learning-rate 5e-05 --ppo.actor.learning-rate 3e-06"
    )
    assert f" {flags} taught" in line
    rates = parse_run_flags([*flags.split(), "--actor-model", "m", "--data", "d"], "train")
    assert rates_for_large_models(rates, tiny_model, tiny_model) == []
    some = replace(given, sft=replace(given.sft, learning_rate=1e-3), stages=("sft", "dpo"))
    assert rates_for_large_models(some, tiny_model, tiny_model) == []
    critic_free = replace(given, stages=("grpo",))
    assert (
        "million. --grpo.actor.learning-rate 3e-06 taught"
        in (rates_for_large_models(critic_free, tiny_model, tiny_model)[0])
    )
    adapted = replace(given, lora=LoraConfig(rank=4))
    assert rates_for_large_models(adapted, tiny_model, tiny_model) == []
    other = replace(some, lora=LoraConfig(rank=4))
    (line,) = rates_for_large_models(other, tiny_model, tiny_model)
    assert "adapters train at sft.lora_learning_rate, 0.0002; sft.learning_rate, 0.001," in line
    both = replace(other, sft=replace(other.sft, lora_learning_rate=3e-4))
    assert rates_for_large_models(both, tiny_model, tiny_model) == []
    ppo = replace(
        adapted, ppo=replace(adapted.ppo, critic=replace(adapted.ppo.critic, learning_rate=1))
    )
    (line,) = rates_for_large_models(ppo, tiny_model, tiny_model)
    assert "--ppo.critic.lora-learning-rate" in line
    large = tmp_path / "large"
    LlamaConfig(num_hidden_layers=24, hidden_size=2048).save_pretrained(large)
    assert rates_for_large_models(given, str(large), str(large)) == []
    (line,) = rates_for_large_models(given, tiny_model, str(large))  # the policy's rates alone
    assert "reward" not in line.partition("million.")[2]
    (line,) = rates_for_large_models(given, str(large), tiny_model)
    assert "million. --reward.learning-rate 5e-05 taught" in line
    (tmp_path / "odd").mkdir()
    MptConfig().save_pretrained(tmp_path / "odd")  # counted by transformers, 6.6 billion
    assert rates_for_large_models(given, str(tmp_path / "odd"), str(tmp_path / "odd")) == []


def test_a_bias_that_cannot_be_added_is_found_before_any_stage(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = tiny_config(tmp_path / "run", tiny_model, preferences)
    rows = prepare_rows(config, tiny_model, tiny_model)
    vocabulary = len(tiny_tokenizer())
    for token, found in ((vocabulary - 1, nullcontext()), (vocabulary, pytest.raises(ConfigError))):
        biased = replace(config, sampling=replace(config.sampling, logit_bias=(f"{token}:5",)))
        with found as error:
            check_rows(biased, rows, tiny_model, tiny_model)
    assert f"tokens below the model's {vocabulary}; got {vocabulary}" in str(error.value)
    for bias in ("inf", "1e39"):
        biased = replace(config, sampling=replace(config.sampling, logit_bias=(f"3:{bias}",)))
        with pytest.raises(ConfigError, match=r"must be float32 numbers or -inf; got .* for token"):
            check_rows(biased, rows, tiny_model, tiny_model)


def test_a_mixture_of_which_every_text_is_dropped_is_found_before_any_stage(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("A long walk in the rain.\n" * 400, encoding="utf-8")
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["reward", "ppo"],
        ppo__ptx_data=[str(texts)],
    )  # fmt: skip
    rows = prepare_rows(config, tiny_model, tiny_model)
    with pytest.raises(ConfigError, match=r"ppo\.ptx_data must have a text to mix in; got none"):
        check_rows(config, rows, tiny_model, tiny_model)
    off = replace(config, ppo=replace(config.ppo, ptx_coef=0.0))
    check_rows(off, prepare_rows(off, tiny_model, tiny_model), tiny_model, tiny_model)


def test_a_system_prompt_that_no_template_can_place_is_refused() -> None:
    values = {"dataset": {"chat_template": "none", "system_prompt": "Be brief."}}
    with pytest.raises(ConfigError, match=r"system_prompt must be empty with dataset\.chat"):
        check_config(build_config(values))


def test_rows_that_a_template_rejects_say_why_once(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    rows = read_jsonl(preferences)
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    rows += [{**row, "prompt": turns + turns[1:]} for row in rows[:1]]
    rows += [
        {**row, "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": f"{n}"}]}
        for n, row in enumerate(rows[:40])
    ]
    data = tmp_path / "system.jsonl"
    write_jsonl(data, rows)
    limits = {"chat_template": "none", "on_bad_row": "drop", "heldout": 0.4}
    config = tiny_config(tmp_path / "run", tiny_model, str(data), dataset=limits)
    account = prepare_rows(config, tiny_model, tiny_model).ledger.datasets["system"]
    told = [reason for reason in account.dropped if "cannot take it; the first: " in reason]
    assert len({reason.rpartition(" (")[0] for reason in told}) == 1
    assert "chat template none" in told[0]
    measured = sum(n for note, n in account.notes.items() if note.endswith("(measuring)"))
    assert 0 < measured <= 41, "each held-out row once, in however many ways it is measured"


@pytest.mark.parametrize("on_bad_row", ["error", "drop"])
def test_a_prompt_of_which_no_token_is_left_is_a_bad_row(
    tmp_path: Path, tiny_model: str, on_bad_row: str
) -> None:
    """A tokenizer may remove all of a text that is not blank. The run ended at the step that drew
    the prompt, whatever was to happen to bad rows."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": "?"}, "content": ""}
    tokenizer["post_processor"] = None
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    data = tmp_path / "prompts.jsonl"
    write_jsonl(data, [{"prompt": text} for text in ("Say cat", "???", "Say dog")])
    config = tiny_config(
        tmp_path / "run", str(model), str(data), stages=["ppo"],
        dataset={"chat_template": "none", "heldout": 0.0, "on_bad_row": on_bad_row},
    )  # fmt: skip
    if on_bad_row == "error":
        told = r"prompts\.jsonl:2: a prompt must have tokens; got none of '\?\?\?'\. Change the row"
        with pytest.raises(DataError, match=told):
            prepare_rows(config, str(model), str(model))
        return
    rows = prepare_rows(config, str(model), str(model))
    assert [row.messages[0].content for row in rows.prompts] == ["Say cat", "Say dog"]
    (why,) = rows.ledger.datasets["prompts"].dropped
    assert "a prompt must have tokens" in why
