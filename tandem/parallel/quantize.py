"""The format of quantized numbers in collectives: a rank's row of numbers as one row of bytes.

    scales | codes | up to 3 zero bytes, so that the next row's scales are aligned

Blocks never span two parameters, whose magnitudes differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tandem.ops.blockwise import INT8, BlockCode, dequantize_into, quantize_into


class Message:
    """Converts rows of numbers to rows of bytes and back."""

    def __init__(self, code: BlockCode, numels: Sequence[int]) -> None:
        """`numels`: the numbers of each parameter in a row, in order."""
        self.code = code
        self.numels = tuple(numels)
        self.numel = sum(self.numels)
        """Numbers in a row."""
        self._scale_bytes = code.num_scales(self.numels) * code.scale_dtype.itemsize
        self._end = self._scale_bytes + code.num_bytes(self.numels)
        self.row_bytes = -(-self._end // 4) * 4
        """Bytes in a row."""

    def write(self, rows: Tensor) -> Tensor:
        """(R, numel) numbers as (R, row_bytes) uint8.

        Raises:
            ShapeError: the rows are not as long as the parameters.
        """
        message = rows.new_empty(rows.shape[0], self.row_bytes, dtype=torch.uint8)
        message[:, self._end :] = 0  # the message depends on the numbers alone
        codes, scales = self._parts(message)
        quantize_into(rows, codes, scales, self.code, self.numels)
        return message

    def read_into(self, message: Tensor, out: Tensor) -> None:
        """(R, row_bytes) as numbers into out (R, numel); (P, R, row_bytes): the sum over P.

        Raises:
            ShapeError: message and out disagree.
        """
        if message.dim() == 2:
            message = message.unsqueeze(0)
        codes, scales = self._parts(message)
        dequantize_into(codes, scales, out, self.code, self.numels)

    def _parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of a message, sharing its memory."""
        scales = message[..., : self._scale_bytes].view(self.code.scale_dtype)
        return message[..., self._scale_bytes : self._end], scales


def shard_numels(parameters: Sequence[nn.Parameter], ranks: int) -> tuple[int, ...]:
    """Numbers of each parameter in one rank's share, padding included, by FSDP2's rule: the rows
    are divided evenly, rounded up."""
    return tuple(-(-p.shape[0] // ranks) * p.shape[1:].numel() for p in parameters)


@torch.no_grad()
def through_codes(model: nn.Module, ranks: int) -> None:
    """Round whole weights as `QuantizedAllGather` from `ranks` pieces would; in place. Every rank's
    piece of every parameter starts a new block."""
    for parameter in model.parameters():
        if not parameter.is_floating_point() or parameter.dim() == 0 or not parameter.numel():
            continue
        (numel,) = shard_numels([parameter], ranks)
        rows = parameter.new_zeros(ranks * numel)
        rows[: parameter.numel()] = parameter.detach().reshape(-1)
        message = Message(INT8, [numel])
        read = torch.empty_like(rows.view(ranks, numel))
        message.read_into(message.write(rows.view(ranks, numel)), read)
        parameter.data.copy_(read.view(-1)[: parameter.numel()].view_as(parameter))


def unit_parameters(unit: nn.Module) -> list[nn.Parameter]:
    """The parameters that FSDP2 gathers with a module, in its order: children's before their
    parent's, each once, without those of units inside. Units may be split already."""
    return list(dict.fromkeys(_owned(unit, set())))


def _owned(module: nn.Module, visited: set[nn.Module]) -> Iterator[nn.Parameter]:
    visited.add(module)
    for child in module.children():
        if child not in visited and not isinstance(child, FSDPModule):
            yield from _owned(child, visited)
    yield from module.parameters(recurse=False)
