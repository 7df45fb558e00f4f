"""What a row says that no model will read, as notes to be counted.

Nothing here refuses a row: a reward function may want these columns, and the words of the
conversation are there. What would be wrong without the rest (tool calls that a template does not
write) is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tandem.data.shapes.aliases import says_something
from tandem.data.shapes.answer_lists import lists_of_numbers
from tandem.data.thoughts import FIELDS
from tandem.data.turns import Turns, first_role

_OF_A_PROMPT = ("input", "context", "history", "system", "system_prompt")
_LOST = {
    "functions": "the model sees no list of tools",
    "chat_template_kwargs": "the chat template is called without them",
}
_NOTED = (*_OF_A_PROMPT, *_LOST)


def unread_of(rest: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Of the columns that a row's shape leaves: those that say something; those of them that have a
    list or an object, which is no answer; those that may be the scores of another's answers."""
    said = {name: value for name, value in rest.items() if says_something(value)}
    lists = (name for name, value in said.items() if _holds_no_answer(value))
    return tuple(said), tuple(lists), lists_of_numbers(said) if said else ()


def _holds_no_answer(value: Any) -> bool:
    """Whether a column has a list or an object that is no message and no conversation."""
    return isinstance(value, list | tuple | Mapping) and first_role(value) is None


def column_notes(extra: Mapping[str, Any]) -> list[str]:
    """Notes on the columns that a row's shape leaves unread."""
    given = [name for name in _NOTED if name in extra and says_something(extra[name])]
    return [
        f"column {name} is not rendered: {_LOST[name]}"
        if name in _LOST
        else f"column {name} is not in the prompt"
        for name in given
    ]


def turn_notes(values: Iterable[Any]) -> list[str]:
    """Notes on what the turns of a row's messages say beside their content."""
    turns = [
        turn
        for value in values
        for turn in (value if isinstance(value, list | tuple) else [value])
        if isinstance(turn, Mapping)
    ]
    if not turns:
        return []
    others = [turn for turn in turns if first_role(turn) != "assistant"]
    notes = [
        f"{name} true of turns that are not the assistant's is not read"
        for name in ("train", "loss")
        if any(turn.get(name) is True for turn in others)
    ]
    if any(turn.get("tool_calls") and turn.get("function_call") for turn in turns):
        notes.append("function_call of turns is not read beside tool_calls")
    lost = [
        name
        for name in FIELDS
        if any(
            says_something(turn.get(name))
            and not (isinstance(turn[name], str) and first_role(turn) == "assistant")
            for turn in turns
        )
    ]
    return notes + [
        f"{name} of turns is not rendered: thoughts are the assistant's, and text" for name in lost
    ]


def skipped_notes(turns: Turns) -> list[str]:
    """Notes on the last turns of a conversation, if they are not its answer."""
    answers = [turn for turn in turns if turn.role == "assistant"]
    if not answers or (turns[-1].role == "assistant" and turns[-1].learned):
        return []
    if not any(turn.learned for turn in answers):
        return ["every assistant turn is marked weight 0, train or loss false: a prompt alone"]
    if turns[-1].learned and answers[-1].learned:
        return ["turns after the last assistant turn skipped"]
    return ["turns after the last assistant turn that is learned skipped"]
