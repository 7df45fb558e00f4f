"""The allocator keeps what is freed, uses it again whole or in parts, and gives it back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tandem.ops import native

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="Linux's memory, and /proc"
)

COUNT_FAULTS = """
import resource, sys, torch
from tandem.engine.allocator import keep_freed_memory
assert not int(sys.argv[1]) or keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(16_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""

HOLD_MEMORY = """
import os, threading, torch
import tandem.generation.blocks as blocks
from tandem.engine.allocator import give_back_if_scarce, give_back_memory, keep_freed_memory
from tandem.generation.blocks import free_bytes, kept_bytes
torch.set_num_threads(1)  # a fork would wait for the others
MEGABYTES = 2**18  # floats
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
old = torch.ones(8 * MEGABYTES)  # of the allocator before
assert keep_freed_memory() and keep_freed_memory()
del old
start = resident()

# Blocks of many sizes that come and go, among small ones that stay: holes are filled again.
kept, held, generator = [], [], torch.Generator().manual_seed(0)
for i in range(2000):
    size = int(torch.randint(100_000, 4 * MEGABYTES, (), generator=generator))
    block = torch.empty(size).fill_(float(i))
    held.append((block, float(i)))
    kept.append(torch.empty(300))
    if len(held) > 8:
        block, value = held.pop(int(torch.randint(8, (), generator=generator)))
        assert block[0] == value == block[-1] and bool((block == value).all())
        del block
print("mixed", resident() - start)
held.clear()

again = torch.empty(20 * MEGABYTES)  # larger than any: free neighbours have become one
again.fill_(1.0)
del again
cpu = torch.device("cpu")
kept = kept_bytes(cpu)
print("kept", kept >> 20)
blocks._number_in = lambda path: None  # no container's limit
blocks._machine_bytes = lambda mapped: 6 * kept
assert free_bytes(cpu) == 7 * kept
give_back_if_scarce(ranks=3)
assert kept_bytes(cpu) == kept
give_back_if_scarce(ranks=4)  # which keep more than half of what all can still get
assert kept_bytes(cpu) == 0 and free_bytes(cpu) == 6 * kept
again = torch.ones(20 * MEGABYTES)
give_back_memory()
print("in use", kept_bytes(cpu) >> 20)  # only what is free is counted, or given back
assert bool((again == 1).all())
del again
assert kept_bytes(cpu) >> 20 >= 19  # without a page that it shares with other blocks
give_back_memory()
print("given back", resident() - start)

# Grown and shrunk storages, NumPy's view, other threads, a fork.
grown = torch.ones(MEGABYTES)
grown.resize_(3 * MEGABYTES)
assert bool((grown[:MEGABYTES] == 1).all())
array = torch.full((MEGABYTES,), 3.0).numpy()
def work(number):
    for i in range(200):
        block = torch.full((50_000 + 1000 * i,), float(number))
        assert bool((block == number).all())
threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
for thread in threads:
    thread.start()
child = os.fork()
if child == 0:
    os._exit(0 if float(torch.full((MEGABYTES,), 2.0).sum()) == 2.0 * MEGABYTES else 1)
assert os.waitpid(child, 0)[1] == 0
for thread in threads:
    thread.join()
assert bool((array == 3.0).all())
"""

KV_AFTER_FRAGMENTS = """
import os, torch
import tandem.generation.blocks as blocks
from tandem.engine.allocator import give_back_if_scarce, keep_freed_memory
torch.set_num_threads(1)
assert keep_freed_memory()
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
MEBIBYTES, start, limit = 2**18, resident(), 400
blocks._number_in = lambda path: None
blocks._machine_bytes = lambda mapped: max(0, limit - resident() + start) << 20
freed, staying = [], []
for _ in range(15):
    freed.append(torch.ones(12 * MEBIBYTES))
    staying.append(torch.ones(MEBIBYTES // 4))
freed.clear()
give_back_if_scarce()
share = int(blocks.free_bytes(torch.device("cpu")) * blocks.CPU_SHARE)
kv = torch.ones(share // 4)  # larger than any hole
print(limit - resident() + start)
"""


def output(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_freed_blocks_are_used_again() -> None:
    counts = [int(output(COUNT_FAULTS, keep)) for keep in ("0", "1")]
    assert counts[1] < 0.8 * counts[0]


@pytest.mark.skipif(not native.available(), reason=native.why_not())
def test_memory_stays_near_what_is_in_use_and_is_given_back() -> None:
    lines = dict(line.rsplit(" ", 1) for line in output(HOLD_MEMORY).splitlines())
    # Nine blocks of up to 4 MiB and 3 MiB of small ones are in use at once.
    assert int(lines["mixed"]) < 80
    assert int(lines["given back"]) < 20
    assert 20 <= int(lines["kept"]) < 80
    assert int(lines["in use"]) < 20


@pytest.mark.skipif(not native.available(), reason=native.why_not())
def test_kv_memory_that_fits_into_no_hole_leaves_some_of_what_the_machine_has() -> None:
    assert int(output(KV_AFTER_FRAGMENTS)) > 400 // 5
