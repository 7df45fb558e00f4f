"""The tools that a model is offered: the schemas of functions."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from functools import partial
from typing import Any, get_type_hints

from tandem.data.tools import read_tools
from tandem.errors import ConfigError
from tandem.named_functions import named_function
from tandem.rewards.binding import parameters_of
from tandem.rewards.tool_use import ToolFunction, check_names, shown_parameters, tool_name
from tandem.text import cause_of


def offered_tools(names: Sequence[str], knob: str) -> str:
    """The schemas of functions that are named, as JSON text; "" for none.

    Args:
        knob: what names them, for errors.
    Raises:
        ConfigError: a name leads nowhere, or a function cannot be described to a model.
    """
    functions = [named_function(name, knob) for name in names]
    check_names(functions, knob)
    schemas = [
        tool_schema(function, f"{knob} {name}")
        for name, function in zip(names, functions, strict=True)
    ]
    return read_tools(schemas) if schemas else ""


def tool_schema(function: ToolFunction, where: str = "tool") -> dict[str, Any]:
    """The JSON schema of the parameters that are the model's to fill, from a function's type hints
    and docstring (Google's form), made by Transformers' `get_json_schema`: what `tools=[function]`
    shows a model in `apply_chat_template`, but for parameters behind a *.

    Args:
        where: the function's place, for errors.
    Raises:
        ConfigError: it lacks a type hint or a description.
    """
    from transformers.utils.chat_template_utils import get_json_schema  # workers need it not

    source = function.func if isinstance(function, partial) else function
    parameters = shown_parameters(function)

    def shown() -> None:
        """Stands for the function, without the parameters that the run fills."""

    try:
        if parameters_of(function) is None:
            raise TypeError("its signature is not known.")
        if inspect.isclass(source):
            raise TypeError("a class.")
        # A callable object has its hints and its words at `__call__`.
        known = source if inspect.isroutine(source) else type(source).__call__
        hints = get_type_hints(known)
        names = [parameter.name for parameter in parameters]
        shown.__name__, shown.__doc__ = tool_name(function), inspect.getdoc(known)
        shown.__annotations__ = {n: h for n, h in hints.items() if n in (*names, "return")}
        hinted = [p.replace(annotation=hints.get(p.name, p.annotation)) for p in parameters]
        shown.__signature__ = inspect.Signature(hinted)  # type: ignore[attr-defined]
        schema: dict[str, Any] = get_json_schema(shown)
        json.dumps(schema)
    except Exception as error:  # whatever a user's annotations do
        raise ConfigError(
            f"{where} must have type hints, and a docstring that says what it does and, under "
            f"Args:, what each parameter is; got: {cause_of(error)}. Add what is "
            "missing; parameters behind a * are not the model's."
        ) from error
    return schema


def tool_names(tools: str) -> list[str]:
    """The names of tools that are listed, as JSON text."""
    found = []
    for tool in json.loads(tools or "[]"):
        function = tool.get("function")
        named = function if isinstance(function, dict) else tool
        found.append(str(named.get("name") or tool.get("type")))
    return found
