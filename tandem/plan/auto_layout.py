"""`tandem train --auto-layout`: the fastest layout that fits, chosen before anything is loaded.

Only knobs that leave the update as it is are changed: ZeRO stages, offload, micro-batches,
checkpointing, slices for generation and how many answers it makes at once. A run that has begun
keeps the layout that it recorded.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from tandem.config.load import plain_values
from tandem.config.schema import RunConfig
from tandem.errors import ConfigError
from tandem.memory.ways import advice, size_text
from tandem.plan.knobs import with_knobs
from tandem.plan.layouts import Laid, flags_of, sets_answer_batch, why_not
from tandem.plan.plan_command import Asked, asked_of
from tandem.predict.machine import this_machine

COMMAND_FILE = "command.txt"
"""The first file that a run writes (training/run_folder.py)."""
LAYOUT_KNOBS = (
    "parallel.actor_zero_stage",
    "parallel.critic_zero_stage",
    "parallel.offload",
    "micro_batch_tokens",
    "parallel.inference_tp_size",
    "gradient_checkpointing",
    "generation_batch_size",
)
"""What --auto-layout may set."""


def choose_layout(
    config: RunConfig, ranks: int, limit: float | None, print_line: Callable[[str], None]
) -> tuple[RunConfig, list[str]]:
    """The configuration with the layout for it, and the flags that set it.

    Args:
        limit: bytes of a rank; None: the device's memory, of a CPU a rank's share.
        print_line: hears what is taken and why.
    Raises:
        ConfigError, ModelError, DataError: as `tandem plan`.
    """
    recorded = _recorded(Path(config.output_dir))
    if recorded is not None:
        knobs = {name: value for name, value in recorded.items() if _differs(config, name, value)}
        flags = flags_of(knobs)
        print_line(
            f"layout: {config.output_dir} has begun, so its layout is kept: "
            f"{shlex.join(flags) or 'as configured'}"
        )
        return with_knobs(config, knobs), flags
    asked = asked_of(config, this_machine(print_line, config.device), ranks)
    tried = asked.layouts(limit, trains_alike=True)
    if sets_answer_batch(config):  # a size that was chosen is kept; others are ways out
        tried = [laid for laid in tried if "generation_batch_size" not in laid.changes]
    found = [laid for laid in tried if _is_allowed(laid)]
    chosen = next((laid for laid in found if laid.fits(limit)), None)
    if chosen is None:
        chosen = min(found, key=lambda laid: laid.peak)
        print_line(_no_fit(chosen, asked.laid(config, asked.models), limit, asked))
    else:
        print_line(_why(chosen, found, limit))
    return with_knobs(config, chosen.changes), flags_of(chosen.changes)


def _is_allowed(laid: Laid) -> bool:
    """Whether the configuration's own rules allow it."""
    try:
        with_knobs(laid.config, {})
    except ConfigError:
        return False
    return True


def _why(chosen: Laid, found: Sequence[Laid], limit: float | None) -> str:
    fitting = sum(laid.fits(limit) for laid in found)
    said = (
        f"layout: {chosen.flags()}: the fastest of {fitting} that fit ({len(found)} tried), "
        f"predicted peak {size_text(chosen.peak)}"
    )
    faster = next((laid for laid in found if not laid.fits(limit)), None)
    if faster is not None and faster.seconds < chosen.seconds:
        said += f"; faster, but too large: {faster.flags()}: {why_not(faster, limit)}"
    return said


def _no_fit(chosen: Laid, plain: Laid, limit: float | None, asked: Asked) -> str:
    allowed = plain.worst.budget if limit is None else limit
    ways = sorted(
        (laid for laid in asked.layouts(limit) if laid.peak < plain.peak),
        key=lambda laid: (not laid.fits(limit), laid.seconds, laid.peak),
    )
    named = advice(plain.peak, [(laid.flags(), laid.peak) for laid in ways])
    return (
        f"layout: none fits into {size_text(allowed)} a rank; taken is the smallest, "
        f"{chosen.flags()} (predicted {size_text(chosen.peak)}). {named}"
    )


def _recorded(folder: Path) -> dict[str, Any] | None:
    """The layout of a run that has begun in the folder; None if none has."""
    if not (folder / COMMAND_FILE).is_file():
        return None
    try:
        values = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))
        return {name: _value(values, name) for name in LAYOUT_KNOBS}
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return None  # not readable: the run itself says so


def _differs(config: RunConfig, name: str, value: Any) -> bool:
    own = _value(plain_values(config), name)
    return (list(own) if isinstance(own, list | tuple) else own) != value


def _value(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values[part]
    return values
