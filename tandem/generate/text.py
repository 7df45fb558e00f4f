"""Tokens to text as they come: no half characters, and strings that end an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_CONTEXT = 6
"""Tokens decoded again before the new ones, for decoders that look at what stands before."""

_HALF = "\ufffd"


class AnswerText:
    """The text of one answer, grown token by token at a cost that does not grow with it.

    Attributes:
        ended: a stop string has appeared; the text ends before it, and further tokens add nothing.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop_strings: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        """Nothing said yet.

        Args:
            decode: ids to text; an unfinished character ends in U+FFFD.
            stop_strings: what ends the answer, whatever tokens it is spelled with.
            min_tokens: a stop string is one only if this many tokens are there when it is whole.
        """
        self.ended = False
        self._decode = decode
        self._stops = tuple(stop_strings)
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        self._longest = max(map(len, stop_strings), default=0)
        self._read = 0  # tokens whose text is in _text
        self._text = ""
        self._before = ""  # of the last of them, as decoded again before what follows
        self._shown = 0
        self._searched = 0  # before this, no stop string begins

    @property
    def text(self) -> str:
        """All of it so far, with the replacement character for an unfinished one."""
        return self._text if self.ended else self._text + self._rest()

    def push(self, token_id: int) -> str:
        """Add a token; return what can be shown for good: neither part of a character nor what
        may turn out to begin a stop string."""
        if self.ended:
            return ""
        self._ids.append(token_id)
        rest = self._rest()
        if rest and not rest.endswith(_HALF):
            self._take_over(rest)
            rest = ""
        if self._stops:
            self._look_for_stop(self._text + rest.rstrip(_HALF))
        return self._show(len(self._text) if self.ended else self._safe_length())

    def flush(self) -> str:
        """What was held back, when no token follows."""
        if not self.ended:
            self._take_over(self._rest())
        return self._show(len(self._text))

    def _rest(self) -> str:
        """Text of the tokens that are not in _text yet."""
        start = max(0, self._read - _CONTEXT)
        return self._decode(self._ids[start:])[len(self._before) :]

    def _take_over(self, rest: str) -> None:
        """All tokens' text is in _text now."""
        self._text += rest
        self._read = len(self._ids)
        self._before = self._decode(self._ids[max(0, self._read - _CONTEXT) :])

    def _look_for_stop(self, text: str) -> None:
        while found := [at for s in self._stops if (at := text.find(s, self._searched)) >= 0]:
            if len(self._ids) >= self._min_tokens:
                self.ended = True
                self._text = text[: min(found)]
                return
            self._searched = min(found) + 1  # whole too early to be one
        self._searched = max(self._searched, len(self._text) - self._longest + 1)

    def _safe_length(self) -> int:
        """Length of _text without an end that a stop string may begin with."""
        first = max(self._shown, len(self._text) - self._longest + 1)
        for start in range(first, len(self._text)):
            if any(s.startswith(self._text[start:]) for s in self._stops):
                return start
        return len(self._text)

    def _show(self, length: int) -> str:
        shown, self._shown = self._text[self._shown : length], max(self._shown, length)
        return shown
