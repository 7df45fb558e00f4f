"""Notes of where ranks are, and who is named when one is missing."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tandem.config.parallel import ParallelConfig
from tandem.errors import DataError, RankError
from tandem.parallel import watchdog as watching_module
from tandem.parallel.watchdog import (
    Note,
    Watch,
    blame,
    is_collective_failure,
    note,
    read_notes,
    watching,
)
from tandem.parallel.world import among_ranks

WAITING = Note(0, beat=9, state="lost", place="a.py:1 (f)", collective="all_reduce")


def later(old: Note, **changes: object) -> Note:
    """The same rank's note some beats after."""
    return replace(old, beat=old.beat + 2, written=old.written + 2, **changes)  # type: ignore[arg-type]


def test_a_rank_whose_notes_stop_is_named_with_its_last_place() -> None:
    still = Note(1, 5, place="b.py:7 (g)", phase="ppo step 3", written=time.time() - 31)
    alive = Note(2, 5, place="a.py:1 (f)", collective="all_reduce", written=time.time())
    (said,) = blame([WAITING, still, alive], [WAITING, still, later(alive)], WAITING)
    assert said == (
        "rank 1, which has not responded for 31 s and was last in b.py:7 (g) in ppo step 3"
    )


def test_a_rank_that_lives_elsewhere_is_named_and_one_that_waits_too_is_not() -> None:
    busy = Note(1, 5, place="b.py:7 (g)", since=100.0, written=110.0)
    waits = Note(2, 5, collective="all_reduce", place="a.py:1 (f)")
    lost = Note(3, 5, state="lost", collective="all_reduce")
    before = [WAITING, busy, waits, lost]
    after = [WAITING, later(busy), later(waits), lost]
    assert blame(before, after, WAITING) == ["rank 1, which for 12 s is in b.py:7 (g)"]


def test_what_failed_comes_before_what_is_silent() -> None:
    failed = Note(1, 5, state="failed", line="ValueError: boom")
    silent = Note(2, 5)
    notes = [WAITING, failed, silent, None]
    assert blame(notes, notes, WAITING) == ["rank 1, which failed: ValueError: boom"]
    notes = [WAITING, Note(1, 5, state="done"), None]
    assert blame(notes, notes, WAITING) == ["rank 2, which never began"]
    assert blame(notes[:2], notes[:2], WAITING) == ["rank 1, which had finished"]
    assert blame([WAITING], [WAITING], WAITING) == []


def test_ranks_that_waited_in_different_collectives_name_each_other() -> None:
    other = Note(1, 5, "lost", "ppo step 1", "b.py:7 (g)", "all_gather")
    alike = replace(WAITING, rank=2)
    notes = [WAITING, other, alike]
    assert blame(notes, notes, WAITING) == [
        "rank 1, which waited in all_gather, called at b.py:7 (g) in ppo step 1"
    ]
    assert blame(notes, [WAITING, other, None], WAITING) == ["rank 2, which never began"]


def test_notes_say_where_the_main_thread_is_and_the_phase() -> None:
    store = dist.HashStore()
    note("ppo step 12")
    try:
        watch = Watch(store, 1, 2, interval=0.05)
        time.sleep(0.3)
        nothing, seen = read_notes(store, 2)
    finally:
        note("")
    assert nothing is None
    assert seen is not None
    assert seen.beat > 2
    assert "test_watchdog.py:" in seen.place
    assert "test_notes_say_where_the_main_thread_is" in seen.where()
    assert seen.where().endswith("in ppo step 12")
    assert seen.collective == ""
    watch.end("done")
    assert [n and n.state for n in read_notes(store, 2)] == [None, "done"]


def test_the_failing_rank_names_the_silent_one_and_its_own_collective() -> None:
    store = dist.HashStore()
    watch = Watch(store, 0, 2, interval=0.05)
    other = Watch(store, 1, 2, interval=0.05)
    other._silence()  # as a stopped process is: its last note says running
    try:
        dist.all_reduce_coalesced(None, group=object())  # any error raised in torch.distributed
    except Exception as error:
        said = watch.explain(error)
    assert said.startswith("rank 0 waited in ")
    assert "(test_the_failing_rank_names_the_silent_one_and_its_own_collective)" in said
    assert "for rank 1, which has not responded for 0 s and was last in " in said


def test_a_store_that_is_gone_is_said() -> None:
    class Gone:
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("gone")

        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("gone")

    watch = Watch(Gone(), 0, 2, interval=0.05)
    assert "does not answer: its node is gone or stopped" in watch.explain(RuntimeError("gloo"))


def test_only_broken_exchanges_count_as_such() -> None:
    closed = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer"
    assert is_collective_failure(RuntimeError(closed))
    assert is_collective_failure(dist.DistBackendError("NCCL timeout"))
    assert not is_collective_failure(RuntimeError("shapes do not match"))
    assert not is_collective_failure(ValueError("gloo"))
    assert not is_collective_failure(DataError("no rows"))


def test_alone_nothing_is_watched() -> None:
    threads = threading.active_count()
    with watching(0, 1):
        assert threading.active_count() == threads


@pytest.mark.parametrize("is_exchange", [True, False])
def test_watching_turns_broken_exchanges_alone_into_a_rank_error(
    monkeypatch: pytest.MonkeyPatch, is_exchange: bool
) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(watching_module, "_store_of_the_ranks", lambda: store)
    kind: type[Exception] = RankError if is_exchange else ValueError
    with pytest.raises(kind) as caught, watching(0, 2, interval=0.02):
        raise RuntimeError("gloo: closed") if is_exchange else ValueError("boom")
    seen = read_notes(store, 2)[0]
    assert seen is not None
    if is_exchange:
        assert "for rank 1, which never began" in str(caught.value)
        assert seen.state == "lost"
    else:
        assert (seen.state, seen.line) == ("failed", "ValueError: boom")


def test_a_rank_that_does_not_come_to_the_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch alone names the rank that waited, as the cause, and a key of its store."""
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(kept.port),
        "RANK": "0",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    defaults = {"interval": 0.02}
    monkeypatch.setattr(watching.__wrapped__, "__kwdefaults__", defaults)  # type: ignore[attr-defined]
    settings = ParallelConfig(timeout_minutes=0.01)
    with (
        pytest.raises(RankError, match=r"^rank 0 waited in .* for rank 1, which never began$"),
        among_ranks(settings, torch.device("cpu")),
    ):
        pass
    assert not dist.is_initialized()
