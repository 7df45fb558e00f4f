"""Generalized advantage estimation."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.objectives.masked import require_same_shape


def generalized_advantages(
    rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns over response tokens.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}

    where t + 1 is the next *response* token: tokens that the policy did not choose (a later user
    turn) are stepped over, and after the last one V = A = 0, for the answer has ended.

    Args:
        rewards: (B, T) float32, reward units.
        values: (B, T) float32, value of the state before token t.
        response_mask: (B, T) bool.
        gamma: discount per token, in [0, 1].
        lam: in [0, 1]; 1 gives return minus value, 0 one-step differences.
    Returns:
        advantages (not whitened) and returns = advantages + values; both 0 off the response.
    Raises:
        ShapeError: the tensors disagree.
    Source: arXiv:1506.02438 eq. 16.
    """
    require_same_shape(rewards=rewards, values=values, response_mask=response_mask)
    rewards, values = rewards.float(), values.float()
    advantages = torch.zeros_like(rewards)
    next_advantage = torch.zeros_like(rewards[:, 0])
    next_value = torch.zeros_like(next_advantage)
    for t in reversed(range(rewards.shape[1])):
        chosen = response_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(chosen, advantage, 0.0)
        next_advantage = torch.where(chosen, advantage, next_advantage)
        next_value = torch.where(chosen, values[:, t], next_value)
    returns = (advantages + values).masked_fill(~response_mask, 0.0)
    return advantages, returns
