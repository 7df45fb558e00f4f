"""Safetensors files opened, and written tensor by tensor, synced."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from safetensors import safe_open
from torch import Tensor

from tandem.files import named, write_all
from tandem.text import first_line

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_ALIGNMENT = 8


def open_tensors(path: Path) -> Any:
    """A safetensors file to read from, as `safe_open` gives it.

    Raises:
        OSError: it cannot be opened.
        SafetensorError: it is damaged.
    """
    try:
        return safe_open(path, framework="pt")
    except RuntimeError as error:  # torch opens the file once more, and has no errors of the system
        raise OSError(errno.EIO, first_line(error), str(path)) from error


@dataclass(frozen=True, slots=True)
class Spec:
    """The type and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        """The spec of a tensor; for a sharded one, of the whole."""
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


class TensorFile:
    """A safetensors file that is written one tensor after another, in any order; a context manager.

    It holds only one tensor at a time, and other threads can run (safetensors' own writer takes all
    tensors at once and holds the GIL).

    Example:
        with TensorFile(path, {"weight": Spec(torch.float32, (4, 4))}) as file:
            file.put("weight", tensor)
    """

    def __init__(
        self, path: Path, specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Creates the file, which must not exist.

        Args:
            specs: the tensors that the file will hold.
            metadata: texts by name, for the header.
        Raises:
            OSError: the disk refuses.
        """
        assert sys.byteorder == "little", "safetensors is little-endian"
        # Wide types first, so that every tensor is aligned for its type.
        order = sorted(specs, key=lambda name: -specs[name].dtype.itemsize)
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        self._offsets: dict[str, int] = {}
        for name in order:
            end = offset + specs[name].num_bytes
            header[name] = {
                "dtype": _DTYPES[specs[name].dtype],
                "shape": list(specs[name].shape),
                "data_offsets": [offset, end],
            }
            self._offsets[name], offset = offset, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._specs = specs
        self._missing = set(specs)
        self._begin = 8 + len(text)
        self._file: BinaryIO = path.open("xb", buffering=0)
        self._write(memoryview(len(text).to_bytes(8, "little") + text))

    def put(self, name: str, tensor: Tensor) -> None:
        """Write one of the tensors, from any device.

        Raises:
            OSError: the disk refuses.
        """
        assert Spec.of(tensor) == self._specs[name], (name, Spec.of(tensor), self._specs[name])
        self._missing.remove(name)
        if tensor.numel() == 0:
            return
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._file.seek(self._begin + self._offsets[name])
        self._write(flat.numpy().data)

    def close(self) -> None:
        """Sync and close the file.

        Raises:
            OSError: the disk refuses.
        """
        with self._file, named(self._file.name):
            os.fsync(self._file.fileno())

    def _write(self, content: memoryview) -> None:
        try:
            write_all(self._file, content)
        except OSError:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._file.close()
            return
        assert not self._missing, sorted(self._missing)
        self.close()
