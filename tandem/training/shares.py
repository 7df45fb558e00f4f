"""How a run's rows are dealt to its steps: as configured, as its folder was begun, or to all of
the steps that run.

The shares that a step was made with are in its manifest and in its checkpoints (`made_from`), so
that is where the folder's are read. The run's configuration then spells them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from tandem.checkpoint.folder import MANIFEST, read_manifest
from tandem.checkpoint.state import newest_numbers
from tandem.config import stages
from tandem.config.schema import RunConfig
from tandem.config.stages import Share, are_apart, in_order, stage_names
from tandem.data.split import DEFAULT_SHARES, SHARES, share_of, shares_among
from tandem.errors import CheckpointError, ConfigError
from tandem.parallel.world import World

Shares = tuple[float, ...]
_KNOB = "dataset.split"


def settle_shares(config: RunConfig, world: World) -> tuple[RunConfig, str]:
    """The configuration with its shares spelled out, and a line to say of them ("" if none).

    Raises:
        ConfigError: the steps of the folder were dealt shares that leave a step of this run none.
    """
    # Only the first rank is sure to see the run's folder.
    before = world.all_gather_object(_dealt(Path(config.output_dir)))[0]
    running = {share_of(step) for step in config.stages}
    others = {step: dealt for step, dealt in before.items() if step not in config.stages}
    if config.dataset.split:
        return config, _overlaps(config, config.dataset.split, running, others)
    if not before:
        shares = shares_among(config.stages)
        said = _alone(config, running)
    else:
        shares = _kept(config, before, running)
        names = " and ".join(others)
        said = (
            f"rows: dealt by the shares {_text(shares)} that {names} of {config.output_dir} was "
            "made with; --data-split gives others"
            if others
            else ""
        )
    return replace(config, dataset=replace(config.dataset, split=shares)), said


def _dealt(folder: Path) -> dict[str, Shares]:
    """The shares that each step in the folder was made with, finished or not, the latest last."""
    found: dict[str, Shares] = {}
    for step in stage_names():
        facts = newest_numbers(folder / "checkpoints" / step) or {}
        if (folder / step / MANIFEST).exists():
            try:
                facts = read_manifest(folder / step).facts
            except CheckpointError:
                continue  # told where the step itself is looked at
        shares = (facts.get("made_from") or {}).get(_KNOB)
        if isinstance(shares, list) and len(shares) == len(SHARES):
            found[step] = tuple(map(float, shares))
    return found


def _kept(config: RunConfig, before: dict[str, Shares], running: set[Share]) -> Shares:
    """The folder's shares: its latest step's that leave every step of this run some."""
    for shares in reversed(before.values()):
        if all(shares[SHARES.index(share)] > 0 for share in running):
            return shares
    dealt = before[next(reversed(before))]
    none = [step for step in config.stages if not dealt[SHARES.index(share_of(step))]]
    done = " and ".join(before)
    command = none[0] if len(none) == 1 else f"train --steps {' '.join(none)}"
    raise ConfigError(
        f"step {none[0]} must have a share of the rows; got none, for {done} of "
        f"{config.output_dir} took them all ({_text(dealt)}). To train on the rows of {done} too, "
        f"run tandem {command} with --data-split {_text(shares_among(none))}; to part them, begin "
        f"anew with --data-split {_text(DEFAULT_SHARES)} in another --output-dir."
    )


def _alone(config: RunConfig, running: set[Share]) -> str:
    """That steps which do not run have no share, where they could run later in this folder."""
    last = max(SHARES.index(share) for share in running)
    run = in_order(config.stages)
    free = [s for s in stages.STAGES if not any(are_apart(s, running) for running in run)]
    takers = {stage.share: stage.name for stage in reversed(free)}  # the first of each share
    later = [takers[share] for share in SHARES[last + 1 :] if share in takers]
    if not later:
        return ""
    return (
        f"rows: all but the held-out ones are for {' and '.join(config.stages)}; to keep some for "
        f"{' and '.join(later)} in this folder, give --data-split {_text(DEFAULT_SHARES)}"
    )


def _overlaps(
    config: RunConfig, shares: Shares, running: set[Share], others: dict[str, Shares]
) -> str:
    """That steps of this run train on rows that others of the folder were dealt."""
    mine = [_range(shares, share) for share in running]
    shared = [
        step
        for step, dealt in others.items()
        for low, high in [_range(dealt, share_of(step))]
        if any(max(low, a) < min(high, b) for a, b in mine)
    ]
    if not shared:
        return ""
    return (
        f"rows: {' and '.join(config.stages)}, dealt by {_text(shares)}, trains on rows that "
        f"{' and '.join(shared)} of {config.output_dir} was dealt too"
    )


def _range(shares: Shares, share: Share) -> tuple[float, float]:
    """The part of [0, 1) that the share's prompts are drawn into."""
    bounds = [0.0, *(bound / sum(shares) for bound in accumulate(shares))]
    place = SHARES.index(share)
    return bounds[place], bounds[place + 1]


def _text(shares: Sequence[float]) -> str:
    return ",".join(f"{share:g}" for share in shares)
