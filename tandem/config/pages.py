"""Help pages of all commands: one layout, and a parser that writes it for the small ones."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from tandem.errors import ConfigError

_WIDTH, _UNBROKEN, _GLUE = 79, 40, "\u00a0"
"""Columns of a page; of a default that stays in one line, its spaces held together by _GLUE."""
_KINDS = {"int": "a whole number", "float": "a number"}
_OF_PATHS = (
    *("--actor-model", "--checkpoint", "--data", "--file", "--folder", "--input", "--model"),
    *("--model-dir", "--model-name-or-path", "--model-path", "--output-dir", "--path", "--run"),
    "--run-dir",
)
"""Flags that people write before a path that has none."""


def flag_lines(flag: str, about: str, default: str) -> list[str]:
    """A flag's lines on a help page: `flag` with its value's name, what it does, its default."""
    shown = f"[{default}]"
    if len(shown) <= _UNBROKEN:
        shown = shown.replace(" ", _GLUE)
    lines = paragraph(f"{about} {shown}" if default else about)
    return [*_spec_lines(flag), *(line.replace(_GLUE, " ") for line in lines)]


def _spec_lines(flag: str) -> list[str]:
    """`flag` with its value's name or choices, a|b|c, which may take several lines."""
    lines = [" "]
    for part in re.findall(r"[^|]*\|?", flag):
        if len(lines[-1]) + len(part) > _WIDTH - 1:
            lines.append(" " * 6)
        lines[-1] += f" {part}" if lines[-1] == " " else part
    return lines


def command_lines(name: str, summary: str) -> list[str]:
    """A command's lines on the page of all commands."""
    indent = " " * 11
    return textwrap.wrap(
        f"  {name:8} {summary}", _WIDTH, subsequent_indent=indent, break_on_hyphens=False
    )


def paragraph(text: str) -> list[str]:
    """An indented paragraph of a help page."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=" " * 6,
        subsequent_indent=" " * 6,
        break_on_hyphens=False,  # a flag stays whole
    )


def home_path(text: str) -> str:
    """A path as the shell would have given it: it leaves `~` alone in --flag=~/x and in quotes."""
    return os.path.expanduser(text)


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line and whose help looks like that of the run commands.

    Example:
        parser = Parser("report", "RUN", "Rewrite a run's HTML report.", "tandem report runs/first")
        parser.section("run").flag("RUN", "A run's folder.")
        options = parser.parse_args(args)
    """

    def __init__(self, command: str, usage: str, summary: str, example: str) -> None:
        super().__init__(prog=f"tandem {command}", add_help=False, allow_abbrev=False)
        self._page = [f"usage: {self.prog} {usage}", "", *textwrap.wrap(summary, _WIDTH)]
        self._example = example
        self._unnamed = ""
        """The first argument that has no flag, as the page writes it."""
        self.add_argument("-h", "--help", action="help")

    def section(self, title: str) -> Parser:
        """Begin a group of flags on the help page."""
        self._page += ["", f"{title}:"]
        return self

    def flag(
        self, spec: str, about: str, default: Any = "", *, shown: str = "", **settings: Any
    ) -> Parser:
        """Add a flag, `--name WORD`, or an argument, `WORD`; its type is that of its default, and
        a list takes several words.

        Args:
            shown: its default on the page, where that is not `default`.
            settings: as for `add_argument`.
        """
        name, _, word = spec.partition(" ")
        if not spec.startswith("-"):
            name, word = name.lower(), name
            self._unnamed = self._unnamed or word
        item = type(default[0]) if isinstance(default, list) and default else str
        known = (
            {"nargs": "+" if default else "*", "type": item}
            if isinstance(default, list)
            else {"type": type(default)}
        )
        if "action" not in settings:
            settings = {"metavar": word.removesuffix(" ..."), **known, **settings}
        self.add_argument(name, default=default, **settings)
        value = " ".join(map(str, default)) if isinstance(default, list) else str(default)
        self._page += flag_lines(spec, about, shown or value)
        return self

    def also(self, spec: str, about: str, shown: str) -> Parser:
        """Show a flag that another parser reads."""
        self._page += flag_lines(spec, about, shown)
        return self

    def text(self, lines: Iterable[str]) -> Parser:
        """Show a paragraph."""
        self._page += ["", *lines]
        return self

    def format_help(self) -> str:
        """The page."""
        example = textwrap.wrap(
            f"Example: {self._example}", _WIDTH, subsequent_indent=" " * 9,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        return "\n".join([*self._page, "", *example, ""])

    def refuse_typo(self, words: Iterable[str]) -> None:
        """Say which of this parser's flags a wrong one is near, if it is.

        Raises:
            ConfigError: one is.
        """
        for word in _flags(words):
            if word not in self._option_string_actions and (near := self._nearest(word)):
                raise ConfigError(f"{word} is not a flag of {self.prog}. Did you mean {near}?")

    def _nearest(self, flag: str) -> str:
        """Which of this parser's flags a wrong one is near; empty if it is near none."""
        near = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.8)
        return near[0] if near else ""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: Any = None
    ) -> argparse.Namespace:
        """As argparse's; flags that it does not have are named, before what is missing is."""
        for flag in _flags(args):
            if flag not in self._option_string_actions:
                near = self._nearest(flag)
                advice = f"Did you mean {near}?" if near else f"See {self.prog} --help."
                if not near and flag.replace("_", "-") in _OF_PATHS and self._unnamed:
                    advice = f"Write {self._unnamed} without one: {self._example}"
                raise ConfigError(f"{flag} is not a flag of {self.prog}. {advice}")
        return super().parse_args(args, namespace)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's, which parse_args calls; a flag that is given twice is an error, and so is
        one that looks like another which must be given."""
        known = self._option_string_actions
        flags = [word.partition("=")[0] for word in args]
        meant = [(flag, known[flag].dest) for flag in flags if flag in known]
        for i, (flag, dest) in enumerate(meant):
            if dest in (before for _, before in meant[:i]):
                self.error(f"{flag} must be given once; got it twice")
        given = {dest for _, dest in meant}
        missing = [f for f, action in known.items() if action.required and action.dest not in given]
        for flag in (flag for flag in _flags(args) if flag not in known):
            if self._nearest(flag) in missing:
                self.refuse_typo([flag])
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Refuse the words in one line; argparse's own message says which."""
        if wrong := re.fullmatch(r"argument (\S+): invalid (int|float) value: (.*)", message):
            flag, kind, value = wrong.groups()
            message = f"{flag} must be {_KINDS[kind]}; got {value}"
        if "arguments are required" in message:
            message += f"; for example: {self._example}"
        raise ConfigError(f"{self.prog}: {message}. See {self.prog} --help.")


def _flags(words: Iterable[str]) -> list[str]:
    """The words that argparse takes for flags with a name, without the values behind their `=`."""
    words = list(words)
    words = words[: words.index("--")] if "--" in words else words
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    return [flag for flag in flags if " " not in flag]  # argparse reads such a word as a value
