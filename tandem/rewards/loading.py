"""Reward functions found by name, their options bound, and what they are made of."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import sysconfig
import zlib
from collections.abc import Callable, Sequence
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.errors import ConfigError, Stopped
from tandem.rewards.calling import RewardFunction
from tandem.rewards.shipped import SHIPPED
from tandem.rewards.spec import RewardSpec, parse_spec
from tandem.text import one_line

GIVEN = {"prompts", "completions", "messages"}
"""What every reward function is given beside the data's columns."""
SETTINGS = ("in_process", "whole_rollout", "checks_answer", "training_only", "as_completion")
"""Attributes of a function that say how it is run and tested (docs/reward_function.md)."""


@cache
def load_reward_function(text: str) -> RewardFunction:
    """The function that a spec (see `parse_spec`) names, with its options bound.

    Raises:
        ConfigError: there is no such file, module, function or option.
    """
    spec = parse_spec(text)
    problem = f"--reward-function must be file.py:function or module:function; got {text!r}"
    where, attribute = home_of(spec)
    try:
        module = _module_from_file(where) if where.endswith(".py") else import_module(where)
    # Whatever a user's file does when it runs is told to them in one line, SystemExit too.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | Stopped):
            raise
        raise ConfigError(
            f"{problem}: {type(error).__name__}: {one_line(error)}. {_advice(spec, error)}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{problem}: {where} has no function {attribute}. Check its spelling.")
    return _bound(function, spec)


def home_of(spec: RewardSpec) -> tuple[str, str]:
    """The file or module that a function is in, and its name there."""
    if spec.where != "tandem":
        return spec.where, spec.function
    where, _, attribute = SHIPPED[spec.function].home.partition(":")
    return where, attribute


def _advice(spec: RewardSpec, error: BaseException) -> str:
    needs = SHIPPED[spec.function].needs if spec.where == "tandem" else ""
    if needs and isinstance(error, ImportError):
        return f"Install it: pip install {needs}."
    return "Fix the file, or its name (--debug shows where)."


def _bound(function: Callable[..., Any], spec: RewardSpec) -> RewardFunction:
    """The function with its options, each as the type of its default."""
    known = {
        p.name: p
        for p in _parameters(function)
        if p.kind is p.KEYWORD_ONLY and p.default is not p.empty
    }
    values: dict[str, Any] = {}
    if spec.where == "tandem":  # a column of such a name must not be taken for the option
        values = {name: p.default for name, p in known.items()}
    for name, text in spec.options.items():
        if name not in known:
            raise ConfigError(
                f"reward function {spec.name} must have the option {name}, a keyword-only "
                f"parameter with a default; got {', '.join(known) or 'none'}. Check its spelling."
            )
        values[name] = _value(text, known[name].default, f"{spec.name}?{name}")
    if not values:
        return function

    @wraps(function)
    def bound(prompts: list[str], completions: list[str], **columns: Any) -> Any:
        return function(prompts, completions, **{**columns, **values})

    # For whoever asks which columns it takes: options are none of them.
    bound.__signature__ = _without(function, set(values))  # type: ignore[attr-defined]
    return bound


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def _without(function: Callable[..., Any], names: set[str]) -> inspect.Signature:
    signature = inspect.signature(function)
    return signature.replace(
        parameters=[p for p in signature.parameters.values() if p.name not in names]
    )


def _value(text: str, default: Any, where: str) -> Any:
    switch = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}
    try:
        if isinstance(default, bool):
            return switch[text.lower()]
        return type(default)(text) if isinstance(default, int | float) else text
    except (KeyError, ValueError):
        kind = {bool: "on or off", int: "a whole number", float: "a number"}[type(default)]
        raise ConfigError(f"{where} must be {kind}; got {text!r}. Change it.") from None


def source_files(text: str) -> list[Path]:
    """The Python files that the behaviour of `load_reward_function(text)` comes from, sorted: its
    module's, and those of the modules that it has imported, and so on. Python's own, installed
    packages and Tandem are left out, unless the function itself is in one.
    """
    load_reward_function(text)
    where, _ = home_of(parse_spec(text))
    root = sys.modules[_module_name(where) if where.endswith(".py") else where]
    package = root.__name__.partition(".")[0]
    found: dict[str, ModuleType] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        file = getattr(module, "__file__", None) or ""
        top = module.__name__.partition(".")[0]
        if module is not root and (top == "tandem" or (top != package and _is_library(file))):
            continue
        if not file.endswith(".py") or file in found:
            continue
        found[file] = module
        homes = [_home(value) for value in list(vars(module).values())]
        waiting += [sys.modules[home] for home in homes if home in sys.modules]
    return [Path(file) for file in sorted(found)]


def _is_library(file: str) -> bool:
    parts = Path(file).parts
    is_installed = "site-packages" in parts or "dist-packages" in parts
    return is_installed or file.startswith(sysconfig.get_path("stdlib"))


def _home(value: Any) -> str:
    """The module that a value is, or that a function or class was defined in."""
    try:
        name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    except Exception:  # an object of the user's may answer with anything
        return ""
    return name if isinstance(name, str) else ""


def _module_name(path: str) -> str:
    place = zlib.crc32(os.path.abspath(path).encode("utf-8", "surrogatepass"))
    return f"tandem_reward_{Path(path).stem}_{place:08x}"  # two files may have one name


def _module_from_file(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}")
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def columns_problem(function: RewardFunction, columns: Sequence[str], label: str = "") -> str:
    """What keeps `function` from being called with lists of these columns, or ""."""
    if taken := sorted(set(columns) & GIVEN):
        return (
            f"data columns must not be named {', '.join(taken)}, which a reward function is given "
            "anyway; got such columns. Rename them in the data"
        )
    try:
        inspect.signature(function).bind([], [], **{name: [] for name in {*columns, "messages"}})
    except TypeError as error:
        label = label or getattr(function, "__name__", str(function))
        return (
            f"reward function {label} must take prompts, completions and the data's columns "
            f"({', '.join(sorted(columns)) or 'none'}); got: {error}. Name its parameters as the "
            "columns, with **columns for the rest"
        )
    except ValueError:  # something without a signature, which the first call will tell of
        pass
    return ""
