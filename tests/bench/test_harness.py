"""Timing, turns, and processes of their own."""

from __future__ import annotations

import sys
import time

import pytest

from bench.harness import Cost, Stopwatch, alternate, in_child, peak_resident_bytes, ratio


def test_a_stopwatch_adds_wall_and_cpu_by_phase_and_starts_again() -> None:
    watch = Stopwatch()
    for _ in range(2):
        with watch("generate"):
            time.sleep(0.02)
    with watch("train"):
        end = time.process_time() + 0.03
        while time.process_time() < end:
            pass
    costs = watch.take()
    assert costs["generate"].wall >= 0.04
    assert costs["generate"].cpu < 0.02
    assert costs["train"].cpu >= 0.03
    assert costs["total"].cpu == costs["generate"].cpu + costs["train"].cpu
    assert watch.take() == {"total": Cost()}


def test_sides_take_turns_and_the_order_turns_round() -> None:
    ran: list[str] = []

    def step(name: str) -> dict[str, Cost]:
        ran.append(name)
        return {"total": Cost(wall=len(ran))}

    costs = alternate({"a": lambda: step("a"), "b": lambda: step("b")}, rounds=3)
    assert ran == ["a", "b", "b", "a", "a", "b"]
    assert [one["total"].wall for one in costs["b"]] == [2, 3, 6]


def test_ratio_is_of_each_round() -> None:
    found = ratio([4.0, 9.0, 20.0], [2.0, 3.0, 2.0])
    assert (found.median, found.least, found.most) == (3, 2, 10)
    assert str(found) == "3.00 (2.00-10.00)"


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_a_child_answers_and_its_peak_is_its_own() -> None:
    ballast = bytearray(300 * 2**20)
    here = peak_resident_bytes()
    there = in_child(peak_resident_bytes)
    assert len(ballast) < here
    assert 2**20 < there < here - 100 * 2**20


def test_a_child_that_dies_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="exit must answer from its process; got exit code 3"):
        in_child(sys.exit, 3)
