"""One call of a reward function, and what came of it: a number, None, or a failure."""

from __future__ import annotations

import inspect
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from tandem.errors import Stopped
from tandem.rewards.binding import NEW_MESSAGES, binding_of
from tandem.rewards.form import as_messages, as_turns, form_advice, is_conversational
from tandem.rewards.per_token import IDS, PER_TOKEN, is_per_token
from tandem.text import one_line, visible

RewardFunction = Callable[..., Any]
"""f(prompts, completions, **columns) -> one number or None per completion; may be async.
`tandem.rewards.binding` says which parameter gets what."""
Reason = Literal["exception", "timeout", "memory", "died", "processes", "result"]
REASONS: tuple[Reason, ...] = get_args(Reason)
"""Why an answer has no score: the function raised, took too long, took too much memory, ended its
process, started too many processes, or returned something else than it must."""
MOST = 1e15
"""Size of a reward whose squares and sums over a rollout are still float32 numbers."""


class CallError(Exception):
    """A call that gives no rewards, for a reason that is known; the text is the message."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call: lists with one entry per completion. A function that asks for the
    conversational form needs the column `messages`, all turns before each."""

    prompts: list[str]
    completions: list[str]
    columns: Mapping[str, list[Any]]

    def __len__(self) -> int:
        return len(self.completions)

    def each(self) -> list[Call]:
        """The same as calls of one completion each."""
        return self.batches(1)

    def batches(self, size: int) -> list[Call]:
        """The same as calls of at most `size` completions each."""
        parts = (slice(start, start + size) for start in range(0, len(self), size))
        return [
            Call(
                self.prompts[part],
                self.completions[part],
                {name: values[part] for name, values in self.columns.items()},
            )
            for part in parts
        ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one answer.

    score: a finite number; None where the function said so, or failed.
    tokens: what it gave each token, whose sum is the score; None of a function that does not.
    failure: the reason, or "". message: what went wrong, in one line.
    turns: of an environment, what it says to the answer, as role and content; None: nothing.
    """

    score: float | None
    failure: Reason | Literal[""] = ""
    message: str = ""
    turns: list[dict[str, str]] | None = None
    tokens: list[float] | None = None


class Judge(ABC):
    """Something else than a reward function that workers call on answers."""

    @abstractmethod
    def outcomes(self, call: Call) -> list[Outcome]:
        """What comes of each answer of a call."""


def failed(count: int, failure: Reason, message: str) -> list[Outcome]:
    """The same failure for `count` answers."""
    return [Outcome(None, failure, message)] * count


def outcomes_of(function: RewardFunction | Judge, call: Call) -> list[Outcome]:
    """Call `function` and check what it returns; whatever it raises is an outcome.

    Raises:
        KeyboardInterrupt, Stopped: a signal came meanwhile.
    """
    if isinstance(function, Judge):
        return function.outcomes(call)

    def called() -> list[Outcome]:
        values = {"prompts": call.prompts, "completions": call.completions, **call.columns}
        if is_conversational(function):
            new = call.columns.get(NEW_MESSAGES) or as_turns(call.completions)
            values |= as_messages(call.columns["messages"], new)
        returned = awaited(binding_of(function, values).call(function, values))
        return _checked(returned, call.columns[IDS] if is_per_token(function) else len(call))

    return guarded(called, len(call), lambda error: form_advice(error, function))


def guarded(
    called: Callable[[], list[Outcome]],
    count: int,
    advice: Callable[[BaseException], str] = lambda error: "",
) -> list[Outcome]:
    """What comes of a user's code, whatever it raises.

    Args:
        count: answers that it is called for. advice: what to say beside its error.
    Raises:
        KeyboardInterrupt, Stopped: a signal came meanwhile.
    """
    try:
        return called()
    except (KeyboardInterrupt, Stopped):
        raise
    except CallError as error:
        return failed(count, error.reason, str(error))
    except MemoryError:
        return failed(count, "memory", "MemoryError")
    # Whatever a user's code does is told to them; SystemExit too.
    except BaseException as error:
        reason: Reason = "died" if isinstance(error, SystemExit) else "exception"
        return failed(count, reason, _named(error) + advice(error))


def awaited(returned: Any) -> Any:
    """What a function returned, or what it comes to if that is to be awaited."""
    if not inspect.isawaitable(returned):
        return returned
    import asyncio  # slow to import, and few functions need it

    return asyncio.run(_awaited(returned))


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _named(error: BaseException) -> str:
    name, text = type(error).__name__, one_line(error)
    return name if text == name else f"{name}: {text}"


def _checked(returned: Any, wanted: int | list[list[int]]) -> list[Outcome]:
    """`wanted`: how many answers there are, or the ids of each where each token is rewarded."""
    if hasattr(returned, "tolist"):  # arrays and tensors are as good as lists
        returned = returned.tolist()
    count = wanted if isinstance(wanted, int) else len(wanted)
    what = "numbers" if isinstance(wanted, int) else "lists of numbers"
    if not isinstance(returned, Sequence) or isinstance(returned, str | bytes):
        message = f"must return a list of {count} {what} or None; got {type(returned).__name__}"
        return failed(count, "result", message)
    if len(returned) != count:
        message = f"must return a list of {count} {what} or None; got {len(returned)}"
        return failed(count, "result", message)
    if isinstance(wanted, int):
        return [_outcome(value) for value in returned]
    return [_of_tokens(value, len(ids)) for value, ids in zip(returned, wanted, strict=True)]


def _of_tokens(value: Any, count: int) -> Outcome:
    """What came of an answer of `count` tokens, each of which has a number."""
    found = value.tolist() if hasattr(value, "tolist") else value
    if found is None:
        return Outcome(None)
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        message = f"must return a list of numbers, one for each token, or None; got {_shown(value)}"
        return Outcome(None, "result", message)
    if len(found) != count:
        message = f"must return a number for each of {count} tokens; got {len(found)} numbers"
        return Outcome(None, "result", message)
    outcomes = [_outcome(number) for number in found]
    numbers = [outcome.score for outcome in outcomes if outcome.score is not None]
    total = _outcome(math.fsum(numbers))
    for outcome in (*outcomes, total):
        if outcome.score is None:
            message = outcome.message or "must return a finite number for each token; got None"
            return Outcome(None, "result", message)
    return replace(total, tokens=numbers)


def _outcome(value: Any) -> Outcome:
    number: Any = value.item() if hasattr(value, "item") else value
    if number is None:
        return Outcome(None)
    if not is_reward(number):
        message = f"must return finite numbers within {MOST:g} or None; got {_shown(value)}"
        if isinstance(value, list | tuple):
            message += f" (one list per answer, for its tokens, needs the attribute {PER_TOKEN})"
        return Outcome(None, "result", message)
    return Outcome(float(number))


def is_reward(value: Any) -> bool:
    """Whether it is a finite number that is not too large."""
    try:
        return (
            isinstance(value, numbers.Real)
            and math.isfinite(float(value))
            and abs(float(value)) <= MOST
        )
    except OverflowError:  # an integer beyond every float
        return False


def _shown(value: Any) -> str:
    try:
        return visible(f"{value!r:.100}")
    except Exception:  # an object of the user's may answer with anything; so may 10**5000
        return type(value).__name__
