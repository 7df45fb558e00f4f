"""One decode step at fixed addresses, so that a GPU can replay it as a CUDA graph.

The tests record and replay on a CPU, with stand-ins for CUDA's stream and graph. None of it has run
on a GPU yet.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.generation.batch_state import Part
from tandem.generation.sampler import Draw, Sampler
from tandem.ops.attention_context import Decode, KVMemory
from tandem.text import first_line

BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Batch sizes for which steps are recorded; above them, multiples of the last."""
TABLE_BLOCKS = 16
"""Tables have this width times a power of two: each width is another recording."""
MAX_DRAWS = 8
"""Samplers that one step keeps recorded; clients of a server may use any number."""

Result = TypeVar("Result")


def bucket_of(rows: int) -> int:
    """The smallest recorded batch size for this many rows."""
    for bucket in BUCKETS:
        if rows <= bucket:
            return bucket
    return -(-rows // BUCKETS[-1]) * BUCKETS[-1]


def width_of(blocks: int) -> int:
    """The narrowest recorded table for this many blocks."""
    width = TABLE_BLOCKS
    while width < blocks:
        width *= 2
    return width


class NoWaiting(TorchDispatchMode):
    """Within, on this thread: RuntimeError if the host would have to wait for the device.

    It goes by the tags and devices of an operation, so that it also finds on a CPU what a CUDA
    graph cannot contain. Our own operations are assumed not to wait.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled: without this, torch would skip any that runs in here
        once, from then on and everywhere."""
        return True

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, or refuse it."""
        if _reads_back(operation, args, kwargs or {}):
            raise RuntimeError(f"{operation} needs numbers of the device on the host")
        result = operation(*args, **(kwargs or {}))
        if operation in _COPIES:
            tensors = [x for x in tree_leaves((args, result)) if isinstance(x, Tensor)]
            if len({x.device.type for x in tensors}) > 1:
                raise RuntimeError(f"{operation} copies between host and device")
        return result


_ATEN = torch.ops.aten
_COPIES = (_ATEN._to_copy.default, _ATEN.copy_.default)
_INDEXING = (_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default)


def _reads_back(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the result's size or the host's next step depends on values on the device."""
    if operation is _ATEN.repeat_interleave.Tensor:  # told its size, it waits for nothing
        return kwargs.get("output_size") is None
    if operation in _INDEXING:  # an index fixes the size, a mask does not
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    tags = operation.tags
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


class Recorder(Protocol):
    """Records functions that always do the same, into the same tensors."""

    refused: dict[Hashable, str]

    def recorded(
        self, function: Callable[[], Result], kind: Hashable, size: Hashable
    ) -> Callable[[], Result]:
        """A call that replays it; its results are valid until an older call of this recorder runs.

        A kind that cannot be recorded is added to `refused`, and the call is `function` itself.

        Args:
            kind, size: what `function` does, and for which shapes.
        """

    def forget(self) -> None:
        """All recordings are dropped: their memory is returned, and later ones share a new pool."""


class CudaRecorder:
    """Records functions into CUDA graphs that share one stream and one pool of memory.

    Attributes:
        refused: why a kind of function is not recorded. The first one is also a warning.
        num_recorded, seconds: recordings so far, and what they took, their warm-up included.
    """

    def __init__(self) -> None:
        self.refused: dict[Hashable, str] = {}
        self.num_recorded, self.seconds = 0, 0.0
        self._warm: set[tuple[Hashable, Hashable]] = set()
        self._stream = torch.cuda.Stream()
        self._pool: Any = None  # made with the first recording

    def recorded(
        self, function: Callable[[], Result], kind: Hashable, size: Hashable
    ) -> Callable[[], Result]:
        """As `Recorder` says; a new kind and size runs once before."""
        if kind in self.refused:
            return function
        begin = time.perf_counter()
        try:
            if (kind, size) not in self._warm:
                self._warm_up(function)
                self._warm.add((kind, size))
            replay = self._captured(function)
            self.num_recorded += 1
            return replay
        except RuntimeError as error:
            # The error of a failed capture hides the error that made it fail.
            cause = error.__context__ or error
            reason = first_line(cause)
            if not self.refused:
                warnings.warn(f"decoding without CUDA graphs, slower: {reason}", stacklevel=2)
            self.refused[kind] = reason
            return function
        finally:
            self.seconds += time.perf_counter() - begin

    def forget(self) -> None:
        """As `Recorder` says; the pool of dropped graphs may not be captured into again."""
        if self._pool is not None:
            self._pool = None
            torch.cuda.empty_cache()  # else it stays reserved until memory runs out

    def _warm_up(self, function: Callable[[], Any]) -> None:
        """Compile kernels and allocate workspaces, which a graph cannot contain.

        Operations that wait are found here, because after a failed capture torch's allocator
        behaves as if the capture went on.
        """
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), NoWaiting():
            function()
        current.wait_stream(self._stream)

    def _captured(self, function: Callable[[], Result]) -> Callable[[], Result]:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        # Not `torch.cuda.graph`, which returns all cached memory to the driver each time.
        with torch.cuda.stream(self._stream):
            # Other threads, such as one that copies a batch, may continue.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                graph.capture_end()

        def replay() -> Result:
            graph.replay()
            return result

        return replay


class DecodeStep:
    """The inputs of one batch size at fixed addresses, and what is recorded for them.

    Unused rows have one token each, which is written to the memory's last block and slot.
    """

    def __init__(self, rows: int, width: int, device: torch.device, recorder: Recorder) -> None:
        self.size = rows, width
        self.token_ids = torch.zeros(rows, dtype=torch.long, device=device)
        self.positions = torch.zeros_like(self.token_ids)
        self.tables = torch.zeros((rows, width), dtype=torch.int32, device=device)
        self.states: Tensor | None = None  # where no layer keeps any
        self._keys, self._numbers = torch.zeros_like(self.token_ids), self.positions.clone()
        self._used, self._scratch = rows, -1
        self._recorder = recorder
        self._forward: Callable[[], Tensor] | None = None
        self._draws: dict[Hashable, Callable[[], tuple[Tensor, Tensor]]] = {}
        self._logits = torch.empty(0)

    def decode(self, memory: KVMemory) -> Decode:
        """What the attention layers need to know."""
        return Decode(self.positions, self.tables, memory, self.states)

    def load(
        self,
        token_ids: Tensor,
        positions: Tensor,
        tables: Tensor,
        scratch: int,
        states: Tensor | None = None,
        scratch_slot: int = 0,
    ) -> None:
        """Copy n rows, (n,) and (n, W), into the inputs; `scratch` is the last block, and
        `scratch_slot` the last slot, of states (n,) if layers keep any."""
        n = len(token_ids)
        self.token_ids[:n].copy_(token_ids)
        self.positions[:n].copy_(positions)
        self.tables[:n, : tables.shape[1]].copy_(tables)
        if scratch != self._scratch:  # another KV memory
            self.tables[n:].fill_(scratch)
            self._scratch = scratch
        if n < self._used:
            self.tables[n : self._used].fill_(scratch)
            self.positions[n : self._used].fill_(0)
        self._used = n
        if states is not None:
            if self.states is None:
                self.states = torch.zeros_like(self.token_ids)
            self.states[:n].copy_(states)
            self.states[n:].fill_(scratch_slot)

    def run(self, forward: Callable[[], Tensor], memory: KVMemory) -> Tensor:
        """(rows, V) logits; `forward` is recorded the first time and replayed after that."""
        if self._forward is None:
            # What runs before it is recorded must not advance the states.
            states = [tensor for layer in memory.states for tensor in layer if tensor.numel()]
            before = [tensor[self.states] for tensor in states]
            self._forward = self._recorder.recorded(forward, "forward", self.size)
            for tensor, rows in zip(states, before, strict=True):
                tensor[self.states] = rows
        self._logits = self._forward()
        return self._logits

    def draw(self, sampler: Sampler, part: Part) -> Draw:
        """Sample for the rows in use from the logits of `run`, as `Sampler.draw` does.

        Samplers with equal rules share a recording, also in later sessions.
        """
        n = self._used
        self._keys[:n].copy_(part.keys)
        self._numbers[:n].copy_(part.token_numbers)

        def drawn() -> tuple[Tensor, Tensor]:
            draw = sampler.draw(self._logits, self._keys, self._numbers)
            return draw.tokens, torch.stack([draw.logprobs, draw.sampled_logprobs, draw.entropy])

        if sampler.rule not in self._draws:
            if len(self._draws) == MAX_DRAWS:
                del self._draws[next(iter(self._draws))]
            self._draws[sampler.rule] = self._recorder.recorded(drawn, sampler.rule, self.size)
        tokens, numbers = self._draws[sampler.rule]()
        logprobs, sampled_logprobs, entropy = numbers[:, :n].clone()
        return Draw(tokens[:n].clone(), logprobs, sampled_logprobs, entropy)
