"""Which rows a run's stages train on, by how they begin, to find rows of other data among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from tandem.config.schema import RunConfig
from tandem.config.stages import STAGES, in_order
from tandem.data.assign import Dataset
from tandem.data.split import split_key
from tandem.errors import ConfigError, DataError
from tandem.metrics.folder import finished_stages
from tandem.text import one_line
from tandem.training.differences import ROWS
from tandem.training.own_folder import names_data
from tandem.training.provenance import Identity, recorded
from tandem.training.run_folder import Run
from tandem.training.stage_data import read_data, read_mixture

_SPLIT = ("seed", "dataset.split", "dataset.heldout")
"""The knobs that decide which stage a row is for."""


@dataclass(frozen=True, slots=True)
class TrainedRows:
    """Of the rows that a run's stages train on: how they begin (`split.split_key`), and in words
    what is not known of them."""

    keys: frozenset[bytes]
    unknown: str = ""


def trained_rows(run: Run) -> TrainedRows:
    """Read the run's data again, as its config.yaml names them, and find the shares of all stages
    that it names or that are finished."""
    config = run.config
    if not names_data(config):
        return TrainedRows(frozenset(), "its prompts came from a program")
    try:
        data = read_data(config)
        mixed = read_mixture(config, data.ledger).texts
    except (ConfigError, DataError) as error:
        return TrainedRows(frozenset(), f"its own data cannot be read: {one_line(error)}")
    names = (*config.stages, *finished_stages(run.path))
    shares = sorted({stage.share for stage in in_order(names)})
    samples = chain.from_iterable(getattr(data, share) for share in shares)
    keys = frozenset(split_key(sample, config.seed) for sample in chain(samples, mixed))
    others = _made_from_others(run, data)
    return TrainedRows(keys, f"{' and '.join(others)} trained on other rows than its config.yaml "
                       "names now" if others else "")  # fmt: skip


def without_data(config: RunConfig) -> RunConfig:
    """The configuration without data sets of its own."""
    mixing = {stage.section for stage in STAGES if "ptx_data" in stage.data}
    sections = {name: replace(getattr(config, name), ptx_data=()) for name in mixing}
    return replace(config, data=(), sft_data=(), eval_data=(), **sections)


def _made_from_others(run: Run, data: Dataset) -> list[str]:
    """The finished stages that were made from other rows, or by another split, than are read."""
    identity = Identity(run.config, run.path, run.world)
    identity.note_rows([account.fingerprint for account in data.ledger.datasets.values()])
    now = {f"{ROWS}{kind}": digests for kind, digests in identity.fingerprints.items()}
    now |= identity.knobs(_SPLIT)
    finished = finished_stages(run.path)

    def differing() -> Iterator[str]:
        for name, value in now.items():
            for stage, before in recorded(run.path, name).items():
                if stage in finished and before != value:
                    yield stage

    return list(dict.fromkeys(differing()))
