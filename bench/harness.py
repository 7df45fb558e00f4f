"""The harness of every bench: sides that take turns, timed by phase in wall and CPU seconds.

A bench is a `Side` for each way to do its work. `ready` builds the sides and runs each once,
`measure` lets them take turns, `compare` makes medians, rates and ratios of what they cost;
bench/report.py has the flags, the tables and the JSON.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from tandem.garbage import no_collection_of_old_objects
from tandem.metrics.timing import Phase, Phases


@dataclass(slots=True)
class Cost:
    """Seconds of one phase, on the clock and of all the process's threads together; flops: its
    operations, where the side counts them."""

    wall: float = 0.0
    cpu: float = 0.0
    flops: float = 0.0

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.wall - other.wall, self.cpu - other.cpu, self.flops - other.flops)


Costs = dict[str, Cost]
Rounds = dict[str, list[Costs]]
"""Costs by phase of every round of every side."""


class Stopwatch(Phases):
    """Times blocks by phase, for all sides alike; Tandem's trainer takes it as its `phases`.

    Example: `with watch("train"): ...`, then `watch.take()["train"].cpu`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._costs: defaultdict[str, Cost] = defaultdict(Cost)

    @contextmanager
    def __call__(
        self, phase: str, *, tokens: float = 0, samples: float = 0, flops: float = 0
    ) -> Iterator[Phase]:
        """Add the block's wall and CPU seconds and its operations to `phase`."""
        wall, cpu = now(), time.process_time()
        block = Phase(tokens, samples, flops)
        try:
            yield block
        finally:
            self._costs[phase].flops += block.flops
            self._costs[phase].wall += now() - wall
            self._costs[phase].cpu += time.process_time() - cpu

    def take(self) -> Costs:
        """The costs so far with their `total`, and start again from zero."""
        costs = dict(self._costs)
        parts = ("wall", "cpu", "flops")
        total = Cost(*(sum(getattr(cost, part) for cost in costs.values()) for part in parts))
        self._costs.clear()
        return {**costs, "total": total}


def now() -> float:
    """Seconds on the clock, once a GPU in use has done all it was given."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class Side(Protocol):
    """One way to do a bench's work."""

    watch: Stopwatch

    def prepare(self) -> None:
        """Go back to where every round starts, where a round changes anything; not timed."""
        return  # a body, so that a side need not have its own

    def run(self, number: int) -> Any:
        """Do the work of round `number`, timed by `watch`; what was done, to be checked."""


def once(side: Side, number: int) -> tuple[Any, Costs]:
    """One round of one side: what it did, and what each phase cost."""
    side.prepare()
    side.watch.take()
    done = side.run(number)
    return done, side.watch.take()


@dataclass(frozen=True)
class Ready:
    """Sides that have run once, what each did then, and why others cannot be had."""

    sides: dict[str, Side]
    done: dict[str, Any]
    absent: dict[str, str]


def ready(makers: Mapping[str, Callable[[], Side]], required: Collection[str]) -> Ready:
    """Build every side and run it once, unmeasured.

    Raises:
        Exception: whatever a required side raised; of the others it is the reason for absence.
    """
    found = Ready({}, {}, {})
    for name, make in makers.items():
        try:
            side = make()
            found.done[name] = once(side, 0)[0]
        except Exception as error:
            if name in required:
                raise
            reason = str(error).strip().partition("\n")[0]
            found.absent[name] = f"{type(error).__name__}: {reason}"
        else:
            found.sides[name] = side
    return found


def measure(
    sides: Mapping[str, Side], rounds: int, check: Callable[[str, Any], None] = lambda *_: None
) -> tuple[dict[str, list[Any]], Rounds]:
    """Run every side once a round, the order turned round each time; what each did and its costs.

    Args:
        check: called with side and result after every run; it raises where the work was another.
    """
    done: dict[str, list[Any]] = {name: [] for name in sides}
    costs: Rounds = {name: [] for name in sides}
    order = list(sides)
    with no_collection_of_old_objects():  # as in a run; it holds for every side
        for number in range(1, rounds + 1):
            for name in order:
                result, cost = once(sides[name], number)
                check(name, result)
                done[name].append(result)
                costs[name].append(cost)
            order.reverse()
    return done, costs


def fastest(make: Callable[[int], Side], candidates: Sequence[int]) -> int:
    """The candidate whose side takes the least CPU time: a median of three runs after one."""
    seconds = {}
    for candidate in candidates:
        side = make(candidate)
        once(side, 0)
        seconds[candidate] = statistics.median(once(side, i)[1]["total"].cpu for i in (1, 2, 3))
    return min(seconds, key=seconds.__getitem__)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times dearer one side is: median, least and most of the rounds' own ratios."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        digits = 2 if self.most < 10 else 1
        return f"{self.median:.{digits}f} ({self.least:.{digits}f}-{self.most:.{digits}f})"


def ratio(dear: Sequence[float], cheap: Sequence[float]) -> Ratio:
    """Each round's `dear / cheap`: both sides of a round have met the same machine."""
    rounds = [a / b for a, b in zip(dear, cheap, strict=True)]
    return Ratio(statistics.median(rounds), min(rounds), max(rounds))


def compare(
    costs: Rounds,
    tokens: float | Mapping[str, Sequence[float]],
    phase: str = "total",
    base: str = "tandem",
) -> dict[str, dict[str, Any]]:
    """By side: medians of seconds and of tokens per second, and its cost per token over the base's.

    Args:
        tokens: that every round of every side stands for; or, where sides differ, by side and
            round. Padding never counts.
    """
    rates: dict[str, dict[str, list[float]]] = {}
    for side, rounds in costs.items():
        of = tokens[side] if isinstance(tokens, Mapping) else [tokens] * len(rounds)
        rates[side] = {
            clock: [n / getattr(one[phase], clock) for n, one in zip(of, rounds, strict=True)]
            for clock in ("wall", "cpu")
        }
    table: dict[str, dict[str, Any]] = {}
    for side, rounds in costs.items():
        table[side] = {}
        for clock, found in rates[side].items():
            seconds = statistics.median(getattr(one[phase], clock) for one in rounds)
            table[side][f"{clock}_seconds"] = seconds
            table[side][f"tokens_per_{clock}_second"] = statistics.median(found)
            if base in rates:
                table[side][f"{clock}_ratio"] = ratio(rates[base][clock], found)
    return table


def require_close(distances: Mapping[str, float], limit: float) -> None:
    """No distance between the sides' numbers is beyond the limit, or no number.

    Raises:
        RuntimeError: one is.
    """
    for name, distance in distances.items():
        if not distance <= limit:
            raise RuntimeError(
                f"{name} must agree to {limit:g} on both sides; got {distance:.3g} apart."
            )


def in_children(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """`function(*one)` for each of `arguments`, at once, in processes that have held nothing else.

    Raises:
        RuntimeError: a child died without an answer; its traceback is on stderr.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in arguments]
    children = [
        context.Process(target=_answer, args=(sender, function, given))
        for (_, sender), given in zip(pipes, arguments, strict=True)
    ]
    for child in children:
        child.start()
    for _, sender in pipes:
        sender.close()
    answers: dict[int, Any] = {}
    pending = {receiver: i for i, (receiver, _) in enumerate(pipes)}
    while pending:
        for receiver in cast(list[Connection], wait(list(pending))):
            number = pending.pop(receiver)
            try:
                answers[number] = receiver.recv()
            except EOFError:
                children[number].join()
                for child in children:  # the others may wait for it for ever
                    child.kill()
                    child.join()
                raise RuntimeError(
                    f"{function.__name__} must answer from every process; got exit codes "
                    f"{[child.exitcode for child in children]}. See the traceback above; -9 where "
                    "nothing is said means too little memory, or that another failed."
                ) from None
    for child in children:
        child.join()
    return [answers[number] for number in range(len(children))]


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` in a process of its own; raises as `in_children`."""
    return in_children(function, [arguments])[0]


def _answer(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    sender.send(function(*arguments))
    sender.close()


def peak_bytes(device: str) -> int:
    """The most that the GPU's allocator has held, or that this process has had resident."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    # Linux's ru_maxrss begins at what the parent had when it forked; VmHWM is the process's own.
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text("utf-8", "replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
