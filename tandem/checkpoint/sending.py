"""A finished folder's files, sent from one rank to the next, where nodes share no file system."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tandem.errors import CheckpointError
from tandem.files import append

_CHUNK_BYTES = 2**26
"""Of a file that is sent to another node."""


def pass_on(
    folder: Path,
    aside: Path | None,
    files: Mapping[str, tuple[int, str]],
    chain: Sequence[int],
) -> bool:
    """Receive a folder's files from the rank before in a chain, write them, and send them on.

    Behind each chunk goes a byte: whether the first rank could read it. If not, all stop there.

    Args:
        aside: where to write them; None if this rank has them.
        files: bytes and SHA-256 by name.
    Returns:
        whether everything came.
    Raises:
        OSError, CheckpointError: this rank's disk refuses, or a file changed; where it is not the
            first, those behind it got everything.
    """
    place = chain.index(dist.get_rank())
    refused: Exception | None = None
    for name, (num_bytes, expected) in files.items():
        digest = hashlib.sha256()
        for offset in range(0, max(1, num_bytes), _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, num_bytes - offset)
            message = torch.zeros(size + 1, dtype=torch.uint8)
            chunk = message[:size].numpy().data
            if place > 0:
                dist.recv(message, chain[place - 1])
            else:
                try:
                    _read_into(chunk, folder / name, offset)
                    message[size] = 1
                except OSError as error:
                    refused = _unreadable(folder / name, error)
            if place + 1 < len(chain):
                dist.send(message, chain[place + 1])
            if not message[size]:
                if refused is not None:
                    raise refused
                return False
            digest.update(chunk)
            try:
                if aside is not None and refused is None:
                    (aside / name).parent.mkdir(parents=True, exist_ok=True)
                    append(aside / name, chunk)
            except OSError as error:
                refused = error
        if digest.hexdigest() != expected and refused is None:
            refused = CheckpointError(f"{folder / name} must have the SHA-256 in its manifest.")
    if refused is not None:
        raise refused
    return True


def _read_into(chunk: memoryview, path: Path, offset: int) -> None:
    with path.open("rb") as file:
        file.seek(offset)
        file.readinto(chunk)


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} on {socket.gethostname()} must be readable, to be copied to the nodes that lack "
        f"it; got: {error.strerror or error}. Repair that disk, or continue where others have it."
    )
