"""Reading the fields of a request's body, one error per wrong field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from tandem.data.chat.own_template import given_variables
from tandem.errors import ConfigError
from tandem.serve.api_errors import ApiError

_LONGEST_SHOWN = 60


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object that a body must be.

    Raises:
        ApiError: it is not one.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(
            f"the body must be a JSON object in UTF-8; got what cannot be read: {why[:120]}. "
            'Send e.g. {"model": ..., "messages": [...]}.',
            code="invalid_json",
        ) from None
    if not isinstance(value, dict):
        raise ApiError(
            f'the body must be a JSON object; got {kind_of(value)}. Send e.g. {{"model": ...}}.',
            code="invalid_json",
        )
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def kind_of(value: Any) -> str:
    """What a JSON value is, for a message."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean",
             int: "a number", float: "a number", type(None): "null"}  # fmt: skip
    return names.get(type(value), type(value).__name__)


def shown(value: Any) -> str:
    """A JSON value in one short ASCII line; null, which is the same as absent, is none."""
    if value is None:
        return "none"
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        text = kind_of(value)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def wrong(name: str, rule: str, value: Any, advice: str = "") -> ApiError:
    """The error of a field that breaks a rule."""
    more = f" {advice}" if advice else ""
    return ApiError(f"{name} must {rule}; got {shown(value)}.{more}", name)


def number(body: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    """A number from `low` to `high`; absent and null mean the default.

    Raises:
        ApiError: it is anything else.
    """
    value = body.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or not math.isfinite(value):
        raise wrong(name, f"be a number from {low:g} to {high:g}", value)
    return float(value)


def integer(
    body: Mapping[str, Any], name: str, default: int | None, low: int, high: int
) -> int | None:
    """A whole number from `low` to `high`; absent and null mean the default.

    Raises:
        ApiError: it is anything else.
    """
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise wrong(name, f"be a whole number from {low} to {high}", value)
    return value


def boolean(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """True or false; absent and null mean the default.

    Raises:
        ApiError: it is anything else.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(name, "be true or false", value)
    return value


def text(body: Mapping[str, Any], name: str, default: str = "", most: int = 10_000) -> str:
    """A text; absent and null mean the default.

    Raises:
        ApiError: it is anything else, or longer than `most` characters.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise wrong(name, "be a text", value)
    if len(value) > most:
        raise ApiError(f"{name} must have at most {most} characters; got {len(value)}.", name)
    return value


def variables(body: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The variables of the chat template that a request sets (see `OwnTemplate`).

    Raises:
        ApiError: they are no object of names and values.
    """
    name = "chat_template_kwargs"
    given = body.get(name)
    if given is None:
        return ()
    if not isinstance(given, dict):
        raise wrong(name, "be an object of variables", given)
    try:
        return given_variables(given)
    except ConfigError as error:
        raise ApiError(f"{name} {error}", name) from None
