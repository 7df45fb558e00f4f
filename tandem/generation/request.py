"""An answer to draw, and the samples of one prompt."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from tandem.generation.constrained import Constraint
from tandem.generation.detokenizer import AnswerText
from tandem.generation.observed import TokenLogprobs
from tandem.generation.sampler import Sampler
from tandem.generation.snapshots import Stop


@dataclass(slots=True, eq=False)
class Request:
    """One answer to draw, and where it stands.

    number: the caller's name for it. key: its `sequence_key`. limit: most tokens it may have.
    text: watches for stop strings; None where there are none. constraint: the form that the answer
    must have; None: any.
    row: among the live rows, -1 off them. is_counted: its prompt is in the row's counts, for
    penalties. blocks: what it holds. state: the slot of its states, where layers keep any; -1:
    none. trail: the slot of what they were at the last block's end, behind `trail_tokens` tokens;
    -1: none. begun: the step that drew its first token. length: tokens drawn, the one that ended it
    included; valid once `ended`.
    finished: a stop token or stop string ended it. failed: its distribution was none (NaN).
    top: how many of the likeliest tokens to observe beside each drawn one; -1: observe nothing.
    epoch: of the pool, when its prompt came in.
    drawn: its tokens as far as the host has read them, where sessions keep answers.
    observed: what was observed, a drawn token each.
    predicted: tokens that it is likely to have, for `speculative`.
    """

    number: int
    prompt: tuple[int, ...]
    key: int
    sampler: Sampler
    limit: int
    text: AnswerText | None = None
    constraint: Constraint | None = None
    row: int = -1
    is_counted: bool = False
    blocks: list[int] = field(default_factory=list)
    state: int = -1
    trail: int = -1
    trail_tokens: int = 0
    begun: int = -1
    length: int = 0
    ended: bool = False
    finished: bool = False
    failed: bool = False
    top: int = -1
    observed: list[TokenLogprobs] = field(default_factory=list)
    epoch: int = 0
    drawn: list[int] = field(default_factory=list)
    predicted: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Group:
    """Samples of one prompt. computed: its tokens whose keys and values are in memory, or will be
    before its own next ones. found: its first blocks, which others compute; awaited: those of them
    that they had not when it came in or was last asked for. state: the slot of its states, -1:
    none. source: the snapshot that they begin as, -1: none. stops: where its run is to leave
    snapshots, in order. logits: (V,) of its last token, once it has been run."""

    prompt: tuple[int, ...]
    waiting: deque[Request]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    found: int = 0
    awaited: set[int] = field(default_factory=set)
    state: int = -1
    source: int = -1
    stops: list[Stop] = field(default_factory=list)
    epoch: int = 0
    logits: Tensor | None = None
