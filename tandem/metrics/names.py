"""Every metric that Tandem logs: one meaning, one name.

`METRICS` is the list, `METRIC` the same by declared name, `find_metric` resolves a logged name
(family members included) and raises on one that is not declared.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from tandem.config.stages import stage_of
from tandem.errors import ConfigError
from tandem.metrics.metric import PHASES, STAGES, Metric
from tandem.metrics.names_ppo import PPO_GROUPS, PPO_METRICS

_SUPERVISED = ("sft", "reward", "dpo")
_PAIRS = ("reward", "dpo")

_TRAINING = (
    Metric(
        "loss",
        "nats",
        _SUPERVISED,
        "Mean loss of the step's batch before its update: SFT cross-entropy per token that counts, "
        "reward (centering included) and DPO -log sigmoid per pair.",
        healthy="falls, then levels; pairs start near 0.693",
        better="lower",
    ),
    Metric(
        "perplexity",
        "ratio",
        ("sft",),
        "exp(loss).",
        healthy="falls",
        better="lower",
    ),
    Metric("learning_rate", "per step", _SUPERVISED, "The learning rate of this step's update."),
    Metric(
        "grad_norm",
        "norm",
        _SUPERVISED,
        "Global L2 norm of the gradient before clipping.",
        healthy="steady; no spikes of 10 times its median",
    ),
    Metric(
        "loss_scale",
        "factor",
        STAGES,
        "What losses are multiplied by in fp16; doubled after 1,000 good steps, halved on overflow",
        healthy="changes seldom",
    ),
    Metric(
        "overflows",
        "steps",
        STAGES,
        "Optimizer steps skipped so far because a gradient overflowed in fp16.",
        healthy="a few at the start, then rarely",
    ),
    Metric(
        "skipped",
        "updates",
        STAGES,
        "Updates left out so far for a loss, gradient or reward that was not sound; their rows are "
        "in the run's folder bad-steps.",
        healthy="0",
        better="lower",
    ),
    Metric("tokens", "tokens", _SUPERVISED, "Tokens in this step's batch that are not padding."),
    Metric("epoch", "passes", _SUPERVISED, "Passes over the stage's data so far, as a fraction."),
    Metric(
        "heldout_loss",
        "nats",
        _SUPERVISED,
        "`loss` on rows that no stage trains on.",
        healthy="falls with the loss",
        better="lower",
    ),
    Metric(
        "heldout_loss/*",
        "nats",
        _SUPERVISED,
        "`heldout_loss` on one data set's rows.",
        better="lower",
    ),
    Metric(
        "heldout_perplexity",
        "ratio",
        ("sft",),
        "exp(heldout_loss).",
        healthy="falls; rising again means overfitting",
        better="lower",
    ),
    Metric(
        "heldout_perplexity/*",
        "ratio",
        ("sft",),
        "`heldout_perplexity` on one data set's rows.",
        better="lower",
    ),
)

_PREFERENCE = (
    Metric(
        "accuracy",
        "share",
        _PAIRS,
        "Pairs whose chosen answer scores above the rejected one (DPO: by implicit reward); a tie "
        "counts half.",
        healthy="0.65 to 0.95; 1.00 on training pairs alone is memory",
        better="higher",
    ),
    Metric(
        "margin",
        "reward units",
        ("reward",),
        "Mean of chosen minus rejected score, raw units.",
        healthy="grows from 0",
        better="higher",
    ),
    Metric("score_chosen", "reward units", ("reward",), "Mean raw score of chosen answers."),
    Metric("score_rejected", "reward units", ("reward",), "Mean raw score of rejected answers."),
    Metric(
        "center_penalty",
        "reward units squared",
        ("reward",),
        "Mean of (chosen + rejected)^2, which reward.center_coef weighs in the loss.",
        source="arXiv:2312.09244",
        healthy="near 0 beside the margin",
    ),
    Metric(
        "heldout_accuracy",
        "share",
        _PAIRS,
        "`accuracy` on held-out pairs.",
        healthy="above 0.55; noisy human labels rarely allow more than 0.75",
        better="higher",
    ),
    Metric(
        "heldout_accuracy/*",
        "share",
        _PAIRS,
        "`heldout_accuracy` on one data set's pairs.",
        better="higher",
    ),
    Metric(
        "heldout_margin",
        "reward units",
        _PAIRS,
        "Mean of chosen minus rejected score (DPO: implicit reward) on held-out pairs.",
        healthy="positive",
        better="higher",
    ),
    Metric(
        "heldout_margin/*",
        "reward units",
        _PAIRS,
        "`heldout_margin` on one data set's pairs.",
        better="higher",
    ),
    Metric(
        "heldout_calibration_error",
        "share",
        _PAIRS,
        "Expected calibration error of sigmoid(margin) as the probability that the chosen answer "
        "is better, on held-out pairs.",
        source="arXiv:1706.04599",
        healthy="below 0.1",
        better="lower",
    ),
    Metric(
        "heldout_calibration_error/*",
        "share",
        _PAIRS,
        "`heldout_calibration_error` on one data set's pairs.",
        better="lower",
    ),
    Metric(
        "normalize_mean",
        "reward units",
        ("reward",),
        "Mean raw score of the SFT policy's answers: step 3's zero.",
    ),
    Metric(
        "normalize_std",
        "reward units",
        ("reward",),
        "Standard deviation of the same scores: step 3's one.",
        healthy="well above 0: the reward model tells answers apart",
    ),
    Metric(
        "implicit_reward_chosen",
        "reward units",
        ("dpo",),
        "Mean of beta times log(policy / reference) of the chosen answers.",
        source="arXiv:2305.18290",
        healthy="near or above 0; a steep fall means that good answers become unlikely too",
    ),
    Metric(
        "implicit_reward_rejected",
        "reward units",
        ("dpo",),
        "The same of the rejected answers.",
        source="arXiv:2305.18290",
        healthy="falls",
    ),
    Metric(
        "implicit_reward_margin",
        "reward units",
        ("dpo",),
        "implicit_reward_chosen minus implicit_reward_rejected.",
        source="arXiv:2305.18290",
        healthy="grows from 0",
        better="higher",
    ),
)

_COST = (
    Metric(
        "rank_idle",
        "share",
        STAGES,
        "Of the forwards and backwards that ranks run in a step's updates, those that count for "
        "nothing: their rank had fewer micro-batches than another, or no row. 0 at one rank.",
        healthy="below 0.2; above, raise batch_size or ppo.minibatch_size, or lower "
        "micro_batch_tokens",
        better="lower",
    ),
    Metric(
        "seconds/*",
        "seconds",
        STAGES,
        "Wall time of a phase since the last log line; `step` is all of it.",
        members=PHASES,
        better="lower",
    ),
    Metric(
        "tokens_per_second/*",
        "tokens/s",
        STAGES,
        "Tokens through a phase, without padding: `generate` counts sampled tokens, the others all "
        "the tokens they read.",
        members=PHASES,
        better="higher",
    ),
    Metric(
        "samples_per_second/*",
        "samples/s",
        STAGES,
        "Sequences (pairs in reward and DPO) through a phase.",
        members=PHASES,
        better="higher",
    ),
    Metric(
        "tflops/*",
        "TFLOP/s",
        STAGES,
        "Model arithmetic of a phase per second, of all ranks together: the forwards and backwards "
        "that a phase ran, recomputation not counted; the vocabulary head for the tokens that go "
        "through it. step: that of all phases over the time of the whole step.",
        members=PHASES,
        better="higher",
    ),
    Metric(
        "peak_memory_bytes/*",
        "bytes",
        STAGES,
        "Most memory in use during a phase: torch's allocator on CUDA, else the process's resident "
        "peak (since its start where the system cannot reset it).",
        members=PHASES,
        better="lower",
    ),
)

METRICS: tuple[Metric, ...] = (*_TRAINING, *_PREFERENCE, *PPO_METRICS, *_COST)
"""Every metric, in the order of the reference page."""

METRIC: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in METRICS})
"""The same by declared name (a family under its `name/*`)."""


def find_metric(name: str) -> Metric:
    """The declaration behind a logged name.

    Example: find_metric("seconds/train").name == "seconds/*".
    Raises:
        ConfigError: if the name is not declared.
    """
    if name in METRIC and not name.endswith("/*"):
        return METRIC[name]
    prefix, _, ending = name.partition("/")
    family = METRIC.get(f"{prefix}/*")
    if family is not None and ending and (not family.members or ending in family.members):
        return family
    known = [m for f in METRICS for m in _spellings(f)]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    raise ConfigError(
        f"metric name must be declared in tandem.metrics.names; got {name!r}. "
        f"The nearest is {near!r}; use it or declare a new Metric."
    )


def group_of(name: str) -> str:
    """What a logged number is about, to show it among its like; "" for a stage's main numbers.

    Raises:
        ConfigError: if the name is not declared.
    """
    metric = find_metric(name)
    if metric.members:
        return "cost"
    if name.startswith("heldout_"):
        return "held-out"
    return next((group for group, inside in PPO_GROUPS.items() if metric in inside), "")


def check_stage(stage: str) -> str:
    """`stage` itself, if it is one that logs.

    Raises:
        ConfigError: if it is not.
    """
    return stage_of(stage).name


def _spellings(metric: Metric) -> list[str]:
    if not metric.members:
        return [metric.name]
    return [metric.name.replace("*", member) for member in metric.members]
