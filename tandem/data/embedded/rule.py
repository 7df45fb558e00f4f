"""The hidden rule of the embedded data set: what a good answer is. Training never sees it.

An answer is one sentence of the form that its question asks for, with any of a few known remarks
before and after it. The rule looks at three things: the form, the content of the sentence, and
the manner that the remarks give it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.data.embedded.facts import CLOSERS, OPENERS, PREAMBLES, RUDE
from tandem.data.embedded.kinds import WEIGHTS
from tandem.data.embedded.task import Fields, Task
from tandem.errors import DataError

REMARKS: tuple[str, ...] = OPENERS + CLOSERS + RUDE


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the rule says of an answer.

    form: it is one sentence of the right kind with nothing but known remarks around it, to the
        full stop; without form content, manner and score are 0.
    content: how right the sentence is, in [0, 1].
    manner: how well it is put, in [0, 1]: a courtesy and then nothing but the answer 1; chatter
        after that 0.5; no remark 0.3; chatter alone 0.15; a rude remark, a remark out of its
        place, or more than one of a kind 0.
    score: 0.2 content + 0.2 manner + 0.6 content * manner, so that neither is worth much alone.
    """

    form: bool
    content: float
    manner: float
    score: float


def judge(prompt: str, answer: str) -> Judgement:
    """What the hidden rule says of `answer` to `prompt`; all it needs is in the two texts.

    Raises:
        DataError: if `prompt` is none that `rows` could write.
    """
    return judge_as(*read_prompt(prompt), answer)


def judge_as(task: Task, fields: Fields, answer: str) -> Judgement:
    """The same for a prompt that has been read."""
    before, sentence, after = _split_remarks(answer)
    said = task.read_answer(sentence)
    if said is None:
        return Judgement(form=False, content=0.0, manner=0.0, score=0.0)
    agrees = all(fields[name] == value for name, value in said.items() if name != "answer")
    content = task.grade(fields, said["answer"]) if agrees else 0.0
    manner = _manner(before, after)
    score = 0.2 * content + 0.2 * manner + 0.6 * content * manner
    return Judgement(form=True, content=content, manner=manner, score=score)


def read_prompt(prompt: str) -> tuple[Task, Fields]:
    """The kind of a prompt and the blanks that it fills.

    Raises:
        DataError: if no kind of instruction is asked in this way.
    """
    for preamble in sorted(PREAMBLES, key=len, reverse=True):
        if prompt.startswith(preamble):
            question = prompt.removeprefix(preamble)
            break
    for task in WEIGHTS:
        if (fields := task.read_prompt(question)) is not None:
            return task, fields
    raise DataError(
        f"prompt must be one that tandem.data.embedded.rows writes; got {prompt!r}. "
        "Judge other answers by other means."
    )


def _split_remarks(answer: str) -> tuple[list[str], str, list[str]]:
    """The known remarks before and after what is left between them."""
    before: list[str] = []
    after: list[str] = []
    while remark := next((r for r in REMARKS if answer.startswith(r + " ")), None):
        before.append(remark)
        answer = answer.removeprefix(remark + " ")
    while remark := next((r for r in REMARKS if answer.endswith(" " + r)), None):
        after.insert(0, remark)
        answer = answer.removesuffix(" " + remark)
    return before, answer, after


def _manner(before: list[str], after: list[str]) -> float:
    in_place = all(r in OPENERS for r in before) and all(r in CLOSERS for r in after)
    if not in_place or len(before) > 1 or len(after) > 1:
        return 0.0
    if before:
        return 0.5 if after else 1.0
    return 0.15 if after else 0.3
