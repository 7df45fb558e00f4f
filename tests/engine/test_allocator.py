"""The allocator keeps what is freed: large blocks fault few of their pages again."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_freed_blocks_are_used_again() -> None:
    counts = [
        int(
            subprocess.run(
                [sys.executable, "-c", CODE, keep], capture_output=True, check=True, text=True
            ).stdout
        )
        for keep in ("0", "1")
    ]
    assert counts[1] < 0.8 * counts[0]
