"""Losses of the user's own, of policies and on pairs, found and tried; advantages, found."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from tandem.config.preferences import DPOConfig
from tandem.config.schema import RLConfig
from tandem.errors import ConfigError, TandemError
from tandem.named_functions import named_function
from tandem.objectives.policy import TokenLosses, given_policy_loss
from tandem.objectives.preferences import AnswerLogprobs, PairLosses, given_pair_loss
from tandem.text import cause_of

if TYPE_CHECKING:
    from tandem.training.algorithm import AdvantagesOf


def named_losses(rl: RLConfig, section: str) -> TokenLosses | None:
    """The function that `loss_function` names; None if it names none.

    Raises:
        ConfigError: it leads nowhere.
    """
    if not rl.loss_function:
        return None
    return cast(TokenLosses, named_function(rl.loss_function, f"{section}.loss_function"))


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
    return cast("AdvantagesOf", function)


def named_pair_losses(dpo: DPOConfig) -> PairLosses | None:
    """The function that `dpo.loss_function` names; None if it names none.

    Raises:
        ConfigError: it leads nowhere.
    """
    if not dpo.loss_function:
        return None
    return cast(PairLosses, named_function(dpo.loss_function, "dpo.loss_function"))


def told(error: Exception) -> str:
    """What went wrong in a user's function, in a sentence."""
    if isinstance(error, TandemError):
        return str(error)
    return f"{type(error).__name__}: {cause_of(error)}. Fix it (--debug shows where)."


def try_token_losses(token_losses: TokenLosses, name: str) -> None:
    """Call a loss on a few made-up answers.

    Raises:
        ConfigError: it fails, gives no loss per token, changes what it was given, has a loss or
            gradient that is not finite, or lets one answer's loss depend on another's, so that
            micro-batches would change the gradient.
    """
    together = _tried(token_losses, name, slice(None))
    alone = torch.cat([_tried(token_losses, name, slice(row, row + 1)) for row in range(2)])
    if not torch.allclose(together, alone, rtol=1e-4, atol=1e-6):
        raise ConfigError(
            f"{name} must give an answer the same loss whatever other answers come with it, as "
            f"updates are split over micro-batches and ranks; got {together.tolist()} for two "
            f"answers at once, {alone.tolist()} one by one. Use nothing that sums over answers, "
            "such as a mean over all tokens."
        )


def _tried(token_losses: TokenLosses, name: str, rows: slice) -> Tensor:
    """The loss of each of some made-up answers, (rows,)."""
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])[rows]
    old = torch.tensor([[-1.0, -0.4, -2.3, -0.1], [-3.0, -0.7, 0.0, 0.0]])[rows]
    moved = torch.tensor([[0.1, -0.3, 0.0, 0.02], [-0.2, 0.4, 0.0, 0.0]])[rows]
    advantages = torch.tensor([[1.5, 1.5, -0.5, 0.2], [-1.0, -1.0, 0.0, 0.0]])[rows]
    given = [old + moved, old, advantages, mask]
    before = [tensor.clone() for tensor in given]
    given[0].requires_grad_()
    losses = []

    def one_by_one(*arguments: Tensor) -> Tensor:
        found = token_losses(*arguments)
        losses.append(found)
        return found

    try:
        given_policy_loss(*given, token_losses=one_by_one).loss.backward()
    # Whatever a user's function does is told to them in one line.
    except Exception as error:
        raise ConfigError(
            f"{name} could not be used on two made-up answers: {told(error)}"
        ) from error
    if any(not torch.equal(a, b) for a, b in zip(given, before, strict=True)):
        raise ConfigError(
            f"{name} must leave its arguments as they are, which later updates read again; it "
            "changed one in place. Write x = x * y for x *= y."
        )
    found, gradient = losses[0].detach(), given[0].grad
    _require_finite(name, "answers", found[mask], [gradient[mask]] if gradient is not None else [])
    return found.masked_fill(~mask, 0.0).sum(dim=1)


def _require_finite(name: str, what: str, losses: Tensor, gradients: Sequence[Tensor]) -> None:
    for kind, numbers in (("losses", [losses]), ("gradients", gradients)):
        if not all(bool(part.isfinite().all()) for part in numbers):
            got = ", ".join(str(part.tolist()) for part in numbers)
            raise ConfigError(
                f"{name} must have finite {kind}; got {got} for made-up {what}. Look for a "
                "division by 0, and for a root or a logarithm at 0, whose slope is infinite."
            )


def try_pair_losses(losses: PairLosses, name: str) -> None:
    """Call a loss on pairs on a few made-up ones.

    Raises:
        ConfigError: it fails, gives no loss per pair, changes what it was given, has a loss or
            gradient that is not finite, or lets one pair's loss depend on another's, so that
            micro-batches would change the gradient.
    """
    together = _tried_pairs(losses, name, slice(None))
    alone = torch.cat([_tried_pairs(losses, name, slice(row, row + 1)) for row in range(2)])
    if not torch.allclose(together, alone, rtol=1e-4, atol=1e-6):
        raise ConfigError(
            f"{name} must give a pair the same loss whatever other pairs come with it, as updates "
            f"are split over micro-batches and ranks; got {together.tolist()} for two pairs at "
            f"once, {alone.tolist()} one by one. Use nothing that sums over pairs."
        )


def _tried_pairs(losses: PairLosses, name: str, rows: slice) -> Tensor:
    """The loss of each of some made-up pairs, (rows,)."""
    totals = torch.tensor([[-4.0, -9.5], [-7.0, -3.25]])
    # Of the second pair policy and reference say the same, as of all pairs when a run begins.
    references = totals + torch.tensor([[-0.5, 0.0], [0.25, 0.0]])
    tokens = torch.tensor([[3, 8], [5, 2]])
    sides = [
        AnswerLogprobs(totals[side, rows].clone(), tokens[side, rows], references[side, rows])
        for side in range(2)
    ]
    given = [t for s in sides for t in (s.total, s.tokens, s.reference) if t is not None]
    before = [tensor.clone() for tensor in given]
    for side in sides:
        side.total.requires_grad_()
    found = []

    def one_by_one(chosen: AnswerLogprobs, rejected: AnswerLogprobs) -> Tensor:
        found.append(losses(chosen, rejected))
        return found[-1]

    try:
        given_pair_loss(one_by_one, *sides, beta=0.1).loss.backward()
    # Whatever a user's function does is told to them in one line.
    except Exception as error:
        raise ConfigError(
            f"{name} could not be used on two made-up pairs: {told(error)}"
        ) from error
    if any(not torch.equal(a, b) for a, b in zip(given, before, strict=True)):
        raise ConfigError(
            f"{name} must leave its arguments as they are; it changed one in place. Write x = x * "
            "y for x *= y."
        )
    gradients = [side.total.grad for side in sides if side.total.grad is not None]
    _require_finite(name, "pairs", found[0].detach(), gradients)
    return found[0].detach()
