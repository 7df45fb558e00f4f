"""Names of other trainers and earlier names: read with a note, or answered with the right knob."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.config.flags import parse_run_flags
from tandem.config.knob_facts import knob_types
from tandem.config.load import build_config, config_knobs, load_config, plain_values
from tandem.config.nearest import SHORT_NAMES
from tandem.config.schema import RunConfig
from tandem.config.spellings import (
    ALIASES,
    CONVERSIONS,
    OFF_ANYWAY,
    OPENRLHF,
    RENAMED,
    VERL,
    alias_knobs,
    conversion,
    ending,
    exact_knobs,
    knob_meant,
)
from tandem.errors import ConfigError

KNOWN = [name for name, _ in config_knobs()]


def knob_of(config: RunConfig, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def nested(name: str, value: object) -> dict[str, Any]:
    *sections, last = name.split(".")
    values: dict[str, Any] = {last: value}
    for section in reversed(sections):
        values = {section: values}
    return values


def read(flags: str, command: str = "train") -> tuple[RunConfig, list[str]]:
    notes: list[str] = []
    return parse_run_flags(flags.split(), command, note=notes.append), notes


def refused(flags: str, command: str = "train") -> str:
    with pytest.raises(ConfigError) as raised:
        read(flags, command)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("command", "flags", "knob", "value", "note"),
    [
        ("train", "--num-generations 4", "sampling.samples_per_prompt", 4,
         "--num-generations is read as --sampling.samples-per-prompt"),
        ("train", "--num_generations=4", "sampling.samples_per_prompt", 4, "--num_generations is"),
        ("ppo", "--max_completion_length 32", "sampling.max_new_tokens", 32, "--sampling.max-new"),
        ("train", "--response_length 32", "sampling.max_new_tokens", 32, "--sampling.max-new"),
        ("train", "--cliprange 0.1", "ppo.clip_ratio", 0.1, "--ppo.clip-ratio"),
        ("train", "--epsilon 0.1", "ppo.clip_ratio", 0.1, "--ppo.clip-ratio"),
        ("train", "--cliprange_value 0.1", "ppo.value_clip", 0.1, "--ppo.value-clip"),
        ("ppo", "--ppo.cliprange 0.1", "ppo.clip_ratio", 0.1, "--ppo.cliprange is read as"),
        ("ppo", "--num_ppo_epochs 3", "ppo.epochs", 3, "--ppo.epochs"),
        ("ppo", "--num_iterations 3", "ppo.epochs", 3, "--ppo.epochs"),
        ("grpo", "--remote_rm_url http://h:1/x", "grpo.reward_function", ("http://h:1/x",),
         "a server's URL, asked as OpenRLHF asks it"),
        ("sft", "--lr_scheduler_type linear", "sft.schedule", "linear", "10 % of the peak"),
        ("sft", "--warmup_ratio 0.2", "sft.warmup", 0.2, "--sft.warmup"),
        ("train", "--reward.warmup_ratio 0.2", "reward.warmup", 0.2, "--reward.warmup"),
        ("train", "--ppo.actor.warmup_ratio 0.2", "ppo.actor.warmup", 0.2, "--ppo.actor.warmup"),
        ("sft", "--learning_rate 3e-5", "sft.learning_rate", 3e-5, "--sft.learning-rate"),
        ("sft", "--num_train_epochs 2", "sft.epochs", 2.0, "--sft.epochs"),
        ("sft", "--max_steps 9", "sft.max_steps", 9, "--sft.max-steps"),
        ("dpo", "--beta 0.3", "dpo.beta", 0.3, "--dpo.beta"),
        ("train", "--save_steps 7", "save_every", 7, "--save-every"),
        ("reward", "--eval_steps 7", "reward.eval_every", 7, "--reward.eval-every"),
        ("train", "--auto_find_batch_size", "halve_micro_batches", True, "batch stays the same"),
        ("train", "--auto_find_batch_size False", "halve_micro_batches", False, "--halve-micro-b"),
        ("train", "--no-auto-find-batch-size", "halve_micro_batches", False, "--no-halve-micro"),
        ("train", "--model_name_or_path m", "actor_model", "m", "--actor-model"),
        ("train", "--lora_target_modules q_proj v_proj", "lora.targets", ("q_proj", "v_proj"),
         "--lora.targets"),
        ("train", "--target_kl 0.3", "ppo.early_stop_kl", 0.3, "--ppo.early-stop-kl"),
        ("train", "--ppo.target-kl 0.3", "ppo.early_stop_kl", 0.3,
         "--ppo.target-kl is now --ppo.early-stop-kl"),
        ("sft", "--pretrain m", "actor_model", "m", "--pretrain is read as --actor-model"),
        ("sft", "--cutoff_len 99", "dataset.max_tokens", 99, "follows dataset.on_long_row"),
        ("sft", "--val_size 0.1", "dataset.heldout", 0.1, "a share of all rows"),
        ("sft", "--train_batch_size 8", "sft.batch_size", 8, "--sft.batch-size"),
        ("grpo", "--train_batch_size 8", "grpo.minibatch_size", 8, "--grpo.minibatch-size"),
        ("grpo", "--max_epochs 2", "grpo.epochs", 2, "--grpo.epochs"),
        ("grpo", "--data.train_files a b", "data", ("a", "b"), "--data.train_files is read as"),
        ("grpo", "--actor_rollout_ref.rollout.n=4", "sampling.samples_per_prompt", 4, "is read as"),
        ("grpo", "--actor_rollout_ref.actor.optim.lr 1e-6", "grpo.actor.learning_rate", 1e-6,
         "--grpo.actor.learning-rate"),
        ("ppo", "--actor_rollout_ref.actor.optim.lr 1e-6", "ppo.actor.learning_rate", 1e-6, "--pp"),
        ("grpo", "--trainer.test_freq 7", "grpo.eval_every", 7, "--grpo.eval-every"),
        ("sft", "--chat_template_path t.jinja", "dataset.chat_template", "t.jinja",
         "--chat_template_path is read as --dataset.chat-template"),
        ("ppo", "--actor_model_name_or_path m", "actor_model", "m", "--actor-model"),
        ("train", "--critic_model_name_or_path m", "reward_model", "m", "unless critic_model"),
        ("train", "--data_path a b", "data", ("a", "b"), "--data_path is read as --data"),
        ("train", "--enable_ema", "ppo.ema", True, "--enable_ema is read as --ppo.ema"),
        ("grpo", "--enable_ema", "grpo.ema", True, "--enable_ema is read as --grpo.ema"),
        ("sft", "--lora_dim 8", "lora.rank", 8, "is lora.alpha 1"),
        ("ppo", "--kl_ctl 0.1", "ppo.kl_coef", 0.1, "--kl_ctl is read as --ppo.kl-coef"),
        ("train", "--ppo.kl_target 6", "ppo.kl_coef_target", 6.0, "is now --ppo.kl-coef-target"),
        ("train", "--max_completion_length 32", "sampling.max_new_tokens", 32, "--sampling.max"),
        ("train", "--max_prompt_length 32", "dataset.max_prompt_tokens", 32, "--dataset.max-prom"),
        ("ppo", "--prompt_data a b", "data", ("a", "b"), "--prompt_data is read as --data"),
        ("ppo", "--lambd 0.9", "ppo.lam", 0.9, "--lambd is read as --ppo.lam"),
        ("ppo", "--value_clip 0.5", "ppo.value_clip", 0.5, "--ppo.value-clip"),
        ("ppo", "--ema --ema_beta 0.9", "ppo.ema_decay", 0.9, "--ppo.ema-decay"),
        ("sft", "--adam_betas 0.9 0.98", "sft.betas", (0.9, 0.98), "--sft.betas"),
        ("sft", "--l2 0.1", "sft.weight_decay", 0.1, "--sft.weight-decay"),
        ("grpo", "--grpo.kl k1-in-reward --grpo.kl-coef-target 3 --algorithm.kl_ctrl.horizon 50",
         "grpo.kl_horizon", 50, "--grpo.kl-horizon"),
    ],
)  # fmt: skip
def test_a_flag_with_the_same_meaning_is_read_with_one_note(
    command: str, flags: str, knob: str, value: object, note: str
) -> None:
    config, notes = read(flags, command)
    assert knob_of(config, knob) == value
    assert len(notes) == 1
    assert note in notes[0]


@pytest.mark.parametrize(
    ("values", "knob", "value", "note"),
    [
        ({"num_generations": 4}, "sampling.samples_per_prompt", 4,
         "num_generations is read as sampling.samples_per_prompt"),
        ({"ppo": {"cliprange": 0.1}}, "ppo.clip_ratio", 0.1, "ppo.cliprange is read as ppo.clip"),
        ({"sft": {"num_train_epochs": 3}}, "sft.epochs", 3.0, "sft.num_train_epochs is read as"),
        ({"ppo": {"critic": {"warmup_ratio": 0.5}}}, "ppo.critic.warmup", 0.5, "ppo.critic.warmup"),
        ({"dpo": {"lr_scheduler_type": "constant"}}, "dpo.schedule", "constant", "not at 0"),
        ({"chat_template": "none"}, "dataset.chat_template", "none", "a folder with one, default"),
        ({"target_kl": 0.5}, "ppo.early_stop_kl", 0.5, "target_kl is read as ppo.early_stop_kl"),
    ],
)  # fmt: skip
def test_a_key_with_the_same_meaning_is_read_with_one_note(
    values: dict[str, Any], knob: str, value: object, note: str
) -> None:
    notes: list[str] = []
    assert knob_of(build_config(values, note=notes.append), knob) == value
    assert len(notes) == 1
    assert note in notes[0]


@pytest.mark.parametrize(
    ("command", "flags", "part"),
    [
        ("sft", "--per_device_train_batch_size 4",
         "is not a flag of tandem sft. Use --sft.batch-size: the whole batch, so the size per"),
        ("train", "--per_device_train_batch_size 4",
         "Use --sft.batch-size, --reward.batch-size or --ppo.minibatch-size: the whole batch"),
        ("train", "--sft.per_device_train_batch_size 4", "Use --sft.batch-size: the whole"),
        ("ppo", "--gradient_accumulation_steps 4", "Use --ppo.minibatch-size: the whole batch; "),
        ("train", "--bf16", "--bf16 is not a flag of tandem train. Use --dtype: write bf16"),
        ("sft", "--steps", "--steps is not a flag of tandem sft. Use --sft.max-steps: optimizer"),
        ("grpo", "--steps", "--steps is not a flag of tandem grpo. Did you mean --grpo-steps?"),
        ("train", "--fp16 True", "Use --dtype: write fp16"),
        ("train", "--num_processes 4", "Use --num-gpus on the command line"),
        ("train", "--steps_per_generation 4", "Use --ppo.minibatch-size: answers per optimizer"),
        ("ppo", "--num_train_epochs 1", "Use --ppo-steps: rollouts; 0 makes one pass over the pro"),
        ("train", "--num_train_epochs 1", "Did you mean --sft.epochs or --reward.epochs? In ppo "),
        ("ppo", "--beta 0.1", "Use --kl-coef: together with ppo.kl_in loss"),
        ("train", "--beta 0.1", "Did you mean --dpo.beta or --kto.beta? In ppo use --kl-coef: tog"),
        ("sft", "--beta 0.1", "Did you mean --dpo.beta or --kto.beta?"),
        ("sft", "--cliprange 0.1", "Did you mean --ppo.clip-ratio?"),
        ("ppo", "--warmup_ratio 0.1", "Did you mean --ppo.actor.warmup or --ppo.critic.warmup?"),
        ("train", "--lr_scheduler_type linear", "Did you mean --sft.schedule, --reward.schedule,"),
        ("distill", "--beta 1", "of GKD, kl is exact-in-loss for beta 1, forward-exact-in-loss"),
        ("distill", "--lmbda 0.5", "Stage distill learns on the policy's own answers, as lmbda 1 "),
        ("grpo", "--beta 0.04", "Use --grpo.kl and --kl-coef: beta weights k3 in the loss, so kl"),
        ("grpo", "--kl_loss_coef 0.1", "Use --grpo.kl and --kl-coef: for low_var_kl kl is forward"),
        ("ppo", "--kl_loss_coef 0.1", "Use --kl-coef and --ppo.kl-in: kl_in is loss"),
        ("grpo", "--actor_rollout_ref.actor.kl_loss_coef 1", "Use --grpo.kl and --grpo.kl-coef: "),
        ("ppo", "--actor_rollout_ref.actor.kl_loss_coef 1", "Use --ppo.kl-coef and --ppo.kl-in: "),
        ("grpo", "--algorithm.kl_ctrl.kl_coef 0.1", "Use --grpo.kl-coef: the KL is in the reward"),
        ("grpo", "--trainer.total_epochs 2", "Use --grpo.steps: rollouts; 0 makes one pass over"),
        ("grpo", "data.train_files=x", "'data.train_files=x' belongs to no flag. Write --data.tr"),
        ("grpo", "trainer.nnodes=2", "'trainer.nnodes=2' belongs to no flag. Use --num-nodes on t"),
        ("grpo", "grpo.steps=2", "'grpo.steps=2' belongs to no flag. Write --grpo.steps=2"),
        ("grpo", "x=2", "'x=2' belongs to no flag"),
        ("train", "run.yaml", "'run.yaml' belongs to no flag. Write --config run.yaml"),
        ("sft", "data/a.jsonl.gz", "belongs to no flag. Write --data data/a.jsonl.gz"),
        ("sft", "it's.CSV", "belongs to no flag. Write --data 'it'\"'\"'s.CSV'"),
        ("sft", "models/first", "'models/first' belongs to no flag"),
        ("sft", "--template llama3", "Use --chat-template: a Jinja file, or chatml; without it"),
        ("grpo", "--apply_chat_template", "Use --chat-template: on is the default, off is none"),
        ("dpo", "--dataset_train_split s", "Use --data: behind the name, as in NAME@/SPLIT or NA"),
        ("sft", "--dataset d.json", "Use --data: files or hub names; a dataset_info.json is not r"),
        ("train", "--no-num-generations", "Did you mean --sampling.samples-per-prompt?"),
        ("grpo", "--vllm_gpu_memory_utilization 0.3", "generates on the training weights with its"),
        ("ppo", "--colocate_all_models", "All models share all ranks; use --num-gpus on the comm"),
        ("ppo", "--adam_offload", "Use --offload: write optimizer, with params"),
        ("ppo", "--lr_warmup_ratio 0.1", "Did you mean --ppo.actor.warmup or --ppo.critic.warmup?"),
        ("ppo", "--ring_attn_size 2", "Sequences are not split over ranks; micro_batch_tokens"),
        ("grpo", "--sapo_temperature_neg 1", "a loss of your own goes into loss_function"),
        ("dpo", "--ld_alpha 0.5", "Losses on pairs weight every token and pair alike"),
        ("dpo", "--max_completion_length 9", "Use --max-tokens: prompt and answer together"),
        ("kto", "--max_prompt_length 9", "Use --max-tokens: prompt and answer together"),
        ("kto", "--loss_type apo", "Stage kto learns KTO's loss alone; remove it"),
        ("kto", "--label_key l", "Use --columns: write label=COLUMN"),
        ("grpo", "--label_key l", "Use --scoring.answer-column: the column with a row's referen"),
        ("grpo", "--soft_punish_cache 9", "Use --grpo.overlong-penalty and --grpo.overlong-buffer"),
        ("sft", "--loss_type nll", "Use --sft.loss: nll or dft"),
        ("online-dpo", "--beta 0.1", "Use --dpo.beta: the same value"),
        ("grpo", "--critic.grad_clip 1", "It means --ppo.critic.max-grad-norm, and grpo has no"),
        ("grpo", "--critic_warmup 9", "It means --ppo.critic-warmup-steps, and grpo has no"),
        ("online-dpo", "--trainer.critic_warmup 9", "and online-dpo has no critic; remove it"),
        ("train", "--stages sft grpo --critic_warmup 9", "and grpo has no critic; remove it"),
        ("train", "--critic_warmup 9", "Use --ppo.critic-warmup-steps: rollouts that train the"),
        ("ppo", "--algorithm.kl_ctrl.target_kl 1", "Use --ppo.kl-coef-target: in nats per answer"),
        ("ppo", "--actor_rollout_ref.actor.clip_ratio_low 0.2", "Use --ppo.clip-ratio: the same"),
        ("grpo", "--actor_rollout_ref.actor.clip_ratio_low 0.2", "Use --grpo.clip-low: the same"),
        ("grpo", "--actor_rollout_ref.actor.ulysses_sequence_parallel_size 2", "Sequences are not"),
        ("sft", "--no_remove_unused_columns", "Reward functions get every column of a row; remove"),
        ("sft", "--no_cuda", "--no_cuda is not a flag of tandem sft. Use --device: write cpu"),
        ("sft", "--bf16 False", "Use --dtype: write bf16; auto is the default, false is fp32"),
        ("sft", "--no-load-in-8bit False", "Use --frozen-weights: write int8; it needs lora.rank"),
        ("sft", "--load_in_8bit", "Use --frozen-weights: write int8; it needs lora.rank"),
        ("ppo", "--critic_warmup 9", "Use --ppo.critic-warmup-steps: rollouts that train the"),
        ("online-dpo", "--learning_rate 1", "Did you mean --ppo.actor.learning-rate?"),
        ("grpo", "--batch-size 4", "Use --grpo.prompts-per-step and --grpo.minibatch-size: pro"),
        ("online-dpo", "--batch-size 4", "Use --ppo.prompts-per-step and --ppo.minibatch-size: pr"),
        ("sft", "--rope_scaling linear", "A model's rotary embeddings are those of its folder"),
        ("grpo", "use_wandb=False", "'use_wandb=False' belongs to no flag. Write --use_wandb"),
    ],
)  # fmt: skip
def test_a_flag_with_another_meaning_is_answered_with_the_right_one(
    command: str, flags: str, part: str
) -> None:
    assert part in refused(flags, command)


@pytest.mark.parametrize(
    "flags",
    [
        "--load_in_8bit False --load_in_4bit=false --fp16 False --use_peft off",
        "--no_load_in_8bit --no-fp16 --no_no_cuda",
        "--actor_rollout_ref.actor.fsdp_config.param_offload=False --trainer.critic_warmup 0",
        "--critic.model.fsdp_config.optimizer_offload False --whiten_rewards False",
        "--fp16 0.0 --critic_warmup=0.0 --use_peft 0. --freezing_actor_steps -1",
    ],
)
def test_a_flag_that_switches_off_what_is_off_anyway_is_read(flags: str) -> None:
    assert read(f"{flags} --seed 3", "ppo") == read("--seed 3", "ppo")


@pytest.mark.parametrize(
    "flags",
    [
        "--save_steps -1 --eval_steps -1 --top_k -1",
        "--ckpt.save_steps=-1 --trainer.test_freq -1 --actor_rollout_ref.rollout.top_k=-1",
    ],
)
def test_minus_one_switches_off_what_another_trainer_switches_off_by_it(flags: str) -> None:
    config, notes = read(flags, "grpo")
    assert (config.save_every, config.grpo.eval_every, config.sampling.top_k) == (0, 0, 0)
    assert "(0 or -1 saves only at the end of each stage)" in "; ".join(notes)
    assert "sampling.top_k must be >= 0; got -1" in refused("--sampling.top-k -1")


@pytest.mark.parametrize(
    ("stage", "knob"),
    [("ppo", "ppo"), ("grpo", "grpo"), ("online-dpo", "ppo"), ("distill", "grpo")],
)
def test_no_limit_of_steps_where_steps_are_rollouts_is_told_how_to_write(
    stage: str, knob: str, tmp_path: Path
) -> None:
    """0 is one pass over the prompts; other trainers' -1 may be several, so it is not read."""
    several = "rollouts, each with several optimizer steps"
    told = f"Use --{knob}-steps: {several}; 0, for -1, makes one pass over the prompts"
    assert told in refused("--max_steps -1", stage)
    teacher = "--reference-model teacher " * (stage == "distill")
    assert getattr(read(f"{teacher}--{knob}-steps 0", stage)[0], knob).steps == 0
    file = tmp_path / "run.yaml"
    file.write_text(f"{knob}: {{max_steps: -1}}\n")
    assert "; 0, for -1, makes one pass" in refused(f"--config {file}", stage)


def test_minus_one_in_a_file_is_off_too(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("save_steps: -1\ntop_k: -1\nfp16: 0.0\nsft: {epochs: 2.0}\nmax_steps: -1\n")
    config, _ = read(f"--config {file}", "sft")
    assert (config.save_every, config.sampling.top_k, config.sft.max_steps) == (0, 0, 0)
    file.write_text("sampling: {top_k: -1}\n")
    assert "sampling.top_k must be >= 0; got -1" in refused(f"--config {file}", "sft")


def test_a_key_that_switches_off_what_is_off_anyway_is_read(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("load_in_8bit: false\nload_in_4bit: true\nsft: {fp16: false}\n")
    said = refused(f"--config {file}", "sft")
    assert said.startswith(f"{file}: load_in_4bit is not a knob. Use parallel.frozen_weights: ")
    assert "load_in_8bit" not in said
    assert "fp16" not in said


def test_what_may_be_off_is_a_name_with_an_answer_and_no_knob() -> None:
    for name in OFF_ANYWAY:
        assert conversion(name) or name in CONVERSIONS
        assert not knob_meant(name, KNOWN)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"bf16": True}, "bf16 is not a knob. Use dtype: write bf16"),
        ({"ppo": {"num_train_epochs": 1}}, "ppo.num_train_epochs is not a knob. Use ppo.steps: ro"),
        ({"dpo": {"per_device_train_batch_size": 1}}, "Use dpo.batch_size: the whole batch"),
        ({"max_steps": 1}, "dpo.max_steps or kto.max_steps? In ppo use ppo.steps: rollouts"),
        ({"sft": {"save_steps": 1}}, "sft.save_steps is not a knob. Did you mean save_every?"),
        ({"warmup_ratio": 0.1}, "Did you mean sft.warmup, reward.warmup, dpo.warmup, kto.warmup"),
        ({"num_generations": 4, "sampling": {"samples_per_prompt": 2}},
         "num_generations must not be given with sampling.samples_per_prompt, the same knob"),
        ({"epsilon": 0.1, "cliprange": 0.2}, "cliprange must not be given with ppo.clip_ratio"),
        ({"ppo": {"target_kl": 0.1, "early_stop_kl": 0.2}}, "ppo.target_kl must not be given with"),
        ({"num_generations": 4, "sampling": 3}, "sampling must be a mapping of knobs; got 3"),
        ({"num_generations": "x"}, "sampling.samples_per_prompt must be a whole number; got 'x'"),
    ],
)  # fmt: skip
def test_a_key_with_another_meaning_or_given_twice_is_refused(
    values: dict[str, Any], part: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        build_config(values, note=lambda line: None)
    assert part in str(raised.value)


LLAMA_FACTORY = """
model_name_or_path: m
stage: sft
finetuning_type: lora
dataset: alpaca
template: qwen
learning_rate: 1.0e-4
num_train_epochs: 2.0
lr_scheduler_type: linear
warmup_ratio: 0.1
bf16: true
quite_unknown: 1
also_unknown: 2
"""


def test_another_trainers_file_is_read_and_answered_as_its_flags_are(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(LLAMA_FACTORY)
    said = refused(f"--config {file}", "sft")
    assert said.count(str(file)) == 1
    assert said.count("Known here: actor_model, ") == 1
    assert "quite_unknown, also_unknown are not knobs. Known here" in said
    for part in (
        "stage is not a knob. The command is the stage: tandem sft",
        "finetuning_type is not a knob. Use lora.rank: above 0 is lora, 0 is full",
        "dataset must be a mapping of knobs; got 'alpaca'. Use data: files or hub names",
        "template is not a knob. Use dataset.chat_template: a Jinja file",
        "bf16 is not a knob. Use dtype",
    ):
        assert part in said
    wrong = ("stage:", "finetuning", "dataset", "template", "bf16", "quite", "also")
    lines = [line for line in LLAMA_FACTORY.splitlines() if not line.startswith(wrong)]
    file.write_text("\n".join(lines))
    config, notes = read(f"--config {file}", "sft")
    assert (config.sft.learning_rate, config.sft.epochs) == (1e-4, 2.0)
    assert (config.sft.schedule, config.sft.warmup) == ("linear", 0.1)
    assert len(notes) == 1
    assert read(f"--config {file} --sft.epochs 3", "sft")[0].sft.epochs == 3
    config, _ = read(f"--config {file}", "dpo")
    assert (config.dpo.learning_rate, config.sft.learning_rate) == (1e-4, 2e-5)
    assert "Did you mean sft.learning_rate, reward.learning_rate, " in refused(f"--config {file}")


AXOLOTL = """
base_model: m
model_type: AutoModelForCausalLM
datasets:
  - path: alpaca
    type: alpaca
test_datasets: [a]
val_set_size: 0.1
adapter: lora
sequence_len: 2048
sample_packing: true
lora_target_linear: true
micro_batch_size: 2
train_on_inputs: false
train_on_eos: turn
evals_per_epoch: 4
rl: dpo
"""


def test_axolotls_file_is_answered_without_guesses(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(AXOLOTL)
    said = refused(f"--config {file}", "sft")
    for part in (
        "base_model is not a knob. Did you mean actor_model?",
        "model_type is not a knob. The model's folder says which classes read it",
        "test_datasets is not a knob. Use eval_data: files",
        "; datasets is not a knob. Use data: files or hub names, as NAME@",
        "val_set_size is not a knob. Use dataset.heldout: a share of all rows",
        "adapter is not a knob. Use lora.rank: above 0 is lora",
        "sample_packing is not a knob. Batches are always packed",
        "lora_target_linear is not a knob. Use lora.targets: all-linear, the default",
        "micro_batch_size is not a knob. Use sft.batch_size: the whole batch, so the size per",
        "train_on_inputs is not a knob. Use sft.loss_on: assistant",
        "train_on_eos is not a knob. The token that ends an answer is always learned",
        "evals_per_epoch is not a knob. Use sft.eval_every: steps",
        "rl is not a knob. The command is the stage",
    ):
        assert part in said
    assert said.count("Did you mean") == 1
    assert "Known here" not in said
    file.write_text("sequence_len: 2048")
    assert read(f"--config {file}", "sft")[0].dataset.max_tokens == 2048
    file.write_text("sample_packing: true\npad_to_sequence_len: true\n")
    assert "sample_packing, pad_to_sequence_len are not knobs. Batches are" in refused(
        f"--config {file}", "sft"
    )
    file.write_text("wandb_project:\nearly_stopping_patience:\ndeepspeed:\nfsdp:\ndebug_it:\n")
    said = refused(f"--config {file}", "sft")
    assert "debug_it is not a knob" in said
    assert "wandb_project" not in said
    file.write_text("wandb_project:\nearly_stopping_patience:\ndeepspeed:\nfsdp:\nseed: 3\n")
    assert read(f"--config {file}", "sft")[0].seed == 3
    file.write_text("log: {wandb: }\n")
    assert "log.wandb must be text; got None" in refused(f"--config {file}", "sft")


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("online-dpo", "beta is not a knob. Use dpo.beta: the same value"),
        ("ppo", "beta is not a knob. Use ppo.kl_coef: together with"),
        ("distill", "beta is not a knob. Use grpo.kl and grpo.kl_coef: "),
    ],
)
def test_a_name_in_a_file_means_what_it_does_for_the_command(
    command: str, part: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("beta: 0.1\n")
    said = refused(f"--config {file}", command)
    assert part in said
    assert ("kl_coef" in said) == (command != "online-dpo")


def test_verls_file_is_read_and_answered_as_its_arguments_are(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text(
        "data: {train_files: a.parquet, quite_unknown: i}\n"
        "actor_rollout_ref:\n"
        "  actor: {kl_loss_coef: 0.1, optim: {lr: 1e-6}}\n"
        "trainer: {nnodes: 2, save_freq: 9}\n"
    )
    said = refused(f"--config {file}", "grpo")
    for part in (
        "actor_rollout_ref.actor.kl_loss_coef is not a knob. Use grpo.kl and grpo.kl_coef: ",
        "trainer.nnodes is not a knob. Use --num-nodes",
        "data.quite_unknown is not a knob. Known here: ",
    ):
        assert part in said
    file.write_text(
        "data: {train_files: a.parquet}\nactor_rollout_ref: {actor: {optim: {lr: 1e-6}}}\n"
    )
    config, _ = read(f"--config {file}", "grpo")
    assert config.data == ("a.parquet",)
    assert config.grpo.actor.learning_rate == 1e-6


SFT_BY_OPENRLHF = """
--data.max_len 4096 --data.dataset a.jsonl --train.batch_size 256 --actor.model_name_or_path m
--ckpt.output_dir runs/sft --ckpt.save_steps 9 --ds.param_dtype bf16 --train.max_epochs 1
--adam.lr 5e-6 --adam.betas 0.9 0.95 --eval.steps 7 --train.seed 7 --ds.lora.rank 8
--model.gradient_checkpointing_enable --lr_warmup_ratio 0.03 --max_norm 2
"""


def test_openrlhfs_sft_command_is_read() -> None:
    config, notes = read(SFT_BY_OPENRLHF, "sft")
    assert (config.actor_model, config.data, config.output_dir) == ("m", ("a.jsonl",), "runs/sft")
    assert (config.dtype, config.seed, config.save_every, config.lora.rank) == ("bf16", 7, 9, 8)
    assert config.dataset.max_tokens == 4096
    sft = config.sft
    assert (sft.learning_rate, sft.batch_size, sft.epochs, sft.eval_every) == (5e-6, 256, 1.0, 7)
    assert (sft.betas, sft.warmup, sft.max_grad_norm) == ((0.9, 0.95), 0.03, 2.0)
    assert config.gradient_checkpointing
    assert "--adam.lr is read as --sft.learning-rate" in notes[0]


PPO_BY_OPENRLHF = """
--actor.model_name_or_path m --reward.model_name_or_path r --critic.model_name_or_path c
--ref.model_name_or_path f --ckpt.output_dir runs/ppo --train.batch_size 128 --train.max_epochs 2
--rollout.n_samples_per_prompt 4 --actor.adam.lr 5e-7 --critic.adam.lr 9e-6
--critic.adam.betas 0.9 0.95 --actor.lr_warmup_ratio 0.1 --algo.kl.init_coef 0.02
--data.prompt_dataset a.jsonl --rollout.max_new_tokens 64 --actor.eps_clip 0.1
--algo.advantage.lambd 0.9
"""


def test_openrlhfs_ppo_command_is_read_and_what_differs_answered() -> None:
    config, _ = read(PPO_BY_OPENRLHF, "ppo")
    assert (config.actor_model, config.reward_model, config.critic_model) == ("m", "r", "c")
    assert (config.reference_model, config.output_dir) == ("f", "runs/ppo")
    ppo = config.ppo
    assert (ppo.minibatch_size, ppo.epochs, ppo.kl_coef, ppo.lam) == (128, 2, 0.02, 0.9)
    assert (ppo.actor.learning_rate, ppo.critic.learning_rate) == (5e-7, 9e-6)
    assert (ppo.critic.betas, ppo.actor.warmup, ppo.clip_ratio) == ((0.9, 0.95), 0.1, 0.1)
    assert config.sampling.samples_per_prompt == 4
    assert read("--reward.remote_url http://h:1/x", "ppo")[0].ppo.reward_function
    said = refused(
        "--ref.num_nodes 1 --vllm.num_engines 4 --rollout.batch_size 1024 --ref.offload "
        "--reward.normalize_enable --reward.clip_range -5 5 --train.colocate_all --muon.lr 1 "
        "--algo.advantage.estimator group_norm --logger.wandb.key k --train.micro_batch_size 1",
        "ppo",
    )
    for part in (
        "--ref.num_nodes is not a flag of tandem ppo. All models share all ranks",
        "--vllm.num_engines is not a flag of tandem ppo. Tandem generates on the training weights",
        "--rollout.batch_size is not a flag of tandem ppo. Use --ppo.prompts-per-step",
        "Use --parallel.offload: write reference",
        "Scores of a reward model are normalized",
        "Use --ppo.reward-clip: one bound for both sides",
        "Use --grpo.algorithm: gae is the stage ppo",
        "Use --log.wandb: a project's name",
        "Use --micro-batch-tokens: tokens per forward",
    ):
        assert part in said
    assert "Did you mean" not in said


@pytest.mark.parametrize(("table", "command"), [(OPENRLHF, "ppo"), (VERL, "ppo"), (VERL, "grpo")])
def test_every_dotted_name_is_read_or_answered(table: dict[str, Any], command: str) -> None:
    for name in table:
        if not knob_meant(name, KNOWN, command):
            assert "See tandem" not in refused(f"--{name} 1", command)


def test_a_configuration_saved_under_earlier_names_is_read_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = plain_values(RunConfig())
    values["steps"] = values.pop("stages")
    for old, new in RENAMED.items():
        if "." not in new:
            continue
        section, _, knob = new.rpartition(".")
        values[section][old.rpartition(".")[2]] = values[section].pop(knob) + 0.5
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    config = load_config(file)
    assert (config.ppo.kl_coef_target, config.ppo.early_stop_kl) == (0.5, 0.6)
    assert capsys.readouterr().err == (
        f"note: {file}: ppo.kl_target is now ppo.kl_coef_target; "
        "ppo.target_kl is now ppo.early_stop_kl; steps is now stages\n"
    )
    monkeypatch.setenv("RANK", "1")  # the first rank has said it
    load_config(file)
    assert not capsys.readouterr().err


def test_the_note_on_trl_s_moving_reference_tells_the_rate_that_the_run_has() -> None:
    config, (note,) = read("--ref_model_sync_steps 64 --dpo.loss sigmoid", "dpo")
    assert config.reference.update_every == 64
    assert f"reference.update_rate is {config.reference.update_rate:g} by default" in note
    config, (*_, note) = read("--ref_model_sync_steps 64 --ref_model_mixup_alpha 0.6", "dpo")
    assert config.reference.update_rate == 0.6
    assert "1 by default, where TRL's is 0.6" in note


def test_flags_and_file_share_one_note_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("num_generations: 2\n")
    config, notes = read(f"--config {file} --num_generations 4")
    assert config.sampling.samples_per_prompt == 4
    assert len(notes) == 1
    assert notes[0].split("; ") == [
        "--num_generations is read as --sampling.samples-per-prompt",
        f"{file}: num_generations is read as sampling.samples_per_prompt",
    ]


def test_an_unknown_flag_takes_all_its_values() -> None:
    said = refused("--reward_funcs think_format_reward accuracy_reward --no_such a b c=d", "grpo")
    assert "Use --reward-function: functions" in said
    assert "accuracy_reward" not in said
    assert "'b'" not in said
    assert "'c=d' belongs to no flag" in said


def test_what_axolotls_file_has_for_trl_is_answered(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trl: {num_generations: 4, use_vllm: true}\nvllm: {port: 8000}\n")
    said = refused(f"--config {file}", "grpo")
    assert "use_vllm, vllm are not knobs. Tandem generates on the training weights" in said
    file.write_text("trl: {num_generations: 4}\nr: 8\nrandom_state: 7\n")
    config, _ = read(f"--config {file}", "grpo")
    assert (config.sampling.samples_per_prompt, config.lora.rank, config.seed) == (4, 8, 7)


def test_an_unknown_flag_hides_no_wrong_value_beside_it() -> None:
    said = refused("--bf16 --num_generations many --sed 3 --ppo.gamma 2 --no-such-thing 1")
    for part in (
        "Use --dtype: write bf16",
        "sampling.samples_per_prompt must be a whole number; got 'many'",
        "Did you mean --seed?",
        "ppo.gamma must be >= 0 and <= 1; got 2.0",
        "--no-such-thing is not a flag",
    ):
        assert part in said


def test_the_tables_name_knobs_that_there_are_and_hide_none() -> None:
    for name, (ends, _) in ALIASES.items():
        assert alias_knobs(name, KNOWN), name
        assert ending(ends, KNOWN), name
    for name, (ends, advice) in CONVERSIONS.items():
        assert advice, name
        assert all(ending(end, KNOWN) for end in ends.split() if end != "and"), name
        assert name not in ALIASES, name
    for name, use in {**VERL, **OPENRLHF}.items():
        if isinstance(use, str):
            dotted = [known for known in CONVERSIONS if known.endswith(f".{use}")]
            assert use in {*ALIASES, *CONVERSIONS} or dotted or exact_knobs(name, KNOWN), name
        else:
            assert all(ending(end, KNOWN) for end in use[0].split()), name
            assert use[1], name
    for old, new in RENAMED.items():
        assert old not in KNOWN
        assert new in KNOWN
        assert knob_meant(old, KNOWN) == knob_meant(old.rpartition(".")[2], KNOWN) == new
    assert knob_types().keys().isdisjoint({*ALIASES, *CONVERSIONS, *RENAMED})
    short = {name.replace("-", "_"): knob for knob, name in SHORT_NAMES.items()}
    for name in ALIASES.keys() & short.keys():
        assert alias_knobs(name, KNOWN) == [short[name]]


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--offload_reference_model", "Use --offload: write reference"),
        ("--unsup_coef 27.8", "Use --ptx-coef: it weights a mean per token"),
        ("--actor_lora_dim 8", "Use --lora-rank: of reward model and critic too"),
        ("--per_device_generation_batch_size 4", "Use --ppo.prompts-per-step: prompts of a whole"),
        ("--per_device_training_batch_size 4", "Use --ppo.minibatch-size: answers per optimizer"),
        ("--num_padding_at_beginning 1", "Masks say what is padding, for OPT too; remove it"),
        ("--print_answers", "Use --log.print-samples-every: 1 shows answers of each step"),
        ("--step 1 2 3", "names, as sft reward ppo for 1 2 3"),
    ],
)
def test_names_of_deepspeed_chat_are_answered(flags: str, part: str) -> None:
    said = refused(flags)
    assert part in said
    assert "Did you mean" not in said


@pytest.mark.parametrize("command", ["train", "sft", "reward", "dpo", "ppo"])
def test_every_name_is_read_or_answered_by_every_command(command: str) -> None:
    """None falls through to a guess by its letters."""
    section = "" if command == "train" else command
    ours = {name.replace("-", "_") for name in SHORT_NAMES.values()}
    for name in {*ALIASES, *(name for name in CONVERSIONS if "." not in name)} - ours:
        if knob_meant(name, KNOWN, section):
            continue
        said = refused(f"--{name} 1", command)
        answer = CONVERSIONS.get(f"{section}.{name}") or CONVERSIONS.get(name)
        if answer is not None:
            assert answer[1].rstrip(".") in said
        else:
            knobs = alias_knobs(name, KNOWN)
            flags = [SHORT_NAMES.get(knob, knob.replace("_", "-")) for knob in knobs]
            assert any(f"--{flag}" in said for flag in flags), said
