"""What the schema says of each knob: its type, and the sentence below it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from tandem.config.load import config_knobs, resolved_types, type_hints
from tandem.config.schema import RunConfig
from tandem.config.stages import stage_names


def knob_types() -> dict[str, Any]:
    """Every knob's type by dotted name."""
    return _knob_types(stage_names())


@cache
def _knob_types(stages: tuple[str, ...]) -> dict[str, Any]:
    """The same for a table of `stages`, which one knob's type lists."""
    return {
        name: type_hints(_class_of(name))[name.rpartition(".")[2]] for name, _ in config_knobs()
    }


@cache
def knob_docs() -> dict[str, str]:
    """Every knob's sentence by dotted name: the string below it in the schema."""
    return {
        name: _class_docs(_class_of(name))[name.rpartition(".")[2]] for name, _ in config_knobs()
    }


@cache
def _class_of(dotted: str) -> type:
    cls: type = RunConfig
    for part in dotted.split(".")[:-1]:
        cls = resolved_types(cls)[part]
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
            match statement, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docs[name] = " ".join(text.split())
    return docs


def value_word(name: str) -> str:
    """The name of a flag's value, for help."""
    hint = knob_types()[name]
    if hint is bool:
        return "| --no-..."
    if typing.get_origin(hint) is Literal:
        return "|".join(str(option) for option in typing.get_args(hint) if option != "")
    if typing.get_origin(hint) is tuple:
        return "A B ..."
    return {int: "N", float: "X", str: "TEXT"}[hint]
