"""Answers in the shapes of OpenAI's API: chat completions and completions, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from typing import Any, Protocol

from tandem.generation.observed import TokenLogprobs
from tandem.serve.answering import Answering, Choice, Step
from tandem.serve.called import Words, calls_of, finish_of, message_of
from tandem.serve.token_bytes import Offsets, TokenBytes

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which is no JSON."""


class Shape(Protocol):
    """How the answers to one request are written."""

    def whole(self, answering: Answering) -> dict[str, Any]:
        """The response to a request that does not stream."""

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The first chunk of a choice; None without one."""

    def chunk(self, step: Step) -> dict[str, Any] | None:
        """The chunk of a step; None if it has nothing to show."""

    def closing(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk, where usage is wanted."""


class _Common:
    """The parts that both shapes share."""

    prefix = ""
    object_whole = ""
    object_chunk = ""

    def __init__(self, model: str, token_bytes: TokenBytes, answering: Answering) -> None:
        self._tokens = token_bytes
        self._top = answering.wanted.top_logprobs
        self._include_usage = answering.wanted.include_usage
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._pending: dict[int, int] = {}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._include_usage else {}
        return {**self._head, "object": self.object_chunk, "choices": [choice], **usage}

    def closing(self, usage: dict[str, Any]) -> dict[str, Any]:
        """As `Shape` says."""
        return {**self._head, "object": self.object_chunk, "choices": [], "usage": usage}

    def _new(self, step: Step, text: str) -> int | None:
        """From which log-prob on a chunk with this text must tell; None if it has nothing to show
        yet."""
        first = self._pending.pop(step.choice.index, step.first_logprob)
        if not text and not step.choice.finish:
            self._pending[step.choice.index] = first
            return None
        return first

    def _with_extras(self, choice: Choice, written: dict[str, Any]) -> dict[str, Any]:
        is_over = choice.finish and choice.extras is not None
        return {**written, "tandem": choice.extras} if is_over else written


class ChatShape(_Common):
    """Chat completions."""

    prefix, object_whole, object_chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, token_bytes: TokenBytes, answering: Answering) -> None:
        super().__init__(model, token_bytes, answering)
        may_call = any(prompt.tools for prompt in answering.prompts)
        self._words = Words(answering.loaded.renderer.call_reader if may_call else None)

    def whole(self, answering: Answering) -> dict[str, Any]:
        """As `Shape` says."""
        choices = [
            self._with_extras(
                choice,
                {
                    "index": choice.index,
                    "message": message_of(choice),
                    "logprobs": self._logprobs(choice, 0),
                    "finish_reason": finish_of(choice),
                },
            )
            for choice in answering.choices
        ]
        return {**self._head, "object": self.object_whole, "choices": choices,
                "usage": answering.usage()}  # fmt: skip

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """As `Shape` says."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._chunk(
            {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        )

    def chunk(self, step: Step) -> dict[str, Any] | None:
        """As `Shape` says."""
        choice = step.choice
        new = self._words.new(choice)
        first = self._new(step, new.thoughts + new.words)
        if first is None:
            return None
        named = {"reasoning_content": new.thoughts, "content": new.words}
        delta: dict[str, Any] = {name: text for name, text in named.items() if text}
        if choice.finish and (calls := calls_of(choice)):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        written = {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._logprobs(choice, first),
            "finish_reason": finish_of(choice),
        }
        return self._chunk(self._with_extras(choice, written))

    def _logprobs(self, choice: Choice, first: int) -> dict[str, Any] | None:
        if self._top < 0:
            return None
        # The stop token is no part of the message.
        seen = choice.logprobs[first : len(choice.token_ids)]
        return {"content": [self._entry(each) for each in seen], "refusal": None}

    def _entry(self, observed: TokenLogprobs) -> dict[str, Any]:
        top = [self._named(token, logprob) for token, logprob in observed.top[: self._top]]
        return {**self._named(observed.token_id, observed.logprob), "top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokens.of(token)
        return {"token": self._tokens.text(token), "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionShape(_Common):
    """Completions."""

    prefix, object_whole, object_chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, token_bytes: TokenBytes, answering: Answering) -> None:
        super().__init__(model, token_bytes, answering)
        self._offsets: dict[int, Offsets] = {}

    def whole(self, answering: Answering) -> dict[str, Any]:
        """As `Shape` says."""
        choices = []
        for choice in answering.choices:
            echo = choice.prompt.text if answering.wanted.echo else ""
            written = self._choice(choice, echo + choice.text, 0)
            choices.append(self._with_extras(choice, written))
        return {**self._head, "object": self.object_whole, "choices": choices,
                "usage": answering.usage()}  # fmt: skip

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """As `Shape` says."""
        return None

    def chunk(self, step: Step) -> dict[str, Any] | None:
        """As `Shape` says."""
        first = self._new(step, step.text)
        if first is None:
            return None
        written = self._choice(step.choice, step.text, first)
        return self._chunk(self._with_extras(step.choice, written))

    def _choice(self, choice: Choice, text: str, first: int) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, first),
            "finish_reason": choice.finish or None,
        }

    def _logprobs(self, choice: Choice, first: int) -> dict[str, Any] | None:
        if self._top < 0:
            return None
        entries: list[TokenLogprobs | None] = [*choice.logprobs[first:]]
        ids = [entry.token_id for entry in choice.logprobs[first:]]
        if choice.index not in self._offsets:  # the first that is told of it
            self._offsets[choice.index] = Offsets(self._tokens)
            if choice.echoed:
                entries, ids = [*choice.echoed, *entries], [*choice.prompt.token_ids, *ids]
        text = (choice.prompt.text if choice.echoed else "") + choice.text
        return {
            "tokens": [self._tokens.name(token) for token in ids],
            "token_logprobs": [None if e is None else _finite(e.logprob) for e in entries],
            "top_logprobs": [None if e is None else self._top_of(e) for e in entries],
            "text_offset": self._offsets[choice.index].of(ids, text),
        }

    def _top_of(self, observed: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the chosen one; of two with one name, the likelier."""
        found: dict[str, float] = {}
        for token, logprob in (*observed.top[: self._top], (observed.token_id, observed.logprob)):
            found.setdefault(self._tokens.name(token), _finite(logprob))
        return found


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
