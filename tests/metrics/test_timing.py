import mmap
import sys
import time

import pytest
import torch

from tandem.errors import ConfigError
from tandem.metrics import timing
from tandem.metrics.names import find_metric
from tandem.metrics.timing import Phases


class Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


def test_blocks_of_a_phase_add_up(monkeypatch):
    clock = Clock(monkeypatch)
    phases = Phases()
    for _ in range(2):
        with phases("train", tokens=100, samples=3) as block:
            clock.now += 2.0
            block.tokens += 20
            block.flops = 4e12
    values = phases.metrics()
    peak = values.pop("peak_memory_bytes/train")
    assert values == {
        "seconds/train": 4.0,
        "tokens_per_second/train": 60.0,
        "samples_per_second/train": 1.5,
        "tflops/train": 2.0,
    }
    assert peak > 1e6
    assert phases.metrics() == {}


def test_rates_without_a_count_are_omitted_and_all_names_are_declared(monkeypatch):
    clock = Clock(monkeypatch)
    phases = Phases()
    with phases("save"):
        clock.now += 1.0
    values = phases.metrics()
    assert set(values) == {"seconds/save", "peak_memory_bytes/save"}
    for name in values:
        find_metric(name)


def test_blocks_nest_and_count_even_if_they_raise(monkeypatch):
    clock = Clock(monkeypatch)
    phases = Phases()

    def step():
        with phases("step"):
            clock.now += 1.0
            with phases("generate", tokens=5):
                clock.now += 2.0
                raise RuntimeError

    with pytest.raises(RuntimeError):
        step()
    values = phases.metrics()
    assert values["seconds/step"] == 3.0
    assert values["seconds/generate"] == 2.0
    assert values["tokens_per_second/generate"] == 2.5


def test_an_unknown_phase_is_refused():
    with pytest.raises(ConfigError, match="got 'seconds/lunch'"), Phases()("lunch"):
        pass


def test_an_outer_peak_covers_the_inner_ones(monkeypatch):
    peaks = {"now": 0}
    monkeypatch.setattr(timing, "reset_peak", lambda: peaks.update(now=0))
    monkeypatch.setattr(timing, "peak_bytes", lambda: peaks["now"])
    phases = Phases()
    with phases("step"):
        peaks["now"] = 5
        with phases("generate"):
            peaks["now"] = 9
        with phases("train"):
            peaks["now"] = 7
        peaks["now"] = 6
    values = phases.metrics()
    found = [values[f"peak_memory_bytes/{p}"] for p in ("step", "generate", "train")]
    assert found == [9, 9, 7]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux resets the peak")
def test_the_peak_is_the_phases_own():
    if not resets_the_peak():
        pytest.skip("this system does not reset the resident peak")
    phases = Phases()
    with phases("train"):
        use_and_give_back()
    with phases("save"):
        pass
    values = phases.metrics()
    grown = values["peak_memory_bytes/train"] - values["peak_memory_bytes/save"]
    assert 48 * 2**20 < grown < 96 * 2**20


def use_and_give_back():
    """64 MiB from the system itself: a run in this process before may have told the C library to
    keep what is freed."""
    with mmap.mmap(-1, 64 * 2**20) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1


def resets_the_peak():
    use_and_give_back()
    before = timing.peak_bytes()
    timing.reset_peak()
    return timing.peak_bytes() < before - 32 * 2**20


@pytest.mark.parametrize(("in_use", "calls"), [(True, 2), (False, 0)])
def test_cuda_is_synchronized_only_where_it_is_in_use(monkeypatch, in_use, calls):
    count = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: count.append(1))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1234)
    phases = Phases()
    with phases("train"):
        pass
    assert len(count) == calls
    assert (phases.metrics()["peak_memory_bytes/train"] == 1234) == in_use


def test_a_step_counts_the_operations_of_its_phases(monkeypatch):
    clock = Clock(monkeypatch)
    phases = Phases()
    with phases("step"):
        with phases("generate", flops=4e12):
            clock.now += 1.0
        with phases("train", flops=8e12):
            clock.now += 3.0
    values = phases.metrics()
    assert (values["tflops/generate"], values["tflops/step"]) == (4.0, 3.0)
