"""Quantized collectives for FSDP2: weights and gradients are sent in few bits.

ZeRO++ (arXiv:2306.10209): `QuantizedAllGather` is its qwZ, `QuantizedReduceScatter` its qgZ, for
`set_custom_all_gather` and `set_custom_reduce_scatter` of a split module, one object per unit. They
run on the current stream and return no handle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from tandem.errors import ConfigError, ShapeError
from tandem.ops.blockwise import INT8, QUANTIZABLE, BlockCode
from tandem.parallel.quantize import Message

# torch 2.13's name; 2.11 has only the older one, which later versions deprecate.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def node_groups(ranks_per_node: int) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """This rank's groups for the two hops: its node, and the ranks of its place in every node.

    A collective. None where a group would be this rank alone.

    Args:
        ranks_per_node: ranks r with equal r // ranks_per_node share a node.
    Raises:
        ConfigError: the nodes are not of equal size.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    if ranks_per_node < 1 or size % ranks_per_node:
        raise ConfigError(
            f"ranks_per_node must divide the ranks; got {ranks_per_node} of {size}. Use as many "
            "ranks on every node."
        )
    nodes = [list(range(first, first + ranks_per_node)) for first in range(0, size, ranks_per_node)]
    likes = [list(range(place, size, ranks_per_node)) for place in range(ranks_per_node)]
    intra = inter = None
    if ranks_per_node > 1:
        intra = [dist.new_group(ranks) for ranks in nodes][rank // ranks_per_node]
    if len(nodes) > 1:
        inter = [dist.new_group(ranks) for ranks in likes][rank % ranks_per_node]
    return intra, inter


class _Allocates:
    """Where FSDP2's buffers come from."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class QuantizedAllGather(_Allocates):
    """qwZ: a unit's weights are gathered as int8, codes and scales in one collective.

    A rank's own share is rounded too, so that all ranks compute with the same bits, forward and
    backward. Not quantized are gathers over fewer than all ranks (hpZ's, of weights that were
    rounded before) and buffers other than float32, bfloat16 and float16 (a unit of mixed dtypes
    comes as bytes).
    """

    def __init__(self, numels: Sequence[int], ranks: int) -> None:
        """`numels`: `shard_numels` of the unit; `ranks`: of the whole data-parallel group."""
        self.ranks = ranks
        self._message = Message(INT8, numels)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> Work | None:
        """Gather input (n,) of every rank into output (ranks * n,), which it may be a part of.

        Raises:
            ShapeError: n is not the unit's share.
        """
        if group.size() != self.ranks or input_tensor.dtype not in QUANTIZABLE:
            return _gather(output_tensor, input_tensor, group=group, async_op=async_op)
        own = self._message.write(input_tensor.view(1, -1))
        everyones = own.new_empty(self.ranks, self._message.row_bytes)
        _gather(everyones.view(-1), own.view(-1), group=group)
        self._message.read_into(everyones, output_tensor.view(self.ranks, -1))
        return None


class QuantizedReduceScatter(_Allocates):
    """qgZ: a unit's gradients are summed in two hops, inside a node and then between nodes.

    A hop quantizes, sends every peer its part (all-to-all) and adds up what it received, in float32
    and in the order of the ranks. Only 1 / ranks_per_node of the gradient goes between nodes.

    Error feedback (arXiv:1901.09847): a hop's rounding error is added to the next gradient, so that
    the mean over steps is right. Only hops of 4 bits keep it: an int8 hop errs by about 1 %. It
    costs 4 bytes per number that the hop sends: the whole unit inside a node, the unit /
    ranks_per_node between nodes. Where a gradient was not finite, the error starts from 0 again.
    """

    def __init__(
        self,
        intra_group: ProcessGroup | None,
        inter_group: ProcessGroup | None,
        *,
        bits_intra: int = 8,
        bits_inter: int = 8,
        error_feedback: bool = False,
        block: int = 256,
        numels: Sequence[int] = (),
    ) -> None:
        """Groups as `node_groups` returns them; a hop without a group is skipped.

        Args:
            bits_intra, bits_inter: 8 or 4, for the hop inside a node and between nodes.
            block: numbers that share a scale.
            numels: `shard_numels` of the unit's trained parameters; without it, or where FSDP2
                reduces others (some got no gradient), blocks span a share as a whole.
        Raises:
            ConfigError: bits other than 8 and 4, or an impossible block.
        """
        self.numels = tuple(numels)
        self._hops = [
            _Hop(group, _code(bits, block), keeps_residual=error_feedback and bits == 4)
            for group, bits in ((intra_group, bits_intra), (inter_group, bits_inter))
        ]

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Sum input (ranks * n,) over the ranks; this rank's share of it into output (n,).

        Raises:
            ConfigError: op is no sum; the group is not the nodes' ranks in order.
            ShapeError: the buffer is no float one, or not of the unit that the residual is of.
        """
        del async_op  # finished on the current stream when it returns, which is what FSDP2 waits on
        self._check(group, op, input_tensor)
        numel = output_tensor.numel()
        intra, inter = self._hops
        numels = self.numels if sum(self.numels) == numel else (numel,)
        # (nodes, ranks of a node, n): first to the peer inside the node that has the rank's place.
        rows = input_tensor.view(inter.size, intra.size, numel)
        nodes = intra.sum(rows, numels)
        total = inter.sum(nodes.view(1, inter.size, numel), numels)
        output_tensor.copy_(total.view(-1))

    @property
    def residuals(self) -> dict[str, Tensor]:
        """The error feedback by hop: part of a run's state."""
        named = zip(("intra", "inter"), self._hops, strict=True)
        return {name: hop.residual for name, hop in named if hop.residual is not None}

    @property
    def residual_shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of `residuals` by hop, if every parameter of `numels` gets a gradient."""
        intra, inter = self._hops
        rows = {"intra": intra.size * inter.size, "inter": inter.size}
        return {
            name: (rows[name], sum(self.numels))
            for name, hop in zip(rows, self._hops, strict=True)
            if hop.keeps_residual
        }

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Within: sums that nobody will use, which must leave `residuals` as they are."""
        for hop in self._hops:
            hop.is_trial = True
        try:
            yield
        finally:
            for hop in self._hops:
                hop.is_trial = False

    def restore(self, residuals: dict[str, Tensor]) -> None:
        """Continue from `residuals` of an earlier run; an empty mapping starts again from zero, as
        one must when the gradients' unit changes, by another loss scale say."""
        for name, hop in zip(("intra", "inter"), self._hops, strict=True):
            hop.residual = residuals.get(name)

    def _check(
        self, group: ProcessGroup, op: ReduceOp | ReduceOp.RedOpType, gradient: Tensor
    ) -> None:
        intra, inter = self._hops
        if op != ReduceOp.SUM:
            raise ConfigError(
                f"a quantized reduce-scatter must sum; got {op}. Call "
                "set_force_sum_reduction_for_comms(True) and set_gradient_divide_factor(1.0)."
            )
        place = inter.rank * intra.size + intra.rank
        if intra.size * inter.size != group.size() or place != group.rank():
            raise ConfigError(
                f"the hops' groups must be the {group.size()} ranks, node by node; got "
                f"{inter.size} nodes of {intra.size} and place {place} of rank {group.rank()}. "
                "Make them with node_groups, with as many ranks on every node."
            )
        if gradient.dtype not in QUANTIZABLE:
            raise ShapeError(
                f"gradients must be float32, bfloat16 or float16; got {gradient.dtype}. Choose "
                "such a reduce_dtype."
            )


class _Hop:
    """One all-to-all of quantized rows, and the sum of those received."""

    def __init__(
        self, group: ProcessGroup | None, code: BlockCode, *, keeps_residual: bool
    ) -> None:
        self._group = group
        self._code = code
        self.keeps_residual = keeps_residual and group is not None
        self._message: Message | None = None
        self.residual: Tensor | None = None
        self.is_trial = False  # what is sent comes to nothing: the residual stays for the next
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()

    def sum(self, rows: Tensor, numels: tuple[int, ...]) -> Tensor:
        """rows (R, peers, n), [:, p] for peer p -> (R, n) float32, the sum of this rank's."""
        num_rows, peers, numel = rows.shape
        if self._group is None:
            return rows.view(num_rows, numel).float()
        if self._message is None or self._message.numels != numels:
            self._message = Message(self._code, numels)
        sent = self._write(rows.reshape(num_rows * peers, numel))
        sent = sent.view(num_rows, peers, -1).transpose(0, 1).contiguous()
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent, group=self._group)
        total = rows.new_empty(num_rows, numel, dtype=torch.float32)
        self._message.read_into(came, total)
        return total

    def _write(self, rows: Tensor) -> Tensor:
        assert self._message is not None
        if not self.keeps_residual:
            return self._message.write(rows)
        if self.residual is None:
            self.residual = torch.zeros_like(rows, dtype=torch.float32)
        if self.residual.shape != rows.shape:
            raise ShapeError(
                "error feedback must see the same gradients each time; got "
                f"{tuple(rows.shape)} after {tuple(self.residual.shape)}. Make one object per "
                "unit, or restore({}) when other parameters are trained."
            )
        wanted = rows.float() if self.is_trial else self.residual.add_(rows)
        message = self._message.write(wanted)
        if self.is_trial:
            return message
        arrived = torch.empty_like(wanted)
        self._message.read_into(message, arrived)
        wanted.sub_(arrived).nan_to_num_(0.0, 0.0, 0.0)
        return message


def _code(bits: int, block: int) -> BlockCode:
    if bits not in (8, 4):
        raise ConfigError(f"bits must be 8 or 4; got {bits}. Use 8 where in doubt.")
    return BlockCode("int8" if bits == 8 else "int4", block)
