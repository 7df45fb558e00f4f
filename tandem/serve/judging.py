"""Numbers beside answers: log-probs, reward, KL and values, by forwards of whole sequences.

Answers are judged together: one forward of each model over all of them, as far as their tokens fit.
A token's numbers depend on its own sequence alone, so on a CPU they are those of each answer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from tandem.data.render import IN_MEMORY
from tandem.data.spoken import as_judged
from tandem.errors import DataError
from tandem.generation.observed import TokenLogprobs, observe, read_observed
from tandem.message import Answer, Message
from tandem.models.lm_head import vocabulary_head
from tandem.models.packed import last_states, predictor_states
from tandem.models.scalar import head_outputs_by_row, normalization
from tandem.ops.logits import rows_at_once
from tandem.serve.loading import Loaded, LoadedScalar
from tandem.types import TokenBatch, TokenRow

TOKENS_AT_ONCE = 4096
"""Most tokens of the answers in one forward, prompts included, unless one alone has more."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A sequence to judge.

    token_ids: prompt and answer, its stop token included. prompt_length: of these, the prompt's.
    is_finished: a stop token ends it. messages, said, tools: what it says, for a reward model with
    another tokenizer; messages is empty where the prompt was no conversation.
    """

    token_ids: tuple[int, ...]
    prompt_length: int
    is_finished: bool
    messages: tuple[Message, ...]
    said: Answer
    tools: str = ""

    @property
    def row(self) -> TokenRow:
        """The same as a row whose response is the answer."""
        answer = len(self.token_ids) - self.prompt_length
        mask = (False,) * self.prompt_length + (True,) * answer
        return TokenRow(self.token_ids, mask, IN_MEMORY)


@dataclass(frozen=True, slots=True)
class Judges:
    """The models that judge a policy's answers; None where there are none.

    why: of those that are there but cannot be loaded, the reason by the number that is missing:
    reward, kl, values.
    """

    reference: Loaded | None
    reward_model: LoadedScalar | None
    critic: LoadedScalar | None
    why: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Judging:
    """An answer and what is wanted of it: reward, kl, token_kl, values; by which models.

    sampled: the policy's log-probs of the answer's tokens where the sampler kept them.
    """

    policy: Loaded
    answered: Answered
    wanted: frozenset[str]
    judges: Judges
    sampled: Sequence[TokenLogprobs] = ()


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
        numbers = observe(head(states), chosen, top, loaded.renderer.pieces.num_ids)
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
def judge(asked: Sequence[Judging]) -> list[dict[str, Any]]:
    """What was wanted of each answer, by one forward of each model that is needed.

    KL is log p(policy) - log p(reference) of the sampled tokens, in nats, at temperature 1; `kl`
    is the sum of `token_kl`. Rewards and values are normalized as in training.

    Returns:
        in the order of `asked`: the wanted numbers, None for those that cannot be had, with the
        reasons in `why`.
    """
    found: list[dict[str, Any]] = [{} for _ in asked]
    why: list[dict[str, str]] = [{} for _ in asked]
    rewards = _Rows[LoadedScalar]()
    kls = _Rows[Loaded]()
    unsampled = _Rows[Loaded]()
    values = _Rows[LoadedScalar]()
    for number, one in enumerate(asked):
        answered, wanted = one.answered, one.wanted - {"seed"}
        if answered.prompt_length == len(answered.token_ids):
            why[number] = dict.fromkeys(sorted(wanted), "the answer has no token")
            found[number] = dict.fromkeys(why[number])
            continue
        found[number] = dict.fromkeys(name for name in _NUMBERS if name in wanted)
        if "reward" in wanted:
            scored = _scored_row(one, why[number])
            if scored is not None and _fits("reward", "reward model", *scored, why[number]):
                rewards.add(number, *scored)
        if wanted & {"kl", "token_kl"}:
            reference = _like(one.judges.reference, one, _REFERENCE, why[number])
            if reference is not None:
                kls.add(number, reference, answered.row)
                if len(one.sampled) != len(answered.token_ids) - answered.prompt_length:
                    unsampled.add(number, one.policy, answered.row)
        if "values" in wanted:
            critic = _like(one.judges.critic, one, _CRITIC, why[number])
            if critic is not None:
                values.add(number, critic, answered.row)
    for number, reward in rewards.computed(_scores):
        found[number]["reward"] = reward
    own = {number: one.sampled for number, one in enumerate(asked)}
    own |= dict(unsampled.computed(_plain_logprobs))
    for number, theirs in kls.computed(_plain_logprobs):
        pairs = zip(own[number], theirs, strict=True)
        token_kl = [mine.logprob - other.logprob for mine, other in pairs]
        numbers = {"kl": sum(token_kl), "token_kl": token_kl}
        found[number] |= {name: numbers[name] for name in numbers if name in found[number]}
    for number, of_tokens in values.computed(_values):
        found[number]["values"] = of_tokens
    return [
        one | ({"why": reasons} if reasons else {}) for one, reasons in zip(found, why, strict=True)
    ]


_NUMBERS = ("reward", "kl", "token_kl", "values")
_REFERENCE, _CRITIC = ("kl", "reference"), ("values", "critic")
"""A number, and who is needed for it."""
_Judge = TypeVar("_Judge", Loaded, LoadedScalar)
_Found = TypeVar("_Found")


class _Rows(Generic[_Judge]):
    """Rows that wait for a forward, by the model that runs it and by the answer's number."""

    def __init__(self) -> None:
        self._of: dict[_Judge, list[tuple[int, TokenRow]]] = {}

    def add(self, number: int, model: _Judge, row: TokenRow) -> None:
        """One row more."""
        self._of.setdefault(model, []).append((number, row))

    def computed(
        self, compute: Callable[[_Judge, list[TokenRow]], Sequence[_Found]]
    ) -> Iterator[tuple[int, _Found]]:
        """What `compute` finds for each row, with the answer's number; some rows at a time."""
        for model, waiting in self._of.items():
            for part in _parts(waiting):
                found = compute(model, [row for _, row in part])
                yield from zip((number for number, _ in part), found, strict=True)


def _parts(waiting: Sequence[tuple[int, TokenRow]]) -> Iterator[list[tuple[int, TokenRow]]]:
    """Rows in order, of at most TOKENS_AT_ONCE together; a longer one is alone."""
    part: list[tuple[int, TokenRow]] = []
    tokens = 0
    for number, row in waiting:
        if part and tokens + len(row) > TOKENS_AT_ONCE:
            yield part
            part, tokens = [], 0
        part.append((number, row))
        tokens += len(row)
    if part:
        yield part


def _like(
    judge: _Judge | None, one: Judging, names: tuple[str, str], why: dict[str, str]
) -> _Judge | None:
    """A judge, if there is one and it can read the answer's tokens; else `why` tells the reason."""
    name, role = names
    if judge is None:
        none = f"{'this model has' if role == 'reference' else 'there is'} no {role}"
        why[name] = one.judges.why.get(name, none)
        return None
    if not judge.renderer.renders_like(one.policy.renderer):
        why[name] = f"the {role} has another tokenizer"
        return None
    return judge if _fits(name, role, judge, one.answered.row, why) else None


def _fits(
    name: str, role: str, judge: Loaded | LoadedScalar, row: TokenRow, why: dict[str, str]
) -> bool:
    """Whether a judge has a position for every token; else `why` tells that it has not."""
    most = judge.positions
    if most is None or len(row) <= most:
        return True
    why[name] = f"the {role} reads at most {most} tokens; prompt and answer have {len(row)}"
    return False


def _scored_row(one: Judging, why: dict[str, str]) -> tuple[LoadedScalar, TokenRow] | None:
    """What the reward model scores, in its own tokens."""
    scorer, answered = one.judges.reward_model, one.answered
    if scorer is None:
        why["reward"] = one.judges.why.get("reward", "there is no reward model")
        return None
    if scorer.renderer.renders_like(one.policy.renderer):
        return scorer, answered.row
    if not answered.messages:
        why["reward"] = "the reward model has another tokenizer and scores conversations only"
        return None
    read = answered.messages, answered.said, IN_MEMORY, answered.tools
    try:
        return scorer, as_judged(scorer.renderer, *read, is_finished=answered.is_finished)
    except DataError as error:  # its template refuses these turns
        why["reward"] = f"the reward model cannot read this conversation: {error}"
        return None


def _scores(scorer: LoadedScalar, rows: list[TokenRow]) -> list[float]:
    states = last_states(scorer.model, _batch(scorer, rows))
    return _normalized(scorer, head_outputs_by_row(scorer.model, states, [1] * len(rows))).tolist()


def _plain_logprobs(loaded: Loaded, rows: list[TokenRow]) -> list[list[TokenLogprobs]]:
    return sequence_logprobs(loaded, rows, 0)


def _values(critic: LoadedScalar, rows: list[TokenRow]) -> list[list[float]]:
    counts = [sum(row.response_mask) for row in rows]
    states = predictor_states(critic.model, _batch(critic, rows))
    values = _normalized(critic, head_outputs_by_row(critic.model, states, counts))
    return [part.tolist() for part in values.split(counts)]


def _normalized(scorer: LoadedScalar, outputs: Tensor) -> Tensor:
    mean, std = normalization(scorer.model)
    return (outputs - mean) / std


def _batch(scorer: LoadedScalar, rows: Sequence[TokenRow]) -> TokenBatch:
    return TokenBatch.from_rows(rows, scorer.renderer.pad_token_id).to(scorer.model.device)


def finite(value: Any) -> Any:
    """Numbers as JSON can hold them: null in place of NaN and infinities."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, list):
        return [finite(item) for item in value]
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return value
