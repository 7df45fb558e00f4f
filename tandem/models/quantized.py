"""A frozen weight as packed integers, which a forward unpacks, multiplies by and discards.

Nothing but the integers is kept: the backward unpacks them again for the gradient to the input.
One layer's weight is unpacked at a time; for up to 512 rows on a CPU only some rows of it.
Source: QLoRA, arXiv:2305.14314. Differs: scales are not quantized again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, distribute_tensor

from tandem.errors import ModelError
from tandem.models.stored import Product, StoredWeight
from tandem.ops import blockwise, dense, gpu
from tandem.ops.spans import Span, length, taken

if TYPE_CHECKING:
    from tandem.ops.adapted_gpu import Packed

_CODES = {"int8": blockwise.INT8, "nf4": blockwise.NF4}
KINDS = tuple(_CODES)
"""int8: 256 weights a scale, 1.016 bytes a weight. nf4: 64 a scale, 0.531 bytes."""
BLOCKS = {kind: code.block for kind, code in _CODES.items()}
"""How many weights of each kind have one scale."""

_MOST_ROWS = 512  # beyond them writing the weight out costs nothing beside the product
Rows = Callable[[int, int], Tensor]
Pieces = Callable[[Tensor], tuple[Tensor, int]]


class PackedParameter(nn.Parameter):
    """Integers of a quantized weight, which cannot be trained."""

    def requires_grad_(self, requires_grad: bool = True) -> PackedParameter:
        """As torch's, with a message that says what to do.

        Raises:
            ModelError: gradients are asked for.
        """
        if requires_grad:
            raise ModelError(
                "a quantized weight must stay frozen; got requires_grad=True. Train adapters on "
                "it (--lora.rank), or load the model without --frozen-weights."
            )
        return self


@dataclass(frozen=True, slots=True)
class Layout:
    """What packed integers mean."""

    kind: str
    shape: torch.Size

    def unpacked(self, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """A new tensor of `shape`: scale times code, rounded once to `dtype`."""
        code, count = self.code, self.shape.numel()
        floats = scales.view(code.scale_dtype)
        return blockwise.dequantize(packed, floats, count, code, dtype).view(self.shape)

    @property
    def code(self) -> blockwise.BlockCode:
        """How its numbers are written."""
        return _CODES[self.kind]

    def times(
        self, x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None
    ) -> Tensor | None:
        """`dense.linear` of x by the weight (out, in), some rows of it unpacked at a time; None
        where that is not faster, or not possible."""
        code = self.code
        if x.numel() > _MOST_ROWS * x.shape[-1] or not blockwise.takes(x, code):
            return None
        floats = scales.view(code.scale_dtype)
        return blockwise.linear(x, packed, floats, self.shape[0], code, bias)

    def times_few(self, x: Tensor, packed: Tensor, scales: Tensor) -> Tensor | None:
        """x by the weight (out, in), unpacked in a GPU's registers; None for too many rows."""
        code, rows = self.code, x.numel() // x.shape[-1]
        from tandem.ops import quantized_gpu  # imports Triton

        if not quantized_gpu.takes(rows, self.shape, self.kind, code.block):
            return None
        made = quantized_gpu.packed_linear(
            x.reshape(rows, -1), packed, scales.view(code.scale_dtype),
            blockwise.nf4_table(x.device), self.shape[0], quantized_gpu.KINDS.index(self.kind),
            code.block,
        )  # fmt: skip
        return made.view(*x.shape[:-1], self.shape[0])

    def on_gpu(self, packed: Tensor, scales: Tensor) -> Packed:
        """The weight as a GPU's kernel with adapters takes it."""
        from tandem.ops.adapted_gpu import Packed  # imports Triton
        from tandem.ops.quantized_gpu import KINDS

        code = self.code
        table = blockwise.nf4_table(packed.device)
        kind = KINDS.index(self.kind)
        return Packed(packed, scales.view(code.scale_dtype), table, self.shape, kind, code.block)

    def sizes(self) -> tuple[int, int]:
        """Bytes of the codes and of the scales."""
        code, runs = self.code, [self.shape.numel()]
        return code.num_bytes(runs), code.num_scales(runs) * code.scale_dtype.itemsize


class _PackedProduct(torch.autograd.Function):
    """product(x, W, bias), W unpacked here and again in the backward; only integers are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        packed: Tensor,
        scales: Tensor,
        layout: Layout,
        turned: bool,
        product: Product,
    ) -> Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.layout, ctx.turned, ctx.product = layout, turned, product
        if not turned and gpu.fuses(x):
            made = layout.times_few(x, packed, scales)
            if made is not None:
                return made if bias is None else made + bias
        if not turned and product is dense.linear:
            made = layout.times(x, packed, scales, bias)
            if made is not None:
                return made
        weight = layout.unpacked(packed, scales, x.dtype)
        return product(x, weight.t() if turned else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        packed, scales = ctx.saved_tensors
        for_x = for_bias = None
        if ctx.needs_input_grad[0]:
            weight = ctx.layout.unpacked(packed, scales, gradient.dtype)
            for_x = ctx.product(gradient, weight if ctx.turned else weight.t(), None)
        if ctx.needs_input_grad[1]:
            for_bias = gradient.flatten(0, -2).sum(0)
        return for_x, for_bias, None, None, None, None, None


class PackedWeight(StoredWeight):
    """A weight as integers.

    Attributes:
        packed: the codes of `ops.blockwise`, flat.
        scales: as bytes, so that no cast (`.to`, FSDP2's mixed precision) rounds them, and every
            backend of torch.distributed can send them.
        layout: what they mean.
        stays_packed: no copy of it is made for decoding, were there room for one.
    """

    stays_packed = False

    def __init__(self, weight: Tensor, kind: str) -> None:
        """Quantizes `weight` (any shape, finite), which is not changed.

        On the meta device the integers have no memory either; give them some and `fill` them.
        """
        super().__init__(weight.shape, weight.dtype)
        self.layout = Layout(kind, weight.shape)
        if weight.is_meta:
            sizes = self.layout.sizes()
            parts = [torch.empty(n, dtype=torch.uint8, device="meta") for n in sizes]
        else:
            packed, scales = blockwise.quantize(weight.detach().reshape(-1), _CODES[kind])
            parts = [packed, scales.view(torch.uint8)]
        self.packed = PackedParameter(parts[0], requires_grad=False)
        self.scales = PackedParameter(parts[1], requires_grad=False)

    @property
    def device(self) -> torch.device:
        """The device of the integers."""
        return self.packed.device

    @torch.no_grad()
    def fill(self, rows: Rows, pieces: Pieces) -> bool:
        """Read this rank's part of a weight row by row and quantize it.

        Args:
            rows: rows first to last of the weight, as floats.
            pieces: gives the part of a parameter that is on this rank, and its first element.
        Returns:
            whether every value that was read is finite.
        """
        code, count = self.layout.code, self.shape.numel()
        # How many weights one byte of the codes, or of the scales, covers.
        parts = [
            (self.packed, code.per_byte),
            (self.scales, code.block // code.scale_dtype.itemsize),
        ]
        here = [(*pieces(parameter), numbers) for parameter, numbers in parts]
        here = [part for part in here if part[0].numel()]
        if not here:
            return True
        # Whole blocks, because codes and scale depend on all values of a block.
        start = min(first * numbers for _, first, numbers in here) // code.block * code.block
        last = max((first + len(piece)) * numbers for piece, first, numbers in here)
        end = min(count, -(-last // code.block) * code.block)
        width = count // self.shape[0]
        top = start // width
        read = rows(top, -(-end // width))
        numbers = read.reshape(-1)[start - top * width : end - top * width]
        packed, scales = blockwise.quantize(numbers.to(here[0][0].device), code)
        made = {code.per_byte: packed, parts[1][1]: scales.view(torch.uint8)}
        for piece, first, numbers_a_byte in here:
            offset = first - start // numbers_a_byte
            piece.copy_(made[numbers_a_byte][offset : offset + len(piece)])
        return bool(torch.isfinite(read).all())

    @torch.no_grad()
    def part(self, dim: int, spans: Sequence[Span], whole: Callable[[Tensor], Tensor]) -> Self:
        """The integers of some rows or columns: a new weight, with the very codes and scales.

        Args:
            dim: 0 for rows, 1 for columns.
            whole: all of a parameter, which may be sharded; then all ranks take part.
        Raises:
            ModelError: a span would cut a block, whose numbers have one scale.
        """
        code, (rows, columns) = self.layout.code, self.shape
        apart = columns if dim == 0 else 1  # numbers from one index to the next
        edges = [edge * apart for span in spans for edge in span]
        edges += [columns] if dim == 1 else []
        if cut := [edge for edge in edges if edge % code.block]:
            raise ModelError(
                f"slices of {self.layout.kind} weights must be of whole blocks of {code.block}; "
                f"got a weight of {rows} x {columns} cut at number {cut[0]}. Use a smaller "
                "--inference-tp-size, or --frozen-weights of smaller blocks (nf4) or none."
            )
        shape = [rows, columns]
        shape[dim] = length(spans)
        made = type(self)(torch.empty(shape, dtype=self.dtype, device="meta"), self.layout.kind)
        for name, numbers in (
            ("packed", code.per_byte),
            ("scales", code.block // code.scale_dtype.itemsize),
        ):
            full = whole(getattr(self, name)).view(1 if dim == 0 else rows, -1)
            scaled = [(apart * first // numbers, apart * last // numbers) for first, last in spans]
            own = taken(full, 1, scaled).flatten()
            setattr(made, name, PackedParameter(own, requires_grad=False))
        return made

    def is_floating_point(self) -> bool:
        """False: it consists of integers."""
        return False

    def product(self, x: Tensor, bias: Tensor | None, *, turned: bool, product: Product) -> Tensor:
        """As the base class says, in x's dtype, with gradient to x (and bias), which `product`
        computes too."""
        cast = None if bias is None else bias.to(x.dtype)
        integers = self.packed, self.scales
        result: Tensor = _PackedProduct.apply(x, cast, *integers, self.layout, turned, product)
        return result

    @torch.no_grad()
    def dequantized(self) -> Tensor:
        """The dequantized weight: a new tensor in the weight's own dtype.

        If it is sharded, all ranks take part, and the result is sharded too.
        """
        if not isinstance(self.packed, DTensor):
            return self.layout.unpacked(self.packed, self.scales, self.dtype)
        assert isinstance(self.scales, DTensor)
        packed, scales = self.packed.full_tensor(), self.scales.full_tensor()
        weight = self.layout.unpacked(packed, scales, self.dtype)
        made = distribute_tensor(
            weight, self.packed.device_mesh, self.packed.placements, src_data_rank=None
        )
        return made.to(self.packed.device)  # the host's, if parameters are kept there
