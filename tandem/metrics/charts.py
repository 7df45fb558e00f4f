"""Line charts and stacked bars as inline SVG; colours come from the page's style sheet.

Text in a chart is escaped here, so the markup returned is safe whatever the labels are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from markupsafe import Markup, escape

from tandem.metrics.text import short_number, visible

Point = tuple[float, float]

_WIDTH, _HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 32
_BUCKETS = 160
_SMOOTH_FROM = 24


@dataclass(frozen=True, slots=True)
class Series:
    """(step, value) pairs in the order of steps; values may be nan or inf.

    `kind`: "noisy" is a faint raw line under a smoothed one, "exact" a line as it is (a schedule),
    "marks" are points with a thin line, for what is measured now and then.
    """

    label: str
    points: Sequence[Point]
    kind: Literal["noisy", "exact", "marks"] = "noisy"


@dataclass(frozen=True, slots=True)
class _Frame:
    """From data to pixels."""

    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, point: Point) -> tuple[float, float]:
        """Pixel of a finite point."""
        (x0, x1), (y0, y1) = self.x, self.y
        across = (point[0] - x0) / (x1 - x0)
        up = (point[1] - y0) / (y1 - y0)
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM),
        )


def line_chart(title: str, unit: str, series: Sequence[Series]) -> Markup:
    """A chart over steps, axes labelled; series n is drawn in the style sheet's colour n.

    At least one point must be finite.
    """
    finite = [p for line in series for p in line.points if math.isfinite(p[1])]
    y_ticks = ticks(min(p[1] for p in finite), max(p[1] for p in finite))
    steps = [p[0] for line in series for p in line.points]
    x_low, x_high = min(steps), max(steps)
    # Steps count from 1; the axis of a whole stage still begins at 0.
    x_low = 0.0 if x_low <= 0.05 * x_high else x_low
    frame = _Frame(
        (x_low, x_high if x_high > x_low else x_low + 1),
        (y_ticks[0], y_ticks[-1]),
    )
    x_ticks = [t for t in ticks(x_low, x_high, whole=True) if x_low <= t <= x_high]
    parts = _axes(frame, x_ticks, y_ticks)
    # Points last: a held-out measurement must not vanish under a line.
    order = sorted(enumerate(series, start=1), key=lambda item: item[1].kind == "marks")
    for number, line in order:
        draw = _marks if line.kind == "marks" else _line
        parts.extend(draw(line, number, frame))
        parts.extend(_not_finite(line, number, frame))
    label = f"{title}, {unit}, over steps" if unit else f"{title} over steps"
    return Markup(
        '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    ).format(_WIDTH, _HEIGHT, visible(label), Markup("").join(parts))


def stacked_bar(label: str, parts: Sequence[tuple[int, str, float]]) -> Markup:
    """Shares of a whole as one bar.

    Args:
        parts: (colour of the style sheet, name, positive value); at least one.
    """
    total = sum(value for _, _, value in parts)
    left = 0.0
    rects = []
    for colour, name, value in parts:
        width = 1000 * value / total
        rects.append(
            Markup(
                '<rect class="f{}" x="{:.2f}" y="0" width="{:.2f}" height="24">'
                "<title>{}: {:.0%}</title></rect>"
            ).format(colour, left, width, visible(name), value / total)
        )
        left += width
    return Markup(
        '<svg class="bar" viewBox="0 0 1000 24" preserveAspectRatio="none" role="img" '
        'aria-label="{}">{}</svg>'
    ).format(visible(label), Markup("").join(rects))


def ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Three to seven round numbers that enclose low..high, evenly apart; integers if `whole`."""
    span = high - low
    if span <= abs(high) * 1e-9 or span == 0:
        pad = abs(high) * 0.1 or 1.0
        low, span = low - pad, 2 * pad
        high = low + span
    magnitude = 10.0 ** math.floor(math.log10(span / 4))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if span / (m * magnitude) <= 5)
    if whole:
        step = max(1.0, float(round(step)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Centred mean over about a fifteenth of the points; the finite points themselves if few."""
    kept = [p for p in points if math.isfinite(p[1])]
    if len(kept) < _SMOOTH_FROM:
        return kept
    half = max(1, len(kept) // 30)
    sums = [0.0]
    for _, value in kept:
        sums.append(sums[-1] + value)
    windows = ((max(0, i - half), min(len(kept), i + half + 1)) for i in range(len(kept)))
    means = [(sums[b] - sums[a]) / (b - a) for a, b in windows]
    return [(p[0], mean) for p, mean in zip(kept, means, strict=True)]


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most two points a bucket, its lowest and highest: fewer points, the same picture."""
    if len(points) <= 2 * _BUCKETS:
        return list(points)
    size = len(points) / _BUCKETS
    edges = [round(n * size) for n in range(_BUCKETS + 1)]
    kept: list[Point] = []
    for a, b in pairwise(edges):
        chosen = {
            min(range(a, b), key=lambda i: points[i][1]),
            max(range(a, b), key=lambda i: points[i][1]),
        }
        kept.extend(points[i] for i in sorted(chosen))
    return kept


def _axes(frame: _Frame, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> list[Markup]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    gap = y_ticks[1] - y_ticks[0]
    for tick in y_ticks:
        y = frame.at((frame.x[0], tick))[1]
        parts.append(
            Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
                _LEFT, right, y, y
            )
        )
        parts.append(
            Markup('<text class="tick end" x="{}" y="{:.1f}">{}</text>').format(
                _LEFT - 6, y + 3.5, _tick_label(tick, gap)
            )
        )
    for tick in x_ticks:
        x = frame.at((tick, frame.y[0]))[0]
        parts.append(
            Markup('<text class="tick mid" x="{:.1f}" y="{}">{}</text>').format(
                x, bottom + 14, f"{tick:,.0f}"
            )
        )
    middle = (_LEFT + right) / 2
    parts.append(
        Markup('<text class="axis mid" x="{:.1f}" y="{}">step</text>').format(middle, _HEIGHT - 4)
    )
    return parts


def _tick_label(tick: float, gap: float) -> str:
    if tick == 0:
        return "0"
    if abs(tick) >= 1e5 or gap < 1e-4:
        return f"{tick:.1e}".replace("e-0", "e-").replace("e+0", "e")
    decimals = max(0, -math.floor(math.log10(gap) + 1e-9))
    if round(gap, decimals) != round(gap, 12):
        decimals += 1
    return f"{tick:.{decimals}f}"


def _line(line: Series, number: int, frame: _Frame) -> list[Markup]:
    kept = [p for p in line.points if math.isfinite(p[1])]
    if line.kind == "exact":
        parts = [_path(f"smooth c{number}", _runs(line.points), frame)]
    else:
        parts = [_path(f"smooth c{number}", [thinned(smoothed(line.points))], frame)]
        if len(kept) >= _SMOOTH_FROM:
            parts.insert(0, _path(f"raw c{number}", _runs(line.points), frame))
    if len(kept) == 1:
        parts.append(_dot(kept[0], line, number, frame))
    return parts


def _marks(line: Series, number: int, frame: _Frame) -> list[Markup]:
    kept = [p for p in line.points if math.isfinite(p[1])]
    thin = kept[:: max(1, len(kept) // 60)]
    return [
        _path(f"link c{number}", [kept], frame),
        *(_dot(point, line, number, frame) for point in thin),
    ]


def _not_finite(line: Series, number: int, frame: _Frame) -> list[Markup]:
    """A cross at the top edge for every step without a number: never drawn as zero."""
    bad = [p for p in line.points if not math.isfinite(p[1])][:50]
    crosses = []
    for step, value in bad:
        x, y = frame.at((step, frame.y[1]))
        crosses.append(
            Markup(
                '<path class="cross c{}" d="M{:.1f} {:.1f}l6 6m0-6l-6 6"><title>{}</title></path>'
            ).format(number, x - 3, y - 3, _tooltip(line, (step, value)))
        )
    return crosses


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    """The stretches of finite points: a line must not bridge what is missing."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [thinned(run) for run in runs if run]


def _path(style: str, runs: Sequence[Sequence[Point]], frame: _Frame) -> Markup:
    strokes = []
    for run in runs:
        pixels = [frame.at(point) for point in run]
        strokes.append("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in pixels))
    return Markup('<path class="{}" d="{}"/>').format(style, "".join(strokes))


def _dot(point: Point, line: Series, number: int, frame: _Frame) -> Markup:
    x, y = frame.at(point)
    return Markup(
        '<circle class="dot f{}" cx="{:.1f}" cy="{:.1f}" r="3.2"><title>{}</title></circle>'
    ).format(number, x, y, _tooltip(line, point))


def _tooltip(line: Series, point: Point) -> Markup:
    return escape(f"{visible(line.label)}, step {point[0]:.0f}: {short_number(point[1])}")
