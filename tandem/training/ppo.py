"""Step 3: PPO against a reward model, a reward function or both; and what every RL stage does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from tandem.checkpoint.state import SavedState
from tandem.config.schema import (
    GRPOConfig,
    PPOConfig,
    RLConfig,
    RunConfig,
    SamplingConfig,
    rl_section,
)
from tandem.config.stages import rl_stage, stage_of
from tandem.config.updates import num_rollouts
from tandem.data.loader import BatchOrder, permutation
from tandem.engine.hybrid import RLHFEngine
from tandem.engine.state import engine_state, restore_engine
from tandem.errors import ConfigError, DataError
from tandem.generation.limits import max_positions
from tandem.generation.sampler import sequence_key
from tandem.metrics.log import Answer
from tandem.models.adapter import set_value_head
from tandem.rewards.per_token import is_per_token
from tandem.rewards.scoring import RewardFunctions
from tandem.training.answer_records import AnswerKeeper
from tandem.training.conversations import conversation_source, given_turns, said
from tandem.training.evaluate import language_model_metrics, policy_metrics
from tandem.training.flight_recorder import rows_of
from tandem.training.ppo_trainer import PPOTrainer
from tandem.training.reward_function import columns_given, rewards_of
from tandem.training.run_folder import Run
from tandem.training.saving import Rendered, save_anywhere, save_policy, with_template
from tandem.training.stage_data import StepRows
from tandem.training.stage_loop import StageJob, StepLoop
from tandem.types import Experience, PromptRow

_BENDING = (
    *("top_p", "top_k", "min_p", "min_new_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Knobs of sampling that draw from another distribution than the policy's at the temperature."""
_FORMS = ("json_schema", "regex")
"""The same, of texts."""

_OF_POLICY_LOSS = ("policy_loss", "clip_fraction")
"""Metrics of a loss that is 0 where nothing rewards."""


def prepare(run: Run, rows: StepRows) -> StageJob:
    """Step 3, ready to run; it leaves `RUN/ppo/{actor,critic,ema}`, folders that from_pretrained
    opens.

    Raises:
        DataError: there is no prompt.
        ConfigError: there is nothing to reward with.
    """
    return rl_job(run, rows, "ppo")


def rl_job(run: Run, rows: StepRows, stage: str) -> StageJob:
    """A stage that learns from its own answers, ready to run.

    Args:
        stage: its name; its section of the configuration says which algorithm it is.
    Raises:
        DataError, ConfigError: as `prepare`.
    """
    rl, prompts = rl_section(run.config), rows.prompts
    if not prompts:
        raise DataError(
            f"stage {stage} must have at least one prompt; got none. See the drops above."
        )
    order = BatchOrder(
        num_rows=len(prompts),
        batch_size=rl.prompts_per_step,
        seed=run.config.seed,
        epochs=None,
        max_steps=num_rollouts(rl, len(prompts)),
    )
    trainer = PPOStage(_trainer(run, rows, stage, order.num_steps), rows, run.print_line)
    return StageJob(
        trainer,
        prompts,
        order,
        rl.eval_every,
        save=partial(save_engine, trainer.trainer.engine, rows, dtype=run.config.save_dtype),
    )


class PPOStage:
    """A step is one rollout and its updates (a `StageTrainer`)."""

    def __init__(
        self, trainer: PPOTrainer, rows: StepRows, print_line: Callable[[str], None]
    ) -> None:
        self.trainer = trainer
        self._print_line = print_line
        self.phases = trainer.phases
        self.thresholds: Mapping[str, float] = {"ratio-gap": trainer.ratio_tolerance}
        self._rows = rows
        self._kept = AnswerKeeper(trainer.engine.tokenizer, trainer.config.log.record_answers)
        self.followed = self._kept.followed

    def step(self, step: int, rows: Sequence[PromptRow], loop: StepLoop) -> dict[str, float]:
        """Answer the prompts and learn from the answers."""
        experience = self.trainer.generate_experience(rows, step=step, begins_update=True)
        loop.made(experience)
        values = self.trainer.train_rlhf(
            experience,
            step=step,
            skip=lambda bad, answers: loop.skip(bad, rows_of(answers.batch)),
        )
        every = self.trainer.config.log.print_samples_every
        if every and step % every == 0:
            loop.sample(*first_answers(experience))
        self._kept.record(loop, experience)
        if not self.trainer.algorithm.is_rewarded:
            values = {n: v for n, v in values.items() if not n.startswith(_OF_POLICY_LOSS)}
        return values

    def evaluate(self) -> dict[str, float]:
        """Scores of answers to held-out prompts, and what was forgotten of the ptx texts."""
        trainer, rows = self.trainer, self._rows
        engine, config = trainer.engine, trainer.config
        heldout = rows.heldout_prompts[: trainer.rl.eval_prompts]
        metrics = policy_metrics(
            engine,
            heldout,
            config,
            trainer.reward_function,
            self._kept.follow,
            trainer.answering.source,
            divergence=trainer.algorithm.divergence,
            print_line=self._print_line,
        )
        if rows.heldout_ptx:
            texts = rows.heldout_ptx
            forgetting = language_model_metrics(engine.actor, texts, rows.renderer, config)
            metrics["heldout_ptx_perplexity"] = forgetting["heldout_perplexity"]
        return metrics

    def rehearse(self) -> None:
        """The largest micro-batches that can come, forward and backward, for nothing."""
        self.trainer.rehearse(self._rows.prompts)

    def state(self) -> tuple[dict[str, Mapping[str, Any]], dict[str, Any]]:
        """The engine's; the KL coefficient."""
        return state_of(self.trainer)

    def restore(self, state: SavedState) -> None:
        """Continue from a checkpoint."""
        restore_trainer(self.trainer, state)


def state_of(trainer: PPOTrainer) -> tuple[dict[str, Mapping[str, Any]], dict[str, Any]]:
    """All of a trainer's state: the engine's; the KL coefficient."""
    return engine_state(trainer.engine), {"kl_coef": trainer.kl_coef}


def restore_trainer(trainer: PPOTrainer, state: SavedState) -> None:
    """Bring a trainer to the state of a checkpoint."""
    restore_engine(state, trainer.engine)
    trainer.kl_coef = float(state.numbers["kl_coef"])


def _trainer(run: Run, rows: StepRows, stage: str, num_steps: int) -> PPOTrainer:
    """The engine with the roles that the algorithm needs, and what trains it."""
    config, rl = run.config, rl_section(run.config)
    section = rl_stage(config.stages).section
    engine = RLHFEngine(
        run.settings,
        run.policy_source(stage),
        tokenizer=rows.tokenizer,
        reward_model=reward_source(run, stage),
        reward_tokenizer=run.reward_module.tokenizer if run.reward_module else None,
        critic=config.critic_model or None,
        reference=config.reference_model or None,
        has_critic=rl.has_critic,
        has_reference=rl.has_reference,
        world=run.world,
    )
    run.print_line(f"{stage}: {engine.describe()}")
    if not stage_of(stage).rewarded:
        teacher = config.reference_model
        run.print_line(f"{stage}: learns {teacher}'s distributions, {rl.kl}")  # type: ignore[attr-defined]
    elif isinstance(rl, GRPOConfig):
        samples = f"{config.sampling.samples_per_prompt} samples per prompt"
        run.print_line(f"{stage}: {rl.algorithm}: {samples}, {rl.effective()}")
    if engine.scorer is not None and (note := engine.scorer.note_on_text(engine.renderer)):
        is_like = engine.scorer.renderer.renders_like(engine.renderer)
        starts_anew = rl.has_critic and not is_like
        starts_anew = starts_anew and not config.critic_model
        start = "; the critic starts from the policy, with a new head" if starts_anew else ""
        run.print_line(f"{stage}: {note}{start}")
    if engine.scorer is not None and (note := engine.scorer.note_on_units()):
        run.print_line(f"{stage}: {note}")
    if rl.reward_function and rl.reward_clip:
        run.print_line(
            f"{stage}: scores beyond +-{rl.reward_clip:g} are clipped, "
            f"{', '.join(rl.reward_function)}'s too "
            f"(--{section}.reward-clip 0: none)"
        )
    for note in notes_on_kl(config, has_reference=rl.has_reference):
        run.print_line(f"{stage}: {note}")
    for what, function in (("loss", rl.loss_function), ("advantages", rl.advantage_function)):
        if function and not isinstance(rl, GRPOConfig):  # whose line says so
            run.print_line(f"{stage}: {what} by {function}")
    columns = columns_given(config, rows).names
    rewards = rewards_of(rl.reward_function or None, config.scoring, run.print_line, columns)
    if rewards is not None and (note := note_on_tokens(rl, rewards)):
        run.print_line(f"{stage}: {note}")
    conversations = conversation_source(
        config, engine.renderer, columns=columns, world=run.world, print_line=run.print_line
    )
    if conversations is not None:
        run.print_line(f"{stage}: {conversations.describe(max_positions(engine.actor))}")
    return PPOTrainer(
        engine,
        config,
        num_steps=num_steps,
        reward_function=rewards,
        source=None if conversations is None else conversations.with_policy(engine),
        ptx_rows=rows.ptx,
        more_prompts=partial(more_prompts, rows.prompts, config.seed),
        print_line=run.print_line,
    )


def note_on_tokens(rl: RLConfig, rewards: RewardFunctions) -> str:
    """What becomes of rewards per token where an answer has one advantage; "" where they stay."""
    functions = zip(rewards.specs, rewards.calls, strict=True)
    labels = [spec.label for spec, call in functions if is_per_token(call)]
    if not labels or not isinstance(rl, GRPOConfig) or rl.advantage_function:
        return ""
    if rl.baseline == "none":
        return ""
    return (
        f"of the rewards per token of {', '.join(labels)} only each answer's sum counts: baseline "
        f"{rl.baseline} gives an answer one advantage (PPO or --grpo.baseline none keeps them)"
    )


def notes_on_kl(config: RunConfig, *, has_reference: bool) -> Iterator[str]:
    """What a KL to the reference then is not."""
    if not has_reference:
        return
    sampling, default, rl = config.sampling, SamplingConfig(), rl_section(config)
    bends = [
        f"--sampling.{name.replace('_', '-')}" + (f" {value:g}" if name not in _FORMS else "")
        for name in (*_BENDING, *_FORMS)
        if (value := getattr(sampling, name)) != getattr(default, name)
    ]
    if bends or sampling.logit_bias:
        bends += ["--sampling.logit-bias"] * bool(sampling.logit_bias)
        yield (
            f"kl compares whole distributions along answers that are not drawn from them "
            f"({', '.join(bends)}): it may be far too low, or negative"
        )
    if isinstance(rl, PPOConfig) and rl.kl_in != "loss" and rl.kl_estimator in ("k2", "k3"):
        yield (
            f"{rl.kl_estimator} in the reward has another gradient than the KL's; that of "
            "--ppo.kl-estimator k1 is right"
        )


def more_prompts(
    prompts: Sequence[PromptRow], seed: int, step: int, taken: Sequence[PromptRow], count: int
) -> list[PromptRow]:
    """At most `count` prompts that a step does not have yet, in an order drawn by its number."""
    names = {id(prompt) for prompt in taken}
    key = sequence_key(seed, step, 0, 0) % 2**64
    order = permutation(len(prompts), key, 0)
    left = (prompts[i] for i in order if id(prompts[i]) not in names)
    return list(islice(left, count))


def reward_source(run: Run, stage: str) -> str | nn.Module | None:
    """A stage's reward model: a torch module that was given, or where it is; None where a function
    alone rewards.

    Raises:
        ConfigError: there is neither.
    """
    rl = rl_section(run.config)
    if rl.reward_model_weight == 0 or not stage_of(stage).rewarded:
        return None
    if run.reward_module is not None:
        return run.reward_module.module
    source = run.reward_source(stage)
    if source is None and not rl.reward_function:
        raise ConfigError(
            f"stage {stage} must have a reward: --reward-model or "
            f"--{rl_stage(run.config.stages).section}.reward-function; got neither, "
            f"and {run.path} has no finished reward step."
        )
    return source


def _or_none(score: float) -> float | None:
    return None if math.isnan(score) else score


def first_answers(experience: Experience) -> tuple[str, dict[str, Answer]]:
    """A step's first prompt, and its answers with their scores; conversations whole."""
    rollout = experience.rollout
    first = rollout.prompts[0]
    answers: dict[str, Answer] = {
        f"sample {i + 1}": {
            "text": said(rollout.prompts[i], rollout.responses[i]),
            "score": _or_none(float(experience.scores[i])),
        }
        for i in range(len(rollout))
        if rollout.group[i] == rollout.group[0]
    }
    return given_turns(first)[-1].content, answers


def save_engine(engine: RLHFEngine, rows: Rendered, folder: Path, *, dtype: str) -> None:
    """Save the engine's trained models in subfolders of `folder`: actor, critic and average."""
    save_policy(engine.actor, rows, folder / "actor", engine.actor_learner.masters, dtype)
    if engine.critic is not None and engine.critic_learner is not None:
        tokenizer, masters = engine.tokenizer, engine.critic_learner.masters
        tokenizer = with_template(tokenizer, engine.renderer)
        set_value_head(engine.critic, is_critics=True)
        save_anywhere(engine.critic, tokenizer, folder / "critic", masters, dtype)
    if engine.ema is not None:
        with engine.ema.exact():
            save_policy(engine.actor, rows, folder / "ema", save_dtype=dtype)
