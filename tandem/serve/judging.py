"""Numbers beside an answer: log-probs, reward, KL and values, by forwards of whole sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tandem.data.render import IN_MEMORY, Renderer
from tandem.generation.observed import TokenLogprobs, observe, read_observed
from tandem.models.lm_head import vocabulary_head
from tandem.models.packed import predictor_states
from tandem.models.scalar import normalization, sequence_scores, token_values
from tandem.ops.logits import rows_at_once
from tandem.serve.loading import Loaded, LoadedScalar
from tandem.types import Message, TokenBatch, TokenRow


@dataclass(frozen=True, slots=True)
class Answered:
    """A sequence to judge.

    token_ids: prompt and answer, its stop token included. prompt_length: of these, the prompt's.
    is_finished: a stop token ends it. messages, text: what it says, for a reward model with
    another tokenizer; messages is empty where the prompt was no conversation.
    """

    token_ids: tuple[int, ...]
    prompt_length: int
    is_finished: bool
    messages: tuple[Message, ...]
    text: str

    @property
    def row(self) -> TokenRow:
        """The same as a row whose response is the answer."""
        answer = len(self.token_ids) - self.prompt_length
        mask = (False,) * self.prompt_length + (True,) * answer
        return TokenRow(self.token_ids, mask, IN_MEMORY)


@dataclass(frozen=True, slots=True)
class Judges:
    """The models that judge a policy's answers; None where there are none."""

    reference: Loaded | None
    reward_model: LoadedScalar | None
    critic: LoadedScalar | None


@torch.no_grad()
def sequence_logprobs(
    loaded: Loaded, rows: Sequence[TokenRow], top: int
) -> list[list[TokenLogprobs]]:
    """Log-probs of the response tokens of each row, and of `top` of the likeliest in their place.

    They are those of the forward that trains: the same states, head and operation.
    """
    batch = TokenBatch.from_rows(rows, loaded.renderer.pad_token_id).to(loaded.model.device)
    hidden = predictor_states(loaded.model, batch)
    head = vocabulary_head(loaded.model)
    targets = batch.token_ids[batch.response_mask]
    found: list[TokenLogprobs] = []
    at_once = rows_at_once(loaded.vocabulary, hidden.dtype, hidden.device)
    for states, chosen in zip(hidden.split(at_once), targets.split(at_once), strict=True):
        numbers = observe(head(states), chosen, top)
        found += read_observed(chosen.tolist(), numbers, [top] * len(chosen))
    parts, start = [], 0
    for row in rows:
        end = start + sum(row.response_mask)
        parts.append(found[start:end])
        start = end
    return parts


def prompt_logprobs(
    loaded: Loaded, token_ids: Sequence[int], top: int
) -> list[TokenLogprobs | None]:
    """Log-probs of a text's tokens, each given those before it; None for the first."""
    if len(token_ids) < 2:
        return [None] * len(token_ids)
    mask = (False,) + (True,) * (len(token_ids) - 1)
    return [None, *sequence_logprobs(loaded, [TokenRow(tuple(token_ids), mask, IN_MEMORY)], top)[0]]


@torch.no_grad()
def judge(
    policy: Loaded,
    answered: Answered,
    wanted: frozenset[str],
    judges: Judges,
    sampled: Sequence[TokenLogprobs] = (),
) -> dict[str, Any]:
    """What was wanted of an answer: reward, kl, token_kl, values.

    KL is log p(policy) - log p(reference) of the sampled tokens, in nats, at temperature 1; `kl`
    is the sum of `token_kl`. Rewards and values are normalized as in training.

    Args:
        sampled: the policy's log-probs of the answer's tokens where the sampler kept them.
    Returns:
        the wanted numbers, None for those that cannot be had, with the reasons in `why`.
    """
    found: dict[str, Any] = {}
    why: dict[str, str] = {}
    if answered.prompt_length == len(answered.token_ids):
        why = dict.fromkeys(sorted(wanted - {"seed"}), "the answer has no token")
        return dict.fromkeys(why) | {"why": why} if why else {}
    if "reward" in wanted:
        found["reward"] = _reward(policy, answered, judges.reward_model, why)
    if wanted & {"kl", "token_kl"}:
        kl = _token_kl(policy, answered, judges.reference, sampled, why)
        if "kl" in wanted:
            found["kl"] = None if kl is None else sum(kl)
        if "token_kl" in wanted:
            found["token_kl"] = kl
    if "values" in wanted:
        found["values"] = _values(policy, answered, judges.critic, why)
    return found | ({"why": why} if why else {})


def _reward(
    policy: Loaded, answered: Answered, scorer: LoadedScalar | None, why: dict[str, str]
) -> float | None:
    if scorer is None:
        why["reward"] = "there is no reward model"
        return None
    row = answered.row
    if not scorer.renderer.renders_like(policy.renderer):
        if not answered.messages:
            why["reward"] = "the reward model has another tokenizer and scores conversations only"
            return None
        row = _rendered(scorer.renderer, answered)
    batch = _batch(scorer, row)
    mean, std = normalization(scorer.model)
    return float((sequence_scores(scorer.model, batch)[0] - mean) / std)


def _rendered(renderer: Renderer, answered: Answered) -> TokenRow:
    row = renderer.conversation(answered.messages, answered.text, IN_MEMORY, last_turn_only=True)
    if answered.is_finished:
        return row
    # An answer that was cut off must not get a terminator.
    return TokenRow(row.token_ids[:-1], row.response_mask[:-1], row.source)


def _token_kl(
    policy: Loaded,
    answered: Answered,
    reference: Loaded | None,
    sampled: Sequence[TokenLogprobs],
    why: dict[str, str],
) -> list[float] | None:
    if reference is None:
        why["kl"] = "this model has no reference"
        return None
    if not reference.renderer.renders_like(policy.renderer):
        why["kl"] = "the reference has another tokenizer"
        return None
    row = answered.row
    own = sampled if len(sampled) == sum(row.response_mask) else None
    own = sequence_logprobs(policy, [row], 0)[0] if own is None else own
    theirs = sequence_logprobs(reference, [row], 0)[0]
    return [mine.logprob - other.logprob for mine, other in zip(own, theirs, strict=True)]


def _values(
    policy: Loaded, answered: Answered, critic: LoadedScalar | None, why: dict[str, str]
) -> list[float] | None:
    if critic is None:
        why["values"] = "there is no critic"
        return None
    if not critic.renderer.renders_like(policy.renderer):
        why["values"] = "the critic has another tokenizer"
        return None
    batch = _batch(critic, answered.row)
    mean, std = normalization(critic.model)
    values = token_values(critic.model, batch)[batch.response_mask]
    found: list[float] = ((values - mean) / std).tolist()
    return found


def _batch(scorer: LoadedScalar, row: TokenRow) -> TokenBatch:
    return TokenBatch.from_rows([row], scorer.renderer.pad_token_id).to(scorer.model.device)


def finite(value: Any) -> Any:
    """Numbers as JSON can hold them: null in place of NaN and infinities."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, list):
        return [finite(item) for item in value]
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return value
