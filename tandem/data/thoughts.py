"""What an assistant thinks before it speaks: how a chat template takes it, and where it is in text.

Data and sampled answers have thoughts at the beginning of the content, within <think> and </think>.
Templates want them there, or in a field of their own, or begin them in the prompt and leave them
out of answered turns. `thought_form` finds out by trying.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from tandem.data.excerpt import excerpt
from tandem.errors import DataError
from tandem.message import Message

BEGINS, ENDS = "<think>", "</think>"
FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a turn under which data and templates may have thoughts."""
_PAIRS = (
    (BEGINS, ENDS),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
)
_THOUGHT, _WORDS = "Qz7thought", "Qz7words"
_SPACE = re.compile(r"\s+")

Write = Callable[[Mapping[str, str]], str]
"""The text of a conversation that a turn with these keys, the assistant's, answers."""


@dataclass(frozen=True, slots=True)
class ThoughtForm:
    """How thoughts are given to one template.

    how: "content": at the beginning of the content. One of FIELDS: under that key. "joined":
        Tandem writes them behind the prompt, since the template takes them out of any answer. "":
        it takes none.
    begins, ends: what stands around them in an answer's text; `begins` may be in the prompt.
    in_prompt: whether prompts end within a thought, after the white space `gap`.
    is_over: whether prompts end with a thought that is over.
    between: from a thought to the words, with white space, if the template showed it.
    before: what stands before joined thoughts that the prompt does not begin.
    as_written: whether the content is written as it is, also where its thought is empty.
    stops: the string that ends answers, if it is in `between` too: generation would stop there.
    is_named: whether the template names the tag that begins them: its model may think.
    """

    how: str = ""
    begins: str = BEGINS
    ends: str = ENDS
    in_prompt: bool = False
    is_over: bool = False
    between: str = ""
    gap: str = ""
    before: str = ""
    as_written: bool = False
    stops: str = ""
    is_named: bool = False

    def split(self, text: str) -> tuple[str, str] | None:
        """The thoughts and the words of an answer, with their white space; None without thoughts,
        or where they do not end."""
        said = text.lstrip()
        for begins, ends in self._pairs:
            if said.startswith(begins):
                thoughts, found, words = said.removeprefix(begins).partition(ends)
                if found:
                    return thoughts, words
        if self.in_prompt:
            thoughts, found, words = text.partition(self.ends)
            if found and self.begins not in thoughts and BEGINS not in thoughts:
                return thoughts, words
        return None

    def behind(self, prompt: str) -> ThoughtForm:
        """The form of answers to this very prompt, by the end of its text: a template may begin the
        thought, or end it, for some alone."""
        end = prompt.rstrip()
        if end.endswith((self.ends, ENDS)):
            return replace(self, in_prompt=False)
        return replace(self, in_prompt=self.in_prompt or end.endswith(self.begins))

    def so_far(self, text: str, is_over: bool) -> tuple[str, str]:
        """The thoughts and the words of an answer of which this much has come, for those who read
        it. Each only grows as the text does, so that a stream can send what is new.

        Args:
            is_over: whether nothing follows. If not, what may be the beginning of a tag is in
                neither.
        Returns:
            thoughts, also if they do not end, without line breaks before and white space behind
            them; words, without line breaks before them if there are thoughts. They are those of
            `split`, which takes an answer whose thoughts do not end as words.
        """
        said, inner, ends = text.lstrip(), text, {self.ends} if self.in_prompt else set()
        for begins in dict.fromkeys((self.begins, BEGINS)):
            if said.startswith(begins):
                inner = said.removeprefix(begins)
                ends = {mine for tag, mine in self._pairs if tag == begins}
                break
            if not is_over and begins.startswith(said):
                return "", ""
        if not ends:
            return "", text
        found = [(at, -len(tag)) for tag in ends if (at := inner.find(tag)) >= 0]
        at, length = min(found, default=(len(inner), 0))
        known = len(inner) if is_over else _known(inner, ends)
        if known <= at:
            return inner[:known].lstrip("\n").rstrip(), ""
        return inner[:at].lstrip("\n").rstrip(), inner[at - length :].lstrip("\n")

    @property
    def _pairs(self) -> tuple[tuple[str, str], ...]:
        """What may stand around an answer's thoughts."""
        return (self.begins, self.ends), (BEGINS, ENDS)

    def end(self, text: str) -> int:
        """Where an answer's thoughts end; its length within one, 0 without any."""
        for ends in dict.fromkeys((self.ends, ENDS)):
            if (end := text.rfind(ends)) >= 0:
                return end + len(ends)
        return len(text) if self.in_prompt or self.begins in text or BEGINS in text else 0

    def apart(self, turn: Message) -> Message:
        """The assistant's turn with its thoughts apart from its words, as the template takes both:
        `given` writes them. Unchanged without thoughts, or if the template takes none."""
        found = self.split(turn.content) if self.how or self.is_over else None
        if found is None:
            return turn
        thoughts, words = found
        if not thoughts.strip() and not self.as_written:  # what the template writes for none
            return replace(turn, content=words.lstrip("\n"))
        if not self.how:
            return turn
        if self.how == "content":  # as it was written
            kept = self.gap + thoughts.lstrip() if self.in_prompt else thoughts
            return replace(turn, thoughts=kept or "\n", content=words)
        kept = thoughts.strip("\n") if self.how == "joined" else thoughts.strip()
        return replace(turn, thoughts=kept, content=words.lstrip("\n"))

    def given(self, turn: dict[str, Any], thoughts: str) -> dict[str, Any]:
        """A turn as the template takes it, with thoughts that are `apart`."""
        words = turn.get("content") or ""
        if self.how in FIELDS:
            return {**turn, self.how: thoughts}
        if self.how == "joined":  # of an earlier turn: the template may leave them out
            thoughts, words = f"\n{thoughts}\n", f"\n\n{words}"
        return {**turn, "content": f"{self.begins}{thoughts}{self.ends}{words}"}


def _known(text: str, tags: Collection[str]) -> int:
    """Up to where a text that goes on has no beginning of a tag."""
    first = max(0, len(text) - max(map(len, tags)) + 1)
    return next(
        (at for at in range(first, len(text)) if any(tag.startswith(text[at:]) for tag in tags)),
        len(text),
    )


NO_THOUGHTS = ThoughtForm()
"""Of a template that takes none."""


def bare(thoughts: str) -> str:
    """Thoughts without line breaks, and tags, around them."""
    kept = thoughts.strip("\n")
    if kept.startswith(BEGINS) and kept.endswith(ENDS):
        kept = kept.removeprefix(BEGINS).removesuffix(ENDS).strip("\n")
    return kept


def in_content(thoughts: str, words: str) -> str:
    """A turn's content with thoughts that data has elsewhere; words that have some are kept."""
    if words.lstrip().startswith(BEGINS):
        return words
    kept = bare(thoughts)
    return f"{BEGINS}\n{kept}\n{ENDS}\n\n{words}"


def thoughts_apart(
    form: ThoughtForm, messages: Sequence[Message], name: str, where: str
) -> list[Message]:
    """The turns with thoughts apart from words, as a template takes them.

    Args:
        name: the template's, for messages.
    Raises:
        DataError: the last turn is an answer with thoughts, and the template's prompts end with a
            thought that is over, or it ends thoughts by the token that ends answers.
    """
    messages = [_whole(turn) for turn in messages]
    last = messages[-1]
    found = form.split(last.content) if last.role == "assistant" else None
    if not (form.is_over or form.stops) or found is None or not found[0].strip():
        return [form.apart(turn) if turn.role == "assistant" else turn for turn in messages]
    if form.is_over:
        why = "whose prompts end with a thought that is over"
    else:
        why = f"which ends them by {form.stops}, where generation ends the whole answer"
    raise DataError(
        f"{where}: an answer must have no thoughts with the {name}, {why}; got "
        f"{excerpt(last.content)}. Remove them, or use a chat_template by which the assistant "
        "thinks and goes on."
    )


def _whole(turn: Message) -> Message:
    """A turn with its thoughts in its content, as data has them."""
    if not turn.thoughts:
        return turn
    return replace(turn, content=in_content(turn.thoughts, turn.content), thoughts="")


@dataclass(frozen=True, slots=True)
class _Shown:
    """Where a trial's text has the thought: whether behind the whole prompt, and what is before it
    and between it and the words."""

    text: str
    behind_prompt: bool
    before: str
    between: str


def thought_form(write: Write, prompt: str, base: str, lead: str, source: str) -> ThoughtForm:
    """How a template takes thoughts.

    Args:
        write: the template; it may raise anything.
        prompt: its text of the turns before. base: what answered turns have of it. lead: what
            stands between that and the words of an answer without thoughts.
        source: the template's.
    """
    pairs = [*(pair for pair in _PAIRS[1:] if pair[0] in source), _PAIRS[0]]
    end = prompt.rstrip()
    opened = next((pair for pair in pairs if end.endswith(pair[0])), None)
    gap = prompt[len(end) :]
    is_over = opened is None and any(end.endswith(pair[1]) for pair in pairs)
    tags = _SPACE.sub("", lead) if base == prompt else ""
    empty = next((pair for pair in pairs if tags == "".join(pair)), None)

    def shown(turn: Mapping[str, str]) -> _Shown | None:
        text = ""
        with suppress(Exception):  # a template is a program: it can divide by zero
            text = write(turn)
        return _shown(text, prompt, base)

    tried = ((name, shown({"content": _WORDS, name: _THOUGHT})) for name in FIELDS)
    field, by_field = next(((name, found) for name, found in tried if found), ("", None))
    pair, by_content = (BEGINS, ENDS), None
    for begins, ends in pairs:
        found = shown({"content": f"{begins}\n{_THOUGHT}\n{ends}\n\n{_WORDS}"})
        if found and found.behind_prompt and _is_once(found.before, begins, ends, opened):
            pair, by_content = (begins, ends), found
            break
    if by_field and by_field.behind_prompt:
        before, between = by_field.before.strip(), by_field.between
        how, tagged = field, (before or (opened[0] if opened else BEGINS), between.strip() or ENDS)
        if by_content and _same(by_field.text, by_content.text):
            how, tagged = "content", pair
        return ThoughtForm(how, *tagged, in_prompt=not before, between=between, gap=gap)
    own = pairs[0]
    if own != _PAIRS[0] and not opened and not is_over and pair != own:  # takes its own tags out
        return ThoughtForm("joined", *own, between=f"\n{own[1]}", before=f"{own[0]}\n")
    if by_content:
        before, between = by_content.before, by_content.between
        shows_all = before.endswith(f"{pair[0]}\n") and between.startswith(f"\n{pair[1]}\n\n")
        return ThoughtForm(
            "content", *pair, in_prompt=opened is not None, between=between, gap=gap,
            as_written=shows_all and not opened and not empty,
        )  # fmt: skip
    if by_field and not is_over and not by_field.before.strip():
        between = by_field.between
        return ThoughtForm("joined", ends=between.strip() or ENDS, in_prompt=True, between=between)
    if opened:
        between = f"\n{opened[1]}\n\n" if prompt.endswith("\n") else opened[1]
        return ThoughtForm("joined", *opened, in_prompt=True, between=between)
    if not is_over and empty:
        return ThoughtForm("joined", *empty, between=empty[1], before=empty[0])
    return ThoughtForm(is_over=is_over)


def _shown(text: str, prompt: str, base: str) -> _Shown | None:
    start = next((start for start in (prompt, base) if text.startswith(start)), None)
    if start is None or text.count(_THOUGHT) != 1 or text.count(_WORDS) != 1:
        return None
    before, _, rest = text[len(start) :].partition(_THOUGHT)
    between, found, _ = rest.partition(_WORDS)
    return _Shown(text, start == prompt, before, between) if found else None


def _is_once(before: str, begins: str, ends: str, opened: tuple[str, str] | None) -> bool:
    """Whether a thought in the content begins once, and none was over before it."""
    if ends in before:
        return False
    return (begins in before) != (opened is not None)


def _same(first: str, second: str) -> bool:
    return _SPACE.sub("", first) == _SPACE.sub("", second)
