"""Tokens to text as they come: no half characters, and strings that end an answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

_CONTEXT = 6
"""Tokens decoded again before the new ones, for decoders that look at what stands before."""

_HALF = "\ufffd"
_LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, and so tokens after which its text is settled."""
_MOST_PENDING = 16
"""Tokens that may wait for a whole character; of more, the settled ones are taken as they are."""


class AnswerText:
    """The text of one answer, grown token by token at a cost that does not grow with it.

    It is what decoding all tokens at once gives. Only where bytes that are no text come right
    after a character that has been shown does a decoder of byte tokens take that character back.

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
        self._text = ""
        self._read = 0  # tokens whose text is in _text
        # Decoding begins where the text was whole: a decoder of byte tokens makes U+FFFD of a
        # whole run of them if it begins inside a character.
        self._start = 0
        self._borders: deque[int] = deque()  # where else it could begin, up to _read
        self._before = ""  # text of the tokens from _start to _read
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
            self._take_over(len(self._ids), rest)
            rest = ""
        elif len(self._ids) - self._read > _MOST_PENDING:
            rest = self._take_settled(rest)
        if self._stops:
            self._look_for_stop(rest.rstrip(_HALF))
        return self._show(len(self._text) if self.ended else self._safe_length())

    def flush(self) -> str:
        """What was held back, when no token follows."""
        if not self.ended:
            self._take_over(len(self._ids), self._rest())
        return self._show(len(self._text))

    def _rest(self) -> str:
        """Text of the tokens that are not in _text yet."""
        if self._read == len(self._ids):
            return ""
        return self._decode(self._ids[self._start :])[len(self._before) :]

    def _take_over(self, end: int, text: str) -> None:
        """The text of the tokens up to `end` is in _text now, `text` being what is new of it."""
        self._text += text
        self._before += text
        self._read = end
        self._borders.append(end)
        if end - self._start > 2 * _CONTEXT:
            while self._borders[0] <= end - _CONTEXT:
                self._start = self._borders.popleft()
            self._before = self._decode(self._ids[self._start : end])

    def _take_settled(self, rest: str) -> str:
        """Take over what no further byte can change; returns the rest that remains."""
        end = len(self._ids) - _LONGEST_CHARACTER
        settled = self._decode(self._ids[self._start : end])[len(self._before) :]
        if not rest.startswith(settled):  # it ends inside a character
            return rest
        self._take_over(end, settled)
        return rest[len(settled) :]

    def _look_for_stop(self, rest: str) -> None:
        """Look through _text and the rest for stop strings that begin where none was yet."""
        text, skipped = self._text[self._searched :] + rest, self._searched
        while found := [at for s in self._stops if (at := text.find(s)) >= 0]:
            if len(self._ids) >= self._min_tokens:
                self.ended = True
                self._text = (self._text + rest)[: skipped + min(found)]
                return
            text = text[min(found) + 1 :]  # whole too early to be one
            skipped += min(found) + 1
        self._searched = max(skipped, len(self._text) - self._longest + 1)

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
