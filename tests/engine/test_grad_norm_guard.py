"""What is out of line, and what is not."""

from __future__ import annotations

import math
import random

import pytest

from tandem.engine.grad_norm_guard import SpikeGuard


def steady(count: int, *, seed: int = 0) -> list[float]:
    chosen = random.Random(seed)
    return [math.exp(chosen.gauss(math.log(2.0), 0.3)) for _ in range(count)]


def test_only_norms_beyond_so_many_deviations_of_the_last_hundred_are_out_of_line() -> None:
    guard = SpikeGuard(6.0, clip=1.0)
    norms = [1e6] * 5 + steady(100)  # the first five are forgotten by then
    for norm in norms:
        guard.add(norm)
    logs = [math.log(norm) for norm in norms[-100:]]
    mean = sum(logs) / 100
    deviation = math.sqrt(sum((log - mean) ** 2 for log in logs) / 100)
    assert guard.limit == pytest.approx(math.exp(mean + 6 * deviation))


def test_nothing_is_out_of_line_before_enough_is_known_or_where_it_is_off() -> None:
    guard, off = SpikeGuard(6.0, clip=1.0), SpikeGuard(0.0, clip=1.0)
    for norm in steady(19):
        guard.add(norm)
        off.add(norm)
    assert guard.limit == math.inf
    guard.add(2.0)
    off.add(2.0)
    assert guard.limit < math.inf
    assert off.limit == math.inf


def test_a_constant_norm_leaves_room_and_clipped_ones_are_in_line() -> None:
    guard = SpikeGuard(6.0, clip=1.0)
    for _ in range(50):
        guard.add(3.0)
    assert guard.limit == pytest.approx(3.0 * math.exp(0.6))
    small = SpikeGuard(6.0, clip=1.0)
    for _ in range(50):
        small.add(1e-4)
    assert small.limit == 1.0


def test_large_norms_that_are_the_rule_are_soon_in_line() -> None:
    guard = SpikeGuard(6.0, clip=1.0)
    for norm in steady(100):
        guard.add(norm)
    left_out = 0
    for _ in range(30):
        left_out += guard.limit < 50.0
        guard.add(50.0)
    assert 1 <= left_out <= 5


def test_a_later_guard_continues() -> None:
    first, second = SpikeGuard(6.0, clip=1.0), SpikeGuard(6.0, clip=1.0)
    for norm in steady(70):
        first.add(norm)
    second.restore(first.history())
    assert second.limit == first.limit
