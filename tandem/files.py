"""Files written atomically and synced: on the disk when the call returns, even after a power
cut."""

from __future__ import annotations

import difflib
import errno
import fcntl
import glob
import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_READERS = 8
_SETTLED_SECONDS = 2.0
_known: dict[tuple[int, ...], str] = {}


def write_new(path: Path, content: bytes) -> None:
    """Write a file that must not exist yet, synced.

    Raises:
        OSError: the disk refuses.
    """
    with path.open("xb", buffering=0) as file, named(path):
        write_all(file, memoryview(content))
        os.fsync(file.fileno())


def read(path: Path) -> bytes:
    """A file's content.

    Raises:
        OSError: it cannot be read; it names the file.
    """
    with named(path):
        return path.read_bytes()


def append(path: Path, content: bytes | memoryview) -> None:
    """Append `content` to a file, made if missing; not synced.

    Raises:
        OSError: the disk refuses; a part may be written.
    """
    with path.open("ab", buffering=0) as file:
        write_all(file, memoryview(content))


def replace(path: Path, content: bytes) -> None:
    """Replace `path` by `content`, atomically and synced.

    Raises:
        OSError: the disk refuses; the old file is kept.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with named(path):  # not by the name that nobody has chosen
        try:
            aside.unlink(missing_ok=True)
            write_new(aside, content)
            os.replace(aside, path)
        except OSError:
            with suppress(OSError):  # a read-only file system refuses this, too
                aside.unlink(missing_ok=True)
            raise
    sync(path.parent)


def remove_left(folder: Path, suffixes: Collection[str], name: str = "") -> None:
    """Remove what processes that are gone were writing in `folder` when they were killed within
    `replace`: files of these suffixes, or of them the one of this name."""
    for left in folder.glob(f".{glob.escape(name) or '*'}.*"):
        process, is_ours = left.suffix[1:], Path(left.stem).suffix in suffixes
        if is_ours and process.isdecimal() and not _is_running(int(process)):
            with suppress(OSError):  # it is small, and in nobody's way
                left.unlink()


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's, or no process's number
        return True
    return True


def lock(path: Path, *, inherited: bool = False) -> BinaryIO | None:
    """Lock `path` for this process, not for those it forks, until the process ends.

    Args:
        inherited: also for the processes that are given the open file, until all have ended.
    Returns:
        the open file that holds the lock; None if another process holds it.
    Raises:
        OSError: the file cannot be made.
    """
    file = path.open("ab", buffering=0)
    try:
        (fcntl.flock if inherited else fcntl.lockf)(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.close()
            return None
        # The file system has no locks, so nobody else holds one.
    return file


def sync(path: Path) -> None:
    """Sync a file, or a folder's list of names, to the disk.

    Raises:
        OSError: the disk refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with named(path):
            os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync folders and do not need to.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hex."""
    with path.open("rb") as file, named(path):
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_once(path: Path) -> str:
    """As `sha256`, but a file that has not changed since this process read it is not read again: a
    model is hashed to verify it, and to record what a run was made from."""
    found = path.stat()
    key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    if key in _known:
        return _known[key]
    digest = sha256(path)
    # A file just written may change again within one tick of the file system's clock.
    if time.time() - max(found.st_mtime, found.st_ctime) > _SETTLED_SECONDS:
        _known[key] = digest
    return digest


def at_once(read: Callable[[T], R], files: Sequence[T]) -> list[R]:
    """`read` of each file, in threads: reading and hashing do not hold the GIL. Raises what `read`
    raises first."""
    if len(files) < 2:
        return [read(file) for file in files]
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as threads:
        return list(threads.map(read, files))


def cache_folder() -> Path:
    """Where what was built or measured on this machine is kept.

    Raises:
        OSError: nothing says where: the user has no home folder, as in some containers.
    """
    chosen = os.environ.get("TANDEM_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"
    except RuntimeError:
        raise OSError("this user has no home folder for a cache; set TANDEM_CACHE") from None


def way_out(error: OSError) -> str:
    """What to do where a disk refuses a file."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return "Free some space" if is_full else "Make it writable"


def existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    while not path.exists():
        path = path.parent
    return path


def folder_near(path: str | Path) -> str:
    """The folder beside one that is not there whose name is nearest to its; empty if none is."""
    return _near(Path(path), Path.is_dir, cutoff=0.6)


def file_near(path: Path) -> str:
    """The same of a file or folder, with a name nearer than that."""
    return _near(path, lambda beside: True, cutoff=0.8)


def _near(path: Path, fits: Callable[[Path], bool], cutoff: float) -> str:
    try:
        beside = [inner.name for inner in path.parent.iterdir() if fits(inner)]
    except (OSError, ValueError):  # no such parent, or one that cannot be read
        return ""
    near = difflib.get_close_matches(path.name, beside, 1, cutoff)
    return str(path.parent / near[0]) if near else ""


def not_a_run(folder: str) -> str:
    """What to say of a folder that is no run's, with the one beside it that may be meant; or of a
    run's on a node that is not its first."""
    if os.path.exists(os.path.join(folder, "command.txt")):
        return (
            f"{folder} must be a run's folder with config.yaml; it has none. Where nodes share no "
            "file system, the folder of the run's first node has it, the metrics and the report: "
            "use that, or copy its files here."
        )
    near = "" if os.path.exists(folder) else folder_near(folder)
    meant = f" Did you mean {near}?" if near else ""
    return f"{folder} must be a run's folder (with config.yaml); it is not.{meant}"


def write_all(file: BinaryIO, content: memoryview) -> None:
    """Write everything: a raw file may take less at a time (2 GiB on Linux).

    Raises:
        OSError: the disk refuses; it names the file.
    """
    with named(file.name):
        while content.nbytes:
            content = content[file.write(content) :]


@contextmanager
def named(path: Path | str) -> Iterator[None]:
    """Errors inside get the file's name, which those of writes and syncs lack."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
