"""Python functions that knobs name: found in a file or module, options bound, and their files."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import sysconfig
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl

from tandem.errors import ConfigError, Stopped
from tandem.text import cause_of

_STAMPS: dict[str, tuple[int, int]] = {}
"""Time and size of each file as it was when it was run as a module."""
FIX_FILE = "Fix the file, or its name (--debug shows where)."


def function_in(
    where: str,
    attribute: str,
    problem: str,
    advice: Callable[[BaseException], str] = lambda error: FIX_FILE,
) -> Callable[..., Any]:
    """The function of that name in a file (`*.py`) or an importable module.

    Args:
        problem: what an error begins with.
        advice: what to do where the file or module raises.
    Raises:
        ConfigError: there is no such file, module or function.
    """
    is_file = where.endswith(".py")
    if not is_file and (os.sep in where or Path(where).is_file()):
        raise ConfigError(f"{problem}: {where} is no Python file. Give one that ends in .py.")
    try:
        module = _module_from_file(where) if is_file else import_module(where)
    # Whatever a user's file does when it runs is told to them in one line, SystemExit too.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | Stopped):
            raise
        told = advice(error)
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == where
        if is_missing and Path(f"{where}.py").is_file():
            told = f"Write {where}.py:{attribute} for the file of that name."
        raise ConfigError(
            f"{problem}: {type(error).__name__}: {cause_of(error)}. {told}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{problem}: {where} has no function {attribute}. Check its spelling.")
    return function


def named_function(text: str, knob: str) -> Callable[..., Any]:
    """The function that `FILE.py:NAME` or `MODULE:NAME` names, with the options behind it,
    `?option=value&...`, bound.

    Raises:
        ConfigError: there is no such file, module, function or option.
    """
    problem = f"{knob} must be file.py:function or module:function; got {text!r}"
    name, options = name_and_options(text, problem)
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ConfigError(f"{problem}. Write e.g. mine.py:my_function.")
    function = function_in(where, attribute, problem)
    known = options_of(function)
    values = {
        option: option_value(known, option, value, f"{knob} {name}")
        for option, value in options.items()
    }
    return partial(function, **values) if values else function


def files_of_function(text: str, knob: str) -> list[Path]:
    """The Python files that the behaviour of `named_function(text, knob)` comes from, sorted (see
    `files_behind`)."""
    named_function(text, knob)
    return files_behind(text.partition("?")[0].rpartition(":")[0])


def name_and_options(text: str, problem: str) -> tuple[str, dict[str, str]]:
    """What stands before `?option=value&...`, and the options.

    Raises:
        ConfigError: the options cannot be read; it begins with `problem`.
    """
    name, mark, query = text.partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(mark))
    except ValueError:
        raise ConfigError(f"{problem}. Write its options as ?option=value&option=value.") from None
    options = dict(pairs)
    if len(options) < len(pairs):
        raise ConfigError(f"{problem}. Give each option once.")
    return name, options


def options_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """A function's options, its keyword-only parameters with a default, to their defaults."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {
        p.name: p.default
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.default is not p.empty
    }


def option_value(known: Mapping[str, Any], option: str, text: str, name: str) -> Any:
    """An option's value as the type of its default.

    Args:
        known: a function's options, to their defaults. name: the function's in messages.
    Raises:
        ConfigError: the function has no such option, or the text is of another type.
    """
    if option not in known:
        raise ConfigError(
            f"{name} must have the option {option}, a keyword-only parameter with a "
            f"default; got {', '.join(known) or 'none'}. Check its spelling."
        )
    switch = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}
    default = known[option]
    try:
        if isinstance(default, bool):
            return switch[text.lower()]
        return type(default)(text) if isinstance(default, int | float) else text
    except (KeyError, ValueError):
        kind = {bool: "on or off", int: "a whole number", float: "a number"}[type(default)]
        raise ConfigError(f"{name}?{option} must be {kind}; got {text!r}. Change it.") from None


def files_behind(where: str) -> list[Path]:
    """The Python files that the behaviour of a file or module comes from, which was imported
    before: its own, those of the modules that it has imported, and so on, sorted. Python's own,
    installed packages and Tandem are left out, unless the module itself is in one.
    """
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
    return f"tandem_named_{Path(path).stem}_{place:08x}"  # two files may have one name


def _module_from_file(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}")
    name, found = _module_name(path), Path(path).stat()
    stamp = (found.st_mtime_ns, found.st_size)
    if name in sys.modules and _STAMPS.get(name) == stamp:
        return sys.modules[name]  # one file may hold several functions
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    _STAMPS[name] = stamp
    return module
