"""What `--reward-function` names: a function, its options, its weight, and its name in metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tandem.errors import ConfigError
from tandem.named_functions import name_and_options
from tandem.rewards.shipped import SHIPPED

_WEIGHT = re.compile(r"(.*[^:]):([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)", re.DOTALL)
_PORT = re.compile(r".*://(?:\[[^\]]*\]|[^/?&:]*)", re.DOTALL)
"""What stands before a port, and so not before a weight."""
_URL = re.compile(r"https?://", re.IGNORECASE)
REMOTE = ("tandem", "remote")
"""What asks a server; it is named by the server's URL alone, too."""
_RENAMED = {"tandem.training.exact_number:reward": "tandem:exact_number"}
"""Names of functions that have moved."""


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One reward function as named on the command line.

    where: a file, a module, or `tandem` for a shipped one. function: its name there. options: its
    keyword arguments, as text. weight: what its scores are multiplied by. label: its name in
    metrics and messages, different for each function of a run.
    """

    where: str
    function: str
    options: dict[str, str] = field(default_factory=dict)
    weight: float = 1.0
    label: str = ""

    @property
    def name(self) -> str:
        """What names the function, without options and weight."""
        return f"{self.where}:{self.function}"


def parse_spec(text: str) -> RewardSpec:
    """Read `FILE.py:FUNCTION`, `MODULE:FUNCTION` or `tandem:NAME`, then `?option=value&...` and
    `:weight` where there are any; or a server's URL, whose query is its own, and `:weight`.

    Example: parse_spec("tandem:length?limit=400:0.5") has weight 0.5 and one option,
    parse_spec("http://localhost:5000/get_reward:0.5") is tandem:remote with the option url.

    Raises:
        ConfigError: no function is named, or the options or the weight cannot be read.
    """
    problem = f"--reward-function must be file.py:function or module:function; got {text!r}"
    name, weight = text, 1.0
    if (found := _WEIGHT.fullmatch(text)) and not _PORT.fullmatch(found[1]):
        name, weight = found[1], float(found[2])
    if not math.isfinite(weight):
        raise ConfigError(f"{problem}. Its weight must be a finite number.")
    if _URL.match(name):
        return RewardSpec(*REMOTE, {"url": name}, weight)
    name, options = name_and_options(name, problem)
    where, _, function = _RENAMED.get(name, name).rpartition(":")
    if not where or not function:
        raise ConfigError(
            f"{problem}. Write e.g. rewards.py:my_reward, or one of "
            f"{', '.join(f'tandem:{shipped}' for shipped in SHIPPED)}; or a server's URL."
        )
    if where == "tandem" and function not in SHIPPED:
        raise ConfigError(
            f"{problem}. The functions that come with Tandem are {', '.join(SHIPPED)}."
        )
    return RewardSpec(where, function, options, weight)


def parse_specs(texts: Sequence[str]) -> list[RewardSpec]:
    """Every function of a run, with labels of their own.

    A shipped function may bring another that is only logged (weight 0): strict and lenient GSM8K.

    Raises:
        ConfigError: one cannot be read, or is named twice.
    """
    specs = [parse_spec(text) for text in texts]
    for spec in list(specs):
        beside = SHIPPED[spec.function].beside if spec.where == "tandem" else ""
        if beside and not any((s.where, s.function) == ("tandem", beside) for s in specs):
            specs.append(RewardSpec("tandem", beside, weight=0.0))
    for i, spec in enumerate(specs):
        if (spec.name, spec.options) in [(s.name, s.options) for s in specs[:i]]:
            raise ConfigError(
                f"--reward-function must name each function once; got {spec.name} twice. Remove "
                "one, or change its weight."
            )
    return with_labels(specs)


def with_labels(specs: Sequence[RewardSpec]) -> list[RewardSpec]:
    """The same with labels: the function's name, its file's or server's before it where two are
    called the same, and a number where that is not enough."""
    labels: list[str] = []
    for spec in specs:
        label = spec.function
        if sum(other.function == spec.function for other in specs) > 1:
            home = Path(spec.where).stem if spec.where.endswith(".py") else spec.where
            if (spec.where, spec.function) == REMOTE:
                home = re.sub(r"^\w+://|[/?].*", "", spec.options.get("url", ""))
            label = f"{home}.{spec.function}"
        plain = re.sub(r"[^\w.-]", "_", label)
        number = 1
        while (label := plain if number == 1 else f"{plain}_{number}") in labels:
            number += 1
        labels.append(label)
    return [replace(spec, label=label) for spec, label in zip(specs, labels, strict=True)]
