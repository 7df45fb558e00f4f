"""Flags on top of a configuration: `--section.knob value` for every knob, short names for some.

The knobs are read off the schema, so there is no second list of them to keep true.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NoReturn

from tandem.config.load import (
    build,
    check_config,
    config_knobs,
    plain_values,
    range_problems,
    read_file,
    set_knob,
    show_note,
    type_hints,
    with_our_names,
)
from tandem.config.nearest import SHORT_NAMES, advice
from tandem.config.schema import RunConfig
from tandem.config.spellings import knob_meant, note_of
from tandem.config.stages import DEFAULT, stage_names, stage_of
from tandem.errors import ConfigError


def parse_run_flags(
    argv: Sequence[str],
    command: str,
    *,
    wrong: Sequence[str] = (),
    note: Callable[[str], None] = show_note,
) -> RunConfig:
    """The configuration that flags, over `--config FILE`, over the defaults, describe.

    Args:
        command: `train`, or the name of a single step, which then is the run's only one.
        wrong: what is wrong with the rest of the command line, to be told with all else.
        note: gets one line on names that were read as others (earlier ones, other trainers').
    Raises:
        ConfigError: unknown flags (with the nearest ones), values of another type or out of range,
            in flags and file, all at once; without any, what is wrong between knobs.
    """
    hints = knob_types()
    given, notes, problems = _KnobParser(command).read(argv)
    problems = [*wrong, *problems]
    values: Any = {}
    if path := given.pop("config", None):
        try:
            values, others, twice = with_our_names(read_file(path))
            notes += [f"{path}: {'; '.join(others)}"] if others else []
            problems += [f"{path}: {problem}" for problem in twice]
        except ConfigError as error:
            problems.append(str(error).rstrip("."))
    if notes:
        note("; ".join(notes))
    config, mistakes = build(values)
    problems += [f"{path}: {problem}" for problem in mistakes]
    values = plain_values(config)
    for name, value in given.items():
        set_knob(values, name, _read(value, hints[name]))
    if command != "train":
        if "steps" in given:
            problems.append(
                f"--stages must go with tandem train; tandem {command} runs {command} alone"
            )
        values["steps"] = [command]
    config, mistakes = build(values)
    problems += mistakes
    if problems:
        problems += range_problems(config)
        raise ConfigError("; ".join(problem.rstrip(".") for problem in problems))
    check_config(config)
    return config


def help_page(command: str, summary: str, *, everything: bool) -> str:
    """Help for `tandem COMMAND`: the common knobs of its steps, or every one by section."""
    lines = [f"usage: tandem {command} [--config FILE.yaml] [flags]", "", summary, ""]
    docs = knob_docs()
    section = None
    for name, knob in config_knobs():
        if not everything and not _is_common(name, knob, command):
            continue
        if everything and name.rpartition(".")[0] != section:
            section = name.rpartition(".")[0]
            lines += ["", f"{section or 'run'}:"]
        flag = _flag(name) if everything else _short_flag(name)
        about = docs[name] if everything else docs[name].split(". ")[0].rstrip(".") + "."
        lines += [f"  {flag} {_value_word(name)}".rstrip()]
        text = f"{about} [{show_value(knob.default)}]"
        lines += textwrap.wrap(text, 92, initial_indent=" " * 6, subsequent_indent=" " * 6)
    if not everything:
        lines += ["", f"All flags: tandem {command} --help-all. Each is a key of --config too."]
        lines += ["Hugging Face's and TRL's names are read where they mean the same."]
        if command == "train":
            lines += [
                *textwrap.wrap(
                    "Learning rates, batch sizes and epochs: "
                    f"{', '.join(f'tandem {name} --help' for name in stage_names())}; the same "
                    "flags work here.",
                    80,
                ),
            ]
    return "\n".join(lines)


def _is_common(name: str, knob: dataclasses.Field[Any], command: str) -> bool:
    """Whether a knob is on a command's first help page: it is common there, and is read there."""
    common = knob.metadata["common"]
    if command == "train":
        return command in common
    stage = stage_of(command)
    return stage.reads(name) and not stage.commons.isdisjoint(common)


def knob_types() -> dict[str, Any]:
    """Every knob's type by dotted name."""
    return _knob_types(stage_names())


@cache
def _knob_types(stages: tuple[str, ...]) -> dict[str, Any]:
    """The same for a table of `stages`, which one knob's type lists."""
    return {name: _hint_of(name) for name, _ in config_knobs()}


@cache
def knob_docs() -> dict[str, str]:
    """Every knob's sentence by dotted name: the string below it in the schema."""
    docs: dict[str, str] = {}
    for name, _ in config_knobs():
        cls = _class_of(name)
        docs[name] = _class_docs(cls)[name.rpartition(".")[2]]
    return docs


def show_value(value: Any) -> str:
    """A value as one would write it on the command line."""
    if isinstance(value, tuple):
        return " ".join(show_value(item) for item in value) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if value != "" else "none"


class Parser(argparse.ArgumentParser):
    """argparse that says what is wrong in one line and leaves the exit to `main`."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}. See {self.prog} --help.")


class _KnobParser(Parser):
    """A parser for knobs: it collects every mistake, names the nearest flag and never exits."""

    def __init__(self, command: str) -> None:
        super().__init__(prog=f"tandem {command}", add_help=False, allow_abbrev=False)
        self._command = command
        self.add_argument("--config", nargs="?", const=_NOTHING, default=argparse.SUPPRESS)
        for name, hint in knob_types().items():
            options = [_flag(name)]
            if name in SHORT_NAMES:
                options.append(f"--{SHORT_NAMES[name]}")
            settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "nargs": "?"}
            if hint is bool:
                self.add_argument(*options, const="on", **settings)
                off = [f"--no-{option.removeprefix('--')}" for option in options]
                self.add_argument(*off, const="off", action=_Off, **settings)
            elif typing.get_origin(hint) is tuple:
                self.add_argument(*options, **settings | {"nargs": "*"})
            else:
                self.add_argument(*options, const=_NOTHING, **settings)

    def read(self, argv: Sequence[str]) -> tuple[dict[str, Any], list[str], list[str]]:
        """The flags' texts by dotted knob, a note on each that had another name, and what is wrong
        with the command line."""
        notes: list[str] = []
        parsed, rest = self.parse_known_args([self._our_flag(arg, notes) for arg in argv])
        given = vars(parsed)
        problems = self._strangers(rest)
        for name in [name for name, value in given.items() if value is _NOTHING]:
            problems.append(f"{_flag(name)} must have a value; got none")
            del given[name]
        return given, notes, problems

    def _our_flag(self, arg: str, notes: list[str]) -> str:
        """A flag under our name, and with dashes; a value as it is."""
        if not arg.startswith("--"):
            return arg
        flag, equals, value = arg.partition("=")
        if (ours := _dashed(flag)) not in self._option_string_actions:
            no = "no-" if ours.startswith("--no-") else ""
            name = ours.removeprefix(f"--{no}")
            knob = knob_meant(name, knob_types(), self._section)
            if knob and (not no or knob_types()[knob] is bool):
                ours = f"--{no}{_dashed(knob)}"
                notes.append(note_of(name, flag, ours))
        return f"{ours}{equals}{value}"

    @property
    def _section(self) -> str:
        return "" if self._command == "train" else stage_of(self._command).section

    def _strangers(self, rest: Sequence[str]) -> list[str]:
        """What belongs to no knob, each with the nearest."""
        problems = []
        for before, word in zip([None, *rest], rest, strict=False):
            if not word.startswith("-"):
                if before is None or not before.startswith("-"):  # else an unknown flag's value
                    problems.append(f"{word!r} belongs to no flag")
                continue
            flag = word.split("=")[0]
            own = [self._section] if self._section else [stage_of(name).section for name in DEFAULT]
            spell = _flag if "." in flag else _short_flag
            hint = advice(flag.lstrip("-").removeprefix("no-"), knob_types(), own, spell)
            hint = hint or f"See {self.prog} --help-all."
            problems.append(f"{flag} is not a flag of {self.prog}. {hint}")
        return problems


class _Off(argparse.Action):
    """`--no-knob`, which takes no value; one that is given is kept, to be refused."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        text = values if values == "off" else f"{option_string} {values}"
        setattr(namespace, self.dest, text)


_NOTHING = object()
"""What a flag without its value leaves."""


def _hint_of(dotted: str) -> Any:
    return type_hints(_class_of(dotted))[dotted.rpartition(".")[2]]


@cache
def _class_of(dotted: str) -> type:
    cls: type = RunConfig
    for part in dotted.split(".")[:-1]:
        cls = typing.get_type_hints(cls)[part]
    return cls


@cache
def _class_docs(cls: type) -> Mapping[str, str]:
    """Attribute docstrings of a dataclass, those of its bases included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
            ):
                docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


_SWITCH = dict.fromkeys(("on", "true", "yes", "1"), True)
_SWITCH |= dict.fromkeys(("off", "false", "no", "0"), False)


def _read(value: Any, hint: Any) -> Any:
    """A flag's text as YAML would have given it; what it is not stays text, to be refused."""
    if hint is bool:
        return _SWITCH.get(value.lower(), value)
    if typing.get_origin(hint) is tuple:
        item_hint = typing.get_args(hint)[0]
        words = value
        if item_hint is not str:  # 2,4,4 is as good as 2 4 4; a path may hold a comma
            words = [word for words in value for word in words.split(",") if word]
        return [_read(word, item_hint) for word in words]
    if typing.get_origin(hint) is Literal:
        return next((option for option in typing.get_args(hint) if str(option) == value), value)
    if hint is int:
        try:
            return int(value)
        except ValueError:
            return value
    return value


def _flag(name: str) -> str:
    return f"--{_dashed(name)}"


def _short_flag(name: str) -> str:
    return f"--{SHORT_NAMES.get(name, _dashed(name))}"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _value_word(name: str) -> str:
    """What follows a flag, for help."""
    hint = knob_types()[name]
    if hint is bool:
        return "| --no-..."
    if typing.get_origin(hint) is Literal:
        return "|".join(str(option) for option in typing.get_args(hint) if option != "")
    if typing.get_origin(hint) is tuple:
        return "A B ..."
    return {int: "N", float: "X", str: "TEXT"}[hint]
