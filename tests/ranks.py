"""Several gloo processes as several ranks, forked from this one so that they start in a moment."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tandem.parallel.world import World


def on_ranks(
    size: int, function: Callable[..., Any], *arguments: Any, ranks_per_node: int = 0
) -> list[Any]:
    """Run `function(world, *arguments)` on `size` ranks; what each returned, in their order.

    Raises:
        AssertionError: a rank failed or hung; with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(
                target=_run,
                args=(rank, size, ranks_per_node or size, Path(folder), function, arguments),
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=240)
        hung = [process for process in processes if process.is_alive()]
        for process in hung:
            process.kill()
        results = []
        for rank in range(size):
            outcome = Path(folder) / f"rank-{rank}"
            assert outcome.exists(), f"rank {rank} of {size} left no result (hung or killed)"
            is_fine, value = pickle.loads(outcome.read_bytes())
            assert is_fine, f"rank {rank} of {size}:\n{value}"
            results.append(value)
        return results


def _run(
    rank: int,
    size: int,
    ranks_per_node: int,
    folder: Path,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
        )
        world = World(rank, size, ranks_per_node, torch.device("cpu"))
        outcome = (True, function(world, *arguments))
    except BaseException:  # the parent shows it
        outcome = (False, traceback.format_exc())
    aside = folder / f".rank-{rank}"
    aside.write_bytes(pickle.dumps(outcome))
    aside.rename(folder / f"rank-{rank}")
    # Not through the parent's exit handlers, pytest's among them.
    os._exit(0)
