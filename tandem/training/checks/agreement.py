"""What the ranks of a run must have in common before they exchange a weight."""

from __future__ import annotations

import hashlib
import json
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import transformers

from tandem.config.load import config_knobs, knob_value
from tandem.config.schema import RunConfig
from tandem.errors import ConfigError, DataError, ModelError, TandemError
from tandem.files import sha256
from tandem.named_functions import files_of_function
from tandem.ops import native
from tandem.ops.arithmetic import computed_by
from tandem.parallel.world import World
from tandem.text import counted, visible
from tandem.types import PromptRow
from tandem.version import own_version

_SHOWN = 3
"""Differences that a message names."""
_PACKAGE = Path(__file__).resolve().parents[2]
_SOURCES = (".py", ".cpp", ".h", ".yaml")
_FUNCTIONS = ("loss_function", "advantage_function", "environment", ".tools")
"""Endings of the knobs that name functions which every rank calls."""


def require_one_configuration(config: RunConfig, world: World) -> None:
    """Refuse ranks that were started with different configurations or run different code. A
    collective.

    Each rank updates its own shard: with another learning rate or loss on one node a model would
    come out that nothing describes, and with another ZeRO stage the ranks would wait for each other
    in different exchanges. Folders may differ from node to node, the names in them may not; the
    output folder may be any.

    Raises:
        ConfigError: on every rank, another one has another value of a knob, other code, or other
            numbers of ranks on its node.
    """
    if world.size == 1:
        return
    same_code = "every node must run the same code"
    for values, rule, advice in (
        (_installed(), same_code, "Install the same versions on each."),
        (
            _values(config, world),
            "every node must have one configuration",
            "Start the same command with the same --config file on each.",
        ),
        (_own_functions(config), same_code, "Copy the files of your own functions to each."),
    ):
        told = world.all_gather_object((socket.gethostname(), values))
        _require_alike(told, rule, advice)


def _require_alike(told: Sequence[tuple[str, Mapping[str, str]]], rule: str, advice: str) -> None:
    """Refuse ranks of which one has told other values by name than the first; with their hosts."""
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
        more = f"; and {counted(len(names) - _SHOWN, 'difference')} more" if names[_SHOWN:] else ""
        raise ConfigError(f"{rule}; got {shown}{more}. {advice}")


def unlike_ranks(world: World, together: int = 1) -> list[str]:
    """A line on ranks that compute with other operations, instructions or GPUs than the first:
    slower perhaps, and other bits. Builds the operations. A collective.

    Args:
        together: ranks that generate together. Each of them draws for itself, and an answer that
            ended on one alone would leave the others waiting.
    Raises:
        ConfigError: on every rank, ranks that generate together compute otherwise.
    """
    if world.size == 1:
        return []
    why_plain = native.why_not() if world.device.type == "cpu" else ""
    told = world.all_gather_object((socket.gethostname(), computed_by(world.device), why_plain))
    for rank, (host, by, _) in enumerate(told):
        lead = rank - rank % together
        lead_host, lead_by, _ = told[lead]
        if by != lead_by:
            raise ConfigError(
                "ranks that generate together (--inference-tp-size) must compute the same bits; "
                f"got {lead_by} on {lead_host} (rank {lead}) and {by} on {host} (rank {rank}). "
                "Give each the same operations (TANDEM_MARCH and TANDEM_AMX say which), or use "
                "--inference-tp-size 1."
            )
    # If all lack the operations, the first has said why.
    others = [rank for rank, said in enumerate(told) if said[1] != told[0][1]]
    if not others:
        return []
    plain = [rank for rank, said in enumerate(told) if said[2]]
    shown = plain or others
    host, by, why = told[shown[0]]
    more = f", as on {counted(len(shown) - 1, 'rank')} more" if shown[1:] else ""
    if plain:
        what = f"plain torch ({visible(why)}){more}, others by C++ operations: all wait for it, and"
    else:
        what = f"{by}{more}, rank 0 by {told[0][1]}:"
    return [f"note: rank {shown[0]} on {host} computes by {what} numbers agree to rounding alone"]


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


def _values(config: RunConfig, world: World) -> dict[str, str]:
    """Every knob that must be the same, as text, and how many ranks this node has."""
    values = {"ranks on a node": str(world.ranks_per_node)}
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


def _installed() -> dict[str, str]:
    """Versions, and a digest of Tandem's own files."""
    return {
        "Tandem": own_version(),
        "Python": ".".join(map(str, sys.version_info[:2])),
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
        "Tandem's files": _digest(file for file in _PACKAGE.rglob("*") if file.suffix in _SOURCES),
    }


def _own_functions(config: RunConfig) -> dict[str, str]:
    """Digests of the files of functions that every rank calls; not of a reward function's, which
    the first rank alone calls."""
    found: dict[str, str] = {}
    for name, _ in config_knobs():
        value = knob_value(config, name)
        if not value or not name.endswith(_FUNCTIONS):
            continue
        texts = [value] if isinstance(value, str) else value
        # One that is missing here is told later, with what it is for.
        with suppress(ConfigError):
            files = {file for text in texts for file in files_of_function(text, name)}
            found[f"files of {name}"] = _digest(files)
    return found


def _digest(files: Iterable[Path]) -> str:
    """Of the contents, wherever the files lie; shortened."""
    return hashlib.sha256("".join(sorted(map(sha256, files))).encode()).hexdigest()[:12]
