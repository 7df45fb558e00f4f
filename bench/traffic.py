"""Counts what collectives send, by kind and phase, within a node and between nodes.

What is counted is the least that a collective can send: every piece goes straight from the rank
that has it to the ranks that need it, a sum is a reduce-scatter and an all-gather. A ring sends as
much. What a backend really does may be more (gloo's reduce-scatter is), and is not seen.

    with counting_traffic(ranks_per_node=2) as traffic:
        with traffic.phase("forward"):
            loss = model(batch)
    traffic.total("all_gather", "forward").inter_node_bytes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {
    "all_gather": ("_allgather_base_", "allgather_", "allgather_coalesced_",
                   "allgather_into_tensor_coalesced_", "all_gather_into_tensor",
                   "all_gather_into_tensor_coalesced", "all_gather_into_tensor_out"),
    "reduce_scatter": ("_reduce_scatter_base_", "reduce_scatter_",
                       "reduce_scatter_tensor_coalesced_", "reduce_scatter_tensor",
                       "reduce_scatter_tensor_coalesced", "reduce_scatter_tensor_out"),
    "all_reduce": ("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_",
                   "all_reduce_coalesced", "all_reduce_coalesced_"),
    "all_to_all": ("alltoall_", "alltoall_base_", "all_to_all_single", "shard_dim_alltoall"),
    "broadcast": ("broadcast_", "broadcast"),
    "reduce": ("reduce_",),
    "gather": ("gather_",),
    "scatter": ("scatter_",),
    "send": ("send", "isend"),
}  # fmt: skip
"""Kinds of collectives, and the operators of torch 2.11 to 2.15 that are of each."""

_KIND = {name: kind for kind, names in KINDS.items() for name in names}
_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
_SILENT = ("recv_", "recv_any_source_", "irecv", "barrier", "monitored_barrier_", "wait_tensor",
           "_wrap_tensor_autograd", "check_for_nan", "mesh_get_process_group")  # fmt: skip
"""Operators of the same namespaces that send nothing, or whose other end is counted."""
_INPUTS = ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors", "tensor")
"""What operators call that which a rank puts in, the first that is there."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective as this rank took part in it.

    kind: of KINDS; op: torch's name; dtype: of what travels; group_size: ranks that take part.
    buffer_bytes: what the rank puts in, for an all-gather what comes out.
    sent_bytes: what the rank sends; inter_node_bytes: the part of it that leaves the node.
    """

    kind: str
    op: str
    dtype: torch.dtype
    group_size: int
    buffer_bytes: int
    sent_bytes: int
    inter_node_bytes: int
    phase: str


@dataclass(frozen=True, slots=True)
class Total:
    """Sums over collectives, of one rank; see `Collective`."""

    count: int = 0
    buffer_bytes: int = 0
    sent_bytes: int = 0
    inter_node_bytes: int = 0


class Traffic(TorchDispatchMode):
    """The collectives that this rank took part in; `counting_traffic` makes one.

    unknown: operators of torch's distributed namespaces that were met and not counted.
    """

    def __init__(self, ranks_per_node: int) -> None:
        super().__init__()
        self.records: list[Collective] = []
        self.unknown: set[str] = set()
        self._ranks_per_node = ranks_per_node
        self._phase = ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within: collectives are of this phase."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def total(self, kind: str | None = None, phase: str | None = None) -> Total:
        """Over the collectives of a kind, of a phase; None: of all."""
        chosen = [
            record
            for record in self.records
            if kind in (None, record.kind) and phase in (None, record.phase)
        ]
        names = ("buffer_bytes", "sent_bytes", "inter_node_bytes")
        return Total(len(chosen), *(sum(getattr(r, name) for r in chosen) for name in names))

    def totals(self) -> dict[tuple[str, str], Total]:
        """By (phase, kind), in the order in which they first occurred."""
        keys = dict.fromkeys((record.phase, record.kind) for record in self.records)
        return {(phase, kind): self.total(kind, phase) for phase, kind in keys}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(found, DTensor) for found in types):
            return NotImplemented  # DTensor takes it apart; its collectives come by here
        if func.namespace in _NAMESPACES:
            self._count(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _count(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = func._schema.name.split("::")[1]
        kind = _KIND.get(name)
        if kind is None:
            if name not in _SILENT:
                self.unknown.add(func._schema.name)
            return
        given = dict(
            zip((argument.name for argument in func._schema.arguments), args, strict=False)
        )
        given |= kwargs
        group = _group(given)
        ranks, me = dist.get_process_group_ranks(group), group.rank()
        to_peers = _to_peers(kind, given, len(ranks), me)
        node = ranks[me] // self._ranks_per_node
        away = [ranks[peer] // self._ranks_per_node != node for peer in range(len(ranks))]
        put_in = _put_in(given)
        self.records.append(
            Collective(
                kind,
                name,
                # A rank that only receives (of a scatter) puts nothing in.
                put_in[0].dtype if put_in else torch.uint8,
                len(ranks),
                _bytes(put_in) * (len(ranks) if kind == "all_gather" else 1),
                round(sum(size for peer, size in enumerate(to_peers) if peer != me)),
                round(sum(size for size, leaves in zip(to_peers, away, strict=True) if leaves)),
                self._phase,
            )
        )


@contextmanager
def counting_traffic(ranks_per_node: int) -> Iterator[Traffic]:
    """Within: this rank's collectives are counted, those of backward passes too.

    Args:
        ranks_per_node: ranks r with equal r // ranks_per_node share a node.
    """
    with Traffic(ranks_per_node) as traffic:
        yield traffic


def _group(given: dict[str, Any]) -> dist.ProcessGroup:
    """The group of an operator: boxed for c10d's, by name or itself for the functional ones."""
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"])
    named = given["group_name"]
    if isinstance(named, str):
        return torch._C._distributed_c10d._resolve_process_group(cast(Any, named))
    return named


def _put_in(given: dict[str, Any]) -> list[Tensor]:
    """The tensors that this rank puts in."""
    for name in _INPUTS:
        if name in given:
            return [leaf for leaf in tree_leaves(given[name]) if isinstance(leaf, Tensor)]
    raise KeyError(f"no input among {sorted(given)}")


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _to_peers(kind: str, given: dict[str, Any], size: int, me: int) -> list[float]:
    """Bytes that this rank sends to each rank of the group, itself included."""
    put_in = _put_in(given)
    whole, root = float(_bytes(put_in)), given.get("root_rank", given.get("src"))
    match kind:
        case "all_gather":
            return [whole] * size
        case "reduce_scatter":
            return [whole / size] * size
        case "all_reduce":
            return [2 * whole / size] * size
        case "all_to_all":
            if isinstance(given.get("input_tensors"), list | tuple):
                return [float(_bytes([tensor])) for tensor in put_in]
            rows = given.get("input_split_sizes")
            per_row = whole / max(1, put_in[0].shape[0])
            return [per_row * int(count) for count in rows] if rows else [whole / size] * size
        case "broadcast":
            return [whole if me == root else 0.0] * size
        case "scatter":
            return [whole / size if me == root else 0.0] * size
    target = given["dst"] if kind == "send" else root
    return [whole if peer == target else 0.0 for peer in range(size)]
