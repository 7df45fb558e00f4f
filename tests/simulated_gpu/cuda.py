"""`torch.cuda` over the simulated device: what Tandem and the libraries it uses ask of it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

MEMORY = 2**33
NUMBER = int(os.environ.get("LOCAL_RANK", "0"))
COUNT = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SIMULATED_GPUS", "1")))
NAME = "simulated GPU"
_OPS = torch.ops.simulated_gpu


class Event:
    """Of work that is done when it is asked for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Stream:
    """A name under which work is done at once."""

    _last = -1

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        Stream._last += 1
        self.stream_id, self.device = Stream._last, torch.device("cuda", NUMBER)

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return CUDAGraph.recording is not None

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


_default = Stream()
_of_thread = threading.local()


def current_stream(device: Any = None) -> Stream:
    return getattr(_of_thread, "stream", _default)


@contextmanager
def stream(wanted: Stream | None) -> Iterator[None]:
    before = current_stream()
    _of_thread.stream = wanted or before
    try:
        yield
    finally:
        _of_thread.stream = before


class CUDAGraph:
    """Operations and launches of Triton's, run again in their order into the same tensors.

    Attributes:
        recording: the graph that is being recorded, if one is.
    """

    recording: CUDAGraph | None = None

    def __init__(self, keep_graph: bool = False) -> None:
        self._graph: int | None = None
        self._length = 0
        self._launches: list[tuple[int, Callable[[], None]]] = []

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if current_stream() is _default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self._graph = _OPS.begin_recording()
        CUDAGraph.recording = self

    def capture_end(self) -> None:
        self._length = _OPS.recorded()
        _OPS.end_recording()
        CUDAGraph.recording = None

    def launched(self, work: Callable[[], None]) -> None:
        """Something that is no operation of torch's was run."""
        self._launches.append((_OPS.recorded(), work))

    def replay(self) -> None:
        done = 0
        for place, work in self._launches:
            _OPS.replay(self._graph, done, place)
            work()
            done = place
        _OPS.replay(self._graph, done, self._length)

    def reset(self) -> None:
        if self._graph is not None:
            _OPS.drop_recording(self._graph)
        self._graph, self._launches = None, []

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.reset()


def install() -> None:
    """From now on torch has one CUDA device."""
    mode: list[Any] = [0]
    generator = torch.Generator()

    def refuse_waits(wanted: Any) -> None:
        mode[0] = wanted
        _OPS.refuse_waits(wanted in ("error", 2))

    card = SimpleNamespace(
        name=NAME, total_memory=MEMORY, major=9, minor=0, multi_processor_count=132, gcnArchName=""
    )
    stand_ins: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": CUDAGraph,
        "_lazy_init": lambda: None,
        "_is_compiled": lambda: True,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: COUNT,
        "current_device": lambda: NUMBER,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: _OPS.give_back(),
        "mem_get_info": lambda device=None: (MEMORY - _OPS.reserved_bytes(), MEMORY),
        "memory_allocated": lambda device=None: _OPS.live_bytes(),
        "memory_reserved": lambda device=None: _OPS.reserved_bytes(),
        "max_memory_allocated": lambda device=None: _OPS.peak_bytes(),
        "max_memory_reserved": lambda device=None: _OPS.peak_bytes(),
        "reset_peak_memory_stats": lambda device=None: _OPS.reset_peak(),
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: card,
        "set_sync_debug_mode": refuse_waits,
        "get_sync_debug_mode": lambda: mode[0],
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
        "current_stream": current_stream,
        "default_stream": lambda device=None: _default,
        "set_stream": lambda wanted: setattr(_of_thread, "stream", wanted),
        "stream": stream,
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: CUDAGraph.recording is not None,
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    for module in [torch.cuda.memory, torch.cuda.random]:
        module._lazy_init = stand_ins["_lazy_init"]
    patched: Any = torch
    patched.accelerator.current_stream = current_stream
    patched.accelerator.set_stream = lambda wanted: setattr(_of_thread, "stream", wanted)
    patched.accelerator.synchronize = lambda device=None: None
    patched._C._cuda_getCurrentRawStream = lambda device: 0
    patched._C._cuda_getDevice = lambda: NUMBER
    patched.Tensor.record_stream = lambda tensor, stream: None
    _storages()


def _storages() -> None:
    """Storages on the device are cloned and resized through tensors."""
    kind: Any = torch.UntypedStorage
    clone, resize = kind.clone, kind.resize_

    def bytes_of(storage: Any, count: int) -> torch.Tensor:
        with torch.no_grad():
            return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage, 0, (count,), (1,))

    def cloned(storage: Any) -> Any:
        if storage.device.type != "cuda":
            return clone(storage)
        return bytes_of(storage, storage.nbytes()).clone().untyped_storage()

    def resized(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size)
        _OPS.resize_storage(bytes_of(storage, 0), size)
        return storage

    kind.clone, kind.resize_ = cloned, resized
