"""The metric behind a logged name: its declaration, group and title.

`find_metric` raises for a name that no row of `tandem.metrics.table` declares.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from tandem.config.stages import Family
from tandem.errors import ConfigError
from tandem.metrics.metric import Metric
from tandem.metrics.own import OWN_PREFIX
from tandem.metrics.table import METRICS

METRIC: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in METRICS})
"""METRICS by declared name (a set under its `name/*`)."""


def find_metric(name: str) -> Metric:
    """The declaration behind a logged name.

    Example: find_metric("seconds/train").name == "seconds/*".
    Raises:
        ConfigError: if the name is not declared.
    """
    if (declared := _declared(name)) is not None:
        return declared
    known = [m.name.replace("*", ending) for m in METRICS for ending in m.members or ("*",)]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    raise ConfigError(
        f"metric name must be declared in tandem.metrics.table, or begin with {OWN_PREFIX}; got "
        f"{name!r}. The nearest is {near!r}; use it, log {OWN_PREFIX + name!r} or declare a Metric."
    )


def metric_or_unknown(name: str) -> Metric:
    """As `find_metric`; for an undeclared name a metric without unit and meaning."""
    return _declared(name) or Metric(name, "", (), "", "")


def _declared(name: str) -> Metric | None:
    if name in METRIC and not name.endswith("/*"):
        return METRIC[name]
    prefix, _, ending = name.partition("/")
    declared = METRIC.get(f"{prefix}/*")
    if declared is not None and ending and (not declared.members or ending in declared.members):
        return declared
    return None


def group_of(name: str) -> str:
    """The group of a logged number, under which trackers show it; "" for a stage's main numbers.

    Raises:
        ConfigError: if the name is not declared.
    """
    metric = find_metric(name)
    return "held-out" if metric.is_heldout else metric.group


def title_of(name: str, family: Family | None = None) -> str:
    """A logged number's title, such as "Held-out KL to the reference"; an undeclared name as it is.

    Example: title_of("heldout_loss/politeness") == "Held-out cross-entropy: politeness".

    Args:
        family: of the stage that logged it, whose loss may be another; None: of an evaluation.
    """
    declared = metric_or_unknown(name)
    if not declared.unit:
        return name
    base, _, ending = name.partition("/")
    words = [_SPELLINGS.get(word, word) for word in base.split("_")]
    of_family = _OF_PAIRS.get(base, "") if family == "pairs" else ""
    title = of_family or declared.title or METRIC.get(base, declared).title or " ".join(words)
    title = title[0].upper() + title[1:]
    return f"{title}: {ending}" if ending else title


_OF_PAIRS = {"loss": "preference loss", "heldout_loss": "held-out preference loss"}
"""What a stage on pairs calls a loss, which evaluations of a policy measure as cross-entropy."""
_SPELLINGS = {"heldout": "held-out", "kl": "KL", "eos": "EOS", "ema": "EMA", "ptx": "mixture",
              "std": "standard deviation", "coef": "coefficient", "grad": "gradient",
              "tflops": "TFLOP/s", "logprobs": "log-probs"}  # fmt: skip
