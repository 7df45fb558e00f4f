"""Advantages: by a critic (GAE), or by the other answers to the same prompt."""

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


def group_normalized(
    scores: Tensor, group: Tensor, *, scale: bool = True, epsilon: float = 1e-6
) -> Tensor:
    """Scores less their group's mean and, with `scale`, over its standard deviation (GRPO).

        A_i = (r_i - mean(r)) / (std(r) + epsilon)        std with n - 1, 0 for a group of one

    Args:
        scores: (B,) float32.
        group: (B,) int64, equal for answers to one prompt.
        scale: False leaves the deviation out (Dr. GRPO, arXiv:2503.20783).
    Returns:
        (B,) float32; exactly 0 throughout a group whose scores are all equal.
    Raises:
        ShapeError: the tensors disagree.
    Source: arXiv:2402.03300 section 4.1.2.
    """
    centered, counts, member = _centered(scores, group)
    if not scale:
        return centered
    squares = torch.zeros(len(counts), device=scores.device).index_add(0, member, centered.square())
    std = (squares / (counts - 1).clamp(min=1)).sqrt()
    return centered / (std[member] + epsilon)


def leave_one_out(scores: Tensor, group: Tensor) -> Tensor:
    """Each score less the mean of the other answers' to the same prompt (RLOO).

        A_i = r_i - (sum(r) - r_i) / (n - 1)        0 for a group of one

    Args, Returns, Raises: as `group_normalized`.
    Source: arXiv:2402.14740 eq. 8.
    """
    centered, counts, member = _centered(scores, group)
    return centered * (counts / (counts - 1).clamp(min=1))[member]


def over_tokens(advantages: Tensor, response_mask: Tensor) -> Tensor:
    """One advantage (B,) per answer on each of its response tokens, (B, T), 0 elsewhere."""
    return advantages[:, None] * response_mask


def _centered(scores: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores less their group's mean, exactly 0 where all are equal; answers of each group (G,);
    each answer's group as an index into those."""
    require_same_shape(scores=scores, group=group)
    scores = scores.float()
    _, member, counts = group.unique(return_inverse=True, return_counts=True)
    # From each group's own first score on: equal scores then give 0 and no rounding error.
    order = torch.arange(len(scores), device=scores.device)
    first = torch.full_like(counts, len(scores)).scatter_reduce(0, member, order, "amin")
    apart = scores - scores[first][member]
    sums = torch.zeros(len(counts), device=scores.device).index_add(0, member, apart)
    return apart - (sums / counts)[member], counts.float(), member
