"""CUDA graphs on a CPU: operations are put on a tape and run again on the very same tensors.

As on a GPU, a replay runs no Python of the function that was captured, so what it took for a
constant stays one; nothing holds a result before the first replay; and one replay spoils what
younger graphs of its pool have left behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors_in(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):  # of nearly every operation, a hundred thousand times
        return [tree]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Tape(TorchDispatchMode):
    """Every operation with its arguments and results, and the tensors that were made for them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: list[Tensor] = []

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {x.untyped_storage().data_ptr() for x in tensors_in((args, kwargs))}
        result = operation(*args, **(kwargs or {}))
        results = tensors_in(result)
        self.operations.append((operation, args, kwargs or {}, results))
        self.made += [x for x in results if x.untyped_storage().data_ptr() not in given]
        return result


class Graph:
    """In place of torch.cuda.CUDAGraph."""

    capturing = False
    by_pool: dict[int, list[Graph]] = {}  # noqa: RUF012 - emptied by `stand_in`

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.tape, self.younger = Tape(), Graph.by_pool.setdefault(id(pool), [])
        self.pool = pool  # or its id might be another's
        self.place = len(self.younger)
        self.younger.append(self)
        # Kernels are launched below autograd, and a tape is kept there.
        self._guard = torch._C._AutoDispatchBelowAutograd()
        self._guard.__enter__()
        self.tape.__enter__()
        Graph.capturing = True

    def capture_end(self) -> None:
        Graph.capturing = False
        self.tape.__exit__(None, None, None)
        self._guard.__exit__(None, None, None)
        self.spoil()

    def replay(self) -> None:
        for younger in self.younger[self.place + 1 :]:
            younger.spoil()
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for operation, args, kwargs, results in self.tape.operations:
                again = tensors_in(operation(*args, **kwargs))
                for kept, new in zip(results, again, strict=True):
                    if kept.data_ptr() != new.data_ptr():
                        kept.copy_(new)

    def spoil(self) -> None:
        with torch.no_grad():
            for made in self.tape.made:
                made.fill_(torch.nan if made.is_floating_point() else 77)


class Stream:
    """In place of torch.cuda.Stream; says what waited for what."""

    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Put the above in the place of CUDA's, for as long as the patch holds."""
    main = Stream()
    Graph.by_pool.clear()
    patch.setattr(torch.cuda, "CUDAGraph", Graph)
    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "current_stream", lambda: main)
    patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    patch.setattr(torch.cuda, "graph_pool_handle", object)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Graph.capturing)
