"""Knobs in and out of YAML and flags; every problem, all at once, with the nearest name."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.config.flags import help_page, parse_run_flags, with_flags
from tandem.config.knob_facts import knob_docs, knob_types
from tandem.config.load import (
    build_config,
    changed_knobs,
    check_config,
    config_knobs,
    dump_config,
    load_config,
)
from tandem.config.nearest import SHORT_NAMES
from tandem.config.schema import PPOConfig, RunConfig, SamplingConfig
from tandem.errors import ConfigError


def test_the_defaults_are_valid() -> None:
    check_config(RunConfig())


def test_a_saved_configuration_comes_back_equal(tmp_path: Path) -> None:
    config = parse_run_flags(
        "--data a.jsonl b.csv:0.5 --ema --data-split 1,1,2 --ppo.actor.learning-rate 3e-6".split(),
        "train",
    )
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config))
    assert load_config(file) == config
    assert config.ppo.actor.learning_rate == 3e-6
    assert config.dataset.split == (1, 1, 2)


@settings(max_examples=30, deadline=None)
@example(1.0, 1, True, "\x85\u2028\r x")
@given(st.floats(1e-9, 1e3), st.integers(1, 10**6), st.booleans(), st.text(max_size=20))
def test_any_value_survives_yaml(tmp_path_factory: pytest.TempPathFactory, rate: float, n: int,
                                 flag: bool, text: str) -> None:  # fmt: skip
    config = RunConfig(actor_model=text)
    config = replace(
        config,
        sft=replace(config.sft, learning_rate=rate, batch_size=n),
        ppo=replace(config.ppo, ema=flag),
    )
    file = tmp_path_factory.mktemp("yaml") / "c.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    assert load_config(file) == config


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: 1\nppo:\n  kl_coef: 1e-2\n  steps: 7\n")
    config = parse_run_flags(["--config", str(file), "--ppo_steps", "9", "--seed=2"], "train")
    assert (config.seed, config.ppo.kl_coef, config.ppo.steps) == (2, 0.01, 9)


def test_all_problems_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "sead: 1\nppo:\n  kl_coeff: 0.1\n  steps: many\n  ema: 1\nsft: 3\ndtype: fp61\n"
    )
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    message = str(raised.value)
    for part in (
        "sead is not a knob. Did you mean seed?",
        "ppo.kl_coeff is not a knob. Did you mean ppo.kl_coef?",
        "ppo.steps must be a whole number; got 'many'",
        "ppo.ema must be true or false; got 1",
        "sft must be a mapping of knobs; got 3",
        "dtype must be one of auto, fp32, bf16",
    ):
        assert part in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [", "line 1"),
        ("\x00", "must be YAML"),
        ("sft: {epochs: 1}\nseed: 1\nsft: {max_steps: 2}", "line 3 must be .*sft a second time"),
        ("sft:\n  epochs: 1\n  epochs: 2", "line 3 must be YAML; got: the key epochs a second"),
        ("sft:\n\tepochs: 1", r"line 2 must .* token\. Indent by spaces, not by tabs\.$"),
        ("sft:\n   epochs: 1\n  seed: 2", "line 3 must .* Begin all keys of one section in the"),
        ("data: [a]\n  seed: 2", r"line 2 must .*Begin all keys of one section in the same col"),
    ],
)
def test_a_file_that_is_not_yaml(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=part):
        load_config(file)


def test_a_missing_file() -> None:
    with pytest.raises(ConfigError, match=r"--config must be a readable YAML file; got nowhere\.y"):
        parse_run_flags(["--config", "nowhere.yaml"], "train")


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (
            "--ppo.kl-coff 3",
            "--ppo.kl-coff is not a flag of tandem train. Did you mean --ppo.kl-coe",
        ),
        ("stray", "'stray' belongs to no flag"),
        ("--seed", "--seed must have a value; got none"),
        (
            "--offload --seed 3",
            "--parallel.offload must have values; got none. Write some of optimizer, params,",
        ),
        (
            "--parallel.offload --seed 3",
            "reference and reward behind it, or --parallel.offload '' for none",
        ),
        ("--sft-data", "--sft-data must have values; got none. Write its values behind it, or"),
        ("--lr 1e-4", "Did you mean --sft.learning-rate, --reward.learning-rate, --ppo.actor.lea"),
        ("--sft.lr 1e-4", "--sft.lr is not a flag of tandem train. Did you mean --sft.learning-r"),
        ("--no-emma", "--no-emma is not a flag of tandem train. Did you mean --ema?"),
        ("--kl-coff 1", "Did you mean --kl-coef?"),
        (
            "--num_train_epochs 3",
            "Did you mean --sft.epochs or --reward.epochs? In ppo use --ppo-s",
        ),
        ("--ema maybe", "ppo.ema must be true or false; got 'maybe'"),
        ("--no-ema=true", "ppo.ema must be true or false; got '--no-ema true'"),
        ("--stages sft rewrd", "did you mean reward?"),
        ("--ppo-steps 1.5", "ppo.steps must be a whole number; got '1.5'"),
        (
            "--dataset.system-prompt a\udcff",
            r"dataset.system_prompt must be text in UTF-8; got 'a\udcff'",
        ),
        ("--sft-data a\udcff b", r"sft_data must be text in UTF-8; got ['a\udcff', 'b']"),
    ],
)
def test_wrong_flags_get_one_line(flags: str, part: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_run_flags(flags.split(), "train")
    assert part in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--data b", "got it twice. A list takes all its values behind one: --data y b"),
        ("--dataset_name b", r"--dataset_name \(--data\) must be given once; got it twice. A list"),
        ("--data=b", "--data must be given once; got it twice. A list"),
        ("--seed 3 --seed 3", "--seed must be given once; got it twice. Remove one"),
        ("--lora-rank 3 --lora.rank 3", "--lora.rank must be given once"),
        ("--ema --no-ema", r"--no-ema \(--ppo.ema\) must be given once"),
        ("--config a.yaml --config b.yaml", "--config must be given once"),
    ],
)  # fmt: skip
def test_a_flag_that_is_given_twice_is_refused(flags: str, part: str) -> None:
    words = f"--actor-model x --data y {flags}".split()
    with pytest.raises(ConfigError, match=part):
        parse_run_flags(words, "train", note=lambda line: None)


def test_an_empty_list_is_written_as_an_empty_value(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("actor_model: x\ndata: [y]\nsft_data: [z]\nparallel: {offload: [reward]}\n")
    flags = ["--config", str(file), "--offload", "", "--sft-data="]
    config = parse_run_flags(flags, "train")
    assert (config.parallel.offload, config.sft_data) == ((), ())


def test_so_it_is_in_a_run_s_file_from_before_the_knob_took_a_list(tmp_path: Path) -> None:
    """0.1.0 wrote `reward_function: ''` into every config.yaml."""
    file = tmp_path / "config.yaml"
    file.write_text("actor_model: x\ndata: y\nsft_data: ''\nppo: {reward_function: ''}\n")
    config = load_config(file)
    assert (config.data, config.sft_data, config.ppo.reward_function) == (("y",), (), ())


def test_flags_take_the_place_of_those_that_set_the_same_knobs() -> None:
    line = "--num-gpus 2 --offload optimizer params --actor-zero-stage=1 --seed 3 --no-ema"
    newer = ["--parallel.offload", "reward", "--parallel.actor-zero-stage", "3"]
    assert with_flags(line.split(), "train", newer) == [
        *("--num-gpus", "2", "--seed", "3", "--no-ema"),
        *newer,
    ]


def test_a_single_stage_gets_advice_on_its_own_knobs() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean --sft\.learning-rate\?$"):
        parse_run_flags(["--lr", "1e-4"], "sft")
    with pytest.raises(ConfigError, match=r"ppo\.actor\.learning-rate or --ppo\.critic\.learn"):
        parse_run_flags(["--lr", "1e-4"], "ppo")


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ("--ema", True),
        ("--ema yes", True),
        ("--ema=true", True),
        ("--ppo.ema on", True),
        ("--no-ema", False),
        ("--ema=false", False),
        ("--no-ppo.ema", False),
    ],
)
def test_switches_take_a_word_or_none(flags: str, value: bool) -> None:
    assert parse_run_flags(flags.split(), "train").ppo.ema is value


def test_every_mistake_of_flags_and_file_is_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("kl_coff: 0.1\nsft: {lr: 3, epochs: -1}\nseed: -3\nppi: {}\nppo: {lam: x}\n")
    flags = f"--config {file} --lora-rnak 3 --ppo.gamma 2 --ppo-steps many --seed 5"
    with pytest.raises(ConfigError) as raised:
        parse_run_flags(flags.split(), "train")
    message = str(raised.value)
    for part in (
        "kl_coff is not a knob. Did you mean ppo.kl_coef?",
        "sft.lr is not a knob. Did you mean sft.learning_rate?",
        "ppi is not a knob. Did you mean ppo?",
        "ppo.lam must be a number; got 'x'",
        "--lora-rnak is not a flag of tandem train. Did you mean --lora-rank?",
        "ppo.steps must be a whole number; got 'many'",
        "ppo.gamma must be >= 0 and <= 1; got 2.0",
        "sft.epochs must be > 0; got -1.0",
    ):
        assert part in message
    assert "seed" not in message  # the flag has put it right


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"ppo": {"ptx_coef": 1.0}}, "ppo.ptx_coef must go with ppo.ptx_data"),
        ({"ppo": {"ema_decay": 0.9}}, "ppo.ema_decay must go with ppo.ema"),
        ({"ppo": {"kl_coef": -1.0}}, "ppo.kl_coef must be >= 0; got -1.0"),
        ({"ppo": {"gamma": 1.5}}, "ppo.gamma must be >= 0 and <= 1; got 1.5"),
        ({"stages": []}, "stages must name at least one stage"),
        ({"stages": ["sft", "sft"]}, "stages must name each stage once"),
        ({"dataset": {"split": [1, 2]}}, "dataset.split must be three shares"),
        ({"dataset": {"split": [0, 0, 0]}}, "dataset.split must have a share above 0"),
        ({"stages": ["ppo", "sft"]}, "stages must be in the order sft reward ppo"),
        ({"stages": ["sft", "dpo", "ppo"]}, "dpo and ppo both start from sft"),
        ({"dropout": 0.1}, "dropout and lora.dropout must be 0 if ppo"),
        ({"sft": {"learning_rate": float("inf")}}, "sft.learning_rate must be finite; got inf"),
        ({"seed": 2**60}, "seed must be >= 0 and <= "),
        ({"sft": {"betas": [0.9, 1.0]}}, "betas must be within [0, 1)"),
        ({"ppo": {"kl_coef_target": 6.0, "kl_coef": 0.0}}, "ppo.kl_coef must be > 0 when"),
        ({"ppo": {"kl_in": "loss", "kl_estimator": "k1"}}, "ppo.kl_estimator must be k2 or k3"),
        ({"ppo": {"minibatch_size": 999}}, "ppo.minibatch_size must be at most"),
        ({"sampling": {"min_new_tokens": 999}}, "sampling.min_new_tokens must be at most"),
        ({"ppo": {"reward_model_weight": 0.0}}, "ppo.reward_model_weight must be > 0 without"),
    ],
)
def test_rules_and_ranges(change: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_config(build_config(change, where=""))
    assert part in str(raised.value)


def test_several_problems_are_one_message() -> None:
    config = build_config({"seed": -1, "ppo": {"lam": 2.0}}, where="")
    with pytest.raises(ConfigError, match=r"seed must be >= 0 .*; got -1; ppo.lam must be"):
        check_config(config)


def test_changed_knobs_names_what_differs() -> None:
    config = build_config({"seed": 1, "ppo": {"ema": True}}, where="")
    assert changed_knobs(config, RunConfig()) == {"seed": (1, 1234), "ppo.ema": (True, False)}


def test_every_knob_is_documented_and_frozen() -> None:
    """A nested dataclass field is a section; every other is a knob with a sentence below it."""
    docs = knob_docs()
    for name, knob in config_knobs():
        assert len(docs[name].split()) >= 4, name
        assert isinstance(knob, dataclasses.Field)
    assert set(SHORT_NAMES) <= set(knob_types())


def test_help_names_common_knobs_and_all_of_them() -> None:
    page = help_page("train", "Summary.", everything=False)
    assert "--data-split" in page
    assert "--ppo.lam" not in page
    assert page.count("\n  --") <= 30
    everything = help_page("train", "Summary.", everything=True)
    assert all(f"--{name.replace('_', '-')} " in everything for name in knob_types())


def test_a_stages_help_shows_the_knobs_it_reads() -> None:
    pages = {
        step: help_page(step, "Summary.", everything=False)
        for step in ("sft", "reward", "dpo", "ppo")
    }
    for step in ("sft", "reward", "dpo"):
        for knob in ("learning-rate", "batch-size", "epochs", "max-steps"):
            assert f"--{step}.{knob} " in pages[step]
        assert "--ppo" not in pages[step]
        assert "--kl-coef" not in pages[step]
        assert "--stages" not in pages[step]
    for flag in ("--ppo.actor.learning-rate", "--kl-coef", "--ppo.minibatch-size", "--ppo-steps"):
        assert f"{flag} " in pages["ppo"]
    assert "--sft." not in pages["ppo"]
    assert "--dpo.beta " in pages["dpo"]
    assert all(page.count("\n  --") <= 36 for page in pages.values())


def test_a_stages_help_says_what_a_default_of_0_stands_for() -> None:
    shown = {
        step: " ".join(help_page(step, "", everything=False).split())
        for step in ("dpo", "ppo", "grpo", "reward")
    }
    assert "0: the value of the loss's paper (simpo 2, the others 0.1). [0]" in shown["dpo"]
    assert "0: an eighth of the rollout's" in shown["ppo"]
    assert "Answers per optimizer step; by default at most the rollout's. [64]" in shown["grpo"]
    assert "Empty: the run's SFT model. [none]" in shown["reward"]


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys, tandem.cli; tandem.cli.main(['train', '--help']);"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0


PATHS = {
    "actor_model": "~/m",
    "reward_model": "~/r",
    "reference_model": "~/s",
    "critic_model": "~/v",
    "data": "~/a.jsonl:2::prompt=q",
    "sft_data": "~/b.jsonl",
    "eval_data": "~/d.jsonl",
    "dataset.chat_template": "~/chatml.jinja",
    "output_dir": "~/runs/x",
    "dpo.loss_function": "~/mine.py:hinge?delta=2",
    "ppo.reward_function": "~/rewards.py:score",
    "sampling.json_schema": "~/person.json",
    "ppo.loss_function": "~/mine.py:gated?negative=1.1",
    "ppo.advantage_function": "~/mine.py:group_means",
    "ppo.environment": "~/guess.py:environment",
    "ppo.tools": "~/calculator.py:multiply",
    "ppo.ptx_data": "~/c.jsonl:0.5",
    "grpo.reward_function": "~/rewards.py:score",
    "grpo.loss_function": "~/mine.py:gated",
    "grpo.advantage_function": "~/mine.py:group_means",
    "grpo.environment": "~/guess.py:environment",
    "grpo.tools": "~/calculator.py:multiply",
    "grpo.ptx_data": "~/c.jsonl:0.5",
    "scoring.reward_models": "~/reward:0.5",
}


def knob_of(config: RunConfig, name: str) -> object:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def test_these_knobs_are_paths() -> None:
    assert {name for name, knob in config_knobs() if knob.metadata.get("path")} == set(PATHS)


def test_a_schema_may_stand_in_yaml_and_in_python_as_it_is(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    (tmp_path / "run.yaml").write_text(
        "sampling:\n  json_schema:\n    type: object\n    properties: {age: {type: integer}}\n"
    )
    config = load_config(tmp_path / "run.yaml")
    assert json.loads(config.sampling.json_schema) == schema
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config
    given: Any = schema
    assert SamplingConfig(json_schema=given) == config.sampling
    with pytest.raises(ConfigError, match=r"sampling\.regex must be text"):
        build_config({"sampling": {"regex": schema}})


@pytest.mark.parametrize("name", PATHS)
def test_the_home_folder_is_expanded_once_wherever_a_path_comes_from(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    given = PATHS[name]
    whole: object = given.replace("~", str(tmp_path))
    if isinstance(knob_of(RunConfig(), name), tuple):
        whole = (whole,)
    section, _, knob = name.rpartition(".")
    text = f"{section}:\n  {knob}: {given!r}\n" if section else f"{knob}: {given!r}\n"
    (tmp_path / "run.yaml").write_text(text)
    flag = f"--{name.replace('_', '-')}"
    for words in (["--config=~/run.yaml"], [f"{flag}={given}"], [flag, given]):
        assert knob_of(parse_run_flags(words, "train"), name) == whole, words
    assert knob_of(load_config(tmp_path / "run.yaml"), name) == whole
    one = (given,) if isinstance(whole, tuple) else given
    home: Any = knob_of(RunConfig(), section) if section else RunConfig()
    made = replace(home, **{knob: one})
    assert (getattr(made, knob)) == whole


def test_an_unknown_home_folder_is_refused() -> None:
    for path in ("~no_such_user_here/x", "./~x"):
        with pytest.raises(ConfigError, match="output_dir must begin with an existing home folder"):
            check_config(RunConfig(output_dir=path))


def test_a_section_must_be_its_dataclass_in_python() -> None:
    with pytest.raises(
        ConfigError, match=r"RunConfig\.ppo must be a PPOConfig; got \{'steps': 3\}"
    ):
        RunConfig(ppo={"steps": 3})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"PPOConfig\.actor must be a ActorOptimizerConfig"):
        PPOConfig(actor={})  # type: ignore[arg-type]
    assert build_config({"ppo": {"steps": 3}}).ppo.steps == 3


def test_types_are_checked_in_python_too() -> None:
    with pytest.raises(
        ConfigError, match=r"seed must be a whole number; got 'x'.*; data must be a"
    ):
        check_config(RunConfig(seed="x", data="a.jsonl"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"stages must be a tuple.* Write \('sft', 'reward'\)"):
        check_config(RunConfig(stages=["sft", "reward"]))  # type: ignore[arg-type]
    check_config(RunConfig(data=("a.jsonl",), ppo=PPOConfig(kl_coef=1)))


@pytest.mark.parametrize(
    ("command", "flags", "bound"),
    [
        ("ppo", "--reward-model r", 10),
        ("ppo", "--reward-function a.py:f", 0),
        ("ppo", "--reward-model r --reward-function a.py:f", 0),
        ("ppo", "--reward-function a.py:f --ppo.reward-clip 10", 10),
        ("ppo", "--reward-model r --ppo.reward-clip 0", 0),
        ("online-dpo", "--reward-function a.py:f", 0),
        ("train", "--reward-function a.py:f", 0),
        ("train", "", 10),
    ],
)
def test_scores_of_a_reward_model_alone_are_clipped_by_default(
    command: str, flags: str, bound: float, tmp_path: Path
) -> None:
    config = parse_run_flags(["--actor-model", "m", "--data", "d", *flags.split()], command)
    assert config.ppo.reward_clip == bound
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config))
    assert load_config(file) == config
    assert parse_run_flags(["--config", str(file)], "train").ppo.reward_clip == bound


@pytest.mark.parametrize(
    ("command", "flags", "said"),
    [
        ("kto", "--dpo.sft-coef 0.1", "--dpo.sft-coef has no effect, as kto does not read it"),
        ("grpo", "--ppo.kl-coef 0.1", "--ppo.kl-coef has no effect, as grpo does not read it"),
        ("train", "--stages sft dpo --kto.beta 1 --dpo.beta 0.2",
         "--kto.beta has no effect, as sft and dpo do not read it"),
        ("online-dpo", "--dpo.beta 0.2 --ppo.steps 3", ""),
        ("dpo", "--sft.loss-on all --ppo.eval-prompts 3 --dataset.heldout 0.1", ""),
        ("sft", "--ppo.kl-coef 0.5", "--ppo.kl-coef has no effect, as sft does not read it"),
        ("sft", "--grpo.eval-prompts 3 --ppo.ema on --ppo.tools t.py:f --scoring.workers 3",
         ("--grpo.eval-prompts, --ppo.ema and --scoring.workers have no effect, as sft does not "
          "read them")),
        ("train", "--stages sft reward --sampling.samples-per-prompt 2 --ppo.reward-model-weight 2",
         ""),
        ("dpo", "--sampling.samples-per-prompt 2 --sampling.temperature 0.5 --no-hybrid-engine",
         "--sampling.samples-per-prompt has no effect, as dpo does not read it"),
        ("dpo", "--sampling.temperature 0.5 --no-hybrid-engine --ppo.eval-prompts 0",
         "--sampling.temperature and --no-hybrid-engine have no effect, as dpo does not read them"),
        ("sft", "--offload optimizer reference reward --critic-zero-stage 3",
         ("--offload reward has no effect, as sft has no reward model; --offload reference has no "
          "effect, as sft has no reference; --critic-zero-stage has no effect, as sft has no "
          "critic and no reward model")),
        ("train", "--offload optimizer reference reward --critic-zero-stage 3", ""),
        ("train", "--offload reference --lora.rank 4",
         "--offload reference has no effect, as the reference is the actor without its adapters"),
        ("train", "--offload reference --lora.rank 4 --reference-model y", ""),
        ("grpo", "--offload reference reward --reward-function a.py:f --grpo.kl k2-in-loss",
         "--offload reward has no effect, as grpo has no reward model"),
        ("grpo", "--offload reference reward --reward-model y",
         "--offload reference has no effect, as grpo has no reference"),
        ("sft", "--lora.critic-rank 2 --gradient-checkpointing --recompute-roles actor",
         ("--lora.critic-rank and --recompute-roles have no effect, as sft does not train a critic "
          "or a reward model")),
        ("sft", "--gradient-checkpointing --recompute-roles critic",
         ("--gradient-checkpointing has no effect, as sft does not train a critic or a reward "
          "model")),
        ("reward", "--lora.critic-rank 4 --gradient-checkpointing --recompute-roles critic",
         "--recompute-roles has no effect, as reward does not train a policy"),
        ("train", "--lora.critic-rank 4 --gradient-checkpointing --recompute-roles critic", ""),
        ("grpo", "--critic-zero-stage 3 --reward-function a.py:f",
         "--critic-zero-stage has no effect, as grpo has no critic and no reward model"),
        ("grpo", "--critic-zero-stage 3 --offload reward --reward-function f:f --output-dir {run}",
         ""),
        ("ppo", "--reward-model r --lora.alpha 32 --lora.targets q_proj",
         "--lora.alpha and --lora.targets have no effect, as lora.rank is 0"),
        ("ppo", "--reward-model r --lora.alpha 32 --lora.critic-rank 4", ""),
        ("ppo", "--reward-model r --scoring.workers 3 --no-scoring.self-test",
         ("--scoring.workers and --no-scoring.self-test have no effect, as the run has no reward "
         "function, environment or tool")),
        ("ppo", "--reward-function a.py:f --scoring.workers 3", ""),
        ("ppo", "--reward-model r --ppo.tools t.py:f --scoring.deadline-seconds 3", ""),
        ("sft", "--log.record-answers 3 --log.print-samples-every 5 --kept-states 0.2",
         ("--log.record-answers, --log.print-samples-every and --kept-states have no effect, as "
         "sft does not read them")),
        ("ppo", "--reward-model r --log.record-answers 3 --kept-states 0.2", ""),
        ("ppo", "--reward-model r --no-hybrid-engine --generation-prefill-tokens 64",
         "--generation-prefill-tokens has no effect, as Hugging Face's generate does not read it"),
        ("sft", "--no-parallel.offload-gradients",
         "--no-parallel.offload-gradients has no effect, as parallel.offload has no optimizer"),
        ("sft", "--no-parallel.offload-gradients --offload optimizer", ""),
    ],
)  # fmt: skip
def test_a_flag_that_no_running_stage_reads_is_noted(
    tmp_path: Path, command: str, flags: str, said: str
) -> None:
    """Of the folder of a run that has a reward model, that one may score."""
    (tmp_path / "reward").mkdir()
    notes: list[str] = []
    words = f"--actor-model x --data y {flags}".format(run=tmp_path).split()
    parse_run_flags(words, command, note=notes.append)
    assert notes == ([said] if said else [])


def test_a_bound_that_a_loss_does_not_read_is_refused() -> None:
    told = (
        "grpo.clip_high must not be set where grpo.loss is cispo, which does not read it; got 0.3"
    )
    start = "--actor-model x --data y --reward-model r --algorithm"
    with pytest.raises(ConfigError, match=told):
        parse_run_flags(f"{start} cispo --grpo.clip-high 0.3".split(), "grpo")
    parse_run_flags(f"{start} dapo --grpo.loss cispo".split(), "grpo")
    parse_run_flags(f"{start} dapo --grpo.clip-high 0.3".split(), "grpo")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"actor_model": torch.nn.Linear(1, 1)},
            "must be text; got Linear. Pass a model in memory as train(config, actor_model=...)",
        ),
        (
            {"grpo": {"reward_function": [lambda completions: completions]}},
            "grpo.reward_function must be text; got function. Name a function as file.py:name",
        ),
        ({"ppo": {"environment": print}}, "got builtin_function_or_method. Name a function as"),
    ],
)
def test_what_is_in_memory_is_shown_by_its_class_with_where_it_goes(
    values: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(values)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_problems_of_a_configuration_in_python_are_one_sentence_each() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({"bf16": True, "do_train": True})
    assert ".;" not in str(caught.value)
