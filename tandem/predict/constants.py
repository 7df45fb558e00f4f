"""The fitted constants, from the package or from a file of one's own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tandem.errors import ConfigError

CONSTANTS = "TANDEM_PLAN_CONSTANTS"
"""The environment variable that names a file to use in place of the package's."""
SHIPPED = Path(__file__).with_name("constants.yaml")
MEBIBYTE = 2.0**20


@dataclass(frozen=True, slots=True)
class Constants:
    """Of one kind of device.

    phases: coefficients by phase and kind of work. Bytes beside what is counted: imports, of a
    run's process over what was measured of the machine; row, of each row of its data; step, of the
    first step's small things; per_rank, the more of each of several ranks. fitted_on: what they
    come from.
    """

    phases: dict[str, dict[str, float]]
    imports: float
    row: float
    step: float
    per_rank: float
    fitted_on: str

    def slack(self, ranks: int) -> float:
        """Bytes of what is fitted to runs' memory, of a run on so many ranks."""
        return self.step + (self.per_rank if ranks > 1 else 0.0)


def constants(kind: str, name: str = "") -> Constants:
    """Those for a CPU or a GPU.

    Args:
        name: of the machine, in which its processor's maker and kind may be; there may be
            constants for these.
    Raises:
        ConfigError: the file named by TANDEM_PLAN_CONSTANTS cannot be used.
    """
    found = sections_in_use()
    values = dict(found[section_for(found, kind, name)])
    slack = values.pop("slack_mib")
    fitted = str(values.pop("fitted_on"))
    names = ("imports", "row", "step", "per_rank")
    imports, row, step, per_rank = (slack[name] * MEBIBYTE for name in names)
    return Constants(values, imports, row, step, per_rank, fitted)


def sections_in_use() -> dict[str, Any]:
    """The content of the file that constants come from; it is kept, so copy before a change.

    Raises:
        ConfigError: the file named by TANDEM_PLAN_CONSTANTS cannot be used.
    """
    found: dict[str, Any] = _read(os.environ.get(CONSTANTS) or str(SHIPPED))
    return found


def section_for(sections: Iterable[str], kind: str, name: str) -> str:
    """Of a file's sections (`gpu`, `cpu`, `cpu MAKER`, `cpu GENERATION with INSTRUCTIONS` ...) the
    one that says most of what is in a machine's name."""
    own = [s for s in sections if s.startswith(f"{kind} ") and _is_of(s.partition(" ")[2], name)]
    return max(own, key=len, default=kind)


def _is_of(text: str, name: str) -> bool:
    """Whether a section's text is of the machine with this name: its generation, alone or with its
    instructions, or whole words of what else it is called. Zen is not Zen 4, nor model 1 model 17.
    """
    generation = _generation(name)
    if text in (generation, generation.partition(" with ")[0]):
        return True
    return re.search(rf"(?<!\w){re.escape(text)}(?!\w)", name.replace(generation, "")) is not None


def _generation(name: str) -> str:
    """The processor's generation and instructions, with which a machine's name ends
    (`processor.kind`); none where the system did not tell them."""
    told = re.search(r": ([^:()]+)\)?$", name)
    return told[1] if told else ""


def own_section(sections: Iterable[str], name: str) -> str:
    """The section that constants fitted on a CPU belong to: its generation's; without one, that
    which served."""
    generation = _generation(name)
    return f"cpu {generation}" if generation else section_for(sections, "cpu", name)


@cache
def _read(path: str) -> Any:
    try:
        values = yaml.safe_load(Path(path).read_text("utf-8"))
        for kind in ("cpu", "gpu"):
            assert {"slack_mib", "fitted_on", "train"} <= set(values[kind])
    except (OSError, yaml.YAMLError, KeyError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"{CONSTANTS} must name a file as `tandem plan --refit` writes it; got {path} "
            f"({type(error).__name__})."
        ) from None
    return values
