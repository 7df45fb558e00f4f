"""Every knob, once: its type, default, range, one sentence, and where the default comes from.

No torch here: help and config errors must come at once. `tandem.config.load` reads and writes
these as YAML and checks them; `docs/config.md` is generated from this file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from tandem.config.knob import RL, STEPS, SUPERVISED, at_home, knob, require_sections
from tandem.config.optimizer import OptimizerConfig, SupervisedConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.preferences import DPOConfig, KTOConfig
from tandem.config.stages import DEFAULT, stage_names
from tandem.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How rows become what each step trains on."""

    split: tuple[float, ...] = knob((), common=True)
    """Shares of the prompts for SFT, reward model and PPO (DPO uses the reward model's share), kept
    for steps that run later too. None given: 2,4,4 (DeepSpeed-Chat's) among the steps that run, so
    that one alone takes all; in a folder whose steps were dealt shares before, those."""
    heldout: float = knob(0.05, ge=0, lt=1)
    """Share of the prompts kept out of every step, to measure on."""
    columns: tuple[str, ...] = knob(())
    """Column map for files of other shapes, as `role=column` (roles: prompt, chosen, rejected,
    completion, messages, text, system, label, margin, ranking, answers, ranks);
    `file.jsonl::prompt=question,completion=answer` behind a data set's name maps that one alone."""
    on_bad_row: Literal["error", "drop"] = knob("error", common=True)
    """A row that cannot be used: stop with its file and line, or drop it, counted by reason."""
    max_tokens: int = knob(512, ge=8, common=("train", *SUPERVISED))
    """Longest sequence (prompt and answer) in steps 1 and 2, in tokens."""
    max_prompt_tokens: int = knob(256, ge=1, common=RL)
    """Longest prompt in step 3, in tokens."""
    on_long_row: Literal["drop", "truncate", "error"] = knob("drop")
    """A row over the limit: drop it (counted), truncate the answer's end or the prompt's oldest
    turns (counted; a row whose answer would vanish is dropped), or stop."""
    system_prompt: str = knob("")
    """Put before every conversation that brings no system turn of its own."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (arXiv:2106.09685). Rank 0 trains the whole model."""

    rank: int = knob(0, ge=0, common=True)
    """Rank of the adapters; 0 turns LoRA off."""
    alpha: float = knob(16.0, gt=0)
    """The update is scaled by alpha / rank."""
    dropout: float = knob(0.0, ge=0, lt=1)
    """Dropout on the adapters' input. Off by default: PPO needs the same policy twice."""
    targets: tuple[str, ...] = knob(("all-linear",))
    """Which linear layers: `all-linear` (but not the vocabulary head), or endings of names."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig(SupervisedConfig):
    """Step 1, supervised fine-tuning."""

    learning_rate: float = knob(2e-5, gt=0, common=STEPS)
    """Peak learning rate of full weights."""
    loss_on: Literal["assistant", "all"] = knob("assistant")
    """Learn from the assistant's tokens only, or from every token. Plain text rows always count
    whole. DeepSpeed-Chat trains on prompts too, which teaches the model to write the user."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig(SupervisedConfig):
    """Step 2, the reward model: Bradley-Terry on the score at the last real token."""

    learning_rate: float = knob(1e-5, gt=0, common=STEPS)
    """Peak learning rate of full weights."""
    center_coef: float = knob(0.0, ge=0)
    """Weight of (chosen + rejected)^2, which keeps raw scores near zero (arXiv:2312.09244, which
    takes 0.01). Off: scores are normalized afterwards anyway, and it cost accuracy (LOG.md)."""
    normalize_prompts: int = knob(128, ge=0)
    """The score is normalized to mean 0 and sd 1 on the SFT policy's answers to this many of
    step 3's prompts (of its own where step 3 has no share); 0 leaves it raw."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How answers are drawn. The defaults sample from the policy itself, untruncated: then what
    PPO updates is the distribution that acted."""

    temperature: float = knob(1.0, gt=0, common=("rl",))
    """Logits are divided by this; PPO's log-probs are at the same temperature."""
    top_p: float = knob(1.0, gt=0, le=1)
    """Draw from the smallest set of tokens with this much probability; 1 is off."""
    top_k: int = knob(0, ge=0)
    """Draw from the k likeliest tokens; 0 is off."""
    min_p: float = knob(0.0, ge=0, lt=1)
    """Draw from tokens at least this share as likely as the likeliest (arXiv:2407.01082); 0 is
    off."""
    repetition_penalty: float = knob(1.0, gt=0)
    """Divide a positive logit of a token that occurred in prompt or answer by this, multiply a
    negative one (arXiv:1909.05858); 1 is off."""
    presence_penalty: float = knob(0.0)
    """Taken from the logit of each token that the answer has already."""
    frequency_penalty: float = knob(0.0)
    """Taken from a token's logit as often as the answer has it already."""
    logit_bias: tuple[str, ...] = knob(())
    """Added to logits, as TOKEN_ID:BIAS each; -100 forbids a token."""
    stop_strings: tuple[str, ...] = knob(())
    """Texts that end an answer; the text is cut before them, the tokens stay as sampled."""
    max_new_tokens: int = knob(128, ge=1, common=RL)
    """Longest answer, in tokens."""
    min_new_tokens: int = knob(0, ge=0)
    """Stop tokens cannot be drawn before this many tokens."""
    samples_per_prompt: int = knob(1, ge=1, common=("rl",))
    """Answers drawn per prompt in step 3."""

    def logit_biases(self) -> dict[int, float]:
        """`logit_bias` by token id.

        Raises:
            ConfigError: an entry that is not ID:BIAS.
        """
        biases: dict[int, float] = {}
        for entry in self.logit_bias:
            token_id, _, bias = entry.partition(":")
            try:
                biases[int(token_id)] = float(bias)
                if int(token_id) < 0 or math.isnan(float(bias)):
                    raise ValueError
            except ValueError:
                raise ConfigError(
                    "sampling.logit_bias must list ID:BIAS, a token's id and a number; got "
                    f"{entry!r}. Use e.g. 50256:-5."
                ) from None
        return biases


@dataclass(frozen=True, kw_only=True)
class ActorOptimizerConfig(OptimizerConfig):
    """The actor's optimizer in step 3."""

    learning_rate: float = knob(1e-6, gt=0, common=STEPS)
    """Peak learning rate of full weights."""
    lora_learning_rate: float = knob(1e-4, gt=0, common=("rl",))
    """Peak learning rate of adapters."""


@dataclass(frozen=True, kw_only=True)
class CriticOptimizerConfig(OptimizerConfig):
    """The critic's optimizer in step 3. It must follow the actor's changing returns, so its rate
    is about ten times the actor's (OpenRLHF: 9e-6 beside 5e-7)."""

    learning_rate: float = knob(1e-5, gt=0, common=STEPS)
    """Peak learning rate of full weights."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Step 3, PPO (arXiv:1707.06347, arXiv:2203.02155)."""

    steps: int = knob(200, ge=0, common=RL)
    """Rollouts to make, each followed by its updates; 0 makes one pass over the prompts."""
    prompts_per_step: int = knob(64, ge=1, common=("rl",))
    """Prompts per rollout (times sampling.samples_per_prompt answers)."""
    epochs: int = knob(2, ge=1, common=("rl",))
    """Passes over each rollout's experience."""
    minibatch_size: int = knob(32, ge=1, common=("rl",))
    """Answers per optimizer step."""
    actor: ActorOptimizerConfig = field(default_factory=ActorOptimizerConfig)
    critic: CriticOptimizerConfig = field(default_factory=CriticOptimizerConfig)
    critic_warmup_steps: int = knob(0, ge=0)
    """Rollouts that train the critic alone, before the actor moves."""
    clip_ratio: float = knob(0.2, gt=0)
    """The policy ratio counts only within 1 +- this (PPO's epsilon)."""
    value_clip: float = knob(0.2, ge=0)
    """The value may move this far from its old value per rollout; 0 turns the clip off."""
    gamma: float = knob(1.0, ge=0, le=1)
    """Discount per token. 1: an answer is one episode and its length must not change its worth."""
    lam: float = knob(0.95, ge=0, le=1)
    """GAE's lambda: 1 is the return minus the value, lower trusts the critic more. A reward at the
    end of n tokens reaches the first with weight lam^n while the critic is untrained: take 1 for
    long answers and short runs."""
    whiten_advantages: bool = knob(True)
    """Advantages get mean 0 and sd 1 over all response tokens of the rollout; without this,
    several epochs per rollout are unstable."""
    kl_coef: float = knob(0.05, ge=0, common=RL)
    """Weight of the KL penalty to the reference."""
    kl_in: Literal["reward", "loss"] = knob("reward")
    """Subtract the KL from each token's reward (InstructGPT), or add it to the loss (GRPO)."""
    kl_estimator: Literal["auto", "k1", "k2", "k3"] = knob("auto")
    """Per-token estimator: k1 = log-ratio (the one with the right gradient in the reward), k2 =
    half its square (right in the loss), k3 = ratio - 1 - log-ratio (low variance, positive).
    auto: k1 in the reward, k2 in the loss."""
    kl_coef_target: float = knob(0.0, ge=0)
    """KL per answer, in nats, that kl_coef is steered to (arXiv:1909.08593); 0 keeps it fixed."""
    kl_horizon: int = knob(10_000, ge=1)
    """Answers over which the adaptive coefficient may change by a factor of about e^0.2."""
    reward_clip: float = knob(10.0, ge=0)
    """Scores are clipped to +- this, after normalization; 0 is off. Clipped ones are counted."""
    missing_eos_penalty: float = knob(1.0, ge=0)
    """Taken from the score of an answer that the length limit cut."""
    entropy_coef: float = knob(0.0, ge=0)
    """Weight of the policy's entropy, which is added to the objective."""
    early_stop_kl: float = knob(0.1, ge=0)
    """Leave the rest of a rollout's epochs when the KL from the policy that sampled it, in nats
    per token, passes this; 0 is off."""
    reward_model_weight: float = knob(1.0, ge=0)
    """Weight of the reward model's normalized score."""
    reward_function: str = knob("", common=RL, path=True)
    """A Python function `file.py:name` or `package.module:name` called as
    f(prompts, completions, **columns) -> list[float | None]; alone, or beside the model."""
    reward_function_weight: float = knob(1.0)
    """Weight of the reward function's number."""
    ema: bool = knob(False, common=RL)
    """Keep an fp32 moving average of the actor, save it and evaluate it beside the actor."""
    ema_decay: float = knob(0.992, gt=0, lt=1)
    """Share of the average kept per optimizer step (DeepSpeed-Chat's value)."""
    ptx_data: tuple[str, ...] = knob((), path=True)
    """Text or SFT data whose language-model loss joins the actor's gradient (mixture training)."""
    ptx_coef: float = knob(0.5, ge=0)
    """Weight of that loss, a mean per token. InstructGPT's 27.8 is for a per-answer sum."""
    ptx_batch_size: int = knob(16, ge=1)
    """Rows of it per optimizer step."""
    old_logprobs: Literal["auto", "sampler", "forward"] = knob("auto")
    """Where the log-probs before the update come from: the sampler kept them (saves the actor's
    scoring forward), or a forward pass recomputes them. auto: the sampler's, if a self-test at the
    start finds them equal to the training forward's (within 1e-5 nats in the mean)."""
    ratio_tolerance: float = knob(0.0, ge=0)
    """How far the mean |log-ratio| before the first update may be from 0; 0 chooses 1e-4 in fp32
    and 3e-2 in bf16. Beyond it the run stops: two forwards of the same policy disagree."""
    eval_every: int = knob(20, ge=0)
    """Score answers to held-out prompts every this many steps, and at both ends; 0: only then."""
    eval_prompts: int = knob(64, ge=0)
    """Held-out prompts used for that."""

    def __post_init__(self) -> None:
        require_sections(self)
        at_home(self)


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """When a step is left out for the numbers that it brings, and when that ends the run."""

    spike_sigma: float = knob(6.0, ge=0)
    """Skip an update whose gradient norm is this many standard deviations above the last 100
    (of its logarithm); 0 takes any that is finite. One that is not finite is always left out."""
    max_skipped: int = knob(5, ge=0)
    """Steps in a row that may be left out; one more ends the run."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a run shows and keeps."""

    tensorboard: bool = knob(True)
    """Write TensorBoard event files too."""
    wandb: str = knob("")
    """Weights & Biases project to log to as well (needs `pip install wandb`); empty is off."""
    print_samples_every: int = knob(10, ge=0)
    """Print a prompt and its answers every this many steps of step 3; 0: never."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: a model, data, and the steps between them and an assistant."""

    actor_model: str = knob("", common=True, path=True)
    """Folder or hub name of the pretrained language model."""
    reward_model: str = knob("", common=("train", "critic"), path=True)
    """Folder or hub name of the model that step 2 turns into a reward model (step 3 alone: the
    reward model itself). Empty: the SFT model of step 1."""
    data: tuple[str, ...] = knob((), common=True, path=True)
    """Data sets as FILE_OR_NAME[:weight]; a weight of 2 counts a set's rows twice per epoch, 0.5
    every other row. `embedded` is the built-in one."""
    sft_data: tuple[str, ...] = knob((), common=("train", "supervised"), path=True)
    """Data sets for step 1 alone."""
    output_dir: str = knob("runs/default", common=True, path=True)
    """The run's folder. The same command again continues there."""
    steps: tuple[str, ...] = knob(DEFAULT, common=("train",), choices=stage_names)
    """Which steps to run, in this order. `sft dpo` is the way without a reward model."""
    seed: int = knob(1234, ge=0, le=2**53, common=True)
    """Seeds the split, the order of rows, new weights and every sampled token."""
    device: Literal["auto", "cpu", "cuda"] = knob("auto", common=True)
    """Where to run; auto takes a GPU if there is one."""
    save_dtype: Literal["auto", "fp32", "bf16", "fp16"] = knob("auto")
    """Type of the weights in finished models' folders; auto: that of the checkpoint they started
    from. Unfinished steps always keep float32 masters."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = knob("auto", common=True)
    """Compute type, in which the weights of every model rest; the optimizer keeps fp32 masters and
    adds gradients up in fp32. auto: bf16 on a GPU, else fp32. fp16 scales its losses dynamically; a
    step that overflows is skipped, for all models, and counted."""
    micro_batch_tokens: int = knob(8192, ge=1)
    """Tokens per forward and backward; gradients do not depend on it, memory does."""
    halve_micro_batches: bool = knob(False, common=True)
    """Where memory runs out, go on with micro-batches of half as many tokens; the gradient is the
    same. At one rank."""
    hybrid_engine: bool = knob(True, common=RL)
    """Generate experience by Tandem's engine on the training weights; off, through Hugging Face's
    `generate` on the same weights: slower, to compare with."""
    generation_batch_size: int = knob(64, ge=1)
    """Most answers that are generated side by side; fewer where their logits would take more than
    64 MiB (512 MiB on a GPU). TRL's knob of this name is a rollout's size: here
    ppo.prompts_per_step * sampling.samples_per_prompt."""
    gradient_checkpointing: bool = knob(False, common=True)
    """Recompute activations in the backward pass: less memory, about a third more time."""
    dropout: float = knob(0.0, ge=0, lt=1)
    """Dropout of the trained models. Off: PPO compares two forwards of one policy."""
    trust_remote_code: bool = knob(False)
    """Let a model's folder bring its own Python code. Read that code first."""
    save_every: int = knob(50, ge=0, common=True)
    """Save a checkpoint every this many steps, to resume from; 0: only at each step's end."""
    keep_checkpoints: int = knob(2, ge=2)
    """Checkpoints kept per step; never fewer than two, so that one can be damaged."""
    save_async: bool = knob(True)
    """Write checkpoints beside the training, from a copy in host memory; off, the training waits
    and nothing is copied."""
    dataset: DataConfig = field(default_factory=DataConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    dpo: DPOConfig = field(default_factory=DPOConfig)
    kto: KTOConfig = field(default_factory=KTOConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    guards: GuardConfig = field(default_factory=GuardConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        require_sections(self)
        at_home(self)


def num_updates(config: RunConfig, num_steps: int) -> int:
    """Optimizer steps of `num_steps` steps of PPO (rollouts), if none stops early."""
    answers = config.ppo.prompts_per_step * config.sampling.samples_per_prompt
    return num_steps * config.ppo.epochs * -(-answers // config.ppo.minibatch_size)
