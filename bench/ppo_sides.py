"""One step of PPO or GRPO, by Tandem and by the plain loop: work, sides, and proof that they do the
same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.harness import Side, Stopwatch, require_close
from bench.models import (
    WORDS,
    Shape,
    apart,
    copied,
    covering_tokenizer,
    end_probability,
    model_config,
    prompt_rows,
    random_ids,
    random_model,
    reset,
    set_end_probability,
)
from bench.plain_hf_ppo import PlainGRPO, PlainPPO, Sequences, Settings
from tandem.config.load import build_config
from tandem.config.schema import RunConfig
from tandem.config.updates import num_updates
from tandem.parallel.world import World
from tandem.plan.knobs import nested
from tandem.training.make_engine import make_engine
from tandem.training.ppo_trainer import PPOTrainer
from tandem.types import Experience, PromptRow, TokenBatch

AGREEMENT = {"fp32": 1e-4, "bf16": 3e-2}
"""How far the two sides may be apart, relative to the plain loop's number."""

CHECK_LEARNING_RATE = 1e-3
"""Large enough that ratios and values reach their clips in the second epoch."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One step: models, prompts, lengths and knobs. The same for both sides.

    algorithm: grpo has no critic and no reference, and its rewards are the reward model's.
    shape: of the actor; critic_shape: of critic and reward model, by default the actor's.
    mode: forced: no answer may end, all have max_new_tokens. ragged: answers end after lengths
        from a geometric distribution, cut at max_new_tokens, with half of that as their mean.
    prompt_tokens: each prompt's length in tokens, or the lengths that prompts take in turn.
    micro_batch_tokens: tokens per forward.
    knobs: Tandem's own, by dotted name.
    """

    algorithm: Literal["ppo", "grpo"] = "ppo"
    shape: Shape
    critic_shape: Shape | None = None
    mode: Literal["forced", "ragged"] = "forced"
    num_prompts: int = 64
    samples_per_prompt: int = 1
    prompt_tokens: tuple[int, ...] = (32,)
    max_new_tokens: int = 64
    epochs: int = 1
    minibatch_size: int = 64
    micro_batch_tokens: int
    actor_learning_rate: float = 1e-6
    critic_learning_rate: float = 1e-5
    dtype: Literal["fp32", "bf16"] = "fp32"
    device: Literal["cpu", "cuda"] = "cpu"
    seed: int = 1
    knobs: Mapping[str, Any] | None = None

    @property
    def num_answers(self) -> int:
        """Answers per step, those to one prompt side by side."""
        return self.num_prompts * self.samples_per_prompt


@dataclass(frozen=True)
class Start:
    """Where both sides start: models on the CPU that nobody changes, tokenizer and prompts.

    The critic starts as the reward model.
    """

    actor: PreTrainedModel
    reward_model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompts: tuple[PromptRow, ...]


def start(work: Work) -> Start:
    """Random weights, and prompts of random ids, from the work's seed."""
    tokenizer = covering_tokenizer(work.shape["vocab_size"])
    eos, positions = tokenizer.eos_token_id, max(work.prompt_tokens) + work.max_new_tokens
    actor, reward_model = (
        random_model(
            model_config(shape, positions, eos=eos), scalar=scalar, seed=work.seed + scalar
        )
        for shape, scalar in ((work.shape, False), (work.critic_shape or work.shape, True))
    )
    lengths = [work.prompt_tokens[i % len(work.prompt_tokens)] for i in range(work.num_prompts)]
    prompts = random_ids(lengths, min(WORDS, len(tokenizer)), work.seed)
    if work.mode == "ragged":
        set_end_probability(actor, prompts[:16], end_probability(work.max_new_tokens), eos)
    return Start(actor, reward_model, tokenizer, prompt_rows(prompts))


@dataclass(frozen=True)
class Done:
    """What one step did: prompt ids, tokens of each answer, optimizer steps, the losses."""

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    metrics: dict[str, float]


class TandemSide(Side):
    """RLHFEngine and PPOTrainer, by their public names."""

    def __init__(
        self,
        work: Work,
        begin: Start,
        *,
        copies: bool = True,
        world: World | None = None,
        watch: Stopwatch | None = None,
    ) -> None:
        """Without `copies` it trains the start's own models, and later steps go on from there."""
        self.begin, self.watch = begin, watch or Stopwatch()
        config = run_config(work)
        models = (begin.actor, begin.reward_model)
        actor, reward_model = map(copied, models) if copies else models
        self.engine = make_engine(
            actor=actor,
            reward_model=reward_model,
            config=config,
            tokenizer=begin.tokenizer,
            reward_tokenizer=begin.tokenizer,
            world=world,
            has_critic=work.algorithm == "ppo",
            has_reference=work.algorithm == "ppo",
        )
        self.trainer = PPOTrainer(self.engine, config, phases=self.watch)

    def prepare(self) -> None:
        """Put the trained weights back to where they started, so that every round is the same."""
        starts = {"actor": self.begin.actor, "critic": self.begin.reward_model}
        for name, learner in self.engine.learners.items():
            to = starts[name]
            reset(learner.model, to)
            with learner.exact():  # float32 masters of weights in half precision
                reset(learner.model, to)

    def make(self, step: int = 1, *, to_train: bool = False) -> Experience:
        """Generate and score; the same answers whenever the weights are the same.

        Args:
            to_train: `train_rlhf` gets it next, as in `tandem train`.
        """
        return self.trainer.generate_experience(
            self.begin.prompts, step=step, begins_update=to_train
        )

    def run(self, number: int) -> Done:
        """One PPO step; `number` is not used, so that all rounds have the same answers."""
        experience = self.make(to_train=True)
        return _done(experience.batch, self.trainer.train_rlhf(experience, step=1))


class PlainSide(Side):
    """The plain Hugging Face loop, held to Tandem's lengths."""

    def __init__(
        self, work: Work, begin: Start, lengths: tuple[int, ...], *, copies: bool = True
    ) -> None:
        """`lengths`: tokens of each answer (`held_lengths`); `copies`: as of `TandemSide`."""
        self.begin, self.watch = begin, Stopwatch()
        self.lengths, self.samples = torch.tensor(lengths), work.samples_per_prompt
        actor = copied(begin.actor, work.device) if copies else begin.actor
        scores = copied(begin.reward_model, work.device) if copies else begin.reward_model
        settings = plain_settings(work, begin)
        self.loop: PlainPPO
        if work.algorithm == "grpo":
            self.loop = PlainGRPO(actor, scores, settings, work.samples_per_prompt)
        else:
            critic = copied(begin.reward_model, work.device)
            self.loop = PlainPPO(actor, critic, scores, settings)

    def prepare(self) -> None:
        """As `TandemSide.prepare`."""
        reset(self.loop.actor, self.begin.actor)
        if not isinstance(self.loop, PlainGRPO):
            reset(self.loop.critic, self.begin.reward_model)

    def run(self, number: int) -> Done:
        """One PPO step."""
        with self.watch("generate"):
            prompts = [row.token_ids for row in self.begin.prompts for _ in range(self.samples)]
            made = self.loop.generate(prompts, self.lengths)
        with self.watch("score"):
            experience = self.loop.score(made)
        with self.watch("train"):
            metrics = self.loop.train(experience)
        batch = TokenBatch(made.token_ids, made.attention_mask, made.response_mask)
        return _done(batch, metrics)


def _done(batch: TokenBatch, metrics: dict[str, float]) -> Done:
    masks = batch.attention_mask & ~batch.response_mask
    return Done(
        prompts=tuple(
            tuple(ids[mask].tolist()) for ids, mask in zip(batch.token_ids, masks, strict=True)
        ),
        lengths=tuple(batch.response_mask.sum(dim=1).tolist()),
        metrics=metrics,
    )


def held_lengths(work: Work, experience: Experience) -> tuple[int, ...]:
    """Where the plain loop must end its answers to have Tandem's lengths.

    A row that the limit cut gets a length past the limit: it must never draw EOS.
    """
    tokens = experience.batch.response_mask.sum(dim=1).tolist()
    finished = experience.rollout.finished.tolist()
    return tuple(
        n if ended else work.max_new_tokens + 1 for n, ended in zip(tokens, finished, strict=True)
    )


def run_config(work: Work) -> RunConfig:
    """The work in Tandem's knobs."""
    section = work.algorithm
    knobs: dict[str, Any] = {
        "stages": [section],
        "seed": work.seed,
        "device": work.device,
        "dtype": work.dtype,
        "micro_batch_tokens": work.micro_batch_tokens,
        "generation_batch_size": work.num_answers,
        "sampling.samples_per_prompt": work.samples_per_prompt,
        "sampling.max_new_tokens": work.max_new_tokens,
        "sampling.min_new_tokens": work.max_new_tokens if work.mode == "forced" else 0,
        f"{section}.prompts_per_step": work.num_prompts,
        f"{section}.epochs": work.epochs,
        f"{section}.minibatch_size": work.minibatch_size,
        f"{section}.missing_eos_penalty": 0.0,
        f"{section}.reward_clip": 10.0,  # of random models, whose scores may be far apart
        f"{section}.early_stop_kl": 0.0,
        f"{section}.actor.learning_rate": work.actor_learning_rate,
    }
    if section == "ppo":
        knobs["ppo.critic.learning_rate"] = work.critic_learning_rate
    for role in ("actor", "critic") if section == "ppo" else ("actor",):
        knobs |= {f"{section}.{role}.schedule": "constant", f"{section}.{role}.warmup": 0.0}
    return build_config(nested(knobs | dict(work.knobs or {})), where="bench: ")


def plain_settings(work: Work, begin: Start) -> Settings:
    """The work in the plain loop's knobs, read from Tandem's so that they are the same."""
    config = run_config(work)
    section = config.ppo if work.algorithm == "ppo" else config.grpo
    clip = config.ppo.clip_ratio if work.algorithm == "ppo" else config.grpo.clip_low
    return Settings(
        max_new_tokens=work.max_new_tokens,
        eos_token_id=begin.tokenizer.eos_token_id,
        pad_token_id=begin.tokenizer.pad_token_id,
        micro_batch_tokens=work.micro_batch_tokens,
        minibatch_size=section.minibatch_size,
        epochs=section.epochs,
        actor_learning_rate=section.actor.learning_rate,
        critic_learning_rate=config.ppo.critic.learning_rate,
        betas=section.actor.betas,
        max_grad_norm=section.actor.max_grad_norm,
        kl_coef=section.kl_coef,
        reward_clip=section.reward_clip,
        clip_ratio=clip,
        value_clip=config.ppo.value_clip,
        gamma=config.ppo.gamma,
        lam=config.ppo.lam,
        bf16=work.dtype == "bf16",
    )


def require_same_work(work: Work, tandem: Done, plain: Done) -> None:
    """Both sides answered the same prompts with as many tokens and took as many steps.

    Raises:
        RuntimeError: they did not.
    """
    updates = float(num_updates(run_config(work), 1))
    pairs = {
        "prompts": (tandem.prompts, plain.prompts),
        "answers' lengths": (tandem.lengths, plain.lengths),
        "optimizer steps": (tandem.metrics["updates"], plain.metrics["updates"]),
        "optimizer steps of the work": (updates, plain.metrics["updates"]),
    }
    if work.mode == "forced":
        asked = (work.max_new_tokens,) * work.num_answers
        pairs["forced lengths"] = (asked, tandem.lengths)
    for name, (left, right) in pairs.items():
        if left != right:
            raise RuntimeError(f"{name} must be the same on both sides; got {left} and {right}.")


def agreement(work: Work) -> dict[str, float]:
    """Both sides score and learn from one rollout of Tandem's; how far they end apart.

    The actor is first moved away from the reference, so that the KL counts, and the learning
    rate is large, so that the second epoch clips. Each number is the size of the difference over
    the size of the plain loop's own (the policy loss, a mean near 0: the difference).

    Raises:
        RuntimeError: one of them is more than AGREEMENT apart.
    """
    work = replace(
        work,
        actor_learning_rate=CHECK_LEARNING_RATE,
        critic_learning_rate=CHECK_LEARNING_RATE,
        epochs=2,
        minibatch_size=work.num_answers,  # the order of rows does not matter then
    )
    begin = start(work)
    tandem = TandemSide(work, begin)
    plain = PlainSide(work, begin, ())
    _move(tandem.engine.actor)
    _move(plain.loop.actor)
    made = tandem.make(to_train=True)
    scored = plain.loop.score(padded_left(made))
    mask, plain_mask = made.batch.response_mask, scored.sequences.response_mask
    if work.dtype == "bf16":
        # Random models score a group's answers so much alike that rounding decides between them,
        # and a critic that starts as the reward model leaves as little of returns less values.
        scored.advantages[plain_mask] = made.advantages[mask]
    has_critic = work.algorithm == "ppo"
    names = ("old_logprobs", "advantages", "ref_logprobs", "values", "returns")
    distances = {
        name: apart([getattr(made, name)[mask]], [getattr(scored, name)[plain_mask]])
        for name in (names if has_critic else names[:2])
    }
    distances["scores"] = apart([made.scores], [scored.scores])
    ours = tandem.trainer.train_rlhf(made, step=1)
    theirs = plain.loop.train(scored)
    distances["policy_loss"] = abs(ours["policy_loss"] - theirs["policy_loss"])
    losses = ("actor_grad_norm", *(("value_loss", "critic_grad_norm") if has_critic else ()))
    for name in losses:
        distances[name] = abs(ours[name] - theirs[name]) / abs(theirs[name])
    for role in ("actor", "critic") if has_critic else ("actor",):
        models = (getattr(owner, role) for owner in (tandem.engine, plain.loop))
        distances[f"{role}_weights"] = apart(*(model.parameters() for model in models))
    limit = AGREEMENT[work.dtype]
    # The critic's gradient is made of such differences too.
    far = ("actor_", "critic_grad_norm") if work.dtype == "bf16" else ("actor_",)
    require_close({k: v for k, v in distances.items() if not k.startswith(far)}, limit)
    # A ratio at its clip falls to either side by the last bit, and Adam makes a whole step of
    # it: after one epoch the actors' weights are 5e-6 apart, after the second 7e-4.
    require_close(distances, 10 * limit)
    return distances


def padded_left(made: Experience) -> Sequences:
    """Tandem's right-padded rollout as the plain loop lays it out: every answer from one column."""
    batch = made.batch
    lengths = (batch.attention_mask & ~batch.response_mask).sum(dim=1).tolist()
    shifts = [max(lengths) - length for length in lengths]
    return Sequences(
        *(
            torch.stack(
                [row.roll(n) for row, n in zip(pad(column, (0, max(shifts))), shifts, strict=True)]
            )
            for column in (batch.token_ids, batch.attention_mask, batch.response_mask)
        )
    )


@torch.no_grad()
def _move(model: PreTrainedModel) -> None:
    """The same noise on the same weights, of a tenth of their size."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise: Tensor = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * noise.to(parameter.device) * parameter.square().mean().sqrt())
