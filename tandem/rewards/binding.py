"""Which argument of a reward function gets what: by name where it can be, else by position.

TRL calls f(prompts=..., completions=..., **columns), so the order of its functions' parameters says
nothing: `f(completions, prompts)` must not be scored on the prompts. A function whose first two
parameters have names of their own, such as `f(questions, answers)`, gets prompts and completions
by position.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

NEW_MESSAGES = "new_messages"
"""The turns since the data's prompt: more than the answer after an environment's."""
IF_NAMED = ("completion_ids", "prompt_texts", NEW_MESSAGES)
"""What goes only to functions with a parameter of that name, since it must be made for them."""
GIVEN = ("prompts", "completions", "messages", *IF_NAMED)
"""What reward functions are given beside the data's columns; a column of such a name is left out.
`messages` goes to functions that can take it."""
_TRAINERS = ("trainer_state", "log_extra", "log_metric", "environments")
"""What TRL also gives, and only TRL has."""


class BindingError(Exception):
    """A function cannot be called with what there is; the text says why."""


@dataclass(frozen=True, slots=True)
class Binding:
    """How a function is called: the names of what it gets by position, in order, and by keyword."""

    positional: tuple[str, ...]
    keywords: tuple[str, ...]

    def call(self, function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
        """What the function returns for these values, by their names."""
        return function(
            *(values[name] for name in self.positional),
            **{name: values[name] for name in self.keywords},
        )


def names_parameter(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of that name."""
    return name in _named(parameters_of(function) or [])


def columns_read(function: Callable[..., Any], columns: Iterable[str]) -> list[str]:
    """Those of these columns that a function's code reads, by a parameter of that name that it uses
    or, from `**columns`, by that name in quotes. Where there is no source, all that it names."""
    named = _named(parameters_of(function) or [])
    try:
        source = inspect.getsource(inspect.unwrap(function))
        # A lambda's source is the line that it stands on, which may be no statement by itself.
        nodes = list(ast.walk(ast.parse(textwrap.dedent(source))))
    except (OSError, TypeError, ValueError, SyntaxError):
        return [column for column in columns if column in named]
    used = {node.id for node in nodes if isinstance(node, ast.Name)} & named.keys()
    quoted = {node.value for node in nodes if isinstance(node, ast.Constant)}
    return [column for column in columns if column in used or column in quoted]


def binding_of(function: Callable[..., Any], names: Iterable[str]) -> Binding:
    """How a function is called with values of these names, `prompts` and `completions` among them.

    Raises:
        BindingError: it cannot be.
    """
    find = _binding_of if isinstance(function, Hashable) else _binding_of.__wrapped__
    return find(function, tuple(names))


@lru_cache(maxsize=64)  # it is asked for every call, which is of one answer
def _binding_of(function: Callable[..., Any], names: tuple[str, ...]) -> Binding:
    parameters = parameters_of(function)
    if parameters is None:  # something without a signature, which the first call will tell of
        return Binding(GIVEN[:2], tuple(name for name in names if name not in GIVEN))
    _refuse_other_trainers(function, parameters)
    takes = [name for name in _named(parameters) if name in names]
    slots = _slots(parameters)
    placed = _by_position(slots, takes)
    missing = [
        name
        for name, parameter in _named(parameters).items()
        if parameter.default is parameter.empty
        and name not in [*takes, *(slots[place] for place in placed)]
    ]
    if missing:
        raise BindingError(_missing(missing[0]))
    known = {*takes, *placed.values()}
    first = [name for name in slots[:2] if name in takes and name not in GIVEN]
    if len(first) == 2 and known.isdisjoint({"completions", "completion_ids"}):
        raise BindingError(
            f"its first two parameters, {' and '.join(first)}, are called as columns of the data, "
            "so that it would never see a completion. Name the one that takes them completions"
        )
    rest = [name for name in names if name not in known and name not in IF_NAMED]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        if known.isdisjoint({"completions", "completion_ids"}):
            raise BindingError("it has no parameter for completions. Name one completions")
        unread = [name for name in rest if name not in GIVEN]
        _refuse_misspelled(parameters, known, slots[:2], unread)
        rest = []
    positional: list[str] = []
    for place, slot in enumerate(slots):
        if place not in placed and slot not in takes:
            break
        positional.append(placed.get(place, slot))
    return Binding(tuple(positional), (*(n for n in takes if n not in positional), *rest))


def columns_problem(function: Callable[..., Any], columns: Iterable[str], label: str = "") -> str:
    """What keeps `function` from being called with lists of these columns, or ""."""
    columns = sorted(set(columns) - set(GIVEN))
    try:
        binding_of(function, [*GIVEN, *columns])
    except BindingError as problem:
        label = label or getattr(function, "__name__", str(function))
        return (
            f"reward function {label} must take prompts, completions and the data's columns "
            f"({', '.join(columns) or 'none'}); got: {problem}"
        )
    return ""


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """A function's parameters; None where it has no signature.

    A decorator that only passes its arguments on has those of the function that it wraps; one with
    names of its own takes what these say, whatever it calls with it.
    """
    try:
        own = list(inspect.signature(function, follow_wrapped=False).parameters.values())
        passes_on = all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in own)
        return list(inspect.signature(function).parameters.values()) if passes_on else own
    except (TypeError, ValueError):
        return None


def _named(parameters: Iterable[inspect.Parameter]) -> dict[str, inspect.Parameter]:
    return {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _slots(parameters: Iterable[inspect.Parameter]) -> list[str]:
    """The positional parameters; `*` for each of the first two places that *args would take."""
    slots: list[str] = []
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            slots.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            slots += ["*"] * (2 - len(slots))
    return slots


def _by_position(slots: Sequence[str], takes: Sequence[str]) -> dict[int, str]:
    """The places of prompts and completions that their parameters' names do not say.

    Args:
        takes: parameters that are called as what there is.
    Raises:
        BindingError: the second parameter may mean completions, or a column.
    """
    if len(slots) < 2:
        return {}
    named = {"prompts", "completions"} & set(takes)
    has_own_name = [slot not in takes for slot in slots[:2]]
    if not named and all(has_own_name):
        return {0: "prompts", 1: "completions"}
    if not named and has_own_name[0]:
        raise BindingError(
            f"the second parameter, {slots[1]}, is called as a column of the data, so that it is "
            "not clear which parameter takes completions. Name that one completions"
        )
    if named == {"completions"} and slots[1] == "completions" and has_own_name[0]:
        return {0: "prompts"}
    if named == {"prompts"} and slots[0] == "prompts" and has_own_name[1]:
        return {1: "completions"}
    return {}


def _refuse_misspelled(
    parameters: Iterable[inspect.Parameter],
    known: set[str],
    first: Sequence[str],
    unread: Sequence[str],
) -> None:
    """Refuse a parameter with a default that is nearly called as a column which nothing takes: it
    would keep its default on every row."""
    for name in _named(parameters).keys() - {*known, *first}:
        if near := get_close_matches(name, unread, n=1):
            raise BindingError(
                f"its parameter {name} is no column, but {near[0]} is. Name its parameters as the "
                "columns, or add **columns if it is none of them"
            )


def _missing(name: str) -> str:
    text = f"missing a required argument: {name!r}"
    if name in _TRAINERS:
        return f"{text}, which TRL's trainer alone has. Remove it, or give it a default"
    if name == "answer":
        return f"{text}. --scoring.answer-column names the column with the reference answer"
    return f"{text}. Name its parameters as the columns, with **columns for the rest"


def _refuse_other_trainers(
    function: Callable[..., Any], parameters: Iterable[inspect.Parameter]
) -> None:
    """Refuse what verl and OpenRLHF call otherwise, and say how to wrap it: a call with lists might
    succeed, and mean nothing."""
    has, name = _named(parameters), getattr(function, "__name__", "f")
    if "solution_str" in has and "completions" not in has:
        columns = [n for n in has if n not in ("solution_str", "ground_truth")]
        each = {"solution_str": "completions", "ground_truth": "answer"}
        raise BindingError(
            f"verl's signature, for one answer. Wrap it: def reward(completions, answer, "
            f"{''.join(f'{column}, ' for column in columns)}**columns): return [{name}(*each) for "
            f"each in zip({', '.join(each.get(n, n) for n in has)})]"
        )
    if {"queries", "prompts"} <= has.keys() and "completions" not in has:
        raise BindingError(
            "OpenRLHF's signature, whose queries are prompts with completions. Wrap it: def "
            "reward(prompts, completions, answer, **columns): return "
            f"{name}([p + c for p, c in zip(prompts, completions)], prompts, answer)['rewards']"
        )
