"""Files as a training run must write them: synced and whole.

What is written here is on the disk when the call returns, not in a cache that a power cut empties.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_READERS = 8
_SETTLED_SECONDS = 2.0
_known: dict[tuple[int, ...], str] = {}


def write_new(path: Path, content: bytes) -> None:
    """Write a file that must not be there, synced.

    Raises:
        OSError: the disk refuses.
    """
    with path.open("xb", buffering=0) as file, named(path):
        write_all(file, memoryview(content))
        os.fsync(file.fileno())


def append(path: Path, content: bytes) -> None:
    """Write `content` at the end of a file, made if missing; not synced.

    Raises:
        OSError: the disk refuses; it may have taken a part.
    """
    with path.open("ab", buffering=0) as file:
        write_all(file, memoryview(content))


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
        with named(path):
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


def write_all(file: BinaryIO, content: memoryview) -> None:
    """All of it: a raw file may take less at a time (2 GiB on Linux).

    Raises:
        OSError: the disk refuses; it names the file.
    """
    with named(file.name):
        while content.nbytes:
            content = content[file.write(content) :]


@contextmanager
def named(path: Path | str) -> Iterator[None]:
    """An error within says of which file it is: that of a write or a sync has no name."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
