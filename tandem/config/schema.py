"""Every knob, once: its type, default, range, one sentence, and where the default comes from.

No torch here: help and config errors must be instant. `tandem.config.load` reads and writes
these as YAML and checks them; `docs/config.md` is generated from this file.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Literal

from tandem.config.dataset import DataConfig
from tandem.config.grpo import CriticFreeConfig
from tandem.config.guards import GuardConfig, LogConfig
from tandem.config.knob import RL, STEPS, UNSET, Unset, at_home, knob, require_sections
from tandem.config.lora import LoraConfig
from tandem.config.moving_reference import ReferenceConfig
from tandem.config.optimizer import OptimizerConfig, SupervisedConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.preferences import DPOConfig, KTOConfig
from tandem.config.reward import RewardConfig
from tandem.config.scoring import ScoringConfig
from tandem.config.stages import DEFAULT, rl_stage, stage_names
from tandem.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SFTConfig(SupervisedConfig):
    """Stage 1, supervised fine-tuning."""

    learning_rate: float = knob(2e-5, gt=0, common=STEPS)
    """Peak learning rate of full weights. The default is for billions of parameters; 135M took 1e-4
    well (docs/real_runs.md)."""
    loss_on: Literal["assistant", "all"] = knob("assistant")
    """Train on the assistant's tokens only, or on every token. Plain text rows always train on
    every token. DeepSpeed-Chat trains on prompts too, which teaches the model to write the user's
    turns."""
    loss: Literal["nll", "dft"] = knob("nll")
    """nll: -log p of every token. dft (arXiv:2508.05629): that times p, as a constant, so that
    tokens which the model finds unlikely pull less."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How answers are sampled. By default from the policy itself, untruncated, so that PPO updates
    the very distribution that it sampled from. What a model has beyond its tokenizer is never
    drawn."""

    temperature: float = knob(1.0, ge=1e-4, common=("rl",))
    """Logits are divided by this; PPO's log-probs use the same temperature."""
    top_p: float = knob(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this total probability; 1 is off."""
    top_k: int = knob(0, ge=0)
    """Sample from the k most likely tokens; 0 is off."""
    min_p: float = knob(0.0, ge=0, lt=1)
    """Sample from tokens whose probability is at least this share of the most likely one's
    (arXiv:2407.01082); 0 is off."""
    repetition_penalty: float = knob(1.0, gt=0)
    """Logits of tokens that occurred in the prompt or the answer are divided by this if positive,
    multiplied if negative (arXiv:1909.05858); 1 is off."""
    presence_penalty: float = knob(0.0)
    """Subtracted from the logit of each token that is already in the answer."""
    frequency_penalty: float = knob(0.0)
    """Subtracted from a token's logit once per occurrence in the answer."""
    logit_bias: tuple[str, ...] = knob(())
    """Added to logits, each as TOKEN_ID:BIAS; -100 forbids a token."""
    stop_strings: tuple[str, ...] = knob(())
    """Texts that end an answer; the text is cut before them, the tokens are kept as sampled."""
    json_schema: str = knob("", path=True)
    """JSON that every answer must be: a file of a JSON Schema, or the schema itself
    (docs/answer_forms.md)."""
    regex: str = knob("")
    """A regular expression that must describe every answer from end to end."""
    max_new_tokens: int = knob(128, ge=1, common=RL)
    """Longest answer, in tokens."""
    min_new_tokens: int = knob(0, ge=0)
    """No stop token is sampled before this many tokens."""
    samples_per_prompt: int = knob(1, ge=1, common=("rl",))
    """Answers sampled per prompt in RL stages; by default 8 in a run with stage grpo (TRL's
    num_generations), 2 with stage online-dpo."""

    def __post_init__(self) -> None:
        if isinstance(self.json_schema, dict):  # as Python code may give it
            object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
        at_home(self)

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
    """The actor's optimizer in PPO."""

    learning_rate: float = knob(1e-6, gt=0, common=STEPS)
    """Peak learning rate of full weights. The default is for billions of parameters; 135M gained
    with 3e-6, and at 1e-5 lost its variety within 17 steps (docs/real_runs.md)."""
    lora_learning_rate: float = knob(1e-4, gt=0, common=("rl",))


@dataclass(frozen=True, kw_only=True)
class CriticOptimizerConfig(OptimizerConfig):
    """The critic's optimizer in PPO. The critic must keep up with the actor's changing returns, so
    its rate is about ten times the actor's (OpenRLHF: 9e-6 and 5e-7)."""

    learning_rate: float = knob(1e-5, gt=0, common=STEPS)


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """What the RL stages have in common."""

    steps: int = knob(200, ge=0, common=RL)
    """Rollouts, each followed by its updates; 0: one pass over the prompts."""
    prompts_per_step: int = knob(64, ge=1, common=("rl",))
    """Prompts per rollout (times sampling.samples_per_prompt answers)."""
    epochs: int = knob(1, ge=1, common=("rl",))
    """Passes over each rollout's experience."""
    minibatch_size: int = knob(0, ge=0, common=("rl",))
    """Answers per optimizer step. 0: an eighth of the rollout's, the share that InstructGPT had."""
    actor: ActorOptimizerConfig = field(default_factory=ActorOptimizerConfig)
    kl_coef: float = knob(0.05, ge=0, common=RL)
    """Weight of the KL penalty against the reference."""
    kl_coef_target: float = knob(0.0, ge=0)
    """KL per answer, in nats, that kl_coef is adapted to reach (arXiv:1909.08593); 0: fixed."""
    kl_horizon: int = knob(10_000, ge=1)
    """Answers over which the adaptive coefficient can change by a factor of about e^0.2."""
    reward_clip: float = knob(Unset("10, with functions 0"), ge=0)
    """Scores are clipped to +- this after normalization, and counted; 0 is off, as by default where
    a reward function scores, on a scale of its own."""
    missing_eos_penalty: float = knob(1.0, ge=0)
    """Subtracted from the score of an answer that the length limit cut off."""
    entropy_coef: float = knob(0.0, ge=0)
    """Weight of the entropy bonus in the policy's objective."""
    early_stop_kl: float = knob(0.1, ge=0)
    """Skip the remaining updates of a rollout when the KL from the policy that sampled it, in nats
    per token of the answers that the update read (metric policy_kl), exceeds this; 0 is off."""
    reward_model_weight: float = knob(1.0, ge=0)
    """Weight of the reward model's normalized score."""
    reward_function: tuple[str, ...] = knob((), common=RL, path=True)
    """Reward functions as `file.py:name`, `module:name` or `tandem:name`, or a server's URL,
    `:weight` behind each, called as f(prompts, completions, **columns) -> list[float | None];
    docs/reward_function.md."""
    reward_function_weight: float = knob(1.0)
    """Weight of the reward functions' weighted sum, added to the reward model's."""
    loss_function: str = knob("", path=True)
    """A policy loss of your own as `file.py:name?option=value` (docs/ppo.md), called as f(logprobs,
    old_logprobs, advantages, response_mask) -> each token's loss. Empty: the section's."""
    advantage_function: str = knob("", path=True)
    """Advantages of your own, likewise, called as f(experience) -> (advantages, the critic's
    returns or None). They are used as they come. Empty: the section's."""
    environment: str = knob("", path=True)
    """What answers hear back, as `file.py:name`, called as f(messages, **columns) -> the next turn,
    or None at the end (docs/environments.md). Empty: conversations of one answer."""
    tools: tuple[str, ...] = knob((), path=True)
    """Functions that the policy may call, as `file.py:name`: their schemas are in each prompt,
    calls in answers are made, and the policy hears what they return (docs/tools.md)."""
    max_turns: int = knob(8, ge=1)
    """Most answers in a conversation with the environment, or with tools."""
    max_conversation_tokens: int = knob(0, ge=0)
    """Most tokens of one. 0: of the longest prompt, all answers and as many heard between them."""
    ema: bool = knob(False, common=RL)
    """Keep an fp32 moving average of the actor, save it and evaluate it next to the actor."""
    ema_decay: float = knob(0.992, gt=0, lt=1)
    """Decay of the average per optimizer step (DeepSpeed-Chat's value)."""
    ptx_data: tuple[str, ...] = knob((), path=True)
    """Text or SFT data whose language-model loss is added to the actor's (mixture training,
    ptx)."""
    ptx_coef: float = knob(0.5, ge=0)
    """Weight of that loss, a mean per token. InstructGPT's 27.8 weights a sum per answer."""
    ptx_batch_size: int = knob(16, ge=1)
    """Rows of ptx_data per optimizer step."""
    old_logprobs: Literal["auto", "sampler", "forward"] = knob("auto")
    """Where the log-probs before the update come from: the sampler (saves the actor's scoring
    forward), or a forward pass that recomputes them. auto: the sampler's, if a self-test at the
    start finds them equal to the training forward's (within 1e-5 nats on average)."""
    ratio_tolerance: float = knob(0.0, ge=0)
    """Largest mean |log-ratio| before the first update; 0: 1e-4 in fp32, 1e-2 in fp16, 3e-2 in
    bf16. Above it the run stops: two forwards of the same policy disagree."""
    eval_every: int = knob(20, ge=0)
    """Score answers to held-out prompts every N rollouts, and at both ends; 0: only then."""
    eval_prompts: int = knob(64, ge=0)
    """Held-out prompts to score."""
    keep_best: bool = knob(False)
    """Leave the models of the evaluation with the highest held-out reward, not the last one's
    (docs/reliability.md)."""
    patience: int = knob(0, ge=0)
    """End the stage once this many evaluations in a row have not raised the highest held-out
    reward; 0: never."""

    def __post_init__(self) -> None:
        require_sections(self)
        if isinstance(self.reward_function, str):  # one function, as the knob took it before
            one = (self.reward_function,) if self.reward_function else ()
            object.__setattr__(self, "reward_function", one)
        if isinstance(self.reward_clip, Unset):
            object.__setattr__(self, "reward_clip", 0.0 if self.reward_function else 10.0)
        at_home(self)

    @property
    def converses(self) -> bool:
        """Whether something answers the policy, which then answers again."""
        return bool(self.environment or self.tools)

    @property
    def has_critic(self) -> bool:
        """Whether the algorithm trains a critic."""
        return True

    @property
    def has_reference(self) -> bool:
        """Whether it compares the policy with where that started."""
        return True


@dataclass(frozen=True, kw_only=True)
class PPOConfig(RLConfig):
    """Stage 3, PPO (arXiv:1707.06347, arXiv:2203.02155)."""

    critic: CriticOptimizerConfig = field(default_factory=CriticOptimizerConfig)
    critic_warmup_steps: int = knob(0, ge=0)
    """First rollouts that train only the critic, before the actor is updated."""
    clip_ratio: float = knob(0.2, gt=0)
    """The policy ratio is clipped to 1 +- this (PPO's epsilon)."""
    value_clip: float = knob(0.2, ge=0)
    """Values are clipped to within this distance of their old values; 0 is off."""
    gamma: float = knob(1.0, ge=0, le=1)
    """Discount per token. 1: an answer is one episode, and its length must not change its
    return."""
    lam: float = knob(1.0, ge=0, le=1)
    """GAE's lambda: 1 is the return minus the value, lower trusts the critic more. A reward at the
    end of n tokens reaches the first one with weight lam^n, so below 1 a critic must have learned
    before the policy can: of 64 tokens 0.95 leaves 4 % (docs/benchmarks.md)."""
    whiten_advantages: bool = knob(True)
    """Normalize advantages to mean 0 and sd 1 over all response tokens of the rollout; without it,
    several epochs per rollout are unstable."""
    kl_in: Literal["reward", "loss"] = knob("reward")
    """Subtract the KL from each token's reward (InstructGPT), or add it to the loss (GRPO)."""
    kl_estimator: Literal["auto", "k1", "k2", "k3"] = knob("auto")
    """Per-token estimator: k1 = log-ratio (the one with the right gradient in the reward), k2 =
    half its square (right in the loss), k3 = ratio - 1 - log-ratio (low variance, positive).
    auto: k1 in the reward, k2 in the loss."""


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(RLConfig, CriticFreeConfig):
    """Policy gradients without a critic: GRPO (arXiv:2402.03300), RLOO, DAPO and others."""

    prompts_per_step: int = knob(32, ge=1, common=("rl",))
    epochs: int = knob(1, ge=1, common=("rl",))
    minibatch_size: int = knob(64, ge=1, common=("rl",))
    """Answers per optimizer step; by default at most the rollout's."""
    kl_coef: float = knob(UNSET, ge=0, common=RL)
    """Weight of the KL penalty against the reference; only read if kl is not none."""
    missing_eos_penalty: float = knob(0.0, ge=0)
    """Subtracted from the score of an answer that the length limit cut off. Off by default, so that
    a reward function's scores stay as they are."""
    reward_clip: float = knob(0.0, ge=0)
    """Scores are clipped to +- this after normalization, and counted. Off by default: answers to a
    prompt whose scores are all beyond a bound would count as equally good."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.apply_preset()

    @property
    def has_critic(self) -> bool:
        return False

    @property
    def has_reference(self) -> bool:
        return self.kl != "none"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: a model, data, and the stages that make an assistant of them."""

    actor_model: str = knob("", common=True, path=True)
    """Folder or hub name of the pretrained language model; of the hub also NAME@REVISION."""
    reward_model: str = knob("", common=("train", "critic"), path=True)
    """Folder or hub name of the model that the reward stage starts from (for PPO alone: the reward
    model itself). Empty: the run's SFT model."""
    reference_model: str = knob("", common=("teacher",), path=True)
    """Folder or hub name of the policy that the KL and the losses on preferences compare with, of
    the same tokenizer; in distillation, of the teacher. Empty: the policy as the stage begins."""
    critic_model: str = knob("", path=True)
    """Folder or hub name of the model that PPO's critic starts from, of the policy's tokenizer and
    any size; a language model gets a new head of zeros. Empty: the reward model if it has that
    tokenizer, else the policy."""
    data: tuple[str, ...] = knob((), common=True, path=True)
    """Data sets as FILE_OR_NAME[@CONFIGURATION/SPLIT][:weight]; weight 2 uses each row twice per
    epoch, 0.5 every other row. `embedded` is the built-in one."""
    sft_data: tuple[str, ...] = knob((), common=("train", "supervised"), path=True)
    """Data sets for SFT only."""
    eval_data: tuple[str, ...] = knob((), common=("supervised", "pairs", "rl"), path=True)
    """Data sets to evaluate on, for all stages, in place of a share of the others
    (dataset.heldout). Rows of the others that begin like one of theirs are not trained on."""
    output_dir: str = knob("runs/default", common=True, path=True)
    """The run's folder. The same command continues an unfinished run there."""
    stages: tuple[str, ...] = knob(DEFAULT, common=("train",), choices=stage_names)
    """Which stages to run, in this order. `sft dpo` needs no reward model."""
    seed: int = knob(1234, ge=0, le=2**53, common=True)
    """Seed of the split, the order of rows, new weights and every sampled token."""
    device: Literal["auto", "cpu", "cuda"] = knob("auto", common=True)
    """Where to run; auto uses a GPU if there is one."""
    save_dtype: Literal["auto", "fp32", "bf16", "fp16"] = knob("auto")
    """Weight type of saved models; auto: that of the checkpoint they started from. Checkpoints to
    resume from always keep fp32 masters."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = knob("auto", common=True)
    """Compute type, in which every model's weights are stored; the optimizer keeps fp32 masters and
    accumulates gradients in fp32. auto: bf16 on a GPU, else fp32. fp16 uses dynamic loss scaling: a
    step that overflows is skipped for all models and counted."""
    deterministic: bool = knob(False)
    """On a GPU, use torch's deterministic algorithms, so that a repeated step has the same bits: a
    slower attention backward, and an error from an operation without one. A CPU needs none of it.
    `tandem replay` always asks for them."""
    micro_batch_tokens: int = knob(8192, ge=1)
    """Tokens per forward and backward pass; it changes memory, not gradients."""
    halve_micro_batches: bool = knob(False, common=True)
    """When memory runs out, continue with micro-batches of half as many tokens; the gradient does
    not change. On one rank only."""
    hybrid_engine: bool = knob(True, common=RL)
    """Generate with Tandem's engine on the training weights; off: with Hugging Face's `generate` on
    the same weights, slower, for comparison."""
    kept_states: float = knob(0.1, ge=0, le=1)
    """On a CPU, in a stage with one update per rollout: what generation computed in the actor's
    layers is kept for the update, which then does not run them again, where it takes at most this
    share of the free memory. 0: nothing is kept. No number changes."""
    generation_batch_size: int = knob(64, ge=1)
    """Most answers generated in parallel; fewer if their logits would exceed 64 MiB (512 MiB on a
    GPU). TRL's knob of this name is the rollout's size: here ppo.prompts_per_step *
    sampling.samples_per_prompt."""
    generation_prefill_tokens: int = knob(0, ge=0)
    """Most tokens of prompts that run at a time, between two tokens of the answers in progress, a
    long prompt in parts; 0: all that come in, at most 4096 in one forward. Answers do not depend on
    it."""
    gradient_checkpointing: bool = knob(False, common=True)
    """Recompute activations in the backward pass: less memory, about a third more time."""
    recompute: Literal["layers", "mlp", "attention"] = knob("layers")
    """What gradient_checkpointing recomputes: whole layers; only each layer's mlp, which is the
    larger part of what a layer keeps, or only its attention. Parts keep more and recompute less;
    not every model family keeps them in modules of their own."""
    recompute_roles: Literal["all", "actor", "critic"] = knob("all")
    """Whose activations gradient_checkpointing recomputes: of every trained model; of the policy
    alone; or of reward model and critic alone."""
    dropout: float = knob(0.0, ge=0, lt=1)
    """Dropout of the trained models. Off by default: PPO compares two forwards of one policy."""
    trust_remote_code: bool = knob(False)
    """Run Python code from a model's folder. Read that code first."""
    save_every: int = knob(50, ge=0, common=True)
    """Save a checkpoint to resume from every N steps; 0: only at the end of each stage."""
    keep_checkpoints: int = knob(2, ge=2)
    """Checkpoints kept per stage; at least two, in case one is damaged."""
    save_async: bool = knob(True)
    """Write checkpoints in the background, from a copy in host memory; off: training waits, and
    nothing is copied."""
    dataset: DataConfig = field(default_factory=DataConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    dpo: DPOConfig = field(default_factory=DPOConfig)
    kto: KTOConfig = field(default_factory=KTOConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    guards: GuardConfig = field(default_factory=GuardConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        require_sections(self)
        at_home(self)


def rl_section(config: RunConfig) -> RLConfig:
    """The section of the run's RL stage, or of the first RL stage if the run has none."""
    section: RLConfig = getattr(config, rl_stage(config.stages).section)
    return section
