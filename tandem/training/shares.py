"""How a run's rows are split over its stages: as configured, as in its folder, or over the stages
that run.

The split that a stage was made with is in its manifest and its checkpoints (`made_from`), where the
folder's is read from. The run's configuration then contains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tandem.config import stages
from tandem.config.schema import RunConfig
from tandem.config.stages import Share, are_apart, in_order
from tandem.data.split import DEFAULT_SHARES, SHARES, share_bounds, share_of, shares_among
from tandem.errors import ConfigError
from tandem.parallel.world import World
from tandem.training.provenance import recorded

Shares = tuple[float, ...]
_KNOB = "dataset.split"


def settle_shares(config: RunConfig, world: World) -> tuple[RunConfig, str]:
    """The configuration with its split filled in, and a line about it for the user, or "".

    Raises:
        ConfigError: the split of the folder's stages leaves no rows to a stage of this run.
    """
    # Only the first rank surely sees the run's folder.
    before = world.all_gather_object(_splits(Path(config.output_dir)))[0]
    running = {share_of(stage) for stage in config.stages}
    others = {stage: split for stage, split in before.items() if stage not in config.stages}
    if config.dataset.split:
        return config, _overlaps(config, config.dataset.split, running, others)
    if not before:
        shares = shares_among(config.stages)
        said = _alone(config, running)
    else:
        shares = _kept(config, before, running)
        names = " and ".join(others)
        said = (
            f"rows: split {_text(shares)}, as for {names} of {config.output_dir}; --data-split "
            "gives other shares"
            if others
            else ""
        )
    return replace(config, dataset=replace(config.dataset, split=shares)), said


def _splits(folder: Path) -> dict[str, Shares]:
    """The split that each stage in the folder was made with, finished or not; the latest last."""
    return {
        stage: tuple(map(float, shares))
        for stage, shares in recorded(folder, _KNOB).items()
        if isinstance(shares, list) and len(shares) == len(SHARES)
    }


def _kept(config: RunConfig, before: dict[str, Shares], running: set[Share]) -> Shares:
    """The folder's split: that of its latest stage which leaves every stage of this run rows."""
    for shares in reversed(before.values()):
        if all(shares[SHARES.index(share)] > 0 for share in running):
            return shares
    split = before[next(reversed(before))]
    none = [stage for stage in config.stages if not split[SHARES.index(share_of(stage))]]
    done = " and ".join(before)
    command = none[0] if len(none) == 1 else f"train --stages {' '.join(none)}"
    raise ConfigError(
        f"stage {none[0]} must have a share of the rows; got none, because {done} of "
        f"{config.output_dir} used them all ({_text(split)}). To train on the rows of {done} too, "
        f"run tandem {command} with --data-split {_text(shares_among(none))}; to keep them apart, "
        f"start again with --data-split {_text(DEFAULT_SHARES)} in another --output-dir."
    )


def _alone(config: RunConfig, running: set[Share]) -> str:
    """A line that says which stages could run later in this folder, but have no rows."""
    last = max(SHARES.index(share) for share in running)
    run = in_order(config.stages)
    free = [s for s in stages.STAGES if not any(are_apart(s, running) for running in run)]
    takers = {stage.share: stage.name for stage in reversed(free)}  # the first stage of each share
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
    """A line that says which of the folder's stages trained on rows of this run's stages."""
    mine = [_range(shares, share) for share in running]
    shared = [
        stage
        for stage, split in others.items()
        for low, high in [_range(split, share_of(stage))]
        if any(max(low, a) < min(high, b) for a, b in mine)
    ]
    if not shared:
        return ""
    return (
        f"rows: {' and '.join(config.stages)}, with the split {_text(shares)}, trains on rows that "
        f"{' and '.join(shared)} of {config.output_dir} trained on too"
    )


def _range(shares: Shares, share: Share) -> tuple[float, float]:
    """The part of [0, 1) to which the share's prompts are hashed."""
    bounds = [0.0, *share_bounds(shares)]
    place = SHARES.index(share)
    return bounds[place], bounds[place + 1]


def _text(shares: Sequence[float]) -> str:
    return ",".join(f"{share:g}" for share in shares)
