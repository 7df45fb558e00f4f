"""The best of n samples of a policy, by the reward.

Best-of-n is the plainest policy that the reward can make, so its frontier (reward against
log n - (n - 1) / n nats of KL) is what PPO and its kin are held to.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from tandem.config.schema import rl_section
from tandem.config.stages import of_family, stage_names
from tandem.errors import ConfigError
from tandem.text import visible
from tandem.training.comparing.compare import answer, policies, rewarding
from tandem.training.run_folder import Run
from tandem.training.scored_answers import score_answers
from tandem.training.stage_data import StepRows


@dataclass(frozen=True, slots=True)
class BestOf:
    """The best of n samples: its mean reward over prompts, and the KL that it costs, in nats."""

    n: int
    kl: float
    mean_reward: float


def best_of_n(scores: Tensor) -> list[BestOf]:
    """The frontier for n = 1, 2, 4, ... and N, from N samples a prompt.

    The mean over all subsets of n of the N samples, so that no sample is wasted and nothing is
    biased: sum_i C(i - 1, n - 1) / C(N, n) s_(i), s_(1) <= ... <= s_(N).

    Args:
        scores: (P, N) rewards.
    Source: the estimator, arXiv:2112.09332 appendix I; the KL, arXiv:2009.01325 appendix G.3.
    """
    ranked = scores.double().sort(dim=1).values.mean(dim=0).tolist()
    total = len(ranked)
    sizes = sorted({*(2**k for k in range(total.bit_length()) if 2**k <= total), total})
    found = []
    for n in sizes:
        subsets = math.comb(total, n)
        reward = sum(
            math.comb(i, n - 1) / subsets * score for i, score in enumerate(ranked) if i >= n - 1
        )
        found.append(BestOf(n, math.log(n) - (n - 1) / n, reward))
    return found


def measure_best_of(
    run: Run, rows: StepRows, num_samples: int, num_prompts: int | None = None
) -> dict[str, list[dict[str, Any]]]:
    """The frontier of every policy that no reward has trained, on the held-out prompts.

    Args:
        num_samples: drawn per prompt, the largest n.
        num_prompts: at most; None: the run's own number.
    Returns:
        by the policy's label, `BestOf` as mappings.
    Raises:
        ConfigError: the run has nothing that scores, or no held-out prompt.
    """
    config = run.config
    with rewarding(run, rows) as (scorer, rewards, conversations):
        rl = rl_section(config)
        prompts = rows.heldout_prompts[: rl.eval_prompts if num_prompts is None else num_prompts]
        if num_samples < 2 or not prompts or (scorer is None and rewards is None):
            raise ConfigError(
                "--best-of must be at least 2 and needs a reward model or function and held-out "
                f"prompts; got {num_samples}, {len(prompts)} prompts and "
                f"{'a' if scorer or rewards else 'no'} reward. Give --best-of 16 in such a run."
            )
        trained = {
            policy.label for stage in of_family(stage_names(), "rl") for policy in stage.policies
        }
        frontiers = {}
        for label, source in policies(run):
            if label in trained:
                continue
            model = run.placement.policy(source, trained=False)
            rollout = answer(model, prompts, rows, run.settings, num_samples, conversations)
            scored = score_answers(rollout, scorer, rows.renderer, rl, rewards, run.world)
            scored.tell_failed_models(run.print_line, "held-out answers")
            scores = scored.mixed.masked_fill(~scored.is_scored, torch.nan).view(-1, num_samples)
            scores = scores[~scores.isnan().any(dim=1)]
            if len(scores):
                frontiers[label] = [asdict(point) for point in best_of_n(scores)]
    return frontiers


def frontier_table(frontiers: dict[str, list[dict[str, Any]]]) -> Table:
    """The best of n of every policy."""
    table = Table(title="Best of n samples, by the reward", title_justify="left")
    for name in ("n", "KL, nats", *frontiers):
        table.add_column(Text(visible(name)), justify="right")
    points = next(iter(frontiers.values()), [])
    for number, point in enumerate(points):
        rewards = [f"{points[number]['mean_reward']:.4g}" for points in frontiers.values()]
        table.add_row(str(point["n"]), f"{point['kl']:.3f}", *rewards)
    return table
