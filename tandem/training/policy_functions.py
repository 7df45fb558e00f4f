"""Losses and advantages of the user's own: found, tried, checked, and what they raise in a run."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from tandem.config.preferences import DPOConfig
from tandem.config.schema import RLConfig
from tandem.engine.oom import is_out_of_memory
from tandem.errors import ConfigError, Stopped, TandemError
from tandem.named_functions import named_function
from tandem.objectives.policy import TokenLosses, given_policy_loss
from tandem.objectives.preferences import AnswerLogprobs, PairLosses, given_pair_loss
from tandem.text import cause_of
from tandem.types import Experience

if TYPE_CHECKING:
    from tandem.training.algorithm import AdvantagesOf

F = TypeVar("F")


class _InRun:
    """A user's function in a run; what it raises there is told in one line.

    Raises:
        ConfigError: it raised something else than that memory has run out; SystemExit too.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function = function
        self._name = name

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self.function(*arguments)
        # Whatever a user's function does is told to them.
        except BaseException as error:
            own = isinstance(error, TandemError | KeyboardInterrupt | Stopped)
            if own or is_out_of_memory(error):
                raise
            raise ConfigError(
                f"{self._name} must not fail; it raised {_named(error)}{_place(error)}. "
                "Fix it (--debug shows the calls)."
            ) from error


def as_written(function: F) -> F:
    """A function that a knob names, as its file has it: what it raises comes as it is."""
    return cast(F, function.function) if isinstance(function, _InRun) else function


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {cause_of(error)}"


def _place(error: BaseException) -> str:
    """The innermost line of a user's file that an error came from; "" if none was called."""
    _, *frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    frame = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    return f" ({Path(frame.filename).name}, line {frame.lineno})"


def named_losses(rl: RLConfig, section: str) -> TokenLosses | None:
    """The function that `loss_function` names; None if it names none.

    Raises:
        ConfigError: it leads nowhere.
    """
    if not rl.loss_function:
        return None
    knob = f"{section}.loss_function"
    function = named_function(rl.loss_function, knob)
    return cast(TokenLosses, _InRun(function, f"{knob} {rl.loss_function}"))


def named_advantages(rl: RLConfig, section: str) -> AdvantagesOf | None:
    """The function that `advantage_function` names; None if it names none.

    Raises:
        ConfigError: it leads nowhere, or does not take one argument.
    """
    if not rl.advantage_function:
        return None
    knob = f"{section}.advantage_function"
    function = named_function(rl.advantage_function, knob)
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"{knob} must take one argument, the experience; {rl.advantage_function} does not: "
            f"{error}. Give its other parameters defaults."
        ) from None
    except ValueError:  # something without a signature, which the first call will tell of
        pass
    return cast("AdvantagesOf", _InRun(function, f"{knob} {rl.advantage_function}"))


def named_pair_losses(dpo: DPOConfig) -> PairLosses | None:
    """The function that `dpo.loss_function` names; None if it names none.

    Raises:
        ConfigError: it leads nowhere.
    """
    if not dpo.loss_function:
        return None
    function = named_function(dpo.loss_function, "dpo.loss_function")
    return cast(PairLosses, _InRun(function, f"dpo.loss_function {dpo.loss_function}"))


@contextmanager
def on_made_up(name: str, what: str, given: Sequence[Tensor]) -> Iterator[None]:
    """Within: a user's function is called on something made up.

    Args:
        what: it is, in words.
        given: its tensors.
    Raises:
        ConfigError: the function fails, or changes what it was given.
    """
    before = [tensor.detach().clone() for tensor in given]
    try:
        yield
    # Whatever a user's function does is told to them in one line, SystemExit too.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | Stopped):
            raise
        problem = str(error)
        if not isinstance(error, TandemError):
            problem = f"{_named(error)}. Fix it (--debug shows where)."
        raise ConfigError(f"{name} could not be used on {what}: {problem}") from error
    if not all(map(torch.equal, given, before)):
        raise ConfigError(
            f"{name} must leave its arguments as they are, which updates read again; it changed a "
            "tensor in place. Write x = x * y for x *= y."
        )


def try_token_losses(token_losses: TokenLosses, name: str) -> None:
    """Call a loss on a few made-up answers.

    Raises:
        ConfigError: it fails, gives no loss per token, changes what it was given, has a loss or
            gradient that is not finite, or lets one answer's loss depend on another's, so that
            micro-batches would change the gradient.
    """
    _require_own_losses(name, "an answer", "answers", partial(_tried, token_losses, name))


def _tried(token_losses: TokenLosses, name: str, rows: slice) -> Tensor:
    """The loss of each of some made-up answers, (rows,)."""
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])[rows]
    old = torch.tensor([[-1.0, -0.4, -2.3, -0.1], [-3.0, -0.7, 0.0, 0.0]])[rows]
    moved = torch.tensor([[0.1, -0.3, 0.0, 0.02], [-0.2, 0.4, 0.0, 0.0]])[rows]
    advantages = torch.tensor([[1.5, 1.5, -0.5, 0.2], [-1.0, -1.0, 0.0, 0.0]])[rows]
    given = [(old + moved).requires_grad_(), old, advantages, mask]
    noting = _Noting(token_losses)
    with on_made_up(name, "two made-up answers", given):
        given_policy_loss(*given, token_losses=noting).loss.backward()
    gradient = given[0].grad
    of_answers = [gradient[mask]] if gradient is not None else []
    _require_finite(name, "answers", noting.losses[mask], of_answers)
    return noting.losses.masked_fill(~mask, 0.0).sum(dim=1)


def try_pair_losses(losses: PairLosses, name: str) -> None:
    """Call a loss on pairs on a few made-up ones.

    Raises:
        ConfigError: it fails, gives no loss per pair, changes what it was given, has a loss or
            gradient that is not finite, or lets one pair's loss depend on another's, so that
            micro-batches would change the gradient.
    """
    _require_own_losses(name, "a pair", "pairs", partial(_tried_pairs, losses, name))


def _tried_pairs(losses: PairLosses, name: str, rows: slice) -> Tensor:
    """The loss of each of some made-up pairs, (rows,)."""
    totals = torch.tensor([[-4.0, -9.5], [-7.0, -3.25]])
    # Of the second pair policy and reference say the same, as of all pairs when a run begins.
    references = totals + torch.tensor([[-0.5, 0.0], [0.25, 0.0]])
    tokens = torch.tensor([[3, 8], [5, 2]])
    sides = [
        AnswerLogprobs(
            totals[side, rows].clone().requires_grad_(), tokens[side, rows], references[side, rows]
        )
        for side in range(2)
    ]
    given = [t for s in sides for t in (s.total, s.tokens, s.reference) if t is not None]
    noting = _Noting(losses)
    with on_made_up(name, "two made-up pairs", given):
        given_pair_loss(noting, *sides, beta=0.1).loss.backward()
    gradients = [side.total.grad for side in sides if side.total.grad is not None]
    _require_finite(name, "pairs", noting.losses, gradients)
    return noting.losses


def required_advantages(found: Any, made: Experience) -> tuple[Tensor, Tensor | None]:
    """What a user's function returned, advantages and the critic's returns, as an experience has
    them: float32, 0 off the response, without gradient.

    Raises:
        ConfigError: it is something else.
    """
    mask, has_critic = made.batch.response_mask, made.values is not None
    pair = found if isinstance(found, tuple) else (found,)
    is_right = len(pair) == 2 and all(
        isinstance(part, Tensor) and part.shape == mask.shape and part.is_floating_point()
        for part in (pair if has_critic else pair[:1])
    )
    if not is_right:
        kinds = ", ".join(
            f"{part.dtype} {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
            for part in pair
        )
        second = "the critic's returns, a tensor like it" if has_critic else "None"
        raise ConfigError(
            "advantages of your own must be a pair, a tensor of floats of the response mask's "
            f"shape {tuple(mask.shape)} and {second}; got {kinds}. Change what the function "
            "returns."
        )
    kept = [part.detach().float().masked_fill(~mask, 0.0) for part in pair[: 1 + has_critic]]
    return kept[0], kept[1] if has_critic else None


class _Noting:
    """A user's loss, which notes what it gives."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._given: list[Tensor] = []

    def __call__(self, *arguments: Any) -> Tensor:
        self._given.append(self._function(*arguments))
        return self._given[-1]

    @property
    def losses(self) -> Tensor:
        """What it gave, without a graph."""
        return self._given[-1].detach()


def _require_own_losses(name: str, one: str, many: str, tried: Callable[[slice], Tensor]) -> None:
    """Require that the loss of one of two does not depend on the other."""
    together = tried(slice(None))
    alone = torch.cat([tried(slice(row, row + 1)) for row in range(2)])
    if not torch.allclose(together, alone, rtol=1e-4, atol=1e-6):
        raise ConfigError(
            f"{name} must give {one} the same loss whatever other {many} come with it, as updates "
            f"are split over micro-batches and ranks; got {together.tolist()} for two {many} at "
            f"once, {alone.tolist()} one by one. Use nothing that sums or averages over {many}."
        )


def _require_finite(name: str, many: str, losses: Tensor, gradients: Sequence[Tensor]) -> None:
    for kind, numbers in (("losses", [losses]), ("gradients", gradients)):
        if not all(bool(part.isfinite().all()) for part in numbers):
            got = ", ".join(str(part.tolist()) for part in numbers)
            raise ConfigError(
                f"{name} must have finite {kind}; got {got} for made-up {many}. Look for a "
                "division by 0, and for a root or a logarithm at 0, whose slope is infinite."
            )
