"""The reward functions that come with Tandem, by the name behind `tandem:`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Shipped:
    """home: "module:function". meaning: what it rewards, one sentence. needs: the pip package that
    it needs. beside: another shipped function that is logged with it, at weight 0."""

    home: str
    meaning: str
    needs: str = ""
    beside: str = ""


SHIPPED: Mapping[str, Shipped] = MappingProxyType(
    {
        "gsm8k": Shipped(
            "tandem.rewards.gsm8k:strict",
            "1 if the number behind `####` is the reference's, else 0.",
            beside="gsm8k_lenient",
        ),
        "gsm8k_lenient": Shipped(
            "tandem.rewards.gsm8k:lenient",
            "1 if the last number is the reference's, wherever it stands, else 0.",
            beside="gsm8k",
        ),
        "exact_number": Shipped(
            "tandem.rewards.exact_number:reward",
            "1 if the last number is the last number of the reference, else 0.",
        ),
        "choice": Shipped(
            "tandem.rewards.choice:reward",
            "1 if the chosen letter (A, B, ...) is the reference's, else 0.",
        ),
        "format": Shipped(
            "tandem.rewards.shape:matches",
            "1 if the completion matches the regular expression `pattern`, else 0.",
        ),
        "length": Shipped(
            "tandem.rewards.shape:overlong",
            "0 up to `limit - buffer`, then down to -1 at `limit` and beyond.",
        ),
        "math_verify": Shipped(
            "tandem.rewards.mathematics:reward",
            "1 if Math-Verify finds the expression equal to the reference, else 0.",
            needs="math-verify",
        ),
        "python_tests": Shipped(
            "tandem.rewards.code:reward",
            "1 if the Python code passes all of the row's unit tests, else 0.",
        ),
        "votes": Shipped(
            "tandem.rewards.votes:decided",
            "1 for the answer that a person prefers (`tandem vote`), 0 for its rivals.",
        ),
        "remote": Shipped(
            "tandem.rewards.remote:RemoteReward",
            "What a server at `url` gives; the URL alone names it, too.",
        ),
        "reasoning_gym": Shipped(
            "tandem.rewards.gym:reward",
            "The score of the row's reasoning-gym task, 0 to 1.",
            needs="reasoning-gym",
        ),
    }
)
"""docs/reward_function.md shows this table."""
