"""What a session has drawn, read in the order of its draws: which answers it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from torch import Tensor

from tandem.generation.drawn import Drawn, Observed, Unread
from tandem.generation.request import Request

_FAILED = -1
"""Stands for a token that was drawn of NaN."""


class Reading:
    """The draws of a session's rows on their way to whoever asked.

    Attributes:
        step: of the newest draw; a request's tokens are counted by the steps since it began.
        watching: some answers have stop strings.
        leaving: requests that draw no more, and whose rows may be given to others.
    """

    def __init__(
        self, stop_token_ids: Sequence[int], *, late: bool, keep_answers: bool, marks_failed: bool
    ) -> None:
        """
        Args:
            late: read what was drawn one step late, so that the device never waits.
            keep_answers: requests keep their tokens.
            marks_failed: an answer whose distribution is NaN ends as failed; else the owner of the
                record sees to it.
        """
        self.step = 0
        self.watching = False
        self.leaving: list[Request] = []
        self._stop_token_ids = frozenset(stop_token_ids)
        self._late, self._keep_answers, self._marks_failed = late, keep_answers, marks_failed
        self._limits: dict[int, list[Request]] = {}  # by the step that draws the last token
        self._unread: deque[Unread] = deque()

    @property
    def is_behind(self) -> bool:
        """Whether draws have not been read."""
        return bool(self._unread)

    def begin(self, requests: Iterable[Request]) -> None:
        """This step draws the first token of each."""
        for request in requests:
            request.begun = self.step
            self._limits.setdefault(self.step + request.limit - 1, []).append(request)

    def draw_again(self, requests: Iterable[Request]) -> None:
        """This step draws one more token of each."""
        for request in requests:
            self._limits[request.begun + request.limit - 1].remove(request)
            request.begun -= 1  # so the steps since are its tokens
            self._limits.setdefault(request.begun + request.limit - 1, []).append(request)

    def add(
        self,
        requests: list[Request],
        tokens: Tensor,
        sampled_logprobs: Tensor,
        observed: Observed | None,
    ) -> None:
        """Tokens have been drawn, one of each; who has reached its limit leaves before the next."""
        done = self._limits.pop(self.step, [])
        self.leaving += [request for request in done if request.row >= 0]
        if self._marks_failed:
            tokens = tokens.masked_fill(sampled_logprobs.isnan(), _FAILED)
        self._unread.append(Unread(self.step, requests, done, tokens, observed))

    def due(self, num_rows: int) -> list[Drawn]:
        """Read the draws that are due, and end what they end; so many rows are live."""
        drawn = []
        running = 0 < num_rows > len(self.leaving)
        while len(self._unread) > (1 if self._late and running else 0):
            drawn.append(self._read(self._unread.popleft()))
        return drawn

    def left(self) -> list[Request]:
        """Those that were leaving and have rows, each once; none is leaving any more."""
        leaving, self.leaving = self.leaving, []
        return [request for request in dict.fromkeys(leaving) if request.row >= 0]

    def end(self, request: Request, step: int, *, finished: bool) -> None:
        """The token that this step drew was a request's last."""
        request.ended, request.finished = True, finished
        request.length = step - request.begun + 1
        self.leaving.append(request)

    def pass_over(self, steps: int) -> None:
        """So many steps were drawn and read elsewhere."""
        for _ in range(steps):
            self.step += 1
            self._limits.pop(self.step, None)  # they are among those that have ended

    def _read(self, unread: Unread) -> Drawn:
        requests, token_ids = unread.requests, unread.token_ids()
        if self._keep_answers:
            for request, token in zip(requests, token_ids, strict=True):
                request.drawn.append(token)
        if unread.observed is not None:
            unread.observed.deliver()
        if self._late:  # a row may have been drawn for after its end
            alive = [i for i, request in enumerate(requests) if not request.ended]
            requests, token_ids = [requests[i] for i in alive], [token_ids[i] for i in alive]
        if self._marks_failed and _FAILED in token_ids:
            for request, token in zip(requests, token_ids, strict=True):
                if token == _FAILED:
                    request.failed = True
                    self.end(request, unread.step, finished=False)
            alive = [i for i, token in enumerate(token_ids) if token != _FAILED]
            requests, token_ids = [requests[i] for i in alive], [token_ids[i] for i in alive]
        if not self._stop_token_ids.isdisjoint(token_ids):
            for request, token in zip(requests, token_ids, strict=True):
                if token in self._stop_token_ids:
                    self.end(request, unread.step, finished=True)
        if self.watching:
            for request, token in zip(requests, token_ids, strict=True):
                if request.text is not None and not request.ended:
                    request.text.push(token)
                    if request.text.ended:
                        self.end(request, unread.step, finished=True)
        for request in unread.at_limit:
            if not request.ended:
                self.end(request, unread.step, finished=False)
        return Drawn(requests, token_ids)
