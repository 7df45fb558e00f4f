"""The ranks of a run, and the exchanges between them that are not weights.

Every rank knows the whole batch and the whole experience; only work and weights are divided. So
these exchanges are small: sums of partial results, rows of a rollout, agreement. On one rank all
of them are the identity, and torch.distributed is not used.
"""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.config.parallel import ParallelConfig
from tandem.errors import ConfigError
from tandem.parallel.watchdog import watching
from tandem.text import first_line, visible

Item = TypeVar("Item")
Given = ParamSpec("Given")
Made = TypeVar("Made")

_made: dict[Any, Any] = {}
"""What functions cached by `while_joined` have made."""


@dataclass(frozen=True, slots=True)
class World:
    """One rank's view of all.

    rank, size: this process among all. ranks_per_node: ranks that share a fast network; ranks
    0 to ranks_per_node - 1 are the first node's. keepers: for each rank, the lowest rank that sees
    the same output folder and writes what is written there once; empty if all ranks see one folder.
    """

    rank: int = 0
    size: int = 1
    ranks_per_node: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    keepers: tuple[int, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether this rank writes and prints for all."""
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        """Groups of ranks that share a fast network."""
        return self.size // self.ranks_per_node

    @property
    def folders(self) -> list[int]:
        """The keepers of the output folders, one per file system."""
        return sorted(set(self.keepers)) or [0]

    @property
    def keeper(self) -> int:
        """The rank that writes once in this rank's output folder (see `keepers`)."""
        return self.keepers[self.rank] if self.keepers else 0

    @property
    def is_keeper(self) -> bool:
        """Whether this rank is its own keeper."""
        return self.keeper == self.rank

    @property
    def here(self) -> list[int]:
        """The ranks that see this rank's output folder."""
        return self.seeing(self.keeper)

    def seeing(self, keeper: int) -> list[int]:
        """The ranks that see the output folder of a keeper."""
        if not self.keepers:
            return list(range(self.size))
        return [rank for rank, other in enumerate(self.keepers) if other == keeper]

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This rank's share of items, divided among the ranks that see its output folder."""
        here = self.here
        return list(items[here.index(self.rank) :: len(here)])

    def all_reduce_(self, *tensors: Tensor) -> None:
        """Add each tensor over all ranks, in place."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def all_reduce_sum(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Add numbers over all ranks, name by name, in float64; every rank has the same names."""
        if self.size == 1:
            return dict(numbers)
        values = torch.tensor(list(numbers.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(values)
        return dict(zip(numbers, values.tolist(), strict=True))

    def all_reduce_max(self, numbers: Iterable[float]) -> list[float]:
        """The largest of each number over all ranks; NaN where any rank's is, which a maximum of
        torch.distributed may lose."""
        values = list(numbers)
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        unknown = tensor.isnan()
        both = torch.stack([tensor.masked_fill(unknown, -math.inf), unknown.double()])
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        return [float(value) for value in both[0].masked_fill(both[1] > 0, math.nan).tolist()]

    def all_gather_object(self, item: Item) -> list[Item]:
        """Every rank's small Python object, in the order of the ranks."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)
        return items

    def gather_flat(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        """All ranks' 1-D tensors, concatenated.

        Args:
            counts: elements of each rank's tensor, known everywhere.
        """
        if self.size == 1:
            return tensor
        longest = max(counts)
        padded = torch.zeros(longest, dtype=tensor.dtype, device=self.device)
        padded[: len(tensor)] = tensor.to(self.device)
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(gathered, padded)
        return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier()


def join(device: torch.device, *, ranks_per_node: int = 0, timeout_minutes: float = 30.0) -> World:
    """Join the other ranks that the launcher's environment names; alone without one.

    Args:
        device: cpu, or cuda, which becomes this rank's own GPU.
        ranks_per_node: ranks that share a fast network; 0 takes the launcher's.
        timeout_minutes: how long a collective may wait for a rank.
    Raises:
        ConfigError: ranks_per_node does not divide the ranks, the environment names some ranks and
            not which this one is or where they meet, or they do not meet there.
    """
    size = _ranks_named()
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if size == 1:
        return World(device=device)
    here = str(ranks_per_node or os.environ.get("LOCAL_WORLD_SIZE") or size)
    local = int(here) if here.isdecimal() else 0
    if not local or size % local:
        raise ConfigError(
            "parallel.ranks_per_node, or the launcher's LOCAL_WORLD_SIZE, must divide the ranks; "
            f"got {visible(here)} of {size}. Use as many ranks on every node."
        )
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
        except dist.DistError as error:
            if _has_store():  # there, who is missing is known
                raise
            host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
            raise ConfigError(
                f"all {size} ranks must meet at MASTER_ADDR:MASTER_PORT within "
                f"parallel.timeout_minutes={timeout_minutes:g}; got {host}:{port} and "
                f"{first_line(error)!r}. Start every rank with an address of rank 0's machine, "
                "and a port that is free there."
            ) from error
    return World(dist.get_rank(), size, local, device)


def _has_store() -> bool:
    """Whether a launcher keeps the store at which ranks meet; else the first rank's process does,
    once it has joined."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _ranks_named() -> int:
    """The ranks that the environment names; 1 if it names none.

    Raises:
        ConfigError: it does not say which of them this is, or where they meet.
    """
    named = {name: os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK", "MASTER_PORT")}
    if named["WORLD_SIZE"] in ("", "1"):
        return 1
    numbers = {name: int(text) for name, text in named.items() if text.isdecimal()}
    size = numbers.get("WORLD_SIZE", 0)
    is_named = len(numbers) == len(named) and numbers["RANK"] < size
    if dist.is_initialized() or (is_named and os.environ.get("MASTER_ADDR")):
        return size
    names = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
    found = ", ".join(f"{name}={os.environ.get(name, '')}" for name in names)
    raise ConfigError(
        "the environment must name the ranks, which of them this is, and where they meet; got "
        f"{visible(found)}. Start with --num-gpus or torchrun, which set these, or remove "
        "WORLD_SIZE for one rank."
    )


@contextmanager
def among_ranks(parallel: ParallelConfig, device: torch.device) -> Iterator[World]:
    """Within: this process is one of the ranks that the launcher's environment names, and watched.

    Raises:
        ConfigError: as `join`.
        RankError: a collective failed in the body, or a rank did not come; says which.
    """
    has_store = _has_store()
    with ExitStack() as stack:
        if has_store:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            stack.enter_context(watching(rank, size))
        world = join(
            device,
            ranks_per_node=parallel.ranks_per_node,
            timeout_minutes=parallel.timeout_minutes,
        )
        if not has_store:
            stack.enter_context(watching(world.rank, world.size))
        yield world
    leave()


def launched(parallel: ParallelConfig, device: torch.device) -> World:
    """The ranks that torchrun's environment names, for a program that gives none; alone without
    such an environment. They are left when the process ends.

    Raises:
        ConfigError: as `join`.
    """
    world = join(
        device,
        ranks_per_node=parallel.ranks_per_node,
        timeout_minutes=parallel.timeout_minutes,
    )
    if world.size > 1:
        atexit.unregister(leave)
        atexit.register(leave)
    return world


def while_joined(make: Callable[Given, Made]) -> Callable[Given, Made]:
    """Cache `make`, which makes groups of ranks, by its arguments and the process group: after
    leaving one and joining another, the groups are made again."""

    @wraps(make)
    def made(*given: Given.args, **named: Given.kwargs) -> Made:
        # Kept until `leave`: destroying a group waits for its threads, which a fork does not have.
        key = (dist.group.WORLD, make, given, *named.items())
        if key not in _made:
            if all(group is not dist.group.WORLD for group, *_ in _made):
                _forget_meshes()
            _made[key] = make(*given, **named)
        found: Made = _made[key]
        return found

    return made


def _forget_meshes() -> None:
    """Let no DTensor get the mesh of a group that is gone: PyTorch keeps what layouts operations
    gave, by meshes, which are equal if their ranks are."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def leave() -> None:
    """Leave the process group, if there is one."""
    _made.clear()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
