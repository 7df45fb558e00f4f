"""The pool loses no block, the scheduler shares and waits as it says, whatever comes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.config.schema import SamplingConfig
from tandem.errors import GenerationError
from tandem.generation import blocks as module
from tandem.generation.blocks import (
    BlockPool,
    affordable_blocks,
    available_bytes,
    blocks_for,
    blocks_needed,
    blocks_wanted,
    free_bytes,
)
from tandem.generation.prefixes import PrefixPool
from tandem.generation.request import Request
from tandem.generation.sampler import Sampler
from tandem.generation.scheduler import Scheduler
from tandem.ops.attention_context import LayerShape

SAMPLER = Sampler(SamplingConfig(), (2,), torch.device("cpu"), 99)
CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 7), max_size=60))
def test_a_block_is_free_when_nobody_holds_it(moves: list[int]) -> None:
    pool = BlockPool(10)
    held: list[list[int]] = []
    for move in moves:
        if move < 4 and pool.num_free >= move:
            held.append(pool.take(move))
        elif move == 4 and held:
            pool.share(held[0])
            held.append(list(held[0]))
        elif held:
            pool.release(held.pop(move % len(held)))
        holders = Counter(block for blocks in held for block in blocks)
        assert pool.num_free == 10 - len(holders)
    for blocks in held:
        pool.release(blocks)
    assert sorted(pool.take(10)) == list(range(10))


def requests_of(prompt: int, limit: int, samples: int) -> list[Request]:
    return [Request(i, (5,) * prompt, i, SAMPLER, limit) for i in range(samples)]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 4)),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 12),
    st.integers(1, 6),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_everything_runs_in_time_and_nothing_is_shared_that_is_written(
    groups: list[tuple[int, int, int]], spare: int, slots: int, refill: int, random: object
) -> None:
    least = max(blocks_needed(prompt, limit, samples) for prompt, limit, samples in groups)
    pool = PrefixPool(least + spare)
    scheduler = Scheduler(pool, slots, refill=refill)
    everyone = []
    for group in groups:
        requests = requests_of(*group)
        everyone += requests
        scheduler.submit(requests)
    live: list[Request] = []
    ran: list[Request] = []
    for _ in range(1000):
        entering = scheduler.admit(len(live))
        if entering is not None:
            live += [entry.request for entry in entering.entries]
            ran += [entry.request for entry in entering.entries]
            copies = [entry.copy for entry in entering.entries if entry.copy is not None]
            assert not {source for source, _ in copies} & {target for _, target in copies}
        assert len(live) <= slots
        assert live or not scheduler.num_waiting  # never stuck
        if not live:
            break
        for request in live:
            assert len(request.blocks) == blocks_for(len(request.prompt) + request.limit)
        whole = Counter(b for r in live for b in r.blocks[: len(r.prompt) // 16])
        own = Counter(b for r in live for b in r.blocks[len(r.prompt) // 16 :])
        assert not own or max(own.values()) == 1
        assert not set(own) & set(whole)
        gone = live.pop(random.randrange(len(live)))  # type: ignore[attr-defined]
        scheduler.leave(gone)
    assert ran == everyone  # first come, first served
    assert pool.num_free == pool.num_blocks


def test_samples_share_the_blocks_that_the_prompt_fills() -> None:
    pool = PrefixPool(100)
    scheduler = Scheduler(pool, 8, refill=1)
    scheduler.submit(requests_of(40, 10, 3))
    entering = scheduler.admit(0)
    assert entering is not None
    assert len(entering.prompts) == 1
    tables = [entry.request.blocks for entry in entering.entries]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    last = tables[2][2]  # the prompt's own third block
    copies = [entry.copy for entry in entering.entries]
    assert copies == [(last, tables[0][2]), (last, tables[1][2]), None]
    assert 100 - pool.num_free == 2 + 3 * 2


def test_a_request_in_the_queue_can_be_withdrawn_at_any_time() -> None:
    pool = PrefixPool(10)
    scheduler = Scheduler(pool, 1, refill=1)
    first, second = requests_of(20, 10, 2)
    scheduler.submit([first, second])
    assert scheduler.admit(0) is not None
    group = scheduler.withdraw(second)
    assert group is not None  # the first needs what its prompt leaves
    scheduler.leave(first)
    assert scheduler.num_waiting == 0
    assert pool.num_free == 8
    scheduler.end(group)
    assert pool.num_free == 10
    (third,) = requests_of(20, 10, 1)
    scheduler.submit([third])
    assert scheduler.withdraw(third) is None  # it had none
    assert pool.num_free == 10


def test_a_request_larger_than_the_memory_is_refused_with_the_numbers() -> None:
    scheduler = Scheduler(PrefixPool(3), 1, refill=1)
    scheduler.submit(requests_of(20, 28, 1))
    with pytest.raises(
        GenerationError, match=r"prompt of 20 tokens .* 4 blocks of 16; got 3 blocks"
    ):
        scheduler.submit(requests_of(20, 29, 1))


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 40),
    st.integers(1, 4), st.integers(1, 9),
)  # fmt: skip
def test_with_the_blocks_wanted_rows_never_wait_for_memory(
    prompts: list[int], limit: int, samples: int, slots: int
) -> None:
    wanted = blocks_wanted(prompts, limit, samples, slots)
    assert all(wanted >= blocks_needed(prompt, limit, samples) for prompt in prompts)
    scheduler = Scheduler(PrefixPool(wanted), slots, refill=1)
    for prompt in sorted(prompts, reverse=True):
        scheduler.submit(requests_of(prompt, limit, samples))
    entering = scheduler.admit(0)
    assert entering is not None
    assert len(entering.entries) == min(slots, samples * len(prompts))


def test_memory_is_what_is_needed_or_what_there_is() -> None:
    shapes = [LayerShape(2, 8, 8)] * 2  # 2 layers of 32 numbers: 4096 bytes a block
    sized = {"shapes": shapes, "dtype": torch.float32, "device": CPU}
    assert affordable_blocks(**sized, needed=7, largest=2, free=10**9) == 7  # type: ignore[arg-type]
    assert affordable_blocks(**sized, needed=7, largest=2, free=8192 * 5) == 5  # type: ignore[arg-type]
    with pytest.raises(GenerationError, match=r"8 MiB \(2100 blocks\); got 0 MiB, 50% of what"):
        affordable_blocks(**sized, needed=2100, largest=2100, free=10**6)  # type: ignore[arg-type]
    assert 2**20 < free_bytes(CPU) < 2**50


@pytest.mark.parametrize(
    ("limit", "used", "name"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_container_gives_back_what_it_holds_of_files(
    limit: str, used: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    monkeypatch.setattr(module, "_machine_bytes", lambda mapped: 900)
    monkeypatch.setattr(module, "_mapped_bytes", lambda: 0)
    assert available_bytes() == 900
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    (tmp_path / limit).write_text("500\n")
    (tmp_path / used).write_text("450\n")
    assert available_bytes() == 50
    stat = (tmp_path / limit).with_name("memory.stat")
    stat.write_text(f"anon 90\nfile 360\n{name} 300\nworkingset_{name} 7\n")
    assert available_bytes() == 350
    monkeypatch.setattr(module, "_mapped_bytes", lambda: 120)  # of those files, still in use
    assert available_bytes() == 230
    monkeypatch.setattr(module, "_mapped_bytes", lambda: 800)  # others, which are used more
    assert available_bytes() == 50
    (tmp_path / used).write_text("900\n")  # beyond the limit for a moment
    assert available_bytes() == 0
    (tmp_path / limit).write_text("max\n")
    assert available_bytes() == 900


def test_weights_that_are_read_from_their_file_are_not_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PROC", tmp_path)
    monkeypatch.setattr(module, "_CGROUP", tmp_path / "none")
    assert available_bytes() > 2**20, "where the system does not say"
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  7000 kB\n")
    assert available_bytes() == 7000 * 1024
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text("Name:\tpython\u00e9\nRssFile:\t    2500 kB\n", "utf-8")
    assert available_bytes() == 4500 * 1024
