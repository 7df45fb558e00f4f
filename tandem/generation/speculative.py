"""Speculative decoding without a draft model: guesses from a text's own past, run beside it.

Where weights come from memory, a step of a few rows takes little longer than one of a single row.
So what followed the last time a text came to its newest tokens (prompt lookup, as in LLMA,
arXiv:2304.04487) is run behind them in the same step, and kept as far as each token is the one that
is drawn in its place. Every draw is made of its own logits and its own randomness, so an answer is
that of one token at a time, on a CPU to the last bit: not the distribution alone, as by rejection
sampling (arXiv:2211.17192). Only how many steps it takes differs, which depends on their time.
"""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from tandem.generation.request import Request
from tandem.models.blocks import has_experts
from tandem.ops import native

_LONGEST_DRAFT = 8
_LONGEST_MATCH = 4
"""Tokens before a place that are compared with a text's newest; more tell nothing more."""
_PLACES = 64
"""Of a token in a text: the newest so many are looked at."""
_MEMORY = 0.95
"""What a chance is worth when the next has been seen."""
_TIMES = 4
"""Steps of as many rows whose times are known; the quickest counts, for others were disturbed."""
_TIMES_HOLD = 256
"""Steps after which a time is measured again: texts have grown, other work has come or gone."""
_WORTH = 1.1
"""How much faster than without it a draft must promise to be."""
LEAST_BYTES = 32 * 2**20
"""Of a model's weights: what a core's share of the last cache is at most, on most machines."""
_LOOK_SHARE = 0.01
"""Of the time that steps take, what may be spent on looks that lead to no draft."""


@dataclass(slots=True)
class _Chance:
    """How often something came true, of late."""

    hits: float = 1.0
    tries: float = 2.0

    def see(self, hit: bool) -> None:
        self.hits, self.tries = self.hits * _MEMORY + hit, self.tries * _MEMORY + 1

    @property
    def rate(self) -> float:
        return self.hits / self.tries


class History:
    """One answer's text so far, and what it leads one to expect.

    Attributes:
        guess: of the tokens that come next; empty where the newest token has not been seen before.
    """

    def __init__(self, prompt: Sequence[int], limit: int, predicted: Sequence[int] = ()) -> None:
        """No token of the answer is known, which may have up to `limit`.

        Args:
            predicted: as if the prompt's end had been answered so once before.
        """
        self.guess: list[int] = []
        before = [*prompt[-_LONGEST_MATCH:], *predicted] if predicted else []
        self._ids = [*before, *prompt]
        self._end = len(self._ids) + limit
        self._indexed = 0
        self._places: dict[int, list[int]] = {}  # of each token, but for the newest one
        self._match, self._forced = 0, False
        self._guessed_at, self._ran = 0, 0
        self._first = [_Chance() for _ in range(_LONGEST_MATCH + 1)]  # by the length of the match
        self._further = _Chance()
        self._index()

    def push(self, token_id: int) -> None:
        """A token has been drawn."""
        self._ids.append(token_id)

    def look(self, forced: Sequence[int] = ()) -> None:
        """Learn from what became of the last guess, and guess again.

        Args:
            forced: tokens that must come next.
        """
        self._learn()
        self._index()
        ids = self._ids
        most = max(0, min(_LONGEST_DRAFT, self._end - len(ids) - 1))  # the last one is not run
        self._guessed_at, self._ran = len(ids), 0
        self._forced = bool(forced)
        self.guess = list(forced[:most])
        if forced:
            return
        place, self._match = self._longest_match()
        if place < 0:
            return
        for i in range(place + 1, place + 1 + most):  # a text that goes round in circles goes on
            self.guess.append(ids[i] if i < len(ids) else self.guess[i - len(ids)])

    def chances(self) -> list[float]:
        """For each token of the guess, how likely it and all before it are to be drawn."""
        if self._forced:
            return [1.0] * len(self.guess)
        chance, further, chances = self._first[self._match].rate, self._further.rate, []
        for _ in self.guess:
            chances.append(chance)
            chance *= further
        return chances

    def draft(self, count: int) -> list[int]:
        """The first tokens of the guess, which are going to be run."""
        self._ran = count
        return self.guess[:count]

    def _index(self) -> None:
        ids = self._ids
        for place in range(self._indexed, len(ids) - 1):
            self._places.setdefault(ids[place], []).append(place)
        self._indexed = max(0, len(ids) - 1)

    def _learn(self) -> None:
        drawn = () if self._forced else self._ids[self._guessed_at :]
        for i, (guessed, token) in enumerate(zip(self.guess, drawn, strict=False)):
            if i == 0:
                self._first[self._match].see(guessed == token)
            elif i < self._ran:
                self._further.see(guessed == token)
            if guessed != token:
                break

    def _longest_match(self) -> tuple[int, int]:
        """The newest of the places where the most of the newest tokens stood before, and how many;
        (-1, 0): none."""
        ids, last = self._ids, len(self._ids) - 1
        best, longest = -1, 0
        for place in reversed(self._places.get(ids[last], ())[-_PLACES:]):
            length = 1
            while length < _LONGEST_MATCH and length <= place:
                if ids[place - length] != ids[last - length]:
                    break
                length += 1
            if length > longest:
                best, longest = place, length
                if longest == _LONGEST_MATCH:
                    break
        return best, longest


@dataclass(slots=True)
class _Time:
    """What the last of the steps of as many rows took, the quickest of them, and when it was."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMES))
    seconds: float = 0.0
    step: int = 0

    def see(self, seconds: float, step: int) -> None:
        self.latest.append(seconds)
        self.seconds, self.step = min(self.latest), step


class StepTimes:
    """How long a step takes by its number of rows, and a look for drafts, as far as it was seen."""

    def __init__(self) -> None:
        self._times: dict[int, _Time] = {}  # those seen last behind
        self._looks: deque[float] = deque(maxlen=_TIMES)
        self._step = 0

    def ran(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        self._step += 1
        seen = self._times.pop(rows, None) or _Time()
        seen.see(seconds, self._step)
        self._times[rows] = seen
        while self._times[oldest := next(iter(self._times))].step < self._step - _TIMES_HOLD:
            del self._times[oldest]

    def looked(self, seconds: float) -> None:
        """A look for drafts took so long."""
        self._looks.append(seconds)

    @property
    def look(self) -> float:
        """Seconds; 0 if none was seen."""
        return min(self._looks, default=0.0)

    @property
    def reach(self) -> int:
        """The most rows worth trying: half as many again as have been seen."""
        return 1 + max(self._times, default=0) * 3 // 2

    def of(self, rows: int) -> float:
        """Seconds, between those of fewer and of more rows in proportion; of more than was seen as
        of the most that were, so that they are tried; 0 if nothing was seen."""
        known = self._times
        if rows in known:
            return known[rows].seconds
        fewer = max((n for n in known if n < rows), default=None)
        more = min((n for n in known if n > rows), default=None)
        if fewer is None or more is None:
            near = more if fewer is None else fewer
            return 0.0 if near is None else known[near].seconds
        share = (rows - fewer) / (more - fewer)
        return known[fewer].seconds + share * (known[more].seconds - known[fewer].seconds)


class Speculator:
    """What a session's live rows are likely to draw next, as far as it is worth its time."""

    def __init__(self, most_rows: int) -> None:
        """
        Args:
            most_rows: of one step, drafts among them; with as many live there are none.
        """
        self.times = StepTimes()
        self._most_rows = most_rows
        self._histories: dict[Request, History] = {}
        self._since = math.inf  # seconds of steps behind the last look, if it led to no draft

    def read(self, requests: Sequence[Request], token_ids: Sequence[int]) -> None:
        """Tokens have been drawn, one of each request."""
        histories = self._histories
        for request, token_id in zip(requests, token_ids, strict=True):
            history = histories.get(request)
            if history is None:
                history = History(request.prompt, request.limit, request.predicted)
                histories[request] = history
            history.push(token_id)

    def ran(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long, drafts among them."""
        self.times.ran(rows, seconds)
        self._since += seconds

    def forget(self, request: Request) -> None:
        """It draws no more."""
        self._histories.pop(request, None)

    def drafts(self, requests: Sequence[Request]) -> list[list[int]] | None:
        """Of each of the live requests the tokens to run behind its last one; None: none of any."""
        room = self._most_rows - len(requests)
        if room <= 0 or any(request.sampler.penalizes for request in requests):
            return None  # penalties follow from how often tokens came
        if self.times.look > self._since * _LOOK_SHARE:
            return None  # a model whose steps take little longer than looks would lose by them
        began = time.perf_counter()
        drafts = self._looked(requests, room)
        self.times.looked(time.perf_counter() - began)
        self._since = 0.0 if drafts is None else math.inf
        return drafts

    def _looked(self, requests: Sequence[Request], room: int) -> list[list[int]] | None:
        """As `drafts`, of no more than `room` tokens."""
        histories = [self._histories[request] for request in requests]
        for request, history in zip(requests, histories, strict=True):
            form = request.constraint
            history.look(() if form is None else form.forced(_LONGEST_DRAFT))
        chances = sorted(
            (-chance, row) for row, history in enumerate(histories) for chance in history.chances()
        )[:room]
        counts = [0] * len(requests)
        for _, row in chances[: self._worth_running(len(requests), [-c for c, _ in chances])]:
            counts[row] += 1
        if not any(counts):
            return None
        return [history.draft(count) for history, count in zip(histories, counts, strict=True)]

    def _worth_running(self, rows: int, chances: Sequence[float]) -> int:
        """How many of the likeliest draft tokens, by their chances, bring most tokens a second."""
        alone, most, look = self.times.of(rows), self.times.reach - rows, self.times.look
        best, count, tokens = _WORTH * rows, 0, float(rows)
        for i, chance in enumerate(chances[: max(0, most)], 1):
            tokens += chance
            seconds = self.times.of(rows + i) + look
            worth = tokens * alone / max(seconds, 1e-9)  # in tokens, as `rows` is
            if worth > best:
                best, count = worth, i
        return count


def accepted(drawn: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Of each row with a draft behind it, which of its draws are an answer's next tokens.

    Args:
        drawn: the tokens behind each row and behind each token of its draft, side by side.
    Returns:
        places in `drawn`: those up to the first that is not as guessed.
    """
    rows, first = [], 0
    for draft in drafts:
        count = 0
        while count < len(draft) and draft[count] == drawn[first + count]:
            count += 1
        rows.append(list(range(first, first + count + 1)))
        first += len(draft) + 1
    return rows


def confirmed(predicted: Sequence[int], answers: Iterable[Sequence[int]]) -> int:
    """How many tokens of a predicted text answers said where they were expected to say them: behind
    the predicted tokens that each said last. It follows from the texts alone, not from what was
    run. Of one answer O(T log T) in time: servers count on the thread that talks to everybody."""
    places: dict[tuple[int, ...], list[int]] = {}  # where up to _LONGEST_MATCH tokens end
    for end in range(1, len(predicted) + 1):
        for begin in range(max(0, end - _LONGEST_MATCH), end):
            places.setdefault(tuple(predicted[begin:end]), []).append(end)
    return sum(len(_said(predicted, places, drawn)) for drawn in answers)


def _said(
    predicted: Sequence[int], places: Mapping[tuple[int, ...], list[int]], drawn: Sequence[int]
) -> set[int]:
    """The places of `predicted` that one answer said."""
    said: set[int] = set()
    at = 0  # the token expected next
    for end, token_id in enumerate(drawn, 1):
        if at < len(predicted) and predicted[at] == token_id:
            said.add(at)
            at += 1
            continue
        for begin in range(max(0, end - _LONGEST_MATCH), end):  # the longest match first
            if ends := places.get(tuple(drawn[begin:end])):
                middle = bisect(ends, at + 1)  # the nearest one is that or the one before
                near = ends[max(0, middle - 1) : middle + 1]
                at = min(near, key=lambda place: abs(place - at - 1))
                break
    return said


def runs_ahead(model: PreTrainedModel) -> bool:
    """Whether steps of this model are worth running several tokens of one text: by the C++
    operations, whose numbers do not depend on the rows beside, and of weights that no cache holds,
    so that they come from memory once for all rows. Not of a mixture's experts, who round otherwise
    beside other rows."""
    if model.device.type != "cpu" or not native.available() or has_experts(model):
        return False
    weights = (*model.parameters(), *model.buffers())
    return sum(weight.nbytes for weight in weights) >= LEAST_BYTES
