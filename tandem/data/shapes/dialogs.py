"""Turns put together of a row's columns: prompt and answers, each dialog with its system turn."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from tandem.data.excerpt import describe, excerpt
from tandem.data.rows import Row, RowProblem
from tandem.data.tools import bare
from tandem.data.turns import Turns, check_prompt, maybe_blank, text_of, turns_of
from tandem.message import Answer, Message, answer_text
from tandem.types import Sample, Source


def with_system(turns: Turns, row: Row) -> Turns:
    """`turns` with the row's `system` column, if it has one, in front."""
    system = row.get("system")
    if system is None or not maybe_blank(system, "system").strip():
        return turns
    if any(turn.role == "system" for turn in turns):
        raise RowProblem(
            "system", excerpt(system), "not be given together with a system turn in the row"
        )
    return (Message("system", system), *turns)


def joined_instruction(row: Row) -> str:
    """An Alpaca row's prompt: the instruction, a blank line, and any input; Dolly's: its context.

    Raises:
        RowProblem: one of them is not text, or the instruction is blank.
    """
    prompt = text_of(row["instruction"], "instruction")
    name = "input" if row.get("input") is not None else instruction_context(row)
    given = maybe_blank(row[name], name) if name else ""
    return f"{prompt}\n\n{given}" if given.strip() else prompt


def instruction_context(row: Row) -> str:
    """The column of a text that an instruction is about, where that is not its input; ""."""
    is_dolly = "input" not in row and isinstance(row.get("context"), str)
    return "context" if is_dolly else ""


def history_turns(pairs: Any) -> Turns:
    """The turns of LLaMA-Factory's column `history`: [instruction, answer] pairs, or their JSON
    text, or nothing.

    Raises:
        RowProblem: it is something else.
    """
    if pairs is None or pairs == "":  # an empty CSV cell
        return ()
    if isinstance(pairs, str):
        with suppress(ValueError, RecursionError):
            pairs = json.loads(pairs)
    if not isinstance(pairs, list | tuple):
        raise RowProblem("history", describe(pairs), "be a list of [instruction, answer] pairs")
    turns: list[Message] = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RowProblem("history", describe(pair), "hold [instruction, answer] pairs only")
        turns.append(Message("user", text_of(pair[0], "history")))
        turns.append(Message("assistant", text_of(pair[1], "history")))
    return tuple(turns)


def whole_dialog(prompt: Turns, answer: Any, field: str) -> Turns:
    """The whole dialog of a prompt and its answer column; one message is the answer."""
    if isinstance(answer, str):
        return (*prompt, Message("assistant", text_of(answer, field)))
    turns = turns_of([answer] if isinstance(answer, dict) else answer, field, or_text=True)
    if turns[0].role == "assistant":
        return prompt + turns
    # A dialog may have a system turn that its prompt column lacks.
    own = tuple(t for t in turns if t.role != "system" or t in prompt)
    # A prompt column may have the last question alone (distilabel's Capybara).
    if prompt in (own[: len(prompt)], own[-2:-1]):
        return turns
    found = f"another dialog, which begins {excerpt(turns[0].content)}"
    raise RowProblem(field, found, "continue the prompt, or repeat it")


def last_answer(turns: Turns, field: str, prompt_field: str) -> tuple[Turns, Answer]:
    """(the turns before the answer, the answer): the dialog must end with the assistant.

    `field` and `prompt_field` name the answer's column and the prompt's in errors.
    """
    answer = answer_of(turns, field)
    return check_prompt(turns[:-1], prompt_field), answer


def answer_of(turns: Turns, field: str) -> Answer:
    """What the assistant says last, which must end the dialog and be there to learn.

    Raises:
        RowProblem: of `field`, if not.
    """
    if turns[-1].role != "assistant":
        raise RowProblem(field, f"{turns[-1].role} last", "end with an assistant turn")
    answer = turns[-1] if turns[-1].tool_calls else turns[-1].content
    if not answer_text(answer).strip():
        raise RowProblem(field, excerpt(turns[-1].content), "not be blank")
    if not turns[-1].learned:
        found = "weight 0, train or loss false on it"
        raise RowProblem(field, found, "end with an answer to learn", "Remove the mark or the row.")
    return answer


def pair_of(
    chosen: Turns, rejected: Turns, source: Source, prompt_field: str, margin: float
) -> Sample:
    """Two dialogs that differ in their last turn, which is the assistant's."""
    for turns, field in ((chosen, "chosen"), (rejected, "rejected")):
        if turns[-1].role != "assistant":
            raise RowProblem(field, f"{turns[-1].role} last", "end with an assistant turn")
    if chosen[:-1] != rejected[:-1]:
        pairs = zip(chosen, rejected, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), len(rejected))
        found = f"{len(rejected)} turns of which {shared} are shared with chosen's {len(chosen)}"
        raise RowProblem("rejected", found, "share all turns but the last with chosen")
    prompt, preferred = last_answer(chosen, "chosen", prompt_field)
    _, beaten = last_answer(rejected, "rejected", prompt_field)
    if bare(preferred) == bare(beaten):
        raise RowProblem("rejected", "the same answer twice", "differ from chosen")
    return Sample(source, prompt, preferred, beaten, margin=margin)
