"""Where the answers of a long conversation lie in its text.

An answer begins where the text of all turns before it ends. Rendering those for every answer takes
quadratic time, so in a long conversation only some are located that way. The others follow from
windows of two answers and from the text itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.errors import DataError
from tandem.message import Message

_EXACT_ANSWERS = 32
"""Up to this many earlier answers, each is located by rendering everything before it."""
_CHECKS = 8
"""How many answers of a longer conversation are located that way, to check the others."""
MOST_TURNS = 512
"""Most turns whose answers are all located that way if the checks fail; time is quadratic."""


class _Renders(Protocol):
    """What is asked of a chat template: see `ChatTemplate`."""

    name: str
    terminator: str

    def prompt(self, messages: Sequence[Message], where: str) -> str: ...

    def render(self, messages: tuple[Message, ...], prompt: bool, where: str) -> str: ...

    def answer_end(self, text: str, prompt: str, answer: Message) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Placed:
    """An earlier answer in the text of a whole conversation: text[start:end]."""

    start: int
    end: int


def places(
    template: _Renders, messages: Sequence[Message], answers: Sequence[int], text: str, where: str
) -> list[Placed | None]:
    """The positions of the answers in a conversation's text; None for a rewritten one.

    Args:
        answers: which of the messages.
    Raises:
        DataError: a long conversation whose windows disagree with those few.
    """
    if len(answers) > _EXACT_ANSWERS:
        found = _by_windows(template, messages, answers, text, where)
        every = len(answers) // _CHECKS
        if found and all(
            found[k] == _place(template, messages, answers[k], text, where)
            for k in range(len(answers) - 1, 0, -every)
        ):
            return found
        if len(messages) > MOST_TURNS:
            raise DataError(
                f"{where}: a conversation must have at most {MOST_TURNS} turns with a "
                f"{template.name} whose turns depend on distant turns; got {len(messages)}. "
                "Split the conversation."
            )
    return [_place(template, messages, i, text, where) for i in answers]


def _place(
    template: _Renders, messages: Sequence[Message], i: int, text: str, where: str
) -> Placed | None:
    """The position of answer i in `text`, found by rendering all turns before it."""
    prompt = template.prompt(messages[:i], where)
    then = template.render(tuple(messages[: i + 1]), False, where)
    end = template.answer_end(then, prompt, messages[i])
    if end is None or not text.startswith(then[:end] + template.terminator):
        return None
    return Placed(len(prompt), end)


def _by_windows(
    template: _Renders, messages: Sequence[Message], answers: Sequence[int], text: str, where: str
) -> list[Placed | None]:
    """As `places`, from renderings of two answers at a time; [] if they do not fit."""
    num_system = next((i for i, m in enumerate(messages) if m.role != "system"), 0)
    system = messages[:num_system]
    found = [_place(template, messages, i, text, where) for i in answers[:2]]
    for first, before, this in zip(answers, answers[1:], answers[2:], strict=False):
        window = [*system, *messages[first + 1 : this + 1]]
        try:
            whole = template.prompt(window[:-1], where)
            then = template.render(tuple(window), False, where)
            last = _place(template, window, len(system) + before - first - 1, whole, where)
        except DataError:  # the template refuses this excerpt
            return []
        end, known = template.answer_end(then, whole, window[-1]), found[-1]
        if end is None or last is None or known is None:
            return []
        start = known.end + len(whole) - last.end
        expected = whole[last.end :] + then[len(whole) : end] + template.terminator
        if not text.startswith(expected, known.end):
            return []
        found.append(Placed(start, start + end - len(whole)))
    return found
