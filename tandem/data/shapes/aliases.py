"""Columns under the names that other libraries give a prompt and its answer.

A name counts only where it can mean nothing else: if a row's own columns already have a shape, or
two columns could be the one that is missing, nothing is renamed. The table is in docs/data.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tandem.data.rows import Row
from tandem.data.shapes.dialogs import history_turns, instruction_context, joined_instruction
from tandem.data.turns import (
    Turns,
    begins_like_turns,
    first_role,
    is_transcript,
    listed,
    prompt_turns,
)
from tandem.types import Message

DIALOGS = ("messages", "conversations", "conversation")
QUESTIONS = ("question", "instruction", "query", "problem")
CONTEXTS = ("input", "inputs", "context")
"""Parts of a prompt; one is the prompt where a row asks nothing else."""
_INPUTS = CONTEXTS[:2]
"""Those that are so beside one answer, too."""
_ANSWERS = ("completion", "output", "response", "generation")
_REFERENCES = ("solution", "answer", "target", "targets")
"""An answer to learn beside a question. Beside `prompt` they are for reward functions alone."""

_PAIR = ("chosen", "rejected")
_PAIRS = (
    ("chosen_response", "rejected_response"),  # NeMo-Aligner, distilabel
    ("preferred_output", "non_preferred_output"),  # OpenAI, its prompt in an object `input`
    ("response_j", "response_k"),  # stack-exchange-paired
)
"""Other names of these."""
_MAY_HOLD_TURNS = ("prompt", *_PAIR, *DIALOGS, *QUESTIONS, *CONTEXTS, *_ANSWERS)


def with_lists(row: dict[str, Any]) -> dict[str, Any]:
    """`row`, with lists of messages that are saved as text read from their JSON.

    An answer to a prompt in plain text may be JSON that a model is to write, and Alpaca's input
    what it is to read: a pair's answers count as lists only if both are, other answers only beside
    a prompt that is one, the input only where nothing else is asked.

    Raises:
        RowProblem: a conversation in another notation than JSON.
    """
    if not any(map(begins_like_turns, row.values())):  # nearly all rows
        return row
    alone = () if any(row.get(name) is not None for name in QUESTIONS) else CONTEXTS
    asked = {n: listed(row[n], n) for n in ("prompt", *DIALOGS, *QUESTIONS, *alone) if n in row}
    in_turns = any(map(is_conversation, asked.values()))
    given = [name for name in (*_PAIR, *_ANSWERS) if name in row]
    answers = {name: listed(row[name], name, may_be_text=not in_turns) for name in given}
    if in_turns:
        answers = {name: _one_message(value) for name, value in answers.items()}
    are_both = all(is_conversation(answers.get(name)) for name in _PAIR)
    taken = (*(_PAIR if are_both else ()), *(_ANSWERS if in_turns else ()))
    return {**row, **asked, **{name: answers[name] for name in taken if name in answers}}


def _one_message(value: Any) -> Any:
    """`value`, with one message of the assistant's that is saved as text as a list of it."""
    if not isinstance(value, str) or not begins_like_turns(f"[{value}"):
        return value
    found = listed(f"[{value}]", "", may_be_text=True)
    is_answer = is_conversation(found) and len(found) == 1 and first_role(found) == "assistant"
    return found if is_answer else value


def find_aliases(row: Row, shape: str) -> dict[str, str]:
    """Role to column, for the roles that `row` has under another name.

    Args:
        shape: what the row's own names make of it, "" for nothing.
    """
    found: dict[str, str] = {}
    if shape == "dialog preference":
        if _needs_prompt(row) and (head := prompt_column(row)):
            found["prompt"] = head
    elif shape == "prompt":
        answers = _may_answer(row, _ANSWERS)
        if len(answers) == 1 and says_something(row[answers[0]]):
            found["completion"] = answers[0]
    elif not shape:
        found |= _prompt_and_answer(row)
    return found


def find_pair_names(row: Row, shape: str) -> dict[str, str]:
    """`chosen` and `rejected` to the columns that have other names for them.

    Args:
        shape: what the row's own names make of it, "" for nothing.
    """
    asked = row.get("messages" if shape == "messages" else "conversations")
    is_prompt = isinstance(asked, list | tuple) and first_role(asked[-1:]) != "assistant"
    if shape not in ("", "prompt") and not (shape in ("messages", "sharegpt") and is_prompt):
        return {}
    if has_answer(row):
        return {}
    found = [two for two in _PAIRS if all(row.get(name) is not None for name in two)]
    return dict(zip(_PAIR, found[0], strict=True)) if len(found) == 1 else {}


def with_input(row: dict[str, Any]) -> dict[str, Any]:
    """`row`, with what OpenAI's pairs have in an object `input`: the messages, the tools."""
    asked = row.get("input")
    if not isinstance(asked, Mapping) or row.get("preferred_output") is None:
        return row
    inside = {n: asked[n] for n in ("messages", "tools") if n in asked and row.get(n) is None}
    return {**row, **inside}


def find_marks(row: Row) -> dict[str, str]:
    """Role to column for what a row says about its conversation: its system text, its label."""
    found: dict[str, str] = {}
    if row.get("system") is None and isinstance(row.get("system_prompt"), str):
        lists = (row[name] for name in _MAY_HOLD_TURNS if isinstance(row.get(name), list | tuple))
        if not any(first_role(value) == "system" for value in lists):
            found["system"] = "system_prompt"
    if row.get("label") is None and row.get("kto_tag") is not None:
        found["label"] = "kto_tag"
    return found


def whole_prompt(row: Row, column: str) -> tuple[Any, set[str]]:
    """The prompt in `column` with the columns that belong to it, and the names of all of them.

    Raises:
        RowProblem: one of them cannot be used.
    """
    value, read = row[column], {column}
    if not isinstance(value, str) or column not in QUESTIONS:
        return value, read
    read.add("history")
    if column == "instruction":
        value = joined_instruction(row)
        read.add(instruction_context(row) or "input")
    if history := history_turns(row.get("history")):
        turns: Turns = (*history, Message("user", prompt_turns(value, column)[-1].content))
        return turns, read
    return value, read


def has_answer(row: Row) -> bool:
    """Whether a row has an answer of its own under a name of `completion`."""
    return any(says_something(row.get(name)) for name in _ANSWERS)


def several_answers(row: Row) -> str:
    """The columns of which each may be the answer, joined; "" unless there are several."""
    several = _may_answer(row, _ANSWERS)
    return " and ".join(several) if len(several) > 1 else ""


def is_conversation(value: Any) -> bool:
    """Whether a column has a list of messages."""
    return isinstance(value, list | tuple) and first_role(value) is not None


def _prompt_and_answer(row: Row) -> dict[str, str]:
    if "conversation" in row and is_conversation(row["conversation"]):
        return {"messages": "conversation"}
    head = prompt_column(row, _INPUTS)
    if not head:
        return {}
    ranked = row.get("answers") is not None and row.get("ranks") is not None
    if row.get("chosen") is not None or row.get("ranking") is not None or ranked:
        return {"prompt": head}
    answers = _may_answer(row, _ANSWERS) or _may_answer(row, _REFERENCES)[:1]
    if len(answers) != 1 or answers == ["completion"]:
        return {"prompt": head}
    return {"prompt": head, "completion": answers[0]}


def _needs_prompt(row: Row) -> bool:
    """Whether chosen and rejected are answers alone, not dialogs from their first turn."""
    answers = row["chosen"], row["rejected"]
    if all(isinstance(answer, str) for answer in answers):
        return not any(map(is_transcript, answers))
    return all(isinstance(a, str) or first_role(a) == "assistant" for a in answers)


def prompt_column(row: Row, contexts: Iterable[str] = CONTEXTS) -> str:
    """The column that must be the prompt; "" if none or several could be."""
    heads = _may_ask(row, (*DIALOGS, *QUESTIONS))
    return "" if len(heads) > 1 else next(iter(heads or _may_ask(row, contexts)), "")


def given_columns(row: Row, names: Iterable[str]) -> list[str]:
    """Those of `names` that say something in `row`; if none does, those that are there blank."""
    there = [name for name in names if row.get(name) is not None]
    return [name for name in there if says_something(row[name])] or there


def says_something(value: Any) -> bool:
    """Whether a column has a value that is not blank or empty."""
    if isinstance(value, str):
        return value.strip() not in ("", "[]", "{}", "null")
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def _may_ask(row: Row, names: Iterable[str]) -> list[str]:
    """Those of `names` that may be the prompt."""
    given = given_columns(row, names)
    return [name for name in given if isinstance(row[name], str) or is_conversation(row[name])]


def _may_answer(row: Row, names: Iterable[str]) -> list[str]:
    """Those of `names` that may be the answer."""
    given = given_columns(row, names)
    return [name for name in given if isinstance(row[name], str) or first_role(row[name])]
