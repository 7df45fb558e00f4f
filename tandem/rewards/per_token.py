"""Reward functions that give each token of an answer a number, not the whole answer one.

Such a function has the attribute `per_token` and a parameter `completion_ids`, and returns of each
answer a list as long as its ids. The answer's score is the sum, so that whatever reads scores reads
them as ever; training gets the numbers at their tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tandem.errors import ConfigError
from tandem.rewards.binding import names_parameter

PER_TOKEN = "per_token"
"""The attribute that says so."""
IDS = "completion_ids"
"""The parameter that says which tokens there are."""


def is_per_token(function: object) -> bool:
    """Whether a function gives each token a number."""
    return bool(getattr(function, PER_TOKEN, False))


def check_per_token(function: object, label: str, combine: str) -> None:
    """Refuse a function whose numbers per token could not be used.

    Args:
        combine: `scoring.combine`.
    Raises:
        ConfigError: it does not see the tokens, or its score would be normalized.
    """
    if not is_per_token(function) or not callable(function):
        return
    if not names_parameter(function, IDS):
        raise ConfigError(
            f"reward function {label} must have a parameter {IDS}, since it rewards each token "
            f"({PER_TOKEN}); got none. Add it, and return of each answer a list as long as its ids."
        )
    if combine != "sum":
        raise ConfigError(
            f"scoring.combine must be sum where a function rewards each token; got {combine} with "
            f"{label}, and scores that are normalized have no tokens. Remove {PER_TOKEN} from it."
        )


def mean_of_tokens(tokens: Sequence[Sequence[float] | None]) -> float | None:
    """The mean reward of a token over answers that have such rewards; None without any."""
    known = [number for one in tokens if one is not None for number in one]
    return math.fsum(known) / len(known) if known else None


def weighted_tokens(
    parts: Sequence[tuple[float, Sequence[Sequence[float] | None]]], count: int
) -> tuple[tuple[float, ...], ...]:
    """Each answer's rewards per token by several functions as their weighted sum; nothing for an
    answer that none of them rewards, and nothing at all where there are no such functions.

    Args:
        parts: each function's weight and, of `count` answers, what it gave their tokens.
    """
    if not parts:
        return ()
    found: list[tuple[float, ...]] = []
    for answer in range(count):
        given = [(weight, own) for weight, tokens in parts if (own := tokens[answer]) is not None]
        columns = zip(*([weight * number for number in own] for weight, own in given), strict=True)
        found.append(tuple(map(math.fsum, columns)))
    return tuple(found)
