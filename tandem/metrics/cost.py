"""The report's time, throughput and memory per phase."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from tandem.config.stages import stage_of
from tandem.metrics.charts import stacked_bar
from tandem.metrics.folder import RunFolder, declared, finite
from tandem.metrics.metric import PHASES
from tandem.metrics.text import duration, with_unit

_OTHER_FROM = 0.005
"""Share of a step's time from which what no phase covers is worth a line."""


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """What one phase of a stage cost in all; rates are over the phase's own time."""

    colour: int
    phase: str
    seconds: str
    share: str
    tokens: str
    samples: str
    tflops: str
    memory: str


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Time per phase of one stage."""

    title: str
    total: str
    bar: Markup
    rows: tuple[PhaseRow, ...]


def time_per_phase(folder: RunFolder) -> list[StageTimes]:
    """Time per phase, of the stages that were timed."""
    return [view for stage in folder.stages() if (view := _stage_times(folder, stage))]


def _stage_times(folder: RunFolder, stage: str) -> StageTimes | None:
    seconds = _phase_seconds(folder, stage)
    total = total_seconds(folder, stage)
    other = total - sum(seconds.values())
    seconds["other"] = other if other > _OTHER_FROM * total else 0.0
    # A phase has the same colour in every stage.
    parts = [(n, phase, s) for n, (phase, s) in enumerate(seconds.items(), start=1) if s > 0]
    if not parts:
        return None
    rows = tuple(
        PhaseRow(
            colour=colour,
            phase=phase,
            seconds=duration(value),
            share=f"{100 * value / total:.0f} %",
            tokens=_rate(folder, stage, "tokens_per_second", phase),
            samples=_rate(folder, stage, "samples_per_second", phase),
            tflops=_rate(folder, stage, "tflops", phase),
            memory=_peak(folder, stage, phase),
        )
        for colour, phase, value in parts
    )
    title = stage_of(stage).title
    return StageTimes(title, duration(total), stacked_bar(f"{title}: time per phase", parts), rows)


def _rate(folder: RunFolder, stage: str, name: str, phase: str) -> str:
    """The rate over all steps: each step's count (rate times seconds) over the time of those."""
    seconds = dict(finite(folder.series(stage, f"seconds/{phase}")))
    rates = [p for p in finite(folder.series(stage, f"{name}/{phase}")) if p[0] in seconds]
    time_of_those = sum(seconds[step] for step, _ in rates)
    if not time_of_those:
        return ""
    count = sum(rate * seconds[step] for step, rate in rates)
    return with_unit(count / time_of_those, declared(f"{name}/{phase}").unit)


def _peak(folder: RunFolder, stage: str, phase: str) -> str:
    points = finite(folder.series(stage, f"peak_memory_bytes/{phase}"))
    return with_unit(max(value for _, value in points), "bytes") if points else ""


def total_seconds(folder: RunFolder, stage: str) -> float:
    """Wall time of a stage as far as it was timed: its steps, or its phases if they are more
    (evaluation may lie outside of a step)."""
    steps = sum(value for _, value in finite(folder.series(stage, "seconds/step")))
    return max(steps, sum(_phase_seconds(folder, stage).values()))


def _phase_seconds(folder: RunFolder, stage: str) -> dict[str, float]:
    return {
        phase: sum(value for _, value in finite(folder.series(stage, f"seconds/{phase}")))
        for phase in PHASES
        if phase != "step"
    }
