"""Blocks of KV memory: which are free, who holds the others, and how many there is room for.

An answer takes all the blocks it can come to need when it begins (prompt and `max_new_tokens`), so
once begun it never waits and nothing has to be computed twice; until they are free it waits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from tandem.errors import GenerationError
from tandem.ops import native
from tandem.ops.attention_context import BLOCK_TOKENS, LayerShape

CPU_SHARE = 0.5
"""Of the memory that is free when generation begins, what KV memory may take on a CPU."""
GPU_SHARE = 0.9
"""The same on a GPU."""
_CGROUP, _PROC = Path("/sys/fs/cgroup"), Path("/proc")


def blocks_for(num_tokens: int) -> int:
    """Blocks that this many tokens fill or begin."""
    return -(-num_tokens // BLOCK_TOKENS)


def blocks_needed(prompt: int, limit: int, samples: int) -> int:
    """Blocks without which a prompt of this many tokens and one of its samples cannot run."""
    kept_for_others = samples > 1 and prompt % BLOCK_TOKENS > 0
    return blocks_for(prompt + limit) + kept_for_others


def blocks_wanted(prompts: Sequence[int], limit: int, samples: int, slots: int) -> int:
    """Blocks with which `slots` rows never wait for memory, the longest of the prompts first."""
    wanted = 0
    for length in sorted(prompts, reverse=True):
        rows = min(samples, slots)
        if rows == 0:
            break
        slots -= rows
        own = blocks_for(length + limit) - length // BLOCK_TOKENS
        wanted += blocks_needed(length, limit, samples) + (rows - 1) * own
    # A shorter prompt that ends inside a block may need one more than a longer one that does not.
    return max(wanted, most_needed(prompts, limit, samples))


def most_needed(prompts: Sequence[int], limit: int, samples: int) -> int:
    """Blocks without which some prompt could never run."""
    return max((blocks_needed(prompt, limit, samples) for prompt in prompts), default=0)


class BlockPool:
    """Numbers of blocks, each free or held by one or more sequences."""

    def __init__(self, num_blocks: int) -> None:
        """All of them free."""
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def holders(self, block: int) -> int:
        """How many sequences hold it."""
        return self._holders[block]

    def take(self, count: int) -> list[int]:
        """Hold `count` free blocks; the caller has asked `num_free` before."""
        assert count <= len(self._free)
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more sequence holds these held blocks."""
        for block in blocks:
            assert self._holders[block] > 0
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One sequence less holds these; a block that none holds is free."""
        for block in blocks:
            assert self._holders[block] > 0
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)


def affordable_blocks(
    shapes: Sequence[LayerShape],
    *,
    needed: int,
    largest: int,
    dtype: torch.dtype,
    device: torch.device,
    free: int | None = None,
    slots: int = 0,
) -> int:
    """How many blocks to allocate: what is needed, or what memory allows if that is less.

    Args:
        needed: blocks that would let every answer run at once.
        largest: blocks of the one that needs most; without them generation cannot go on.
        free: bytes that are free; measured if None.
        slots: sequences whose states are kept beside the blocks, by layers that have any.
    Raises:
        GenerationError: there is no room for the largest.
    """
    share = _share(device)
    block_bytes = sum(s.numbers_per_token for s in shapes) * BLOCK_TOKENS * dtype.itemsize
    room = int((free_bytes(device) if free is None else free) * share)
    allowed = max(0, room - slots * state_bytes(shapes, dtype)) // max(1, block_bytes)
    if allowed < largest:
        states = slots * state_bytes(shapes, dtype)
        beside = f" less {states >> 20} MiB for layers' states" if states else ""
        raise GenerationError(
            f"KV memory must hold the longest prompt and answer, {largest * block_bytes >> 20} MiB "
            f"({largest} blocks); got {allowed * block_bytes >> 20} MiB, {share:.0%} of what is "
            f"free{beside}. Lower sampling.max_new_tokens or dataset.max_prompt_tokens, or free "
            "memory."
        )
    return min(needed, allowed)


def state_bytes(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of the states that layers keep of one sequence, however long it is."""
    return sum(shape.state.bytes_per_sequence(dtype) for shape in shapes)


def affordable_slots(wanted: int, each: int, device: torch.device, free: int | None = None) -> int:
    """How many of the wanted sequences may keep states of `each` bytes: they take at most half of
    what KV memory may take, but there is one at least.

    Args:
        free: bytes that are free; measured if None.
    """
    if not each or wanted <= 1:
        return wanted
    room = (free_bytes(device) if free is None else free) * _share(device) / 2
    return max(1, min(wanted, int(room) // each))


def _share(device: torch.device) -> float:
    return CPU_SHARE if device.type == "cpu" else GPU_SHARE


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device, its container's limit respected; with those
    that this process has freed and keeps."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) + kept_bytes(device)
    return available_bytes() + kept_bytes(device)


def available_bytes() -> int:
    """Bytes that the system can still give to processes, its container's limit respected. What the
    container holds of files that it has read, such as models, it gives back when it must; but not
    what this process still uses of them (`_mapped_bytes`)."""
    mapped = _mapped_bytes()
    limits = [_machine_bytes(mapped)]
    for limit, used, read in (
        ("memory.max", "memory.current", ("memory.stat", "inactive_file")),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            ("memory/memory.stat", "total_inactive_file"),
        ),
    ):
        most, taken = _number_in(_CGROUP / limit), _number_in(_CGROUP / used)
        if most is not None and taken is not None:
            held = _number_of(read[1], _CGROUP / read[0])
            limits.append(max(0, most - taken + max(0, held - mapped)))
    return min(limits)


def kept_bytes(device: torch.device) -> int:
    """Bytes that this process has freed and keeps for what it allocates next."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if torch.cuda.is_available() or not native.available():
        return 0  # the C library keeps what it keeps
    return int(torch.ops.tandem.kept_memory())


def _machine_bytes(mapped: int) -> int:
    """What the system says is available, without the `mapped` bytes of this process; where it does
    not say, half of what is built in."""
    available = _number_of("MemAvailable:", _PROC / "meminfo") * 1024
    if available:
        return max(0, available - mapped)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _mapped_bytes() -> int:
    """Bytes of files in this process's memory: libraries, and weights that were not copied when
    they were loaded, as those of frozen models. The system counts them as available, but each
    forward would read them from the disk again."""
    return _number_of("RssFile:", _PROC / "self/status") * 1024


def _number_of(name: str, path: Path) -> int:
    """What a file of lines of names and numbers says; 0 where it does not."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    found = (line.split() for line in lines)
    return next((int(words[1]) for words in found if words[:1] == [name]), 0)


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such controller, or "max": no limit
        return None
