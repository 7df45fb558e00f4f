"""Which rank is to blame, from how all ended."""

from __future__ import annotations

from pathlib import Path

from tandem.launch.failure import Failure
from tandem.launch.failure_report import Ending, Verdict, judge, last_line


def ending(rank: int, code: int | None, failure: Failure | None = None, seen: float = 9) -> Ending:
    log = Path(f"/nowhere/rank-{rank}.log")
    return Ending(rank=rank, host="h", log=log, log_start=0, code=code, failure=failure, seen=seen)


def test_the_first_that_failed_by_itself_is_to_blame() -> None:
    lost = Failure("lost", "rank 0 waited in all_reduce for rank 1", 2, time=1.0)
    crash = Failure("crash", "ValueError: boom", 1, time=3.0)
    verdict = judge([ending(0, 2, lost), ending(1, 1, crash), ending(2, None)])
    assert verdict.line == "rank 1 on h: ValueError: boom. Log: /nowhere/rank-1.log"
    assert (verdict.code, verdict.is_certain, verdict.can_retry) == (1, True, True)
    verdict = judge([ending(0, 2, lost), ending(1, None)])
    assert verdict.line.startswith("rank 0 waited in all_reduce for rank 1. Log: ")
    assert (verdict.code, verdict.is_certain) == (2, False)
    # A death by a signal is noticed a little after what it causes.
    verdict = judge([ending(0, 1, crash, seen=3.1), ending(1, -9, seen=3.2)], {1: "f.py:3 (g)"})
    assert verdict.line.startswith("rank 1 on h was killed by SIGKILL (out of memory, or by hand)")
    assert "; it was last in f.py:3 (g). Log: " in verdict.line
    assert verdict.code == 137
    assert Verdict.from_json(verdict.to_json()) == verdict


def test_an_error_that_all_share_is_shown_without_a_rank_and_never_tried_again() -> None:
    error = Failure("error", "model 'x' must be a folder", 2, time=1.0)
    verdict = judge([ending(0, 2, error), ending(1, 2, error)])
    assert (verdict.line, verdict.code) == ("model 'x' must be a folder", 2)
    assert not verdict.can_retry
    verdict = judge([ending(0, 0), ending(1, 2, error)])
    assert verdict.line == "rank 1 on h: model 'x' must be a folder"


def test_a_rank_that_was_told_to_end_is_not_the_cause() -> None:
    """It ends before it could say so, and both ends are noticed together or in the other order."""
    for seen in (3.2, 3.1):
        verdict = judge([ending(0, -15, seen=seen), ending(1, -9, seen=3.2)])
        assert verdict.code == 137
        assert "rank 1 on h was killed by SIGKILL" in verdict.line
    assert judge([ending(0, -15), ending(1, None)]).code == 143


def test_an_aborted_rank_is_shown_with_whom_it_waited_for() -> None:
    verdict = judge([ending(0, -6), ending(1, None)], {}, ["rank 1, which is silent"])
    assert "rank 0 on h was killed by SIGABRT, and waited for rank 1, which is" in verdict.line


def test_last_words_are_quoted_safely(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"before\n\x1b[31mred \xff words\n\n")
    assert last_line(log) == "\\x1b[31mred \ufffd words"
    assert last_line(log, start=log.stat().st_size) == ""
    assert last_line(tmp_path / "none") == ""


def test_ranks_that_a_signal_stopped_say_how_far_they_came() -> None:
    said = "stopped by SIGTERM after ppo step 21, which is saved. The same command continues"
    stopped = Failure("stopped", said, 143, time=1.0)
    verdict = judge([ending(0, 143, stopped), ending(1, 143, stopped)])
    assert (verdict.line, verdict.code, verdict.can_retry) == (said, 143, False)
    verdict = judge([ending(0, 130, Failure("stopped", "stopped", 130, time=1.0)), ending(1, None)])
    assert (verdict.line, verdict.code) == ("rank 0 was stopped", 130)
