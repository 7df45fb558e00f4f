"""A sweep's results side by side: text, CSV, and a page with bars."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from markupsafe import Markup

from tandem.config.stages import stage_of
from tandem.files import replace as replace_file
from tandem.metrics.metric import PHASES
from tandem.metrics.text import duration, short_number, with_unit
from tandem.plan.cases import Skipped, skip_reasons
from tandem.plan.results import Result
from tandem.text import visible_lines

_COLUMNS: dict[str, Callable[[Result], str]] = {
    "stage": lambda r: r.stage,
    "case": lambda r: r.name,
    "ranks": lambda r: str(r.ranks),
    "s/step": lambda r: _number(r.seconds_per_step),
    "generate tok/s": lambda r: _number(r.tokens_per_second.get("generate")),
    "train tok/s": lambda r: _number(r.tokens_per_second.get("train")),
    "peak/rank": lambda r: with_unit(r.peak, "bytes") if r.peak else "",
    "GPU peak": lambda r: with_unit(r.gpu_peak, "bytes") if r.gpu_peak else "",
    "loss or reward": lambda r: _number(r.outcome),
    "wall": lambda r: duration(r.wall_seconds),
    "error": lambda r: visible_lines(r.error),
}
_LEFT_ALIGNED = ("stage", "case", "error")

_BARS: dict[str, tuple[str, Callable[[Result], float | None]]] = {
    "Peak of the first rank's GPU memory": ("bytes", lambda r: float(r.gpu_peak) or None),
    "Peak resident memory of the largest rank": ("bytes", lambda r: float(r.peak) or None),
    "Time of a step": ("seconds", lambda r: r.seconds_per_step),
    "Training, tokens/s": ("tokens/s", lambda r: r.tokens_per_second.get("train")),
    "Generation, tokens/s": ("tokens/s", lambda r: r.tokens_per_second.get("generate")),
}
_ROW, _LABEL, _WIDTH, _VALUE = 22, 210, 720, 100

_PAGE = Markup("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Sweep {name}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
  color: #17202c; background: #fff; }}
pre, td, th {{ font-variant-numeric: tabular-nums; }}
table {{ border-collapse: collapse; font-size: .86rem; margin-top: 1.5rem; }}
td, th {{ text-align: right; padding: .15rem .6rem; border-bottom: 1px solid #dfe4ea; }}
td.left, th.left {{ text-align: left; }}
svg {{ width: 100%; height: auto; }}
svg text {{ font-size: 12px; fill: #17202c; }} svg .end {{ text-anchor: end; }}
.bar {{ fill: #2563d9; }}
</style></head><body><h1>Sweep {name}</h1>{body}</body></html>
""")


def summary_line(result: Result) -> str:
    """A finished case in one line."""
    if result.exit_code:
        return f"failed with exit code {result.exit_code}: {visible_lines(result.error)}"
    parts = [duration(result.wall_seconds)]
    parts += [f"{phase} {rate:,.0f} tokens/s" for phase, rate in result.tokens_per_second.items()]
    if result.peak:
        parts.append(f"peak {with_unit(result.peak, 'bytes')} a rank")
    if result.outcome is not None:
        parts.append(f"{stage_of(result.stage).headline} {_number(result.outcome)}")
    return ", ".join(parts)


def write_tables(results: Sequence[Result], skipped: Sequence[Skipped], folder: Path) -> None:
    """Write table.txt, table.csv and report.html of the results so far."""
    for name, text in (
        ("table.txt", text_table(results, skipped)),
        ("table.csv", csv_table(results)),
        ("report.html", page(results, skipped, folder.resolve().name)),
    ):
        replace_file(folder / name, text.encode("utf-8"))


def text_table(results: Sequence[Result], skipped: Sequence[Skipped]) -> str:
    """Aligned columns, then what was skipped and why."""
    names, *cells = _rows(results)
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if name in _LEFT_ALIGNED else cell.rjust(width)
            for name, cell, width in zip(names, row, widths, strict=True)
        ).rstrip()
        for row in (names, *cells)
    ]
    lines += [visible_lines(line) for line in skip_reasons(skipped)]
    return "\n".join(lines) + "\n"


def _rows(results: Sequence[Result]) -> list[list[str]]:
    """The columns' names, then one row per case; columns that are always empty are omitted."""
    columns = {name: [cell(r) for r in results] for name, cell in _COLUMNS.items()}
    filled = {name: cells for name, cells in columns.items() if any(cells)}
    return [list(filled), *map(list, zip(*filled.values(), strict=True))]


def csv_table(results: Sequence[Result]) -> str:
    """All figures as plain numbers: seconds, tokens/s, bytes; one column per phase and rank."""
    phases = [p for p in PHASES if any(p in r.seconds for r in results)]
    ranks = sorted({rank for r in results for rank in r.peak_bytes}, key=int)
    knobs = list(dict.fromkeys(name for r in results for name in r.knobs))
    by_phase = ("seconds", "tokens_per_second", "device_bytes")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["stage", "case", "ranks", *knobs, "exit_code", "error", "wall_seconds", "steps", "outcome"]
        + [f"{figure}/{p}" for figure in by_phase for p in phases]
        + [f"peak_bytes/rank{rank}" for rank in ranks]
    )
    for r in results:
        writer.writerow(
            [r.stage, r.name, r.ranks]
            + [_plain(r.knobs.get(name, "")) for name in knobs]
            + [r.exit_code, visible_lines(r.error), r.wall_seconds, r.steps, r.outcome]
            + [getattr(r, figure).get(p) for figure in by_phase for p in phases]
            + [r.peak_bytes.get(rank) for rank in ranks]
        )
    return out.getvalue()


def page(results: Sequence[Result], skipped: Sequence[Skipped], name: str) -> str:
    """One HTML page with bars over all cases of a stage; no script, no network."""
    parts = []
    for stage in dict.fromkeys(r.stage for r in results):
        of_stage = [r for r in results if r.stage == stage]
        parts.append(Markup("<h2>{}</h2>").format(stage))
        for title, (unit, figure) in _BARS.items():
            values = [(r.name, figure(r)) for r in of_stage]
            known = [(label, value) for label, value in values if value is not None]
            if known:
                parts.append(Markup("<h3>{}</h3>{}").format(title, bars(title, unit, known)))
        parts.append(_html_table(of_stage))
    reasons = [line.removeprefix("skipped ") for line in skip_reasons(skipped)]
    items = [Markup("<li>{}</li>").format(visible_lines(line)) for line in reasons]
    if items:
        parts.append(Markup("<h2>Skipped</h2><ul>{}</ul>").format(Markup("").join(items)))
    return str(_PAGE.format(name=visible_lines(name), body=Markup("").join(parts)))


def bars(title: str, unit: str, values: Sequence[tuple[str, float]]) -> Markup:
    """One horizontal bar per case, as inline SVG."""
    most = max(value for _, value in values) or 1.0
    room = _WIDTH - _LABEL - _VALUE
    rows = [
        Markup(
            '<text class="end" x="{}" y="{}">{}</text>'
            '<rect class="bar" x="{}" y="{}" width="{:.1f}" height="{}"/>'
            '<text x="{:.1f}" y="{}">{}</text>'
        ).format(
            _LABEL - 8, i * _ROW + 15, visible_lines(label),
            _LABEL, i * _ROW + 4, room * value / most, _ROW - 8,
            _LABEL + room * value / most + 6, i * _ROW + 15, with_unit(value, unit),
        )
        for i, (label, value) in enumerate(values)
    ]  # fmt: skip
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        _WIDTH, len(values) * _ROW + 4, title, Markup("").join(rows)
    )


def _html_table(results: Sequence[Result]) -> Markup:
    names, *rows = _rows(results)

    def row(tag: str, cells: Sequence[str]) -> Markup:
        return Markup("<tr>{}</tr>").format(
            Markup("").join(
                Markup('<{t} class="{c}">{v}</{t}>').format(
                    t=tag, c="left" if name in _LEFT_ALIGNED else "", v=cell
                )
                for name, cell in zip(names, cells, strict=True)
            )
        )

    body = [row("td", cells) for cells in rows]
    return Markup("<table>{}{}</table>").format(row("th", names), Markup("").join(body))


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else short_number(value)


def _plain(value: object) -> object:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value
