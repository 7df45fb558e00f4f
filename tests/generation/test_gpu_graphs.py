"""Recording a step: what is refused, what a replay reads, and where rows lie."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.config.schema import SamplingConfig
from tandem.generation.batch_state import Rows
from tandem.generation.gpu_graphs import (
    BUCKETS,
    MAX_DRAWS,
    CudaRecorder,
    DecodeStep,
    NoWaiting,
    bucket_of,
    width_of,
)
from tandem.generation.request import Request
from tandem.generation.sampler import Sampler
from tandem.ops.attention_context import KVMemory
from tests.generation.cuda_stand_ins import Graph, stand_in

CPU = torch.device("cpu")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> CudaRecorder:
    stand_in(monkeypatch)
    return CudaRecorder()


def test_recordings_are_counted_with_their_seconds(recorder: CudaRecorder) -> None:
    x = torch.ones(3)
    for size in (1, 2):
        recorder.recorded(lambda: x + 1, "sum", size)()
    assert recorder.num_recorded == 2
    assert recorder.seconds > 0
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        recorder.recorded(lambda: x * float(x.sum()), "waits", 1)()
    assert recorder.num_recorded == 2


def test_a_replay_reads_what_is_at_the_same_places_now(recorder: CudaRecorder) -> None:
    x, runs = torch.ones(3), []

    def doubled() -> Tensor:
        runs.append(len(runs))
        return x * 2 + len(runs)

    call = recorder.recorded(doubled, "double", 3)
    assert len(runs) == 2, "once to warm up, once to record"
    x.fill_(5)
    first = call()
    assert first.tolist() == [12, 12, 12]
    x.fill_(1)
    assert call() is first, "the result is at the same place"
    assert first.tolist() == [4, 4, 4]
    assert len(runs) == 2, "no Python of it runs again"
    recorder.recorded(doubled, "double", 3)
    assert len(runs) == 3, "it is warm"


def test_recordings_share_one_pool_until_it_is_forgotten(recorder: CudaRecorder) -> None:
    def one() -> Tensor:
        return torch.ones(2) + 1

    older, younger = (recorder.recorded(one, "one", n) for n in (2, 3))
    result = younger()
    older()
    assert result.isnan().all(), "an older one's scratch memory may be a younger one's result"
    recorder.forget()
    apart = recorder.recorded(one, "one", 4)()
    older()
    assert apart.tolist() == [2, 2]
    assert len(Graph.by_pool) == 2


WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x * x.sum().item(),
    "truth": lambda x: x if x.any() else -x,
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "set by a mask": lambda x: x.index_put((x > 0,), torch.arange(3.0)),
    "unique": lambda x: x.unique(),
    "to another device": lambda x: x.to("meta"),
    "from another device": lambda x: torch.empty(3, device="meta").copy_(x),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_makes_the_host_wait_is_refused_with_one_warning(
    name: str, recorder: CudaRecorder
) -> None:
    x = torch.arange(3.0)

    def wait() -> Any:
        return WAITS[name](x)

    def three_times() -> list[Any]:
        return [recorder.recorded(wait, *of) for of in (("wait", 1), ("wait", 2), ("another", 1))]

    with pytest.warns(UserWarning, match="decoding without CUDA graphs, slower: aten") as warned:
        assert three_times() == [wait] * 3
    assert len(warned) == 1
    assert recorder.refused.keys() == {"wait", "another"}
    assert not Graph.by_pool, "none got as far as a capture"
    other = recorder.recorded(lambda: x + 1, "fine", 1)
    assert other().tolist() == [1, 2, 3]


def test_what_waits_for_nothing_is_let_through() -> None:
    x, at = torch.arange(6.0).view(2, 3), torch.tensor([1, 0])
    with NoWaiting():
        assert x[at].tolist() == x.flip(0).tolist()
        x[at, at] = 9.0
        assert x.to(torch.float64).gather(1, at[:, None]).shape == (2, 1)
        assert torch.searchsorted(x.sort(-1).values, x).shape == (2, 3)


def test_a_capture_that_breaks_off_says_what_broke_it(
    recorder: CudaRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = Graph.capture_end

    def broken(graph: Graph) -> None:
        end(graph)
        raise RuntimeError("capture was invalidated")

    def never_captured() -> Tensor:
        if Graph.capturing:
            raise RuntimeError("not while capturing\nand more")
        return torch.ones(1)

    monkeypatch.setattr(Graph, "capture_end", broken)
    with pytest.warns(UserWarning, match="slower: not while capturing$"):
        call = recorder.recorded(never_captured, "kind", 1)
    assert call().tolist() == [1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorder.recorded(lambda: torch.ones(1), "other", 1)
    assert recorder.refused["other"] == "capture was invalidated"


def test_rows_that_have_left_are_filled_up_again(recorder: CudaRecorder) -> None:
    step = DecodeStep(4, 16, CPU, recorder)
    tables = torch.arange(12, dtype=torch.int32).view(4, 3)
    step.load(torch.tensor([7, 8, 9, 10]), torch.tensor([40, 41, 42, 43]), tables, 99)
    step.load(torch.tensor([5, 6]), torch.tensor([20, 21]), tables[2:], 99)
    assert step.token_ids[:2].tolist() == [5, 6]
    assert step.positions.tolist() == [20, 21, 0, 0]
    assert step.tables[:2, :3].equal(tables[2:])
    assert step.tables[2:].eq(99).all()
    step.load(torch.tensor([5]), torch.tensor([22]), tables[:1], 50)
    assert step.positions.tolist() == [22, 0, 0, 0]
    assert step.tables[1:].eq(50).all(), "the memory is another, and so is its last block"


def test_buckets_hold_what_they_are_for() -> None:
    sizes = [bucket_of(n) for n in range(1, 1500)]
    assert all(n <= size for n, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert set(sizes) == {*BUCKETS, 1024, 1536}
    widths = [width_of(n) for n in range(1, 200)]
    assert all(n <= width for n, width in enumerate(widths, 1))
    assert set(widths) == {16, 32, 64, 128, 256}


def test_what_is_recorded_for_a_draw_serves_all_that_draw_alike(recorder: CudaRecorder) -> None:
    step = DecodeStep(2, 16, CPU, recorder)
    rows = Rows(2, 1, CPU)
    recorded: list[object] = []
    step.run(lambda: torch.randn(2, 99), KVMemory([], 1, dtype=torch.float32, device=CPU))
    record = recorder.recorded

    def counted(function: Any, kind: Any, size: Any) -> Any:
        recorded.append(kind)
        return record(function, kind, size)

    recorder.recorded = counted  # type: ignore[method-assign]

    def recordings(stop: int, temperature: float = 1.0) -> int:
        sampler = Sampler(SamplingConfig(temperature=temperature), (stop,), CPU, 99)
        requests = [Request(i, (5, 6), 77 + i, sampler, 9) for i in range(2)]
        part = rows.enter(requests, [0, 9])
        before = len(recorded)
        step.draw(sampler, part)
        rows.leave(requests)
        return len(recorded) - before

    assert [recordings(2), recordings(2)] == [1, 0]
    assert recordings(3) == 1, "other tokens end an answer"
    for i in range(MAX_DRAWS):
        assert recordings(2, temperature=2.0 + i) == 1
    assert recordings(2) == 1, "the oldest has gone"
    assert recordings(2, temperature=1.0 + MAX_DRAWS) == 0


def test_a_function_that_warmed_up_stays_compiled() -> None:
    """torch marks code objects that meet a dispatch mode as not to be compiled, for good."""
    calls = []

    def backend(module: Any, _: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            calls.append(module)
            return module(*arguments)

        return run

    @torch.compile(backend=backend)
    def doubled(x: Tensor) -> Tensor:
        return (x * 2).sin()

    x = torch.ones(3)
    with NoWaiting():
        doubled(x)
    before = len(calls)
    doubled(x)
    assert len(calls) == before + 1
