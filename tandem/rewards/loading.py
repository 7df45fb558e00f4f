"""Reward functions found by name, their options bound, and what they are made of."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, cast

from tandem.named_functions import (
    FIX_FILE,
    files_behind,
    function_in,
    option_value,
    options_of,
)
from tandem.rewards.binding import parameters_of
from tandem.rewards.calling import RewardFunction
from tandem.rewards.form import CONVERSATIONAL, is_conversational
from tandem.rewards.per_token import PER_TOKEN
from tandem.rewards.shipped import SHIPPED
from tandem.rewards.spec import RewardSpec, parse_spec

SETTINGS = (
    *("in_process", "whole_rollout", "checks_answer", "training_only", "as_completion"),
    CONVERSATIONAL,
    PER_TOKEN,
)
"""Attributes of a function that say how it is run and tested (docs/reward_function.md)."""


@cache
def load_reward_function(text: str) -> RewardFunction:
    """The function that a spec (see `parse_spec`) names, with its options bound.

    Raises:
        ConfigError: there is no such file, module, function or option, or an option of a shipped
            function has a value that it cannot use.
    """
    spec = parse_spec(text)
    problem = f"--reward-function must be file.py:function or module:function; got {text!r}"
    where, attribute = home_of(spec)

    def advice(error: BaseException) -> str:
        needs = SHIPPED[spec.function].needs if spec.where == "tandem" else ""
        is_missing = needs and isinstance(error, ImportError)
        return f"Install it: pip install {needs}." if is_missing else FIX_FILE

    return _bound(function_in(where, attribute, problem, advice), spec)


def home_of(spec: RewardSpec) -> tuple[str, str]:
    """The file or module that a function is in, and its name there."""
    if spec.where != "tandem":
        return spec.where, spec.function
    where, _, attribute = SHIPPED[spec.function].home.partition(":")
    return where, attribute


def _bound(function: Callable[..., Any], spec: RewardSpec) -> RewardFunction:
    """The function with its options, each as the type of its default, in the form that it gets."""
    ships, known = spec.where == "tandem", dict(options_of(function))
    # What ships takes texts, and an option of that name which a function has itself is its own.
    chooses_form = not ships and CONVERSATIONAL not in known
    if chooses_form:
        known[CONVERSATIONAL] = is_conversational(function)
    values = {
        option: option_value(known, option, text, f"reward function {spec.name}")
        for option, text in spec.options.items()
    }
    form = values.pop(CONVERSATIONAL, None) if chooses_form else None
    if ships:  # or a column of an option's name would be taken for the option
        values = known | values
        if check := getattr(function, "check_options", None):
            check(**values)
    if isinstance(function, type) and ships:
        return cast(RewardFunction, function(**values))
    if not values and form is None:
        return function

    @wraps(function)
    def bound(*arguments: Any, **columns: Any) -> Any:
        return function(*arguments, **{**columns, **values})

    # For whoever asks which columns it takes: options are none of them.
    if (parameters := parameters_of(function)) is not None:
        left = [p for p in parameters if p.name not in values]
        bound.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]
    if form is not None:
        setattr(bound, CONVERSATIONAL, form)
    return bound


def source_files(text: str) -> list[Path]:
    """The Python files that the behaviour of `load_reward_function(text)` comes from (see
    `files_behind`), sorted."""
    load_reward_function(text)
    return files_behind(home_of(parse_spec(text))[0])
