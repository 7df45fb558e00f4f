"""The only renderer from conversations to tokens, for every stage and for chat.

A row has two parts that are tokenized separately: the prompt, and what the assistant wrote.
Generation always starts where the prompt ends, so an answer's ids are the same whether they were
generated, trained on or read again as an earlier turn, and `conversation(m, a).token_ids` starts
with `prompt(m).token_ids`.

Text never becomes a control token, whoever wrote it: control strings in it are spelled out in
plain tokens (see tandem.data.control).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, get_args

from transformers import PreTrainedTokenizerBase

from tandem.data.chat.call_reader import CallReader
from tandem.data.chat.changed_json import changed_tools, changed_turn, each, texts_of, tool_texts
from tandem.data.chat.marked_template import marked_in_time
from tandem.data.chat.own_template import PROBES, OwnTemplate, text_before
from tandem.data.chat.template import ChatTemplate, Part
from tandem.data.chat.template_limits import in_time
from tandem.data.control import ControlTokens, free_mark
from tandem.data.excerpt import excerpt
from tandem.data.span_tokenizer import PieceTokenizer, definition_of
from tandem.data.spoken import Spoken, spoken
from tandem.data.thoughts import thoughts_apart
from tandem.data.turns import listed_tools, turns_in
from tandem.data.unrolled import unrolled
from tandem.errors import DataError, ModelError
from tandem.message import Answer, Message, Role, answer_turn
from tandem.text import visible
from tandem.types import PromptRow, Source, TokenRow

IN_MEMORY = Source(dataset="", path="conversation", line=1)
"""The source of a prompt that is not from a file, such as a chat's."""


@dataclass(frozen=True, slots=True)
class _BeforeAnswer:
    """The turns before an answer as rendered, their text, ids, and which the assistant wrote."""

    turns: tuple[Message, ...]
    text: str
    ids: list[int]
    mask: list[bool]


class Renderer:
    """Conversations, prompts and documents to tokens, with one tokenizer.

    Args:
        tokenizer: any Hugging Face tokenizer with an EOS token. Its chat template is used if it has
            one, else "Human: ...\\n\\nAssistant: ..." with EOS after every assistant turn.
        stop_token_ids: further ids that end an answer (a generation_config's eos_token_id).
        own: the template that the tokenizer was given in place of its own
            (`own_template.put_template`), if it was: messages name it.
    Attributes:
        terminator_id: the token that ends an assistant's turn (a template's <|im_end|>, else EOS).
        stop_token_ids: every token at which generation must stop, the terminator first.
        pad_token_id: fills batches; masks never depend on it, so it may equal EOS.
        framing, frame: what the template writes around turns; the control strings there, BOS, EOS.
        lead, trail: what it writes around an answer's words, as it is decoded.
        pieces, thoughts: text to ids and back; how the template takes what is thought before words.
    Raises:
        ModelError: the tokenizer has no EOS, or its template cannot be used for training.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: int | Sequence[int] | None = None,
        own: OwnTemplate | None = None,
    ) -> None:
        eos = tokenizer.eos_token_id
        if eos is None:
            raise ModelError(
                f"tokenizer {tokenizer.name_or_path!r} must have an EOS token; got none. "
                "Set its eos_token to the token that ends a text."
            )
        self._control = ControlTokens(tokenizer)
        self.pieces = PieceTokenizer(tokenizer, self._control)
        self._document_prefix, prefix_text = text_before(tokenizer)
        self._template = ChatTemplate(tokenizer, self._control, prefix_text, own)
        self.thoughts = self._template.thoughts
        self._eos_id = int(eos)
        self.terminator_id: int = self._control.ids.get(self._template.terminator, self._eos_id)
        extra = [stop_token_ids] if isinstance(stop_token_ids, int) else stop_token_ids or []
        self.stop_token_ids: tuple[int, ...] = tuple(
            dict.fromkeys([self.terminator_id, self._eos_id, *map(int, extra)])
        )
        pad = tokenizer.pad_token_id
        self.pad_token_id: int = self._eos_id if pad is None else int(pad)
        self._last: tuple[Any, _BeforeAnswer] | None = None
        self.lead, self.trail = self._decoded_frame()
        self.framing, self.frame = self._frame()
        self._marked: str | None = None
        self._definition = definition_of(tokenizer)

    @property
    def chat_template(self) -> str:
        """The jinja template in use, to be saved with a model: with generation marks around what
        the assistant writes, if it had none and they can be put."""
        if self._marked is None:
            template, tokenizer = self._template, self.pieces.tokenizer
            self._marked = marked_in_time(template.source, template.terminator, tokenizer)
        return self._marked

    @property
    def vocabulary(self) -> dict[str, int]:
        """The tokenizer's tokens, added ones too, with their ids."""
        return {str(token): int(i) for token, i in self.pieces.tokenizer.get_vocab().items()}

    @property
    def control_ids(self) -> tuple[int, ...]:
        """The control tokens of the chat template, ascending: those in its source, around turns of
        any role that it takes, and the one that ends an answer."""
        template = self._template
        texts = [template.source, template.prompt(template.opening, "probe")]
        for role in get_args(Role):
            with suppress(DataError):  # it need not take each
                texts.append(template.prompt([Message(role, "yes"), *template.opening], "probe"))
        found = {i for text in texts for i in self._control.written(text)}
        return tuple(sorted(found | {self.terminator_id}))

    @property
    def call_reader(self) -> CallReader | None:
        """What reads calls of tools in a model's answers; None where the template does not show
        how they are written."""
        return self._template.calls.reader()

    def spoken(self, text: str, tools: str, messages: Sequence[Message]) -> Spoken:
        """An answer's text as the assistant's turn behind `messages`: see `data.spoken`."""
        return spoken(self.call_reader if tools else None, text, tools, messages)

    @property
    def takes_more_turns(self) -> bool:
        """Whether an answered conversation can go on: the template may take one prompt alone."""
        opening = list(self._template.opening)
        with suppress(DataError):
            self._template.prompt([*opening, Message("assistant", "yes"), opening[-1]], "probe")
            return True
        return False

    def prompt(
        self,
        messages: str | Sequence[Message | Mapping[str, Any]],
        columns: Mapping[str, Any] | None = None,
        source: Source = IN_MEMORY,
        tools: str | Sequence[Mapping[str, Any]] = "",
    ) -> PromptRow:
        """`messages` up to where the assistant begins.

        Args:
            messages: the turns, as Message or as {"role": ..., "content": ...}, with tool_calls,
                tool_call_id and name if they have them; a text is one user turn.
            tools: JSON schemas of what the assistant may call, or their list as JSON text.
        Raises:
            DataError: there is no turn, or the template or the tokenizer refuses one.
        """
        where = visible(str(source))
        turns, listed = turns_in(messages), listed_tools(tools)
        with in_time(where):
            cut, mark, template = self._cut(turns, listed, source)
            shown, text = template.text(cut, mark, where)
            parts = template.parts(shown, text, where, every_answer=False)
        ids, _ = self._encode(parts, mark, where)
        return PromptRow(ids, tuple(turns), dict(columns or {}), source, listed)

    def fewest_tokens(self, messages: Sequence[Message], tools: str = "") -> int:
        """Tokens that turns have at least, by their characters; 0 if that is not known."""
        with in_time(where := visible(str(IN_MEMORY))):
            cut, mark, template = self._cut(messages, tools, IN_MEMORY)
            _, text = template.text(cut, mark, where, answered=messages[-1].role == "assistant")
        return self.pieces.fewest(text.replace(mark, ""))

    def conversation(
        self,
        messages: Sequence[Message],
        answer: Answer,
        source: Source,
        last_turn_only: bool = False,
        tools: str | Sequence[Mapping[str, Any]] = "",
        goes_on: bool = False,
    ) -> TokenRow:
        """`messages` with `answer` as the assistant's last turn; ends right after its terminator.

        Args:
            messages: the turns before the answer.
            answer: text, or the assistant's turn if that calls tools.
            tools: as for `prompt`.
            last_turn_only: response_mask holds on the answer alone (pairs of answers), instead of
                on every assistant turn that is `learned`. Terminators are included in both cases.
            goes_on: the answer is only the beginning of one; it ends with its text.
        Raises:
            DataError: there is no turn, or the template or the tokenizer refuses one.
            ModelError: the template does not show which tokens are the assistant's.
        """
        where = visible(str(source))
        every = [*messages, answer_turn(answer)]
        with in_time(where):
            cut, mark, template = self._cut(every, listed_tools(tools), source)
            before = self._before_answer(template, tuple(cut[:-1]), mark, where, not last_turn_only)
            turns, text = template.text([*before.turns, cut[-1]], mark, where, answered=True)
            last = template.answer(turns, text, before.text, where)
        if goes_on:
            last = replace(last, text=last.text.removesuffix(template.trail))
        prompt_ids = before.ids
        answer_ids, answer_mask = self._encode([last], mark, where, ends=not goes_on)
        mask = ([False] * len(prompt_ids) if last_turn_only else before.mask) + answer_mask
        mask[0] = False  # Nothing precedes index 0 to predict it from.
        return TokenRow(prompt_ids + answer_ids, mask, source)

    def learned(
        self, messages: Sequence[Message], answer: Answer, source: Source, tools: str = ""
    ) -> tuple[TokenRow, ...]:
        """`conversation`, in a row for each answer where the template rewrites earlier ones."""
        return unrolled(self, messages, answer, source, tools)

    def heard(
        self,
        messages: Sequence[Message],
        turns: Sequence[Message],
        source: Source = IN_MEMORY,
        tools: str = "",
    ) -> tuple[int, ...]:
        """What stands between an answer and the next one, whatever the first one says: ids from
        behind the `terminator_id` that ended it up to where the assistant begins again.

        Args:
            messages: the turns before the answer. turns: that it hears. tools: as for `prompt`.
        Raises:
            DataError: the template or the tokenizer refuses a turn.
            ModelError: the template does not show where an earlier answer ends.
        """
        where, spoken = visible(str(source)), [*messages, Message("assistant", ""), *turns]
        texts, word = [*chain.from_iterable(map(texts_of, spoken)), *tool_texts(tools)], "Qz7heard"
        while any(word in text for text in texts):
            word += "d"
        plain = [m.role == "assistant" and not m.tool_calls for m in spoken]
        spoken = [replace(m, content=word) if p else m for m, p in zip(spoken, plain, strict=True)]
        with in_time(where):
            cut, mark, template = self._cut(spoken, tools, source)
            _, text = template.text(cut, mark, where)
        end = self._template.trail + (self._template.terminator or self.pieces.tokenizer.eos_token)
        before, found, after = text.rpartition(word + end)
        if not found:
            raise ModelError(
                f"a chat template for conversations that go on must end earlier answers with "
                f"{excerpt(end)}, as the last one; got {excerpt(text.rpartition(word)[2])} after "
                f"one of {where}. Use another chat_template."
            )
        ids = self.pieces.encode(after, mark, (before + found)[-self._control.longest :], where)
        return tuple(ids)

    def document(self, text: str, source: Source) -> TokenRow:
        """Plain text, learned whole: BOS if the tokenizer adds one, the text, EOS.

        Raises:
            DataError: the tokenizer refuses the text.
        """
        self._control.require_writable(text, visible(str(source)))
        mark = free_mark([text])
        # A tokenizer treats the start of a text like the text after its BOS.
        body = self.pieces.encode(self._control.cut(text, mark), mark, "", visible(str(source)))
        ids = (*self._document_prefix, *body, self._eos_id)
        return TokenRow(ids, (False, *[True] * (len(ids) - 1)), source)

    def decode(self, ids: Sequence[int], begins: bool = True) -> str:
        """The text of a response, without its terminator and the template's white space.

        Args:
            ids: as `conversation` marks them, or as sampled. begins: the answer begins with them.
        """
        kept, lead = [int(i) for i in ids], self.lead if begins else ""
        if kept and kept[-1] in self.stop_token_ids:
            kept.pop()
        text = self.pieces.decode(kept)
        words = text.removeprefix(lead).removesuffix(self.trail)
        return "" if lead.startswith(text) else words  # a stream would have to take it back

    def prompt_text(self, row: PromptRow) -> str:
        """A prompt as the model reads it, control tokens included, up to where the text of an
        answer (`decode`) follows."""
        thinks = self.thoughts.ends in self.lead  # the answer has other thoughts
        return self.continuation(row.token_ids) + (self.lead if not thinks else "")

    def continuation(self, ids: Sequence[int]) -> str:
        """The text of ids that follow other text, with nothing removed: of a plain completion."""
        return self.pieces.decode([int(i) for i in ids])

    def hides(self, messages: Sequence[Message], role: str) -> bool:
        """Whether the template writes nothing of a role's turns; not where it refuses them."""
        with suppress(DataError), in_time("probe"):
            turns = self._template.calls.in_form(messages, False, "probe")
            return self._template.hides(turns, role)
        return False

    def hides_tools(self, messages: Sequence[Message]) -> bool:
        """Whether the template writes nothing of tools for turns like these."""
        asked = [m for m in messages if m.role in ("system", "user")]  # it may refuse calls
        system, users = ([m for m in asked if m.role == role] for role in ("system", "user"))
        for turns in (asked, [*system, *users[-1:]], self._template.opening):  # or two of one role
            with suppress(DataError), in_time("probe"):
                return self._template.hides_tools(turns)
        return False

    def spelled(self, text: str) -> list[str]:
        """The control strings in someone's text, in order; they are encoded as plain text."""
        return [text[found.start : found.end] for found in self._control.find(text)]

    def renders_like(self, other: Renderer) -> bool:
        """Whether both render every conversation to the same tokens, so that ids can be shared."""
        if (self._definition, self.terminator_id) != (other._definition, other.terminator_id):
            return False
        same = self._template.source == other._template.source
        return same or self.chat_template == other.chat_template  # saved with marks

    def _before_answer(
        self,
        template: ChatTemplate,
        turns: tuple[Message, ...],
        mark: str,
        where: str,
        every_answer: bool,
    ) -> _BeforeAnswer:
        """A conversation up to where the last answer begins; that of the call before is kept, since
        all answers of a pair, a ranking or a group have the same."""
        key = (template, turns, mark, every_answer)
        if (last := self._last) is None or last[0] != key:  # of another thread's call, perhaps
            shown, text = template.text(turns, mark, where)
            parts = template.parts(shown, text, where, every_answer=every_answer)
            ids, mask = self._encode(parts, mark, where)
            last = self._last = (key, _BeforeAnswer(shown, text, ids, mask))
        return last[1]

    def _encode(
        self, parts: Sequence[Part], mark: str, where: str, ends: bool = True
    ) -> tuple[list[int], list[bool]]:
        """Ids of the parts and, per id, whether it is the assistant's and to be learned."""
        ids, mask = list[int](), list[bool]()
        for part in parts:
            new = self.pieces.encode(part.text, mark, part.before, where)
            if part.answer and ends:
                new.append(self.terminator_id)
            ids += new
            mask += [part.answer and part.learned] * len(new)
        return ids, mask

    def _cut(
        self, messages: Sequence[Message], tools: str, source: Source
    ) -> tuple[list[Message], str, ChatTemplate]:
        """The turns with every control string in them cut at the mark, the mark, and the template
        with the tools, which are cut as well."""
        if not messages or (len(messages) == 1 and messages[0].role == "assistant"):
            raise DataError(
                f"{visible(str(source))}: a conversation must hold a turn to answer; got none. "
                "Put the user's turn before the answer."
            )
        texts = []
        template = self._template
        messages = template.calls.in_form(messages, bool(tools), visible(str(source)))
        messages = thoughts_apart(self.thoughts, messages, template.name, visible(str(source)))
        for message in messages:
            if message.role not in get_args(Role):
                raise DataError(
                    f"{visible(str(source))}: role must be one of {', '.join(get_args(Role))}; got "
                    f"{excerpt(message.role)}. Rename it."
                )
            texts += texts_of(message)
        texts += tool_texts(tools)
        for text in texts:
            self._control.require_writable(text, visible(str(source)))
        mark = free_mark([template.source, *texts])
        change = each(partial(self._control.cut, mark=mark))
        if tools:
            tools = changed_tools(tools, change)
        has_more = tools or any(m.tool_calls for m in messages)
        template = template.given(tools, mark if has_more else "")
        return [changed_turn(m, change) for m in messages], mark, template

    def _frame(self) -> tuple[str, frozenset[str]]:
        template, tokenizer = self._template, self.pieces.tokenizer
        own = template.prompt(template.opening, "probe") + template.terminator
        ends = (str(token) for token in (tokenizer.bos_token, tokenizer.eos_token) if token)
        words = template.opening[-1].content
        return own.replace(words, ""), frozenset((*self.spelled(own), *ends))

    def _decoded_frame(self) -> tuple[str, str]:
        """The text around the assistant's words in an answer's decoded ids."""
        # What ends a thought that the prompt begins tells it from one that was cut off.
        lead = "" if self.thoughts.in_prompt else self._template.lead
        before = self._template.prompt(self._template.opening, "probe")
        return self.pieces.decoded_around(PROBES, lead, self._template.trail, before)
