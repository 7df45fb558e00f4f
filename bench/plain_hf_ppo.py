"""PPO and GRPO with plain Hugging Face parts: the loop of a careful user who has the textbook.

Prompts padded on the left, `generate` with sampling, padded forwards over the whole (B, T) with
full logits in micro-batches, log_softmax and gather, GAE as a loop over time, whitening, clipped
losses, AdamW. Nothing here is Tandem's, so that what Tandem is measured against stays what it is.

Columns: index t of every (B, T) tensor speaks of token t; 0 off the response.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

from bench.plain_hf_supervised import adamw, autocast, update


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The knobs of one PPO step, named as in the textbook.

    micro_batch_tokens: padded tokens per forward; at least one row is taken.
    """

    max_new_tokens: int
    eos_token_id: int
    pad_token_id: int
    micro_batch_tokens: int
    minibatch_size: int
    epochs: int
    actor_learning_rate: float
    critic_learning_rate: float
    betas: tuple[float, float]
    max_grad_norm: float
    kl_coef: float
    reward_clip: float
    clip_ratio: float
    value_clip: float
    gamma: float
    lam: float
    bf16: bool = False


class Sequences(NamedTuple):
    """Prompts padded on the left, then answers padded on the right; all (B, T).

    response_mask: tokens that the policy sampled, EOS included.
    """

    token_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor


class Experience(NamedTuple):
    """Sequences with all that the updates need; (B, T) but scores, (B,)."""

    sequences: Sequences
    old_logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    scores: Tensor


class HoldLengths(LogitsProcessor):
    """Makes row i draw EOS as its answer's token number `lengths[i]`, and never before.

    lengths: (B,) int64, from 1; a row with more than `max_new_tokens` never draws it.
    """

    def __init__(self, lengths: Tensor, prompt_width: int, eos_token_id: int) -> None:
        self.lengths = lengths
        self.prompt_width = prompt_width
        self.eos_token_id = eos_token_id

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        number = input_ids.shape[1] - self.prompt_width + 1
        scores[:, self.eos_token_id] = -torch.inf
        due = (self.lengths == number).nonzero().flatten()
        scores[due] = -torch.inf
        scores[due, self.eos_token_id] = 0.0
        return scores


class PlainPPO:
    """Actor, reference, critic and reward model, and one step of PPO in three calls.

    critic and reward_model are sequence-classification models with one output.
    """

    def __init__(
        self,
        actor: PreTrainedModel,
        critic: PreTrainedModel,
        reward_model: PreTrainedModel,
        settings: Settings,
    ) -> None:
        """The models are taken as they are; the reference is a copy of the actor."""
        self.actor, self.critic = actor, critic
        self.reference = copy.deepcopy(actor).requires_grad_(False).eval()
        self.reward_model = reward_model.requires_grad_(False).eval()
        self.settings = settings
        self.actor_optimizer = adamw(actor, settings.actor_learning_rate, settings.betas)
        self.critic_optimizer = adamw(critic, settings.critic_learning_rate, settings.betas)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], lengths: Tensor) -> Sequences:
        """Sample an answer to each prompt, of the lengths (B,) that `HoldLengths` says."""
        settings, device = self.settings, self.actor.device
        token_ids, attention_mask = left_padded(prompts, settings.pad_token_id, device)
        width = token_ids.shape[1]
        hold = HoldLengths(lengths.to(device), width, settings.eos_token_id)
        self.actor.eval()
        with autocast(self.actor, settings.bf16):
            sequences = self.actor.generate(  # type: ignore[operator]
                token_ids,
                attention_mask=attention_mask,
                generation_config=sampling(
                    settings.max_new_tokens, settings.eos_token_id, settings.pad_token_id
                ),
                logits_processor=LogitsProcessorList([hold]),
            )
        is_eos = (sequences[:, width:] == settings.eos_token_id).long()
        sampled = is_eos.cumsum(dim=1) - is_eos == 0  # up to and with the first EOS
        response_mask = torch.cat([torch.zeros_like(token_ids, dtype=torch.bool), sampled], dim=1)
        return Sequences(
            sequences, torch.cat([attention_mask.bool(), sampled], dim=1), response_mask
        )

    @torch.no_grad()
    def score(self, sequences: Sequences) -> Experience:
        """Log-probs by actor and reference, values, scores, rewards, advantages, returns."""
        settings, mask = self.settings, sequences.response_mask
        self.actor.eval()
        self.critic.eval()
        parts = [self._score_part(part) for part in self._microbatches(sequences)]
        old, ref, values, scores = (torch.cat(column) for column in zip(*parts, strict=True))
        scores = scores.clamp(-settings.reward_clip, settings.reward_clip)
        rewards = -settings.kl_coef * (old - ref) * mask
        rewards[torch.arange(len(mask)), _last(mask)] += scores
        advantages = self._gae(rewards, values, mask)
        returns = (advantages + values) * mask
        chosen = advantages[mask]
        whitened = (advantages - chosen.mean()) / chosen.std(correction=0).clamp(min=1e-8)
        return Experience(sequences, old, ref, values, whitened * mask, returns, scores)

    def train(self, experience: Experience) -> dict[str, float]:
        """Update actor and critic; returns the means of losses and gradient norms."""
        settings = self.settings
        self.actor.train()
        self.critic.train()
        updates: list[tuple[float, float, float, float]] = []
        for _ in range(settings.epochs):
            order = torch.randperm(len(experience.scores))
            for rows in order.split(settings.minibatch_size):
                updates.append(self._update(_select(experience, rows)))
        names = ("policy_loss", "value_loss", "actor_grad_norm", "critic_grad_norm")
        columns = zip(*updates, strict=True)
        means = {
            name: sum(column) / len(updates) for name, column in zip(names, columns, strict=True)
        }
        return {**means, "updates": float(len(updates))}

    def _update(self, minibatch: Experience) -> tuple[float, float, float, float]:
        """One optimizer step of each: policy loss, value loss, both gradient norms."""
        settings = self.settings
        count = int(minibatch.sequences.response_mask.sum())
        policy_total = value_total = 0.0
        rows = torch.arange(len(minibatch.scores))
        for chosen in rows.split(self._rows(minibatch.sequences)):
            part = _select(minibatch, chosen)
            policy_loss = self._policy_loss(part) / count
            policy_loss.backward()
            value_loss = self._value_loss(part) / count
            value_loss.backward()
            policy_total += policy_loss.item()
            value_total += value_loss.item()
        norms = [
            update(model, optimizer, settings.max_grad_norm)
            for model, optimizer in (
                (self.actor, self.actor_optimizer),
                (self.critic, self.critic_optimizer),
            )
        ]
        return policy_total, value_total, norms[0], norms[1]

    def _policy_loss(self, part: Experience) -> Tensor:
        clip = self.settings.clip_ratio
        logprobs = self._logprobs(self.actor, part.sequences)
        ratio = torch.exp(logprobs - part.old_logprobs)
        surrogate = torch.minimum(
            ratio * part.advantages, ratio.clamp(1 - clip, 1 + clip) * part.advantages
        )
        return -(surrogate * part.sequences.response_mask).sum()

    def _value_loss(self, part: Experience) -> Tensor:
        clip = self.settings.value_clip
        values = self._values(part.sequences)
        moved = part.values + (values - part.values).clamp(-clip, clip)
        worst = torch.maximum((values - part.returns) ** 2, (moved - part.returns) ** 2)
        return 0.5 * (worst * part.sequences.response_mask).sum()

    def _score_part(self, part: Sequences) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return (
            self._logprobs(self.actor, part),
            self._logprobs(self.reference, part),
            self._values(part),
            self._scores(part),
        )

    def _scores(self, part: Sequences) -> Tensor:
        """(b,): what the reward model says at an answer's last token."""
        outputs = self._head_outputs(self.reward_model, part)
        return outputs[torch.arange(len(outputs)), _last(part.response_mask)]

    def _logprobs(self, model: PreTrainedModel, part: Sequences) -> Tensor:
        """(b, T) log-prob of each response token, from the logits of every position."""
        with autocast(model, self.settings.bf16):
            logits = model(
                input_ids=part.token_ids,
                attention_mask=part.attention_mask.long(),
                position_ids=_positions(part.attention_mask),
                use_cache=False,
            ).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
        chosen = logprobs.gather(2, part.token_ids[:, 1:, None]).squeeze(2)
        return torch.nn.functional.pad(chosen, (1, 0)) * part.response_mask

    def _values(self, part: Sequences) -> Tensor:
        """(b, T): at t what the critic says after token t - 1."""
        outputs = self._head_outputs(self.critic, part)
        return torch.nn.functional.pad(outputs[:, :-1], (1, 0)) * part.response_mask

    def _head_outputs(self, model: PreTrainedModel, part: Sequences) -> Tensor:
        """(b, T) float32: the scalar head over every position."""
        with autocast(model, self.settings.bf16):
            hidden = model.base_model(
                input_ids=part.token_ids,
                attention_mask=part.attention_mask.long(),
                position_ids=_positions(part.attention_mask),
                use_cache=False,
            ).last_hidden_state
            return model.score(hidden).squeeze(-1).float()  # type: ignore[operator]

    def _gae(self, rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Advantages over the answers, each one run of columns; nothing follows its last token."""
        gamma, lam = self.settings.gamma, self.settings.lam
        advantages = torch.zeros_like(rewards)
        following = torch.zeros_like(rewards[:, 0])
        for t in reversed(range(rewards.shape[1])):
            next_values = values[:, t + 1] if t + 1 < rewards.shape[1] else 0.0
            delta = rewards[:, t] + gamma * next_values - values[:, t]
            following = (delta + gamma * lam * following) * mask[:, t]
            advantages[:, t] = following
        return advantages

    def _rows(self, sequences: Sequences) -> int:
        return max(1, self.settings.micro_batch_tokens // sequences.token_ids.shape[1])

    def _microbatches(self, sequences: Sequences) -> list[Sequences]:
        parts = (column.split(self._rows(sequences)) for column in sequences)
        return [Sequences(*part) for part in zip(*parts, strict=True)]


class PlainGRPO(PlainPPO):
    """The same without a critic and a reference: advantages are an answer's score against its
    group's, and one update of a rollout needs no log-probs of before."""

    def __init__(
        self,
        actor: PreTrainedModel,
        reward_model: PreTrainedModel,
        settings: Settings,
        samples_per_prompt: int,
    ) -> None:
        """Answers to one prompt, `samples_per_prompt`, stand side by side."""
        self.actor = actor
        self.reward_model = reward_model.requires_grad_(False).eval()
        self.settings, self.group = settings, samples_per_prompt
        self.actor_optimizer = adamw(actor, settings.actor_learning_rate, settings.betas)

    @torch.no_grad()
    def score(self, sequences: Sequences) -> Experience:
        """Scores, advantages, and log-probs where more than one update will need them."""
        settings, mask = self.settings, sequences.response_mask
        parts = self._microbatches(sequences)
        scores = torch.cat([self._scores(part) for part in parts])
        scores = scores.clamp(-settings.reward_clip, settings.reward_clip)
        groups = scores.view(-1, self.group)
        away = groups - groups.mean(dim=1, keepdim=True)
        advantages = (away / (groups.std(dim=1, keepdim=True) + 1e-6)).view(-1, 1) * mask
        none = torch.zeros_like(advantages)
        old = none
        if settings.epochs * len(scores) > settings.minibatch_size:
            self.actor.eval()
            old = torch.cat([self._logprobs(self.actor, part) for part in parts])
        return Experience(sequences, old, none, none, advantages, none, scores)

    def train(self, experience: Experience) -> dict[str, float]:
        """Update the actor; returns the means of loss and gradient norm."""
        settings = self.settings
        self.actor.train()
        is_one = settings.epochs * len(experience.scores) <= settings.minibatch_size
        updates: list[tuple[float, float]] = []
        for _ in range(settings.epochs):
            order = torch.randperm(len(experience.scores))
            for rows in order.split(settings.minibatch_size):
                updates.append(self._actor_update(_select(experience, rows), is_one))
        loss, norm = (sum(column) / len(updates) for column in zip(*updates, strict=True))
        return {"policy_loss": loss, "actor_grad_norm": norm, "updates": float(len(updates))}

    def _actor_update(self, minibatch: Experience, is_one: bool) -> tuple[float, float]:
        settings, clip = self.settings, self.settings.clip_ratio
        count, total = int(minibatch.sequences.response_mask.sum()), 0.0
        for chosen in torch.arange(len(minibatch.scores)).split(self._rows(minibatch.sequences)):
            part = _select(minibatch, chosen)
            logprobs = self._logprobs(self.actor, part.sequences)
            ratio = torch.exp(logprobs - (logprobs.detach() if is_one else part.old_logprobs))
            surrogate = torch.minimum(
                ratio * part.advantages, ratio.clamp(1 - clip, 1 + clip) * part.advantages
            )
            loss = -(surrogate * part.sequences.response_mask).sum() / count
            loss.backward()
            total += loss.item()
        return total, update(self.actor, self.actor_optimizer, settings.max_grad_norm)


def left_padded(
    prompts: Sequence[Sequence[int]], pad_token_id: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """(b, t) ids and attention mask of prompts that end in the last column."""
    width = max(map(len, prompts))
    token_ids = torch.full((len(prompts), width), pad_token_id)
    attention_mask = torch.zeros((len(prompts), width), dtype=torch.long)
    for i, prompt in enumerate(prompts):
        token_ids[i, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask[i, width - len(prompt) :] = 1
    return token_ids.to(device), attention_mask.to(device)


def sampling(
    max_new_tokens: int, eos_token_id: int, pad_token_id: int, **more: Any
) -> GenerationConfig:
    """Plain sampling from the model's own distribution."""
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        **more,
    )


def _positions(attention_mask: Tensor) -> Tensor:
    """(b, T) position of each token in its own row, whatever stands on its left."""
    return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)


def _last(mask: Tensor) -> Tensor:
    """(b,) the last column that the mask holds in."""
    return torch.where(mask, torch.arange(mask.shape[1], device=mask.device), -1).amax(dim=1)


def _select(experience: Experience, rows: Tensor) -> Experience:
    sequences = Sequences(*(column[rows] for column in experience.sequences))
    return Experience(sequences, *(column[rows] for column in experience[1:]))
