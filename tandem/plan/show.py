"""A plan on one screen, and as JSON."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tandem.config.schema import rl_section
from tandem.memory.ways import size_text
from tandem.plan.layouts import Laid, failures
from tandem.predict.constants import constants
from tandem.predict.memory import Models
from tandem.predict.stage import Phase, StagePrediction
from tandem.text import counted

_PARTS = {"gathered weights": "gathered", "activations' gradients": "act. grads",
          "read or checked, then AdamW and masters": "read/checked",
          "gradients being reduced": "reduced", "weights in flight": "in flight"}  # fmt: skip
_UNBROKEN = 10_000
"""Columns where the output is no terminal: more than any line has."""


def show_plan(
    laid: Laid, others: Sequence[Laid], limit: float | None, notes: Sequence[str]
) -> None:
    """Print stages and phases, then the best layouts and why others failed."""
    console = Console(highlight=False)
    if not console.is_terminal:  # a file or a program gets whole lines
        console = Console(highlight=False, width=_UNBROKEN)
    wide = console.width >= 110
    hardware = laid.stages[0].hardware
    ranks = laid.stages[0].ranks
    # Flags and numbers are to be read whole, so lines wrap at words.
    count = hardware.label if not hardware.on_cpu else f"{hardware.name}, {counted(ranks, 'rank')}"
    console.print(f"[bold]plan[/bold] for {count}, {laid.stages[0].dtype}")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("stage", "phase"):
        table.add_column(name, no_wrap=True)
    for name in ("peak/rank", "live", "s/step", "tokens/s", _rate_title(hardware.on_cpu)):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("of it", no_wrap=True, overflow="ellipsis")
    for stage in laid.stages:
        for number, (name, phase) in enumerate(stage.phases.items()):
            table.add_row(*_row(stage, name, phase, first=number == 0, parts=5 if wide else 1))
    console.print(table)
    for stage in laid.stages:
        _say(console, _sums(stage))
    if line := _comparison(laid):
        _say(console, line)
    _verdict(console, laid, others, limit)
    for note in notes:
        _say(console, note, style="dim")


def _say(console: Console, line: str, style: str = "") -> None:
    """Print a line, wrapped under itself, never between a flag and its value."""
    glued = re.sub(r"(--[\w-]+) (?!--)(?=[\w./']+(?: |$|:))", "\\1\u00a0", line)
    glued = re.sub(r"(\d) (?=[KMGT]iB|s\b|min\b|h\b)", "\\1\u00a0", glued)
    width = console.width - 1
    indent = len(line) - len(line.lstrip()) + 4
    rows = textwrap.wrap(
        glued, width, subsequent_indent=" " * indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    for row in rows:
        console.print(row.replace("\u00a0", " "), style=style, soft_wrap=True, markup=False)


def _rate_title(on_cpu: bool) -> str:
    return "of peak" if on_cpu else "MFU"


def _row(stage: StagePrediction, name: str, phase: Phase, *, first: bool, parts: int) -> list[str]:
    seconds = phase.seconds
    at_peak = name == stage.peak_phase
    largest = sorted(phase.live.items(), key=lambda item: -item[1])[:parts]
    return [
        stage.stage if first else "",
        name,
        ("*" if at_peak else "") + size_text(phase.reserved),
        size_text(phase.peak),
        _seconds(seconds),
        f"{phase.tokens / seconds:,.0f}" if seconds and phase.tokens else "",
        _share(stage, phase),
        ", ".join(f"{_PARTS.get(part, part)} {size_text(size)}" for part, size in largest),
    ]


def _share(stage: StagePrediction, phase: Phase) -> str:
    """The better used of the device's two rates: products, or (marked bw) memory."""
    if not phase.seconds:
        return ""
    hardware = stage.hardware
    whole = hardware.flops.get(stage.dtype) or hardware.flops["fp32"]
    products = phase.flops / phase.seconds / (whole * hardware.cores)
    memory = phase.moved / phase.seconds / hardware.bandwidth
    if not phase.flops:
        return ""
    return f"{products:.0%}" if products >= memory else f"{min(1.0, memory):.0%} bw"


def _sums(stage: StagePrediction) -> str:
    num_steps = stage.work.steps
    steps = counted(num_steps, "step") if num_steps else "an unknown number of steps"
    parts = [f"{stage.stage}: {steps} of {_seconds(stage.step_seconds)} s"]
    if stage.total_seconds is not None:
        beside = "" if stage.evaluations else " without evaluations, whose rows are not known"
        parts += [*_evaluations(stage), f"in all {duration(stage.total_seconds)}{beside}"]
    if stage.dollars is not None:
        parts.append(f"${stage.dollars:,.2f}")
    parts.append(f"disk {size_text(stage.disk)}")
    if not stage.hardware.on_cpu:
        parts.append(f"host {size_text(stage.host)} a rank")
    return ", ".join(parts)


def _evaluations(stage: StagePrediction) -> list[str]:
    """How many evaluations a stage has, and how long one takes."""
    found = stage.evaluations
    if found is None or not found.count:
        return []
    if not found.each:
        return ["no rows to evaluate on"]
    return [f"{counted(found.count, 'evaluation')} of {_seconds(found.each)} s ({found.reads})"]


def _comparison(laid: Laid) -> str:
    """The line about the comparison at the end; "" where its rows are not known."""
    found = laid.stages[-1].comparison
    if found is None:
        return ""
    whole = f", the run {duration(laid.seconds)}" if laid.knows_steps else ""
    reads = f" ({found.reads} each)" if found.reads else ""
    return (
        f"comparison at the end: {counted(found.models, 'model')}{reads}, "
        f"{duration(found.seconds)}{whole}"
    )


def _verdict(console: Console, laid: Laid, others: Sequence[Laid], limit: float | None) -> None:
    allowed = laid.worst.budget if limit is None else limit
    fits = laid.fits(limit)
    worst = laid.worst
    where = f"{worst.stage}, {worst.phases[worst.peak_phase].instant}"
    verdict = f"peak (*) {size_text(laid.peak)} of {size_text(allowed)} a rank, in {where}: "
    _say(console, verdict + ("fits" if fits else "does not fit"), style="" if fits else "bold red")
    alike = [other for other in others if other.trains_alike]
    fitting = [other for other in alike if other.fits(limit)][:3]
    for other in fitting:
        _say(console, f"  yes {_time_and_peak(other)}: {other.flags()}")
    if alike and not fitting:
        smallest = min(alike, key=lambda other: other.peak)
        _say(console, f"  none fits; the smallest: {size_text(smallest.peak)}: {smallest.flags()}")
    adapted = [other for other in others if not other.trains_alike and other.fits(limit)][:1]
    for other in adapted:
        kind = "trains only adapters" if "lora.rank" in other.changes else "a rounded base"
        _say(console, f"  yes {_time_and_peak(other)}, {kind}: {other.flags()}")
    for other, why in failures(alike, limit, 3):
        _say(console, f"  no  {other.flags()}: {why}")


def _time_and_peak(laid: Laid) -> str:
    each = "" if laid.knows_steps else " for a step of each"
    return f"{duration(laid.seconds)}{each}, {size_text(laid.peak)}"


def plan_notes(laid: Laid, rows: Sequence[str], models: Iterable[Models] = ()) -> list[str]:
    """What a reader must know of the figures: lengths, price, what the constants are from, and
    which layers of the models are not counted as they are."""
    hardware = laid.stages[0].hardware
    notes = [f"rows: {'; '.join(dict.fromkeys(rows))}"]
    if hardware.price is not None:
        notes.append(f"price: ${hardware.price:g} per hour and device ({hardware.priced})")
    known = constants(hardware.kind, hardware.name)
    lengths = "answers as long as sampling.max_new_tokens"
    if rl_section(laid.config).converses:
        lengths = "conversations as long as they may be"
    notes.append(f"times: {known.fitted_on}; {lengths}")
    shapes = [shape for each in models for shape in (each.policy, each.value, each.critic)]
    others = sorted({kind for shape in shapes for kind in shape.others})
    if others:
        notes.append(
            f"memory and times: layers of {', '.join(others)} are counted as attention, and may "
            "need several times more; the rehearsal at a run's start finds out"
        )
    return notes


def plan_values(
    laid: Laid, others: Sequence[Laid], limit: float | None, notes: Sequence[str]
) -> dict[str, Any]:
    """The same figures for programs, as docs/plan.schema.json says: bytes and seconds."""
    compared = laid.stages[-1].comparison
    return {
        "hardware": laid.stages[0].hardware.name,
        "ranks": laid.stages[0].ranks,
        "dtype": laid.stages[0].dtype,
        "price": {"per_hour": laid.stages[0].hardware.price,
                  "date": laid.stages[0].hardware.priced},
        "fits": laid.fits(limit),
        "limit_bytes": laid.worst.budget if limit is None else limit,
        "peak_bytes": laid.peak,
        "comparison_seconds": None if compared is None else compared.seconds,
        "stages": [stage_values(stage) for stage in laid.stages],
        "layouts": [
            {"changes": dict(other.changes), "flags": other.flags(),
             "trains_alike": other.trains_alike, "fits": other.fits(limit),
             "peak_bytes": other.peak, "seconds": other.seconds}
            for other in others
        ],
        "rejected": [
            {"changes": dict(other.changes), "flags": other.flags(), "why": why}
            for other, why in failures(others, limit, len(others))
        ],
        "notes": list(notes),
    }  # fmt: skip


def stage_values(stage: StagePrediction) -> dict[str, Any]:
    """One stage's figures."""
    return {
        "stage": stage.stage,
        "steps": stage.work.steps,
        "step_seconds": stage.step_seconds,
        "evaluations": _evaluation_values(stage),
        "total_seconds": stage.total_seconds,
        "dollars": stage.dollars,
        "disk_bytes": stage.disk,
        "host_bytes": stage.host,
        "peak_bytes": stage.peak,
        "peak_phase": stage.peak_phase,
        "phases": {
            name: {"live_bytes": phase.peak, "reserved_bytes": phase.reserved,
                   "parts": dict(phase.live), "instant": phase.instant, "seconds": phase.seconds,
                   "tokens": phase.tokens, "flops": phase.flops, "moved_bytes": phase.moved}
            for name, phase in stage.phases.items()
        },
    }  # fmt: skip


def _evaluation_values(stage: StagePrediction) -> dict[str, Any] | None:
    found = stage.evaluations
    if found is None:
        return None
    return {"count": found.count, "each_seconds": found.each, "once_seconds": found.once}


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} days"
