"""Rewards for a completion's shape: a format by regular expression, and its length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tandem.errors import ConfigError


def matches(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    pattern: str = "",
    where: str = "anywhere",
    **columns: Any,
) -> list[float]:
    """1.0 where the completion matches `pattern`, 0.0 where not; `.` matches line breaks too.

    Args:
        where: `anywhere`, or `whole` for the whole completion (spaces around it do not count).
    Raises:
        ConfigError: no pattern is given, or it is none.
    """
    check_format(pattern=pattern, where=where)
    compiled = _compiled(pattern)
    if where == "whole":
        return [float(compiled.fullmatch(text.strip()) is not None) for text in completions]
    return [float(compiled.search(text) is not None) for text in completions]


def overlong(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    limit: int = 0,
    buffer: int = 0,
    unit: str = "words",
    **columns: Any,
) -> list[float]:
    """DAPO's soft overlong penalty: 0 up to `limit - buffer`, then linear to -1 at `limit`.

    Args:
        limit, buffer: in units; a buffer of 0 is a fifth of the limit.
        unit: `words` or `characters`. A reward function sees texts, so these are not tokens.
    Raises:
        ConfigError: no limit is given, the buffer is not within it, or the unit is another.
    Source: arXiv:2503.14476 eq. 13.
    """
    check_length(limit=limit, buffer=buffer, unit=unit)
    room = buffer or max(1, limit // 5)
    lengths = [len(text.split()) if unit == "words" else len(text) for text in completions]
    return [-min(1.0, max(0.0, (length - (limit - room)) / room)) for length in lengths]


def check_format(*, pattern: str, where: str) -> None:
    """Check the options of `matches`.

    Raises:
        ConfigError: as `matches`.
    """
    if where not in ("anywhere", "whole"):
        raise ConfigError(f"tandem:format?where must be anywhere or whole; got {where!r}. Use one.")
    _compiled(pattern)


def check_length(*, limit: int, buffer: int, unit: str) -> None:
    """Check the options of `overlong`.

    Raises:
        ConfigError: as `overlong`.
    """
    if unit not in ("words", "characters"):
        raise ConfigError(f"tandem:length?unit must be words or characters; got {unit!r}. Use one.")
    if limit < 1 or not 0 <= buffer <= limit:
        raise ConfigError(
            f"tandem:length must have a limit above 0 and a buffer within it; got {limit} and "
            f"{buffer}. Write e.g. tandem:length?limit=200&buffer=50."
        )


matches.checks_answer = False  # type: ignore[attr-defined]
overlong.checks_answer = False  # type: ignore[attr-defined]
matches.check_options = check_format  # type: ignore[attr-defined]
overlong.check_options = check_length  # type: ignore[attr-defined]


@lru_cache
def _compiled(pattern: str) -> re.Pattern[str]:
    if not pattern:
        raise ConfigError(
            "tandem:format must have a pattern; got none. Write e.g. "
            "'tandem:format?pattern=<answer>.*</answer>'."
        )
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(
            f"tandem:format?pattern must be a regular expression; got {pattern!r} ({error}). "
            "Write + as %2B and & as %26."
        ) from None
