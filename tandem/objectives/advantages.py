"""Advantages: by a critic (GAE), or by the other answers to the same prompt."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tandem.objectives.masked import require_same_shape, whiten
from tandem.ops import gpu

_CPU_NUMBERS = 1 << 16


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
    if gpu.fuses(rewards):
        from tandem.ops.advantages_gpu import advantages_gpu  # imports Triton

        made: tuple[Tensor, Tensor] = advantages_gpu(rewards, values, response_mask, gamma, lam)
        return made
    together = max(1, len(rewards))
    if rewards.device.type == "cpu":  # as many rows, which are independent, as its caches hold
        together = max(1, _CPU_NUMBERS // max(1, rewards.shape[1]))
    parts = (x.split(together) for x in (rewards, values, response_mask))
    advantages = torch.cat([_scanned(r, v, m, gamma, lam) for r, v, m in zip(*parts, strict=True)])
    return advantages, (advantages + values).masked_fill(~response_mask, 0.0)


def _scanned(
    rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> Tensor:
    """Advantages in log2(T) steps of a few operations: a loop over T columns of a few numbers each
    would cost the calls.

    A_t = d_t + c_t A_{t+1} with d = delta and c = gamma lam on the response, and 0 and 1 off it.
    After a step of s, A_t = d_t + c_t A_{t+2s}, which is d_t once 2 s reaches T.
    """
    batch, length = rewards.shape
    places = torch.arange(length, device=rewards.device).expand(batch, length)
    # The next response token's place, T where there is none.
    marked = torch.where(response_mask, places, length).flip(1).cummin(dim=1).values.flip(1)
    following = torch.nn.functional.pad(marked[:, 1:], (0, 1), value=length)
    next_value = torch.nn.functional.pad(values, (0, 1)).gather(1, following)
    delta = rewards + gamma * next_value - values
    sums = torch.where(response_mask, delta, 0.0)
    factors = torch.full_like(sums, gamma * lam).masked_fill(~response_mask, 1.0)
    step = 1
    while step < length:
        ahead = torch.nn.functional.pad(sums[:, step:], (0, step))
        sums = sums + factors * ahead
        factors = factors * torch.nn.functional.pad(factors[:, step:], (0, step))
        step *= 2
    return sums.masked_fill(~response_mask, 0.0)


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
    centered = _centered(scores, group)[0]
    return centered / (group_std(scores, group) + epsilon) if scale else centered


def group_std(scores: Tensor, group: Tensor) -> Tensor:
    """The standard deviation of each score's group, with n - 1; 0 for a group of one. (B,)

    Args, Raises: as `group_normalized`.
    """
    centered, counts, member = _centered(scores, group)
    squares = torch.zeros(len(counts), device=scores.device).index_add(0, member, centered.square())
    return (squares / (counts - 1).clamp(min=1)).sqrt()[member]


def leave_one_out(scores: Tensor, group: Tensor) -> Tensor:
    """Each score less the mean of the other answers' to the same prompt (RLOO).

        A_i = r_i - (sum(r) - r_i) / (n - 1)        0 for a group of one

    Args, Returns, Raises: as `group_normalized`.
    Source: arXiv:2402.14740 eq. 8.
    """
    centered, counts, member = _centered(scores, group)
    return centered * (counts / (counts - 1).clamp(min=1))[member]


def length_weighted(scores: Tensor, lengths: Tensor, group: Tensor) -> Tensor:
    """Each score less its group's mean, the answers weighted by their lengths (OPO).

        A_i = r_i - sum(n r) / sum(n)        exactly 0 where a group's scores are all equal

    Args:
        lengths: (B,) response tokens of each answer, n.
    Source: arXiv:2505.23585.
    """
    require_same_shape(scores=scores, lengths=lengths)
    centered, counts, member = _centered(scores, group)
    zeros = torch.zeros(len(counts), device=scores.device)
    lengths = lengths.float()
    weighted = zeros.index_add(0, member, lengths * centered)
    return centered - (weighted / zeros.index_add(0, member, lengths))[member]


def has_signal(scores: Tensor, group: Tensor) -> Tensor:
    """(B,) bool: whether the scores of an answer's group differ. They are compared with each
    other, so that no rounding of a mean or deviation decides it."""
    require_same_shape(scores=scores, group=group)
    _, member = group.unique(return_inverse=True)
    num_groups = int(member.max()) + 1 if len(member) else 0
    start = torch.zeros(num_groups, device=scores.device, dtype=scores.dtype)
    lowest, highest = (
        start.scatter_reduce(0, member, scores, how, include_self=False) for how in ("amin", "amax")
    )
    return (lowest != highest)[member]


Baseline = Literal["none", "group-mean", "leave-one-out", "length-weighted"]
Scale = Literal["none", "group-std", "batch-std", "whiten"]


def critic_free_advantages(
    rewards: Tensor, group: Tensor, response_mask: Tensor, *, baseline: Baseline, scale: Scale
) -> Tensor:
    """Advantages per token from rewards alone, for every algorithm without a critic.

        baseline   none: A_t = sum of the answer's rewards from t on (REINFORCE++)
                   else one A per answer, of r = the sum of its rewards, on each of its tokens:
                   group-mean (GRPO), leave-one-out (RLOO), length-weighted (OPO)
        scale      none; group-std: / (std of the group's r + 1e-6) (GRPO);
                   batch-std: / (std of all r + 1e-4) (TRL);
                   whiten: mean 0 and sd 1 over all response tokens, with n - 1 (REINFORCE++)

    Args:
        rewards: (B, T) float32, 0 off the response: score at the end, KL penalty where there is
            one (in r it comes before the baseline is taken).
        group: (B,) int64, equal for answers to one prompt. All answers of the step, of all ranks.
        response_mask: (B, T) bool.
    Returns:
        (B, T) float32, 0 off the response. Unless whitened, exactly 0 throughout a group whose r
        are all equal, but where there is no baseline.
    Raises:
        ShapeError: the tensors disagree.
    """
    require_same_shape(rewards=rewards, response_mask=response_mask)
    totals = rewards.float().masked_fill(~response_mask, 0.0).sum(dim=1)
    if baseline == "none":
        advantages = _from_here_on(rewards, response_mask)
    else:
        lengths = response_mask.sum(dim=1)
        of_answers = {
            "group-mean": lambda: group_normalized(totals, group, scale=False),
            "leave-one-out": lambda: leave_one_out(totals, group),
            "length-weighted": lambda: length_weighted(totals, lengths, group),
        }
        advantages = over_tokens(of_answers[baseline](), response_mask)
    if scale == "group-std":
        return advantages / (group_std(totals, group) + 1e-6)[:, None]
    if scale == "batch-std":
        spread = totals.std() if len(totals) > 1 else totals.new_zeros(())
        return advantages / (spread + 1e-4)
    if scale == "whiten":
        return whiten(advantages, response_mask, correction=1)
    return advantages


def _from_here_on(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """(B, T): the sum of a row's rewards from each response token to the end; 0 elsewhere."""
    kept = rewards.float().masked_fill(~response_mask, 0.0)
    sums = kept.flip(1).cumsum(dim=1).flip(1)
    return sums.masked_fill(~response_mask, 0.0)


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
