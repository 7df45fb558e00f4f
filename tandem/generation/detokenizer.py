"""Tokens to text while they are generated: no half characters, and stop strings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

_CONTEXT = 6
"""Tokens decoded again before the new ones, for decoders that depend on preceding tokens."""

_HALF = "\ufffd"
_LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, and so the tokens after which its text is final."""
_MOST_PENDING = 16
"""Tokens that may wait for a whole character; beyond that, the final ones are taken as they are."""


class AnswerText:
    """The text of one answer, token by token, at a cost that does not grow with its length.

    The result is that of decoding all tokens at once, with one exception: a decoder of byte tokens
    may take a shown character back if bytes that are not text follow it.

    Attributes:
        ended: a stop string has appeared; the text ends before it, and further tokens add nothing.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop_strings: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        """
        Args:
            decode: ids to text; an unfinished character ends in U+FFFD.
            stop_strings: end the answer, whatever tokens they consist of.
            min_tokens: a stop string that is complete before this many tokens is ignored.
        """
        self.ended = False
        self._decode = decode
        self._stops = tuple(stop_strings)
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        self._longest = max(map(len, stop_strings), default=0)
        self._text = ""
        self._read = 0  # tokens whose text is in _text
        # Decoding starts between characters: started inside one, a decoder of byte tokens turns
        # the bytes that follow into U+FFFD.
        self._start = 0
        self._borders: deque[int] = deque()  # later places where it could start, up to _read
        self._before = ""  # text of the tokens from _start to _read
        self._shown = 0
        self._searched = 0  # no stop string begins before this

    @property
    def text(self) -> str:
        """All of it so far, with the replacement character for an unfinished one."""
        return self._text if self.ended else self._text + self._rest()

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is final: no part of a character, and nothing that
        may be the beginning of a stop string."""
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
        """The text that was held back; no token follows."""
        if not self.ended:
            self._take_over(len(self._ids), self._rest())
        return self._show(len(self._text))

    def _rest(self) -> str:
        """Text of the tokens that are not in _text yet."""
        if self._read == len(self._ids):
            return ""
        return self._decode(self._ids[self._start :])[len(self._before) :]

    def _take_over(self, end: int, text: str) -> None:
        """Append `text`, of the tokens up to `end`, to _text."""
        self._text += text
        self._before += text
        self._read = end
        self._borders.append(end)
        if end - self._start > 2 * _CONTEXT:
            while self._borders[0] <= end - _CONTEXT:
                self._start = self._borders.popleft()
            self._before = self._decode(self._ids[self._start : end])

    def _take_settled(self, rest: str) -> str:
        """Take over what no further byte can change; returns the rest."""
        end = len(self._ids) - _LONGEST_CHARACTER
        settled = self._decode(self._ids[self._start : end])[len(self._before) :]
        if not rest.startswith(settled):  # it ends inside a character
            return rest
        self._take_over(end, settled)
        return rest[len(settled) :]

    def _look_for_stop(self, rest: str) -> None:
        """Search _text and the rest for stop strings, from where the last search ended."""
        text, skipped = self._text[self._searched :] + rest, self._searched
        while found := [at for s in self._stops if (at := text.find(s)) >= 0]:
            if len(self._ids) >= self._min_tokens:
                self.ended = True
                self._text = (self._text + rest)[: skipped + min(found)]
                return
            text = text[min(found) + 1 :]  # complete too early to count
            skipped += min(found) + 1
        self._searched = max(skipped, len(self._text) - self._longest + 1)

    def _safe_length(self) -> int:
        """Length of _text without an end that may be the beginning of a stop string."""
        first = max(self._shown, len(self._text) - self._longest + 1)
        for start in range(first, len(self._text)):
            if any(s.startswith(self._text[start:]) for s in self._stops):
                return start
        return len(self._text)

    def _show(self, length: int) -> str:
        shown, self._shown = self._text[self._shown : length], max(self._shown, length)
        return shown
