"""This machine as hardware to plan for: measured in about two seconds, and kept.

A product of each of three widths, a copy, small operations, a loopback connection, a file. Rates
are per CPU second of one core, so that other processes hardly disturb them; if they took much of
the machine all the same, the figures serve this once and are not kept.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem import processor
from tandem.errors import ConfigError
from tandem.files import cache_folder
from tandem.files import replace as replace_file
from tandem.predict.hardware import Hardware, as_values, hardware_of, read_hardware
from tandem.process import resident_bytes

MACHINE_FILE = "TANDEM_MACHINE"
"""The environment variable that names a file to use in place of a measurement."""
_DEVICES = Path("/dev")
WIDTHS = (64, 256, 768)
_ROWS = 512
_BUSY = 1.25
"""Wall seconds per CPU second from which the machine counts as busy."""
_PATIENCE = 3.0
"""Wall seconds that a measurement may take at most, per CPU second that it asks for."""
_FLOPS_SECONDS = 0.15
_COPY_BYTES, _DISK_BYTES, _SOCKET_BYTES = 2**26, 2**25, 2**24


def this_machine(print_line: Callable[[str], None] | None = None, device: str = "auto") -> Hardware:
    """This machine: the file that TANDEM_MACHINE names, the kept measurement, or a new one.

    Args:
        device: of the run (`device`): "cpu" leaves GPUs out.
        print_line: hears that it is being measured, and if it was too busy.
    Raises:
        ConfigError: the file of TANDEM_MACHINE cannot be used.
    """
    known = known_machine(device)
    if known is not None:
        return known
    say = print_line or (lambda line: None)
    say("measuring this machine ...")
    found, busy = measure_machine(device)
    if busy > _BUSY:
        say(
            f"this machine is busy (a second of work took {busy:.1f} s): these figures are not "
            "kept, and times are as if it were free"
        )
        return found
    _keep(found, device)
    return found


def known_machine(device: str = "auto") -> Hardware | None:
    """What is known of this machine without measuring; None if nothing is. `device` as for
    `this_machine`.

    Raises:
        ConfigError: the file of TANDEM_MACHINE cannot be used.
    """
    if named := os.environ.get(MACHINE_FILE):
        return read_hardware(Path(named))
    try:
        path = _kept_at(device)
        values = json.loads(path.read_text("utf-8"))
        kept = hardware_of(values, str(path))
        return replace(kept, memory=memory_bytes()) if kept.on_cpu else kept
    except (OSError, ValueError, ConfigError):  # none, or of another version: measured again
        return None


def measure_machine(device: str = "auto") -> tuple[Hardware, float]:
    """This machine measured now, and wall seconds per CPU second meanwhile (1: it was free).
    `device` as for `this_machine`."""
    import torch

    from tandem.ops import native
    from tandem.ops.rates import one_thread

    if device != "cpu" and torch.cuda.is_available():
        return _measured_gpu(), 1.0
    with one_thread():  # rates are a core's
        native.available()  # built before anything is timed
        wall, cpu = time.perf_counter(), time.process_time()
        products = {str(width): _product_rate(width, torch.float32) for width in WIDTHS}
        half = _product_rate(WIDTHS[-1], torch.bfloat16)
        bandwidth, call = _copy_rate(), _call_seconds()
        busy = (time.perf_counter() - wall) / max(1e-9, time.process_time() - cpu)
    found = Hardware(
        name=f"this machine ({processor.kind()})",
        kind="cpu",
        memory=memory_bytes(),
        flops={"fp32": products[str(WIDTHS[-1])], "bf16": half, "fp16": half},
        products=products,
        bandwidth=bandwidth,
        link=_loopback_rate(),
        network=1.25e9,
        disk=_disk_rate(),
        per_node=1 << 20,
        call=call,
        cores=torch.get_num_threads(),
        process=_process_bytes(),
        packs=native.available(),
    )
    return found, busy


def _measured_gpu() -> Hardware:
    """The GPU's own product and copy rates; what joins several is taken from PCIe 4."""
    import torch

    gpu = torch.cuda.get_device_properties(0)
    rates = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        x = torch.randn(8192, 8192, device="cuda", dtype=dtype)
        rates[name] = 2 * 8192**3 / _device_seconds(lambda x=x: x @ x)  # type: ignore[misc]
    source = torch.empty(2**28, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / _device_seconds(lambda: target.copy_(source))
    return Hardware(
        name=f"this machine ({gpu.name})",
        count=torch.cuda.device_count(),
        memory=float(gpu.total_memory),
        flops={"bf16": rates["bf16"], "fp16": rates["bf16"], "fp32": rates["fp32"]},
        bandwidth=copied,
        link=32e9,
        network=1.25e9,
        disk=_disk_rate(),
        per_node=torch.cuda.device_count(),
    )


def _device_seconds(work: Callable[[], object]) -> float:
    import torch

    for _ in range(3):
        work()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(10):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / 10


def _product_rate(width: int, dtype: Any) -> float:
    """FLOP per CPU second of Tandem's linear, forward, on (rows, width) by (width, width)."""
    import torch

    from tandem.ops import dense

    x, weight = torch.randn(_ROWS, width).to(dtype), torch.randn(width, width).to(dtype)
    with torch.no_grad():
        seconds = _quickest(lambda: dense.linear(x, weight), _FLOPS_SECONDS)
    return 2.0 * _ROWS * width * width / seconds


def _copy_rate() -> float:
    """Bytes per CPU second that a copy reads and writes."""
    import torch

    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2.0 * _COPY_BYTES / _quickest(lambda: target.copy_(source), 0.1)


def _call_seconds() -> float:
    """CPU seconds of one small tensor operation, Python's part included."""
    import torch

    x, y = torch.ones(8, 8), torch.ones(8, 8)

    def calls() -> None:
        for _ in range(200):
            torch.add(x, y)

    return _quickest(calls, 0.1) / 200


class _Until:
    """Ends after `seconds` of CPU time, or `_PATIENCE` times as many by the clock."""

    def __init__(self, seconds: float) -> None:
        self._cpu = time.process_time() + seconds
        self._wall = time.monotonic() + _PATIENCE * seconds

    def reached(self) -> bool:
        return time.process_time() >= self._cpu or time.monotonic() >= self._wall


def _quickest(work: Callable[[], object], seconds: float) -> float:
    """CPU seconds of the quickest of many runs of `work`, after a few to warm up; on a busy machine
    fewer, so that nobody waits long."""
    end, runs = _Until(seconds / 2), 0
    while not end.reached() or runs < 2:
        work()
        runs += 1
    best, end, runs = float("inf"), _Until(seconds), 0
    while not end.reached() or runs < 2:
        begin = time.process_time()
        work()
        best, runs = min(best, time.process_time() - begin), runs + 1
    return max(best, 1e-9)


def _loopback_rate() -> float:
    """Bytes per second through a connection to this machine itself."""
    left, right = socket.socketpair()
    block = bytes(2**20)

    def send() -> None:
        for _ in range(_SOCKET_BYTES // len(block)):
            left.sendall(block)
        left.close()

    begin = time.perf_counter()
    sender = threading.Thread(target=send)
    sender.start()
    while right.recv(2**20):
        pass
    sender.join()
    right.close()
    return _SOCKET_BYTES / (time.perf_counter() - begin)


def _disk_rate() -> float:
    """Bytes per second that are written and synced."""
    block = os.urandom(2**20) * (_DISK_BYTES // 2**20)
    try:
        with tempfile.NamedTemporaryFile(dir=".") as file:
            begin = time.perf_counter()
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return _DISK_BYTES / (time.perf_counter() - begin)
    except OSError:  # nothing can be written here
        return 5e8


def _process_bytes() -> float:
    """Resident bytes of this process with most of what a run imports, before any model; the rest
    is a constant (constants.yaml)."""
    import tandem.generation.generator
    import tandem.models.save  # noqa: F401

    return float(resident_bytes())


def memory_bytes() -> float:
    """Bytes of this machine's memory, or of its container's limit."""
    limits = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limits.append(float(Path("/sys/fs/cgroup", name).read_text("ascii")))
        except (OSError, ValueError):
            continue
    return min(limits)


def _kept_at(device: str) -> Path:
    """The file of this machine's measurement: by processor, cores and threads, and by the GPUs that
    this torch may use."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    gpus = "" if device == "cpu" else _gpus()
    key = f"1 {processor.kind()} {processor.num_cores()} {threads} {gpus}"
    return cache_folder() / f"machine-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def _gpus() -> str:
    """What tells GPUs, without loading torch; empty where torch has none to use."""
    torch = importlib.metadata.version("torch")
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = sorted(str(path) for path in _DEVICES.glob("nvidia[0-9]*"))
    found += [str(path) for name in ("kfd", "dxg") for path in _DEVICES.glob(name)]  # AMD's, WSL's
    if not found or torch.endswith("+cpu") or seen in ("", "-1"):
        return ""
    return f"{torch} {' '.join(found)} {seen or ''}"


def _keep(found: Hardware, device: str) -> None:
    try:
        path = _kept_at(device)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(as_values(found), indent=1).encode())
    except OSError:  # measured again the next time
        return
