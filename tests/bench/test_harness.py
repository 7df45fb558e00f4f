"""Timing, turns, and processes of their own."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import Any

import pytest

from bench.harness import (
    Cost,
    Side,
    Stopwatch,
    compare,
    fastest,
    in_child,
    measure,
    peak_bytes,
    ratio,
    ready,
)


class Named(Side):
    """A side that notes its runs, and takes what it is told to."""

    def __init__(self, name: str, ran: list[str], cpu: float = 0.0) -> None:
        self.watch, self.name, self.ran, self.cpu = Stopwatch(), name, ran, cpu

    def run(self, number: int) -> Any:
        self.ran.append(f"{self.name}{number}")
        end = time.process_time() + self.cpu
        with self.watch("train"):
            while time.process_time() < end:
                pass
        return number


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
    checked: list[tuple[str, int]] = []
    found = ready({"a": lambda: Named("a", ran), "b": lambda: Named("b", ran)}, required="ab")
    done, costs = measure(found.sides, 3, lambda name, result: checked.append((name, result)))
    assert ran == ["a0", "b0", "a1", "b1", "b2", "a2", "a3", "b3"]
    assert found.done == {"a": 0, "b": 0}
    assert done == {"a": [1, 2, 3], "b": [1, 2, 3]}
    assert checked[:3] == [("a", 1), ("b", 1), ("b", 2)]
    assert [list(one) for one in costs["b"]] == [["train", "total"]] * 3


def test_a_side_that_fails_is_absent_unless_it_is_required() -> None:
    def broken() -> Side:
        raise OSError("not here\nand more")

    found = ready({"a": lambda: Named("a", []), "b": broken}, required="a")
    assert found.sides.keys() == {"a"}
    assert found.absent == {"b": "OSError: not here"}
    with pytest.raises(OSError, match="not here"):
        ready({"b": broken}, required="b")


def test_the_fastest_takes_the_least_cpu_time() -> None:
    assert fastest(lambda n: Named("a", [], cpu=0.01 * abs(n - 20)), (18, 20, 22)) == 20


def test_rates_and_ratios_by_hand() -> None:
    times = {"tandem": [(1.0, 2.0), (2.0, 2.0)], "hf": [(4.0, 2.0), (4.0, 8.0)]}
    costs = {side: [{"total": Cost(*one)} for one in of] for side, of in times.items()}
    table = compare(costs, 60)
    assert table["tandem"]["tokens_per_wall_second"] == 45
    assert table["hf"]["cpu_seconds"] == 5
    assert asdict(table["hf"]["wall_ratio"]) == {"median": 3, "least": 2, "most": 4}
    assert asdict(table["hf"]["cpu_ratio"]) == {"median": 2.5, "least": 1, "most": 4}
    # Twice the tokens in the same time: half the cost.
    halved = compare(costs, {"tandem": [60, 60], "hf": [120, 120]})
    assert halved["hf"]["wall_ratio"].median == 1.5
    assert "wall_ratio" not in compare({"hf": costs["hf"]}, 60)["hf"]


def test_ratio_is_of_each_round() -> None:
    found = ratio([4.0, 9.0, 20.0], [2.0, 3.0, 2.0])
    assert (found.median, found.least, found.most) == (3, 2, 10)
    assert str(found) == "3.0 (2.0-10.0)"


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_a_child_answers_and_its_peak_is_its_own() -> None:
    ballast = bytearray(300 * 2**20)
    here = peak_bytes("cpu")
    there = in_child(peak_bytes, "cpu")
    assert len(ballast) < here
    assert 2**20 < there < here - 100 * 2**20


@pytest.mark.usefixtures("forked")
def test_a_child_that_dies_is_an_error() -> None:
    with pytest.raises(
        RuntimeError, match=r"exit must answer from every process; got exit codes \[3\]"
    ):
        in_child(sys.exit, 3)
