"""The hidden rule of the embedded data set: what a good answer is. Training never sees it.

An answer is one sentence of the form that its question asks for, with any of a few known remarks
before and after it. The rule looks at the form, the content of the sentence, and the manner, which
is what the remarks make of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.data.embedded.tasks import TASKS, WORLD, Fields, Task
from tandem.errors import DataError

PREAMBLES: list[str] = WORLD["preambles"]
OPENERS: list[str] = WORLD["openers"]
CLOSERS: list[str] = WORLD["closers"]
RUDE: list[str] = WORLD["rude"]
_REMARKS = (*OPENERS, *CLOSERS, *RUDE)
_BEGINNINGS = tuple(f"{remark} " for remark in _REMARKS)
_ENDINGS = tuple(f" {remark}" for remark in _REMARKS)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the rule makes of an answer.

    form: it is one sentence of the right kind with nothing but known remarks around it, to the
        full stop; without form, content, manner and score are 0.
    content: how right the sentence is, in [0, 1].
    manner: how polite it is, in [0, 1]: a courtesy and then only the answer 1; chatter after that
        0.5; no remark 0.3; chatter alone 0.15; a rude remark, a remark in the wrong place, or more
        than one of a kind 0.
    score: 0.2 content + 0.2 manner + 0.6 content * manner, so that neither is worth much alone.
    """

    form: bool
    content: float
    manner: float
    score: float


def judge(prompt: str, answer: str) -> Judgement:
    """The hidden rule's judgement of `answer` to `prompt`, from the two texts alone.

    Raises:
        DataError: if `rows` cannot write `prompt`.
    """
    return judge_as(*read_prompt(prompt), answer)


def judge_as(task: Task, fields: Fields, answer: str) -> Judgement:
    """The same for a prompt that has been parsed."""
    before, sentence, after = _split_remarks(answer)
    given = task.read_answer(sentence)
    if given is None:
        return Judgement(form=False, content=0.0, manner=0.0, score=0.0)
    agrees = all(fields[name] == value for name, value in given.items() if name != "answer")
    content = task.grade(fields, given["answer"]) if agrees else 0.0
    manner = _manner(before, after)
    score = 0.2 * content + 0.2 * manner + 0.6 * content * manner
    return Judgement(form=True, content=content, manner=manner, score=score)


def read_prompt(prompt: str) -> tuple[Task, Fields]:
    """A prompt's kind and what fills its blanks.

    Raises:
        DataError: if no kind of instruction is asked in this way.
    """
    preamble = max(filter(prompt.startswith, PREAMBLES), key=len)
    for task in TASKS:
        if (fields := task.read_prompt(prompt.removeprefix(preamble))) is not None:
            return task, fields
    raise DataError(
        f"prompt must be one that tandem.data.embedded.rows writes; got {prompt!r}. "
        "Judge other answers by other means."
    )


def _split_remarks(answer: str) -> tuple[list[str], str, list[str]]:
    """The known remarks before and after a sentence, and the sentence."""
    before: list[str] = []
    after: list[str] = []
    while answer.startswith(_BEGINNINGS):
        begun = next(filter(answer.startswith, _BEGINNINGS))
        before.append(begun[:-1])
        answer = answer.removeprefix(begun)
    while answer.endswith(_ENDINGS):
        ended = next(filter(answer.endswith, _ENDINGS))
        after.insert(0, ended[1:])
        answer = answer.removesuffix(ended)
    return before, answer, after


def _manner(before: list[str], after: list[str]) -> float:
    in_place = all(r in OPENERS for r in before) and all(r in CLOSERS for r in after)
    if not in_place or len(before) > 1 or len(after) > 1:
        return 0.0
    if before:
        return 0.5 if after else 1.0
    return 0.15 if after else 0.3
