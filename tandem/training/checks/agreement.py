"""What the ranks of a run must agree on before they exchange a weight."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tandem.config.load import config_knobs, knob_value
from tandem.config.schema import RunConfig
from tandem.errors import ConfigError, DataError, ModelError, TandemError
from tandem.ops import native
from tandem.parallel.world import World
from tandem.text import counted, visible
from tandem.types import PromptRow

_SHOWN = 3
"""Knobs that a message names."""


def require_one_configuration(config: RunConfig, world: World) -> None:
    """Refuse ranks that were started with different configurations. A collective.

    Each rank updates its own shard: with another learning rate on one node a model would come out
    that no configuration describes, and with another ZeRO stage the ranks would wait for each other
    in different exchanges. Folders may differ from node to node, the names in them may not; the
    output folder may be any.

    Raises:
        ConfigError: on every rank, another one has another value of a knob.
    """
    told = world.all_gather_object((socket.gethostname(), _values(config)))
    host, first = told[0]
    for rank, (other_host, values) in enumerate(told):
        names = [name for name in first if values.get(name) != first[name]]
        names += [name for name in values if name not in first]
        if not names:
            continue
        shown = "; ".join(
            f"{name} {_short(first, name)} on {host} (rank 0) and {_short(values, name)} on "
            f"{other_host} (rank {rank})"
            for name in names[:_SHOWN]
        )
        more = f"; and {counted(len(names) - _SHOWN, 'knob')} more" if names[_SHOWN:] else ""
        raise ConfigError(
            f"every node must have one configuration; got {shown}{more}. Start the same command "
            "with the same --config file on each."
        )


def plain_ranks(world: World) -> list[str]:
    """A line on ranks that lack the C++ operations which others have: they are slower, and what
    they say of it is in their logs. Builds the operations. A collective."""
    if world.size == 1 or world.device.type != "cpu":
        return []
    told = world.all_gather_object((socket.gethostname(), native.why_not()))
    plain = [(rank, *said) for rank, said in enumerate(told) if said[1]]
    if not plain or len(plain) == world.size:  # then the first rank has said it
        return []
    rank, host, why = plain[0]
    more = f", as on {counted(len(plain) - 1, 'rank')} more" if plain[1:] else ""
    line = (
        f"note: rank {rank} on {host} computes by plain torch ({visible(why)}){more}, others by "
        "C++ operations: all wait for it, and numbers agree to rounding alone"
    )
    return [line]


def require_same_prompts(prompts: Sequence[PromptRow], world: World) -> None:
    """Refuse ranks that were given different prompts: each answers its share of what it takes for
    everybody's. A collective.

    Raises:
        ConfigError: on every rank, another one has other prompts.
    """
    if world.size == 1:
        return
    told = world.all_gather_object(hash(tuple(prompt.token_ids for prompt in prompts)))
    others = [rank for rank, digest in enumerate(told) if digest != told[0]]
    if others:
        raise ConfigError(
            "every rank must be given the same prompts, which they share among themselves; got "
            f"others on rank {others[0]} than on rank 0. Give each rank all of them."
        )


@contextmanager
def refused_together(world: World) -> Iterator[None]:
    """Within: what one rank refuses all do, for the first one's reason. A collective.

    Raises:
        ConfigError: on every rank, a rank raised it, a DataError or a ModelError.
    """
    refused: TandemError | None = None
    try:
        yield
    except (ConfigError, DataError, ModelError) as error:
        refused = error
    if reason := next(filter(None, world.all_gather_object(str(refused or ""))), ""):
        raise ConfigError(reason) from refused


def _values(config: RunConfig) -> dict[str, str]:
    """Every knob that must be the same, as text."""
    values: dict[str, str] = {}
    for name, knob in config_knobs():
        if name == "output_dir":
            continue
        value = knob_value(config, name)
        if knob.metadata.get("path"):
            texts = [value] if isinstance(value, str) else value
            value = [text.rstrip("/").rpartition("/")[2] for text in texts]
        values[name] = json.dumps(value, default=str)
    return values


def _short(values: Mapping[str, str], name: str) -> str:
    return visible(values.get(name, "nothing")[:60])
