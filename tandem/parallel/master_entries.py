"""What an optimizer with masters keeps for each weight, cut into slices and buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tandem.config.parallel import OptimizerStates
from tandem.errors import CheckpointError, ModelError
from tandem.parallel.dtensor import local, own_rows
from tandem.parallel.moments import (
    MOMENTS,
    Packing,
    exact_moments,
    from_8bit,
    kind_for,
    row_size,
    zero_moments,
)


class Slice(NamedTuple):
    """Some elements of one parameter's piece, flattened."""

    entry: Entry
    where: slice
    master: Tensor
    step: Tensor


class Entry(Mapping[str, Tensor]):
    """What the optimizer keeps for one parameter; as a mapping, its state, split as it is.

    gradient: the float32 sum so far; None before the first. spare: host memory for the next one.
    kind: how the moments are kept. travels: gradient and weight go to where the master is and back,
    as the optimizer's lanes take them.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        device: torch.device,
        master: Tensor | None,
        kind: OptimizerStates,
        ordinal: int,
        *,
        is_own_master: bool,
    ) -> None:
        if not local(parameter).is_contiguous():
            raise ModelError(
                "weights must be contiguous for an optimizer with masters; got "
                f"strides {parameter.stride()}. Use --dtype fp32 without --offload optimizer."
            )
        self.parameter = parameter
        self.travels = True
        self.kind = kind_for(kind, parameter.shape)
        self.row_size = row_size(parameter.shape)
        # Made from the parameter, so that the state is split as it is.
        self.tensors = zero_moments(self.kind, parameter, device)
        # An existing master is not copied: there may be no room for two.
        source = parameter.detach() if master is None else master
        copies = master is None and not is_own_master
        self.tensors["master"] = source.to(device, torch.float32, copy=copies).contiguous()
        self.gradient: Tensor | None = None
        self.spare: Tensor | None = None
        self.slices: list[Slice] = []
        self._ordinal = ordinal
        self._first = own_rows(parameter)[1] * self.row_size

    def __getitem__(self, name: str) -> Tensor:
        return self.slices[0].step if name == "step" else self.tensors[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        own = local(value)
        if name not in self or own.shape != local(self[name]).shape:
            raise CheckpointError(
                f"AdamW's state must be {', '.join(self)}, of the shapes for its weight; "
                f"got {name} of shape {tuple(value.shape)}. Use another checkpoint."
            )
        for target in [s.step for s in self.slices] if name == "step" else [local(self[name])]:
            target.copy_(own)

    def __iter__(self) -> Iterator[str]:
        return iter(("step", *self.tensors))

    def __len__(self) -> int:
        return 1 + len(self.tensors)

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Copy this rank's pieces of a saved state, whose moments may be of another kind."""
        if "step" in saved:
            self["step"] = saved["step"]
        moments = {name: value for name, value in saved.items() if name != "step"}
        own = {name: local(self[name]).dtype for name in self if name not in ("step", "master")}
        if {name: value.dtype for name, value in moments.items()} == own:
            for name, value in moments.items():
                self[name] = value
            return
        exact = exact_moments(moments)
        for s in self.slices:
            self.pack(s, [exact[name].reshape(-1)[s.where] for name in MOMENTS])

    def unpack(self, s: Slice) -> list[Tensor]:
        """Both moments of a slice in float32, flat; in float32 they share memory with the state."""
        flat = {name: local(self[name]).view(-1)[s.where] for name in MOMENTS}
        if self.kind != "8bit":
            return [value.float() for value in flat.values()]
        return [
            from_8bit(name, codes.view(-1, self.row_size), self._scales(name, s)).view(-1)
            for name, codes in flat.items()
        ]

    def pack(self, s: Slice, moments: Sequence[Tensor]) -> None:
        """Round both moments of a slice into the state, by the bits of the slice's step."""
        targets = [local(self[name]).view(-1)[s.where] for name in MOMENTS]
        first = self._first + s.where.start
        packing = Packing(self.row_size, first, self._ordinal, s.step)
        if self.kind == "bf16":
            packing.to_bf16(moments, targets)
        elif self.kind == "8bit":
            packing.to_8bit(moments, targets, [self._scales(name, s) for name in MOMENTS])
        else:
            for target, values in zip(targets, moments, strict=True):
                target.copy_(values)

    def _scales(self, name: str, s: Slice) -> Tensor:
        rows = slice(s.where.start // self.row_size, s.where.stop // self.row_size)
        return local(self[f"{name}_scale"])[rows]


def bucketed(entries: Iterable[Entry], size: int) -> Iterator[list[Slice]]:
    """Cut entries into slices, and group these into buckets, of at most `size` elements; a row that
    is packed in blocks stays whole."""
    bucket: list[Slice] = []
    filled = 0
    for entry in entries:
        master = local(entry["master"]).view(-1)
        unit = entry.row_size if entry.kind == "8bit" else 1
        most = max(unit, size // unit * unit)
        # A rank with an empty piece counts its steps too.
        for begin in range(0, max(1, master.numel()), most):
            end = min(begin + most, master.numel())
            if bucket and filled + end - begin > size:
                yield bucket
                bucket, filled = [], 0
            where = slice(begin, end)
            step = torch.zeros((), device=master.device)
            bucket.append(Slice(entry, where, master[where], step))
            entry.slices.append(bucket[-1])
            filled += end - begin
    if bucket:
        yield bucket
