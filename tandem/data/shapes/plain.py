"""The plain shapes of rows: which columns each needs, and how it becomes a `Sample`.

SHAPES lists them; the first whose needs a row meets is its shape (null counts as absent). In every
conversation the answer is the last assistant turn, and the prompt is everything before it. The
renderer marks earlier assistant turns as learned too, so SFT trains on whole dialogs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.data.excerpt import describe, names
from tandem.data.rows import Row, RowProblem
from tandem.data.shapes.dialogs import (
    history_turns,
    joined_instruction,
    last_answer,
    pair_of,
    whole_dialog,
    with_system,
)
from tandem.data.shapes.labels import labelled, margin_of
from tandem.data.shapes.map_advice import map_to_add
from tandem.data.turns import (
    check_prompt,
    is_transcript,
    listed,
    prompt_turns,
    text_of,
    transcript_turns,
    turns_of,
)
from tandem.message import Message
from tandem.types import Sample, Source


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape of row: the columns it needs, those it may have, and how it is read.

    text: the needed column that must be text, or the row has another shape.
    """

    name: str
    needs: tuple[str, ...]
    may: tuple[str, ...]
    read: Callable[[Row, Source], Sample]
    text: str = ""

    def fits(self, row: Row, mapped: Mapping[str, str]) -> bool:
        """Whether `row` has the needed columns and the shape reads every mapped role."""
        for name in self.needs:  # of every row, for most shapes: a loop is fastest
            if row.get(name) is None:
                return False
        if self.text and self.text not in mapped and not isinstance(row[self.text], str):
            return False
        return not mapped or all(role in self.needs + self.may for role in mapped)


def preference(row: Row, source: Source) -> Sample:
    """prompt, chosen and maybe rejected: strings or message lists (TRL's explicit prompt).

    A list of messages holds the answer alone, or the whole dialog.
    """
    prompt = with_system(prompt_turns(row["prompt"], "prompt"), row)
    chosen = whole_dialog(prompt, row["chosen"], "chosen")
    if row.get("rejected") is None:
        prompt, answer = last_answer(chosen, "chosen", "prompt")
        return Sample(source, prompt, answer)
    rejected = whole_dialog(prompt, row["rejected"], "rejected")
    return pair_of(chosen, rejected, source, "prompt", margin_of(row))


def dialog_preference(row: Row, source: Source) -> Sample:
    """chosen and rejected as whole dialogs: their common beginning is the prompt.

    Either both are message lists (TRL's implicit prompt) or both HH transcripts.
    """
    chosen, rejected = row["chosen"], row["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str):
        if not (is_transcript(chosen) or is_transcript(rejected)):
            expected = "exist, or chosen and rejected be transcripts with Human: turns"
            example = "Name the prompt's column, as in FILE::prompt=COLUMN."
            raise RowProblem("prompt", names(row), expected, map_to_add(row) or example)
        dialogs = [transcript_turns(text_of(row[f], f), f) for f in ("chosen", "rejected")]
    else:
        dialogs = [turns_of(row[f], f) for f in ("chosen", "rejected")]
    chosen, rejected = (with_system(dialog, row) for dialog in dialogs)
    return pair_of(chosen, rejected, source, "chosen", margin_of(row))


def ranking(row: Row, source: Source) -> Sample:
    """prompt and ranking: its answers, best first; or answers with ranks, 1 the best.

    Equal ranks are answers that are not compared; at least two must differ.
    """
    prompt = check_prompt(with_system(prompt_turns(row["prompt"], "prompt"), row), "prompt")
    field = "ranking" if row.get("ranking") is not None else "answers"
    answers = row[field]
    if not isinstance(answers, list | tuple) or len(answers) < 2:
        raise RowProblem(field, describe(answers), "be a list of two answers or more")
    texts = [text_of(answer, field) for answer in answers]
    if len({text.strip() for text in texts}) < len(texts):
        raise RowProblem(field, "the same answer twice", "hold each answer once")
    ranks = list(range(1, len(texts) + 1)) if field == "ranking" else row["ranks"]
    if field == "answers":
        _check_ranks(ranks, len(texts))
    ranked = tuple(sorted(zip(ranks, texts, strict=True), key=lambda each: each[0]))
    best, worst = ranked[0][1], ranked[-1][1]
    return Sample(source, prompt, best, worst, ranking=ranked)


def _check_ranks(ranks: Any, count: int) -> None:
    if not isinstance(ranks, list | tuple) or len(ranks) != count:
        raise RowProblem("ranks", describe(ranks), f"be a list of {count} ranks, one an answer")
    wrong = next((rank for rank in ranks if type(rank) is not int or rank < 1), None)
    if wrong is not None:
        raise RowProblem("ranks", describe(wrong), "hold whole numbers from 1, the best, on")
    if len(set(ranks)) == 1:
        raise RowProblem("ranks", f"{ranks[0]} for all answers", "differ for two answers at least")


def prompt_completion(row: Row, source: Source) -> Sample:
    """prompt and completion: strings or message lists; `label` false marks a bad answer."""
    prompt = with_system(prompt_turns(row["prompt"], "prompt"), row)
    dialog = whole_dialog(prompt, row["completion"], "completion")
    prompt, answer = last_answer(dialog, "completion", "prompt")
    return labelled(Sample(source, prompt, answer), row)


def messages(row: Row, source: Source) -> Sample:
    """A conversation; without an assistant turn it is a prompt."""
    return _conversation(row, "messages", source)


def sharegpt(row: Row, source: Source) -> Sample:
    """ShareGPT's `conversations`, with from and value."""
    return _conversation(row, "conversations", source)


def alpaca(row: Row, source: Source) -> Sample:
    """instruction, input, output: the prompt is the instruction, a blank line, and any input.

    `history` (LLaMA-Factory's) holds the turns before it as [instruction, answer] pairs.
    """
    prompt = Message("user", joined_instruction(row))
    turns = with_system((*history_turns(row.get("history")), prompt), row)
    turns = check_prompt(turns, "instruction")
    output, joins = row["output"], any(row.get(name) for name in ("input", "history"))
    if isinstance(output, list) and len(output) > 1 and not joins:
        advice = "Answers, the best one first, are read with ::prompt=instruction,ranking=output."
        raise RowProblem("output", describe(output), "be text", advice)
    return labelled(Sample(source, turns, text_of(output, "output")), row)


def plain_text(row: Row, source: Source) -> Sample:
    """Plain text without a conversation."""
    if listed(row["text"], "text") is not row["text"]:
        advice = "Add ::messages=text to the file's name."
        raise RowProblem("text", "a list of messages", "be plain text", advice)
    return Sample(source, text=text_of(row["text"], "text"))


def question_answer(row: Row, source: Source) -> Sample:
    """question and answer, both text."""
    question = Message("user", text_of(row["question"], "question"))
    turns = check_prompt(with_system((question,), row), "question")
    return labelled(Sample(source, turns, text_of(row["answer"], "answer")), row)


def prompt_only(row: Row, source: Source) -> Sample:
    """A prompt, to be answered in PPO."""
    prompt = with_system(prompt_turns(row["prompt"], "prompt"), row)
    return Sample(source, check_prompt(prompt, "prompt"))


# What a row may say about its only answer.
_ANSWER = ("label", "grade")
_ASKED = ("system", "tools")
_PAIR = (*_ASKED, "margin")

# The first that fits is used: the most specific columns come first.
SHAPES = (
    Shape("preference", ("prompt", "chosen"), (*_PAIR, "rejected", "grade"), preference),
    Shape("dialog preference", ("chosen", "rejected"), _PAIR, dialog_preference),
    Shape("completion", ("prompt", "completion"), (*_ASKED, *_ANSWER), prompt_completion),
    Shape("messages", ("messages",), (*_ASKED, *_ANSWER), messages),
    Shape("sharegpt", ("conversations",), (*_ASKED, *_ANSWER), sharegpt),
    Shape("alpaca", ("instruction", "output"), ("input", *_ASKED, "history", *_ANSWER), alpaca),
    Shape("text", ("text",), (), plain_text),
    # An answer that is a number or an object is a reference that reward functions compare with.
    Shape("question", ("question", "answer"), (*_ASKED, *_ANSWER), question_answer, "answer"),
    Shape("ranking", ("prompt", "ranking"), _ASKED, ranking),
    Shape("ranked answers", ("prompt", "answers", "ranks"), _ASKED, ranking),
    Shape("prompt", ("prompt",), _ASKED, prompt_only),
)


NEEDS = (
    *(" + ".join(shape.needs) for shape in SHAPES[:-1]),
    *("prompt + answers + scores", "prompt + answer_a + answer_b + preferred"),
    "prompt",
)
"""The columns of each shape, and of rows that compare answers, as errors say them."""


def shape_of(row: Row, columns: Mapping[str, str]) -> Shape | None:
    """The shape of a row; `columns` maps roles, all of which it must read."""
    return next((shape for shape in SHAPES if shape.fits(row, columns)), None)


def _conversation(row: Row, field: str, source: Source) -> Sample:
    """The turns up to the last assistant turn that is to be learned; a prompt if there is none."""
    turns = with_system(turns_of(row[field], field), row)
    spoken = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
    answers = [i for i in spoken if turns[i].learned]
    if not answers:
        return Sample(source, check_prompt(turns[: spoken[-1]] if spoken else turns, field))
    prompt, answer = last_answer(turns[: answers[-1] + 1], field, field)
    return labelled(Sample(source, prompt, answer), row)
