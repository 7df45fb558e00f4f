"""The data types that packages exchange, with shapes.

Shape letters: B sequences, T tokens, V vocabulary, D width, N selected tokens.
Every (B, T) tensor is right-padded and index t is about token t: `logprobs[:, t]` is
log p(token t | tokens < t) and `values[:, t]` the value of the state before token t.
Masks come from collation and from the sampler and are never inferred from a token's value, so the
pad token may equal EOS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

from tandem.compact import Marks, TokenIds
from tandem.errors import ShapeError
from tandem.message import Answer as Answer
from tandem.message import Message as Message
from tandem.message import Role as Role

if TYPE_CHECKING:  # reading data must not wait for torch
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Source:
    """Where a sample came from, for messages.

    Example: Source(dataset="politeness", path="prefs/politeness.jsonl.gz", line=17).
    `line` counts from 1 (the row number if the format has no lines).
    """

    dataset: str
    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of any data set, in the form that every stage reads.

    A dialog row has `prompt` (all turns before the answer, ending with the user's) and, if the row
    has them, the answer to learn or prefer (`chosen`) and the worse one (`rejected`).
    An answer is text, or the assistant's turn if that calls tools; `tools` are those that it may
    call, a list as JSON text. A text row has only `text`. `label` is set if the row labels its only
    answer as good (`chosen`) or bad (`rejected`), `grade` if it grades it, more is better, `margin`
    if it tells how much better `chosen` is. `ranking` is set if it ranks several answers, as (rank,
    answer) with 1 the best; `chosen` is then the best of them and `rejected` the worst. One made of
    graded answers has, in its order, their `grades` and the `rows` of each. Columns that Tandem
    does not read are kept for reward functions.

    Example: the row {"prompt": "2+2?", "chosen": "4", "rejected": "5", "level": "easy"} is
    Sample(prompt=(Message("user", "2+2?"),), chosen="4", rejected="5", columns={"level": "easy"}).
    """

    source: Source
    prompt: tuple[Message, ...] = ()
    chosen: Answer | None = None
    rejected: Answer | None = None
    text: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    label: bool | None = None
    margin: float = 0.0
    ranking: tuple[tuple[int, Answer], ...] = ()
    grade: float | None = None
    grades: tuple[float, ...] = ()
    rows: tuple[tuple[Source, ...], ...] = ()
    tools: str = ""

    @property
    def sources(self) -> tuple[Source, ...]:
        """All rows that it was made of."""
        return tuple(chain.from_iterable(self.rows)) or (self.source,)

    @property
    def is_pair(self) -> bool:
        """Whether it has a better and a worse answer."""
        return self.chosen is not None and self.rejected is not None


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One rendered sequence: ids and, per id, whether the assistant wrote it (its EOS included).

    Example: "Human: hi\\n\\nAssistant:" + " yo" + EOS gives
    token_ids=(40, 17, 9, 31, 2), response_mask=(False, False, False, True, True).
    """

    token_ids: Sequence[int]
    response_mask: Sequence[bool]
    source: Source

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", TokenIds.of(self.token_ids))
        object.__setattr__(self, "response_mask", Marks.of(self.response_mask))

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class PairRow:
    """A prompt's preferred and rejected answer, each a whole rendered sequence.

    margin: how much better the row calls the preferred one, in reward-model units.
    """

    chosen: TokenRow
    rejected: TokenRow
    margin: float = 0.0

    def __len__(self) -> int:
        return max(len(self.chosen), len(self.rejected))

    @property
    def sequences(self) -> tuple[TokenRow, ...]:
        """Both, the preferred one first."""
        return self.chosen, self.rejected

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(better, worse) places in `sequences`."""
        return ((0, 1),)


@dataclass(frozen=True, slots=True)
class RankedRow:
    """A prompt's answers in order of preference, each a whole rendered sequence.

    ranks: of each, 1 is the best; equal ones are not compared. At least two differ. grades: of
    each, if the ranks are made of them.
    Example: ranks (1, 2, 2) compares the first answer with each of the others.
    """

    sequences: tuple[TokenRow, ...]
    ranks: tuple[int, ...]
    margin: float = 0.0
    grades: tuple[float, ...] = ()

    def __len__(self) -> int:
        return max(map(len, self.sequences))

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(better, worse) places in `sequences` of every two answers that are compared."""
        places = range(len(self.ranks))
        return tuple((i, j) for i in places for j in places if self.ranks[i] < self.ranks[j])


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """One answer, a whole rendered sequence."""

    answer: TokenRow

    def __len__(self) -> int:
        return len(self.answer)

    @property
    def sequences(self) -> tuple[TokenRow, ...]:
        """The one sequence."""
        return (self.answer,)


@dataclass(frozen=True, slots=True)
class LabelledRow(AnswerRow):
    """An answer that its row calls good or bad."""

    is_desirable: bool


@dataclass(frozen=True, slots=True)
class GradedRow(AnswerRow):
    """An answer and its grade, in the units of its data set."""

    grade: float


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt to answer: its ids up to where the assistant begins, its turns, its columns, the
    tools that may be called (a list as JSON text)."""

    token_ids: Sequence[int]
    messages: tuple[Message, ...]
    columns: Mapping[str, Any]
    source: Source
    tools: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", TokenIds.of(self.token_ids))

    def __len__(self) -> int:
        return len(self.token_ids)


def _sent(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers on a device; from the host by way of pinned memory, without waiting."""
    if numbers.device.type == "cpu" and device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=device.type != "cpu")


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Sequences side by side, right-padded.

    token_ids: (B, T) int64. attention_mask: (B, T) bool, a real token.
    response_mask: (B, T) bool, a token that the assistant wrote, its EOS included; a subset of
    attention_mask that never holds at index 0 (nothing precedes it to be predicted from).
    host: the same batch in host memory, where this one is on a device; made when it is first asked
        for (`on_host`) unless it was known before.
    """

    token_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    host: TokenBatch | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        shapes = {tuple(tensor.shape) for tensor in self._tensors}
        if len(shapes) != 1 or len(next(iter(shapes))) != 2:
            raise ShapeError(
                f"TokenBatch tensors must share one (B, T) shape; got {sorted(shapes)}. "
                "Build batches with TokenBatch.from_rows."
            )

    @staticmethod
    def from_rows(rows: Sequence[TokenRow], pad_token_id: int) -> TokenBatch:
        """Right-pad `rows` to the longest of them.

        Raises:
            ShapeError: a row has not as many marks as ids.
        """
        import torch

        for row in rows:
            if len(row.response_mask) != len(row):
                raise ShapeError(
                    f"{row.source}: response_mask must have a mark for each of {len(row)} ids; "
                    f"got {len(row.response_mask)}. Render the row again."
                )
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
        width = max((len(row) for row in rows), default=0)
        attention_mask = torch.arange(width) < lengths[:, None]
        token_ids = torch.full(attention_mask.shape, pad_token_id, dtype=torch.long)
        response_mask = torch.zeros(attention_mask.shape, dtype=torch.bool)
        ids = list(chain.from_iterable(row.token_ids for row in rows))
        token_ids[attention_mask] = torch.tensor(ids, dtype=torch.long)
        marks = list(chain.from_iterable(row.response_mask for row in rows))
        response_mask[attention_mask] = torch.tensor(marks, dtype=torch.bool)
        return TokenBatch(token_ids, attention_mask, response_mask)

    @property
    def num_response_tokens(self) -> int:
        """How many tokens a token-mean loss divides by."""
        return int(self.on_host().response_mask.sum())

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    def lengths(self) -> Tensor:
        """(B,) int64: real tokens per sequence."""
        return self.attention_mask.sum(dim=1)

    def on_host(self) -> TokenBatch:
        """The same batch in host memory; the device is asked at most once."""
        if self.token_ids.device.type == "cpu":
            return self
        if self.host is None:
            object.__setattr__(self, "host", self.to("cpu"))
        assert self.host is not None
        return self.host

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same batch on `device`."""
        if self.host is not None and str(device) == "cpu":
            return self.host
        import torch

        place = torch.device(device)
        if place.type == self.token_ids.device.type == "cpu":
            return self
        # In one transfer.
        token_ids, real, response = _sent(torch.stack(self._tensors), place)
        moved = TokenBatch(token_ids, real.bool(), response.bool())
        if place.type == "cpu":
            return moved
        return replace(moved, host=self if self.token_ids.device.type == "cpu" else self.host)

    def select(self, rows: Tensor, there: Tensor | None = None) -> TokenBatch:
        """The sequences at `rows` (M,) int64, on the host or the device, trimmed to the longest of
        them.

        Args:
            there: the same numbers on this batch's device, if they are there already.
        """
        if there is None:
            there = _sent(rows, self.token_ids.device)
        return self._selected(rows, there)

    def _selected(self, rows: Tensor, there: Tensor) -> TokenBatch:
        """`there`: the rows on this batch's device."""
        host = self.on_host()
        chosen = rows.cpu()
        width = int(host.attention_mask[chosen].sum(dim=1).max()) if len(rows) else 0
        own = host._cut(chosen, width)
        return own if host is self else self._cut(there, width, own)

    def _cut(self, rows: Tensor, width: int, host: TokenBatch | None = None) -> TokenBatch:
        token_ids, real, response = (tensor[rows, :width] for tensor in self._tensors)
        return TokenBatch(token_ids, real, response, host)

    @property
    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.token_ids, self.attention_mask, self.response_mask


@dataclass(frozen=True, slots=True)
class Rollout:
    """Prompts with what the policy answered, and the generator's own numbers.

    batch: prompt then response per row; `response_mask` marks sampled tokens, EOS included.
    rollout_logprobs: (B, T) float32 nats, log-prob of each sampled token under the policy at the
        sampling temperature, as the generator computed it; 0 off the response.
    sampled_logprobs: (B, T) float32 nats, the same under the distribution that the token was drawn
        from (after top-k, top-p, the tokenizer's bound); equal to rollout_logprobs without any.
    rollout_entropy: (B, T) float32 nats, of the policy at the sampling temperature where each
        token was drawn; 0 off the response.
    finished: (B,) bool, the response ended with a stop (token or string), not at the length limit.
    prompts: B rows (each repeated for its samples); responses: B texts, stop token left out.
    group: (B,) int64, which of the rollout's prompts each row answers.
    rank_seconds: how long each rank took for its share; empty where there is but one.
    """

    batch: TokenBatch
    rollout_logprobs: Tensor
    sampled_logprobs: Tensor
    rollout_entropy: Tensor
    finished: Tensor
    prompts: tuple[PromptRow, ...]
    responses: tuple[str, ...]
    group: Tensor
    rank_seconds: tuple[float, ...] = ()
    PER_TOKEN: ClassVar = ("rollout_logprobs", "sampled_logprobs", "rollout_entropy")

    def __len__(self) -> int:
        return len(self.batch)


@dataclass(frozen=True, slots=True)
class Experience:
    """A rollout scored: all that an update needs. Never changed after it is made.

    old_logprobs, ref_logprobs: (B, T) float32 nats at the sampling temperature.
    rewards, advantages, values, returns: (B, T) float32, reward units; 0 off the response.
    scores: (B,) float32, one reward per response, normalized, clipped and mixed as configured.
    group: (B,) int64, equal for answers to one prompt of the rollout.
    in_loss: (B,) bool, answers that the loss counts; None: all.
    ref_logprobs, values, returns: None where there is no reference, or no critic.
    rollout, metrics: what it was made from and what making it measured; of the whole rollout,
        whatever rows were selected.
    """

    batch: TokenBatch
    old_logprobs: Tensor
    rewards: Tensor
    advantages: Tensor
    scores: Tensor
    group: Tensor
    rollout: Rollout
    metrics: Mapping[str, float]
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    in_loss: Tensor | None = None

    def __len__(self) -> int:
        return len(self.batch)

    def select(self, rows: Tensor, there: Tensor | None = None) -> Experience:
        """As `TokenBatch.select`."""
        from torch import Tensor

        if there is None:
            there = _sent(rows, self.batch.token_ids.device)
        batch = self.batch._selected(rows, there)
        width = batch.token_ids.shape[1]
        chosen: dict[str, Any] = {}
        for f in fields(self):
            if isinstance(value := getattr(self, f.name), Tensor):
                where = there if value.device == there.device else rows.to(value.device)
                chosen[f.name] = value[where, :width] if value.dim() == 2 else value[where]
        return replace(self, batch=batch, **chosen)
