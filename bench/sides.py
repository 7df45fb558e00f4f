"""Tandem and the plain loop, each doing a step of the same work."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from bench.harness import Cost, Stopwatch, peak_resident_bytes
from bench.plain_hf_ppo import PlainPPO, Settings
from bench.work import Start, Work, start
from tandem.config.schema import (
    ActorOptimizerConfig,
    CriticOptimizerConfig,
    PPOConfig,
    RunConfig,
    SamplingConfig,
)
from tandem.engine.allocator import keep_freed_memory
from tandem.engine.hybrid import RLHFEngine
from tandem.training.ppo_trainer import PPOTrainer
from tandem.types import Experience, TokenBatch


@dataclass(frozen=True)
class Done:
    """What one step did: prompt ids, tokens of each answer, optimizer steps, the losses."""

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    metrics: dict[str, float]


class TandemSide:
    """RLHFEngine and PPOTrainer, by their public names."""

    def __init__(self, work: Work, begin: Start, *, copies: bool = True) -> None:
        """Without `copies` it trains the start's own models, and later steps go on from there."""
        self.work, self.begin = work, begin
        self.watch = Stopwatch()
        config = run_config(work)
        self.engine = RLHFEngine(
            actor=copy.deepcopy(begin.actor) if copies else begin.actor,
            reward_model=copy.deepcopy(begin.reward_model) if copies else begin.reward_model,
            config=config,
            tokenizer=begin.tokenizer,
            reward_tokenizer=begin.tokenizer,
        )
        self.trainer = PPOTrainer(self.engine, config, phases=self.watch)

    def reset(self) -> None:
        """Put the trained weights back to where they started, so that every round is the same."""
        _reset(self.engine.actor, self.begin.actor)
        _reset(self.engine.critic, self.begin.reward_model)

    def make(self) -> Experience:
        """Generate and score; the same answers whenever the weights are the same."""
        return self.trainer.generate_experience(self.begin.prompts, step=1)

    def step(self) -> tuple[Done, dict[str, Cost]]:
        """One PPO step from the start's weights, and what each phase cost."""
        self.reset()
        self.watch.take()
        experience = self.make()
        metrics = self.trainer.train_rlhf(experience, step=1)
        return _done(experience.batch, metrics), self.watch.take()


class PlainSide:
    """The plain Hugging Face loop, held to Tandem's lengths."""

    def __init__(
        self, work: Work, begin: Start, lengths: tuple[int, ...], *, copies: bool = True
    ) -> None:
        """`lengths`: tokens of each answer (`held_lengths`); `copies`: as of `TandemSide`."""
        self.work, self.begin = work, begin
        self.watch = Stopwatch()
        self.lengths = torch.tensor(lengths)
        self.loop = PlainPPO(
            _copy(begin.actor, work.device) if copies else begin.actor,
            _copy(begin.reward_model, work.device),
            _copy(begin.reward_model, work.device) if copies else begin.reward_model,
            plain_settings(work, begin),
        )

    def reset(self) -> None:
        """As `TandemSide.reset`."""
        _reset(self.loop.actor, self.begin.actor)
        _reset(self.loop.critic, self.begin.reward_model)

    def step(self) -> tuple[Done, dict[str, Cost]]:
        """One PPO step from the start's weights, and what each phase cost."""
        self.reset()
        self.watch.take()
        prompts = [list(row.token_ids) for row in self.begin.prompts]
        with self.watch("generate"):
            sequences = self.loop.generate(prompts, self.lengths)
        with self.watch("score"):
            experience = self.loop.score(sequences)
        with self.watch("train"):
            metrics = self.loop.train(experience)
        batch = TokenBatch(sequences.token_ids, sequences.attention_mask, sequences.response_mask)
        return _done(batch, metrics), self.watch.take()


def held_lengths(work: Work, experience: Experience) -> tuple[int, ...]:
    """Where the plain loop must end its answers to have Tandem's lengths.

    A row that the limit cut gets a length past the limit: it must never draw EOS.
    """
    tokens = experience.batch.response_mask.sum(dim=1).tolist()
    finished = experience.rollout.finished.tolist()
    return tuple(
        n if ended else work.max_new_tokens + 1 for n, ended in zip(tokens, finished, strict=True)
    )


def peak_memory(
    side: str, work: Work, lengths: tuple[int, ...], threads: int, keeps: bool
) -> dict[str, int]:
    """Peak bytes of a process that does two steps of one side, and what it held before them.

    It holds no copy of the start's weights, which only a bench needs. On a GPU the figures are the
    GPU's.

    Args:
        keeps: with Tandem's allocator, for either side.
    """
    torch.set_num_threads(threads)
    if keeps:
        keep_freed_memory()
    begin = start(work)
    copies = work.device == "cuda"
    built: TandemSide | PlainSide
    if side == "tandem":
        built = TandemSide(work, begin, copies=copies)
    else:
        built = PlainSide(work, begin, lengths, copies=copies)
    before = _memory(work)
    for _ in range(2):
        built.step()
    return {"before": before, "peak": _memory(work)}


def _memory(work: Work) -> int:
    return torch.cuda.max_memory_allocated() if work.device == "cuda" else peak_resident_bytes()


def run_config(work: Work) -> RunConfig:
    """The work in Tandem's knobs."""
    forced = work.mode == "forced"
    return RunConfig(
        seed=work.seed,
        device=work.device,
        dtype=work.dtype,
        micro_batch_tokens=work.tandem_micro_batch_tokens or work.micro_batch_tokens,
        generation_batch_size=work.num_prompts,
        sampling=SamplingConfig(
            max_new_tokens=work.max_new_tokens,
            min_new_tokens=work.max_new_tokens if forced else 0,
        ),
        ppo=PPOConfig(
            prompts_per_step=work.num_prompts,
            epochs=work.epochs,
            minibatch_size=work.minibatch_size,
            missing_eos_penalty=0.0,
            target_kl=0.0,
            actor=ActorOptimizerConfig(
                learning_rate=work.actor_learning_rate, schedule="constant", warmup=0.0
            ),
            critic=CriticOptimizerConfig(
                learning_rate=work.critic_learning_rate, schedule="constant", warmup=0.0
            ),
        ),
    )


def plain_settings(work: Work, begin: Start) -> Settings:
    """The work in the plain loop's knobs, read from Tandem's so that they are the same."""
    config = run_config(work)
    ppo = config.ppo
    return Settings(
        max_new_tokens=work.max_new_tokens,
        eos_token_id=begin.tokenizer.eos_token_id,
        pad_token_id=begin.tokenizer.pad_token_id,
        micro_batch_tokens=work.micro_batch_tokens,
        minibatch_size=ppo.minibatch_size,
        epochs=ppo.epochs,
        actor_learning_rate=ppo.actor.learning_rate,
        critic_learning_rate=ppo.critic.learning_rate,
        betas=ppo.actor.betas,
        max_grad_norm=ppo.actor.max_grad_norm,
        kl_coef=ppo.kl_coef,
        reward_clip=ppo.reward_clip,
        clip_ratio=ppo.clip_ratio,
        value_clip=ppo.value_clip,
        gamma=ppo.gamma,
        lam=ppo.lam,
        bf16=work.dtype == "bf16",
    )


def _done(batch: TokenBatch, metrics: dict[str, float]) -> Done:
    prompt_masks = batch.attention_mask & ~batch.response_mask
    return Done(
        prompts=tuple(
            tuple(ids[mask].tolist())
            for ids, mask in zip(batch.token_ids, prompt_masks, strict=True)
        ),
        lengths=tuple(batch.response_mask.sum(dim=1).tolist()),
        metrics=metrics,
    )


def _copy(model: PreTrainedModel, device: str) -> PreTrainedModel:
    copied = copy.deepcopy(model)
    nn.Module.to(copied, device)
    return copied


@torch.no_grad()
def _reset(model: PreTrainedModel, to: PreTrainedModel) -> None:
    for parameter, value in zip(model.parameters(), to.parameters(), strict=True):
        parameter.copy_(value)
