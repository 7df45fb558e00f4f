"""Files as a training run must write them: synced, whole, tensor by tensor.

What is written here is on the disk when the call returns, not in a cache that a power cut empties.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeVar

import torch
from torch import Tensor

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
T = TypeVar("T")
R = TypeVar("R")

_ALIGNMENT = 8
_READERS = 8
_SETTLED_SECONDS = 2.0
_known: dict[tuple[int, ...], str] = {}


@dataclass(frozen=True, slots=True)
class Spec:
    """What a tensor in a file is, before there is one."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        """That of a tensor; of one in pieces, the whole's."""
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

    Nothing but the tensor at hand is held, and other threads run meanwhile (safetensors' own
    writer takes all tensors at once and keeps Python's lock).

    Example:
        with TensorFile(path, {"weight": Spec(torch.float32, (4, 4))}) as file:
            file.put("weight", tensor)
    """

    def __init__(
        self, path: Path, specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Creates the file, which must not be there.

        Args:
            specs: the tensors that the file will hold.
            metadata: texts by name, kept in its header.
        Raises:
            OSError: the disk refuses.
        """
        assert sys.byteorder == "little", "safetensors holds little-endian numbers"
        # Wide types first, so that every tensor is aligned for its own.
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
        """Write one of the tensors, from whatever device it is on.

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
        """Bring the file to the disk.

        Raises:
            OSError: the disk refuses.
        """
        with self._file, _named(self._file.name):
            os.fsync(self._file.fileno())

    def _write(self, content: memoryview) -> None:
        try:
            _write(self._file, content)
        except OSError:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._file.close()
            return
        assert not self._missing, sorted(self._missing)
        self.close()


def write_new(path: Path, content: bytes) -> None:
    """Write a file that must not be there, synced.

    Raises:
        OSError: the disk refuses.
    """
    with path.open("xb", buffering=0) as file, _named(path):
        _write(file, memoryview(content))
        os.fsync(file.fileno())


def append(path: Path, content: bytes) -> None:
    """Write `content` at the end of a file, made if missing; not synced.

    Raises:
        OSError: the disk refuses; it may have taken a part.
    """
    with path.open("ab", buffering=0) as file:
        _write(file, memoryview(content))


def replace(path: Path, content: bytes) -> None:
    """Put `content` at `path`, synced: after any stop the old file is there or the new one.

    Raises:
        OSError: the disk refuses; the old file is there.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.unlink(missing_ok=True)
        write_new(aside, content)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def lock(path: Path) -> BinaryIO | None:
    """Hold `path` for this process, not for those it forks; it is free when that ends, in any way.

    Returns:
        what keeps the lock until it is closed; None if another process has it.
    Raises:
        OSError: the file cannot be made.
    """
    file = path.open("ab", buffering=0)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.close()
            return None
        # The file system knows no locks, so nobody else has one.
    return file


def sync(path: Path) -> None:
    """Bring a file, or a folder's list of names, to the disk.

    Raises:
        OSError: the disk refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with _named(path):
            os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not sync folders; their names are safe by themselves.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_once(path: Path) -> str:
    """As `sha256`, but a file that has not changed since it was read by this process is not read
    again: a model is hashed to verify it, and to write down what a run was made from."""
    found = path.stat()
    key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    if key in _known:
        return _known[key]
    digest = sha256(path)
    # A file written a moment ago may change again within one tick of the file system's clock.
    if time.time() - max(found.st_mtime, found.st_ctime) > _SETTLED_SECONDS:
        _known[key] = digest
    return digest


def at_once(read: Callable[[T], R], files: Sequence[T]) -> list[R]:
    """`read` of each, several files at a time: reading and hashing do not hold Python's lock.

    Raises:
        whatever `read` raises, for the first file where it does.
    """
    if len(files) < 2:
        return [read(file) for file in files]
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as threads:
        return list(threads.map(read, files))


def _write(file: BinaryIO, content: memoryview) -> None:
    """All of it: a raw file may take less at a time (2 GiB on Linux)."""
    with _named(file.name):
        while content.nbytes:
            content = content[file.write(content) :]


@contextmanager
def _named(path: Path | str) -> Iterator[None]:
    """An error within says of which file it is: that of a write or a sync has no name."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
