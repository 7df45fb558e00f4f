"""Rows of common shapes to `Sample`s: one function per shape, chosen by the columns.

`to_sample` looks at the columns present (null counts as absent), uses the first shape of SHAPES
whose needs are met, and keeps every column that the shape does not read, for reward functions.
Columns by other names are found first (see `aliases`). The column `answer` is kept even if a shape
reads it: rewards compare with it. So is one that an alias makes the answer, and those of several
answers that are compared (see `comparisons`).

In every conversation the answer is the last assistant turn, and the prompt is everything before it.
The renderer marks earlier assistant turns as learned too, so SFT trains on whole dialogs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tandem.data.aliases import (
    find_aliases,
    find_marks,
    says_something,
    several_answers,
    whole_prompt,
    with_lists,
)
from tandem.data.answer_lists import lists_of_numbers
from tandem.data.comparisons import Compared, named, read_compared
from tandem.data.dialogs import last_answer, pair_of, whole_dialog, with_system
from tandem.data.excerpt import describe, names
from tandem.data.grades import read_grade
from tandem.data.labels import is_labelled, is_verdict, labelled, margin_of, verdict
from tandem.data.map_advice import map_to_add, unknown_shape
from tandem.data.mapped_row import MARKS
from tandem.data.rows import RowProblem
from tandem.data.tools import tools_or_note
from tandem.data.turns import (
    check_prompt,
    first_role,
    history_turns,
    is_transcript,
    joined_instruction,
    listed,
    prompt_turns,
    text_of,
    transcript_turns,
    turns_of,
)
from tandem.data.unread import column_notes, skipped_notes, turn_notes
from tandem.message import Message
from tandem.types import Sample, Source

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape of row: the columns it needs, those it may have, and how it is read."""

    name: str
    needs: tuple[str, ...]
    may: tuple[str, ...]
    read: Callable[[Row, Source], Sample]

    def fits(self, row: Row, mapped: Mapping[str, str]) -> bool:
        """Whether `row` has the needed columns and the shape reads every mapped role."""
        for name in self.needs:  # of every row, for most shapes: a loop is fastest
            if row.get(name) is None:
                return False
        return not mapped or all(role in self.needs + self.may for role in mapped)


@dataclass(frozen=True, slots=True)
class Shaped:
    """A sample and how it was read.

    shape: the shape's name, with the columns that were found under other names.
    notes: what is worth counting, each once per row. label_column, grade_column: where its label
    and its grade are from, or "". unread: the columns of a prompt alone that nothing reads; lists:
    those of them that have a list or an object, which is no answer; numbers: those that may be the
    scores of another's answers.
    """

    sample: Sample
    shape: str
    notes: tuple[str, ...] = ()
    label_column: str = ""
    grade_column: str = ""
    unread: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


def to_sample(row: Row, source: Source, columns: Mapping[str, str] | None = None) -> Shaped:
    """The sample in `row`; `columns` maps roles to this row's column names.

    Raises:
        RowProblem: a mapped column is missing, no shape fits, or a value cannot be used.
    """
    columns = columns or {}
    _require_mapped(row, columns)
    renamed = {name: value for name, value in row.items() if name not in columns.values()}
    renamed |= {role: row[column] for role, column in columns.items()}
    renamed = with_lists(renamed)
    shape = _shape_of(renamed, columns)
    known = shape.name if shape is not None else ""
    found = {} if columns else find_aliases(renamed, known)
    several = _compared(renamed, columns, known, found)
    if several is not None:
        renamed, columns, found = several.row, several.columns, dict(several.prompt)
    marks = find_marks(renamed)
    joined: set[str] = set()
    values = {role: renamed[column] for role, column in (found | marks).items()}
    if "prompt" in found:
        values["prompt"], joined = whole_prompt(renamed, found["prompt"])
    renamed |= values
    if several is not None:
        shape = next(shape for shape in SHAPES if shape.name == several.plain)
        shape = shape if shape.fits(renamed, columns) else None
    elif found:  # marks are of any shape
        shape = _shape_of(renamed, columns)
    if shape is None:
        raise unknown_shape(row, renamed, columns, _needs())
    # A column that nobody mapped may be called so and mean something else.
    if "label" in columns or ("label" in shape.may and is_verdict(renamed.get("label"))):
        renamed["label"] = verdict(renamed["label"])
    own = several.own if several is not None else {}
    try:
        sample = shape.read(renamed, source)
    except RowProblem as problem:
        raise _in_terms_of_the_row(problem, found | marks | own) from None
    graded = read_grade(renamed if "grade" in shape.may else {}, sample, columns)
    where = {**found, **marks, **columns, **own}
    roles = shape.needs + shape.may if several is None else ("prompt", "system")
    read = joined | {where.get(role, role) for role in roles}
    listing = where.get("tools", "tools")
    read -= {"answer", "margin", listing, where.get("grade", "grade")}
    read -= {found.get("completion", "answer")}
    if not is_labelled(renamed):
        read.discard(where.get("label", "label"))
    if several is not None:
        read -= several.kept
    extra = {name: value for name, value in row.items() if name not in read}
    listed_in = renamed if "tools" in shape.may else {}
    tools, no_tools = tools_or_note(listed_in.get("tools"), is_mapped="tools" in columns)
    sample = replace(sample, columns=extra, grade=graded.grade, tools=tools)
    left = {name: value for name, value in extra.items() if name != listing or not tools}
    notes = column_notes(left) if shape.read is not plain_text else ()
    if graded.grade is not None and graded.column != "grade":
        found |= {"grade": graded.column}
    noted = (*_notes(renamed, shape, sample), *filter(None, [graded.note, no_tools]), *notes)
    if several is not None:
        noted = (*several.notes, *noted)
    unread: tuple[str, ...] = ()
    if shape.read is prompt_only and (several is None or not several.understood):
        unread = tuple(name for name, value in left.items() if says_something(value))
    return Shaped(
        sample,
        named(shape.name, found) if several is None else several.shape,
        noted,
        where.get("label", "label") if sample.label is not None else "",
        where.get(graded.column, graded.column),
        unread,
        tuple(name for name in unread if _holds_no_answer(extra[name])) if unread else (),
        lists_of_numbers({name: extra[name] for name in unread}) if unread else (),
    )


def _require_mapped(row: Row, columns: Mapping[str, str]) -> None:
    for role, column in columns.items():
        if column not in row:
            weight = re.search(r":[\d.]+$", column)
            advice = f"A weight goes before the map: FILE{weight[0]}::..." if weight else ""
            raise RowProblem(column, names(row), f"exist, mapped to the role {role}", advice)


def _compared(
    row: Row, columns: Mapping[str, str], shape: str, found: Mapping[str, str]
) -> Compared | None:
    """`read_compared`, with the shape that the row has whatever marks are mapped."""
    if columns and not columns.keys().isdisjoint(MARKS):
        others = {role: n for role, n in columns.items() if role not in MARKS}
        own = _shape_of(row, others)
        shape = own.name if own is not None else ""
        found = found if others else find_aliases(row, shape)
    return read_compared(row, columns, shape, found)


def _holds_no_answer(value: Any) -> bool:
    """Whether a column has a list or an object that is no message and no conversation."""
    return isinstance(value, list | tuple | Mapping) and first_role(value) is None


def _shape_of(row: Row, columns: Mapping[str, str]) -> Shape | None:
    return next((shape for shape in SHAPES if shape.fits(row, columns)), None)


def _in_terms_of_the_row(problem: RowProblem, found: Mapping[str, str]) -> RowProblem:
    """The problem with the names that the row's columns have."""
    role, dot, rest = problem.field.partition(".")
    field = f"{found.get(role, role)}{dot}{rest}"
    return RowProblem(field, problem.found, problem.expected, problem.advice)


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
    return labelled(Sample(source, turns, text_of(row["output"], "output")), row)


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
    Shape("question", ("question", "answer"), (*_ASKED, *_ANSWER), question_answer),
    Shape("ranking", ("prompt", "ranking"), _ASKED, ranking),
    Shape("ranked answers", ("prompt", "answers", "ranks"), _ASKED, ranking),
    Shape("prompt", ("prompt",), _ASKED, prompt_only),
)


def _needs() -> list[str]:
    """The columns of each shape, and of rows that compare answers, as errors say them."""
    compared = ("prompt + answers + scores", "prompt + answer_a + answer_b + preferred")
    return [*(" + ".join(shape.needs) for shape in SHAPES[:-1]), *compared, "prompt"]


def _conversation(row: Row, field: str, source: Source) -> Sample:
    """The turns up to the last assistant turn that is to be learned; a prompt if there is none."""
    turns = with_system(turns_of(row[field], field), row)
    spoken = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
    answers = [i for i in spoken if turns[i].learned]
    if not answers:
        return Sample(source, check_prompt(turns[: spoken[-1]] if spoken else turns, field))
    prompt, answer = last_answer(turns[: answers[-1] + 1], field, field)
    return labelled(Sample(source, prompt, answer), row)


def _notes(row: Row, shape: Shape, sample: Sample) -> list[str]:
    """What was skipped in a row that is used, or what else it has."""
    notes = []
    if "margin" in shape.may and margin_of(row):
        notes.append("with a margin, which the reward model's loss reads")
    if "label" in shape.may and row.get("label") is not None and not is_labelled(row):
        notes.append("with a label that is neither true (1) nor false (0), not read as good or bad")
    if any(not turn.learned for turn in sample.prompt):
        notes.append("turns marked weight 0 or train false are shown, not learned")
    if shape.read in (messages, sharegpt):
        notes += skipped_notes(turns_of(row[shape.needs[0]], shape.needs[0]))
    if shape.read is prompt_only and (several := several_answers(row)):
        notes.append(f"{several} may each be the answer, so neither is: map one to completion")
    if shape.read is not plain_text:
        notes += turn_notes(row[name] for name in shape.needs + shape.may if name in row)
    return notes
