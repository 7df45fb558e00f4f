"""Answers that must have a form: which tokens each may go on with.

llguidance follows a grammar and finds the allowed tokens of a step; the draw itself, and what is
recorded of it, are the sampler's. A grammar holds the whole of what a model writes: white space
that the template has before the words, thoughts, the words themselves, which must have the form,
and white space behind them.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from copy import copy
from threading import Lock
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary, proxy

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tandem.config.answer_form import AnswerForm, quoted, require_library
from tandem.config.form_limits import too_costly
from tandem.data.chat.call_grammar import calls_form
from tandem.data.chat.grammar_text import GrammarText
from tandem.data.render import Renderer
from tandem.data.thinking import thoughts_behind
from tandem.data.thoughts import ThoughtForm
from tandem.errors import GenerationError

if TYPE_CHECKING:
    from tandem.generation.request import Request

_KEPT_GRAMMARS = 32
"""Grammars that are kept compiled, for the next answer of the same form."""
_ONE_STEP = '%llguidance {"no_forcing": true}'
"""Find one step's tokens, without following on what must come behind them, which may be long."""
_MARK = "x"
"""Comes before what an answer may be, and is taken at once: llguidance counts the ways to go on
only behind a token."""
_ENDED = "no text goes on from here and has the form"
_MANY = (
    "it may go on in too many ways at once: give objects fewer optional properties, and rules "
    "fewer alternatives that begin alike"
)
_TOLD = {
    "NoExtension": _ENDED,
    "Parser Error: Current row": _MANY,
    "parser error: Too many items": _MANY,
    "lexer error: too many expressions": "its patterns are too large: shorten them, or the "
    "repetitions in them",
}
_ALL = -1
"""32 bits, all set."""
Bits = np.ndarray | None
"""The tokens that may come next, a bit each, (W,) int32; None for any."""
_QUICK_SECONDS = 0.05
"""Of compiling a grammar again while other answers wait."""


class CompiledForm:
    """A grammar as llguidance follows it.

    The lexer, which all answers of the grammar share, keeps every state that any of them was in.
    Once there are too many, or one step was too costly, it lets no answer go on. The grammar is
    then compiled again.
    """

    def __init__(self, compiled: Callable[[], Any]) -> None:
        """compiled: a matcher of an answer that has not begun, with a lexer of its own."""
        self._compiled = compiled
        self._seconds = 0.0
        self.matcher = self._new()

    def renew(self, spent: Any, *, patient: bool) -> bool:
        """Compile it again, unless that was done since `spent` was `matcher`.

        Args:
            patient: nobody waits where it takes long.
        Returns:
            nothing further can be done for the answer: the lexer is new, or would take too long.
        """
        if self.matcher is not spent:
            return False
        if patient or self._seconds <= _QUICK_SECONDS:
            self.matcher = self._new()
        return True

    def _new(self) -> Any:
        begun = time.monotonic()
        matcher = self._compiled()
        self._seconds = time.monotonic() - begun
        return matcher


class Constraint:
    """The form of one answer, as far as it has been written.

    Attributes:
        problem: why the model has no token to go on with; "" while it has some.
    """

    def __init__(self, form: CompiledForm, stops: Collection[int]) -> None:
        """stops: tokens that end an answer."""
        self._form, self._stops = form, stops
        self._first = form.matcher
        self._matcher = self._first.deep_copy()
        self._taken: list[int] = []
        self._is_over = False
        self.problem = ""

    def copy(self) -> Constraint:
        """The same for another answer that has come as far."""
        made = copy(self)
        made._matcher, made._taken = self._matcher.deep_copy(), self._taken.copy()
        return made

    def bits(self, *, patient: bool = False) -> np.ndarray | None:
        """The tokens that may come next, a bit each, (W,) int32; None for any: the answer has
        ended. patient: see `CompiledForm.renew`."""
        if self._is_over:
            return None
        found, is_last = self._matcher.compute_bitmask(), False
        while self._matcher.is_error() and not is_last:
            is_last = self._form.renew(self._first, patient=patient)
            self._first = self._form.matcher
            self._matcher = self._first.deep_copy()
            self._matcher.try_consume_tokens(self._taken)
            found = self._matcher.compute_bitmask()
        bits = np.frombuffer(found, np.int32)
        # llguidance ends what it cannot follow, as if it had its form.
        return np.zeros_like(bits) if self._matcher.is_error() else bits

    def forced(self, most: int) -> list[int]:
        """The next tokens as far as each is the only one that may come, of up to `most`."""
        tokens, ahead = list[int](), self
        while len(tokens) < most and (bits := ahead.bits()) is not None:
            words = bits.nonzero()[0]
            if len(words) != 1 or (word := int(bits[words[0]]) & 0xFFFFFFFF) & (word - 1):
                break
            tokens.append(32 * int(words[0]) + word.bit_length() - 1)
            ahead = self.copy() if ahead is self else ahead
            ahead.take(tokens[-1])
        return tokens

    def ahead(self, draft: Sequence[int]) -> list[Bits]:
        """What `bits` says behind each token of a draft, from before the first of them on: as far
        as they may come, and have a token to go on with."""
        found: list[Bits] = [self.bits()]
        ahead = self.copy()
        for token in draft:
            bits = found[-1]
            if bits is None or not _allows(bits, token):
                break
            ahead.take(token)
            bits = ahead.bits()
            if bits is not None and not bits.any():
                break
            found.append(bits)
        return found

    def take(self, token: int) -> None:
        """The answer has got this token."""
        if not self._is_over:
            self._is_over = token in self._stops
            self.take_all([token])  # what came of NaN is not taken

    def take_all(self, token_ids: Sequence[int]) -> int:
        """The answer has got these tokens, up to the first that it may not have.

        Returns:
            how many.
        """
        taken = int(self._matcher.try_consume_tokens(list(token_ids)))
        # At an error the rest is tried again, by `bits`.
        self._taken += token_ids if self._matcher.is_error() else token_ids[:taken]
        return taken

    def stuck(self) -> str:
        """What to say where `bits` leaves none of the model's tokens."""
        if self._matcher.is_error():
            said = " ".join(self._matcher.get_error().partition("<state>")[0].split())
            return next((told for start, told in _TOLD.items() if said.startswith(start)), said)
        return "the model has no token for what must come"


def _allows(bits: np.ndarray, token: int) -> bool:
    """Whether a token may come; none may that the model has and the tokenizer does not."""
    word, bit = divmod(token, 32)
    return word < len(bits) and bool(int(bits[word]) >> bit & 1)


def allowed_tokens(
    requests: Sequence[Request], vocabulary: int, device: torch.device
) -> Tensor | None:
    """Which tokens each answer may go on with, (n, V) bool; None if none must have a form."""
    found = [None if r.constraint is None else r.constraint.bits() for r in requests]
    return allowed_by(found, requests, vocabulary, device)


def followed(
    requests: Sequence[Request], drafts: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[Bits]]:
    """Drafts of these answers, cut where their forms do not go on so; and behind each answer and
    each token of its draft the tokens that may come, side by side."""
    cut, found = list[list[int]](), list[Bits]()
    for request, draft in zip(requests, drafts, strict=True):
        form = request.constraint
        bits = [None] * (1 + len(draft)) if form is None else form.ahead(draft)
        cut.append(list(draft[: len(bits) - 1]))
        found += bits
    return cut, found


def allowed_by(
    found: Sequence[Bits], requests: Sequence[Request], vocabulary: int, device: torch.device
) -> Tensor | None:
    """`allowed_tokens` of rows with these bits, each of an answer's."""
    width = max((len(bits) for bits in found if bits is not None), default=0)
    if not width:
        return None
    rows = np.full((len(requests), max(width, -(-vocabulary // 32))), _ALL, np.int32)
    for row, bits in zip(rows, found, strict=True):
        if bits is not None:
            row[: len(bits)] = bits
            row[len(bits) :] = 0  # the model has more tokens than the tokenizer
    packed = rows.view(np.uint8)
    unpacked = np.unpackbits(packed, axis=1, count=vocabulary, bitorder="little")
    for i in np.flatnonzero(~unpacked.any(axis=1)).tolist():
        if (constraint := requests[i].constraint) is not None:
            constraint.problem = constraint.stuck()
    return torch.from_numpy(unpacked.view(np.bool_)).to(device)


def take_drawn(requests: Sequence[Request], tokens: Tensor) -> None:
    """Tell the forms of answers what was drawn, (n,), which the host waits for: the next tokens
    depend on it."""
    for request, token in zip(requests, tokens.tolist(), strict=True):
        if request.constraint is not None:
            request.constraint.take(token)


class Constrainer:
    """Makes the constraints of answers in one conversation format."""

    def __init__(self, renderer: Renderer) -> None:
        """
        Raises:
            FormError: llguidance is not installed.
            GenerationError: it cannot read the tokenizer.
        """
        require_library()
        from llguidance.hf import from_tokenizer

        self._renderer: Renderer = proxy(renderer)  # by which it is kept
        self._kept: OrderedDict[str, CompiledForm] = OrderedDict()
        self._lock = Lock()
        tokenizer = renderer.pieces.tokenizer
        known = len(tokenizer)
        self._stops = frozenset(t for t in renderer.stop_token_ids if t < known)
        try:
            fast = cast(PreTrainedTokenizerFast, tokenizer)
            self._tokenizer = from_tokenizer(fast, eos_token=sorted(self._stops))
        except Exception as error:  # of a library in another language
            raise GenerationError(
                "answers with a form need a tokenizer that can write any byte (ByteLevel or "
                f"ByteFallback); got {tokenizer.name_or_path!r}, of which llguidance says: "
                f"{' '.join(str(error).split())[:120]}"
            ) from None

    def calls(self, tools: str, name: str = "", *, one: bool = False) -> AnswerForm | None:
        """Calls of tools as a form (see `calls_form`); None where there are no tools, or the
        template does not show how calls are written.

        Raises:
            GenerationError: the tools' schemas are too costly to follow.
        """
        reader = self._renderer.call_reader if tools else None
        if reader is None or reader.shape is None:
            return None
        form = calls_form(reader.shape, self._writing, tools, name, one=one)
        if form is not None and (found := too_costly(form.kind, form.text)):
            raise GenerationError(
                f"schemas of tools must be such that can be followed in time; got {found}."
            )
        return form

    def or_calls(self, form: AnswerForm, tools: str) -> AnswerForm:
        """The form, or calls of tools, if there are any."""
        calls = self.calls(tools)
        return form if calls is None else form.or_else(calls)

    @property
    def _writing(self) -> GrammarText:
        """Writes the template's text into grammars."""
        return GrammarText(self._renderer.pieces.control, self._tokenizer.is_special_token)

    def answer(
        self, form: AnswerForm, prompt: Sequence[int], begun: Sequence[int] = ()
    ) -> Constraint:
        """Of the assistant's answer to a prompt, whose words must have the form.

        Args:
            prompt: token ids. begun: those that the answer begins with.
        Raises:
            GenerationError: the form cannot be followed, or the answer has begun otherwise.
        """
        thoughts = thoughts_behind(self._renderer, prompt)
        rules = _answer_rules(self._renderer, self._writing, thoughts)
        made = self._begun(rules, form)
        if (taken := made.take_all(begun)) < len(begun):
            said = self._renderer.continuation(begun[:taken])
            raise GenerationError(
                "the beginning of an answer must have the form that is asked of the whole; got "
                f"another behind {said[-60:]!r}."
            )
        return made

    def text(self, form: AnswerForm) -> Constraint:
        """Of a text that goes on from its prompt, and must have the form from there on.

        Raises:
            GenerationError: as `answer`.
        """
        return self._begun("whole: @answer", form)

    def _begun(self, rules: str, form: AnswerForm) -> Constraint:
        from llguidance import LLMatcher, LLParserLimits

        first = {"lark_grammar": f"{_ONE_STEP}\nstart: {quoted(_MARK)} whole\n{rules}"}
        grammar = json.dumps({"grammars": [first, *form.grammars("answer")]})
        tokenizer, limits = self._tokenizer, form.limits

        def compiled() -> LLMatcher:
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**limits))
            matcher.try_consume_tokens(tokenizer.greedy_tokenize(_MARK))
            return matcher

        kept = self._kept.get(grammar) or CompiledForm(compiled)  # others need not wait for it
        with self._lock:
            self._kept[grammar] = kept
            self._kept.move_to_end(grammar)
            while len(self._kept) > _KEPT_GRAMMARS:
                self._kept.popitem(last=False)
            made = Constraint(kept, self._stops)
        bits = made.bits(patient=True)
        if bits is None or not bits.any():
            raise GenerationError(
                f"an answer's form must be one that can be followed; got: {made.stuck()[:200]}."
            )
        return made


_constrainers: WeakKeyDictionary[Renderer, Constrainer] = WeakKeyDictionary()
_making = Lock()


def constrainer_of(renderer: Renderer) -> Constrainer:
    """The one that all answers in this conversation format share.

    Raises:
        FormError, GenerationError: as `Constrainer`.
    """
    with _making:
        if renderer not in _constrainers:
            _constrainers[renderer] = Constrainer(renderer)
        return _constrainers[renderer]


def _answer_rules(renderer: Renderer, writing: GrammarText, thoughts: ThoughtForm) -> str:
    """The grammar of an answer around its words."""
    written, lines = writing.literal, list[str]()
    ways = [written(renderer.lead)]
    if thoughts.in_prompt or (thoughts.is_named and not thoughts.is_over):
        lines = [*writing.until("inner", thoughts.ends), r"SPACE: /[ \t\r\n]{0,8}/"]
        ways.append(f"{written(thoughts.begins)} inner SPACE")
    if thoughts.in_prompt:
        ways = ["inner SPACE"]
    start = " | ".join(f"{way} @answer" for way in ways)
    trail = f" ({written(renderer.trail)})?" if renderer.trail else ""
    return "\n".join([f"whole: ({start}){trail}", *lines])
