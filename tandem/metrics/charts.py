"""Line charts, points, histograms and stacked bars as inline SVG; colors come from the style sheet.

Labels are escaped here, so the markup returned is safe whatever they contain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from markupsafe import Markup, escape

from tandem.metrics.text import short_number
from tandem.text import visible_lines

Point = tuple[float, float]

_WIDTH, _HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 348, 10, 158
_LEAST_SPAN, _LEAST_SPAN_OF_POWERS = 0.01, 0.05
"""Of an axis, over its numbers: a narrower one would have labels longer than there is room for."""
_BUCKETS = 160
_SMOOTH_FROM = 24
_MAX_DOTS, _MAX_CROSSES = 60, 50
_TAG_LETTER, _TAG_HEIGHT, _DOT = 6.0, 12.0, 3.0
"""Of a point's label: width of a letter (its type has 10.5 pixels), height; radius of a dot."""


@dataclass(frozen=True, slots=True)
class Series:
    """(step, value) pairs in the order of steps; values may be nan or inf.

    `kind`: "noisy" is a faint raw line under a smoothed one, "exact" a plain line (a schedule),
    "marks" are points on a thin line, for evaluations. `color` is its number in the style sheet.
    """

    label: str
    points: Sequence[Point]
    kind: Literal["noisy", "exact", "marks"] = "noisy"
    color: int = 1

    @property
    def finite(self) -> list[Point]:
        """The points with a finite value."""
        return [point for point in self.points if math.isfinite(point[1])]


@dataclass(frozen=True, slots=True)
class _Frame:
    """The ranges of both axes, in data units."""

    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, point: Point) -> Point:
        """Pixel of a finite point."""
        (x0, x1), (y0, y1) = self.x, self.y
        right = (point[0] - x0) / (x1 - x0)
        up = (point[1] - y0) / (y1 - y0)
        return _LEFT + right * (_RIGHT - _LEFT), _BOTTOM - up * (_BOTTOM - _TOP)

    def path(self, style: str, runs: Sequence[Sequence[Point]]) -> str:
        """A line through each run of points."""
        lines = (
            "L".join("{:.1f} {:.1f}".format(*self.at(point)) for point in run)
            for run in runs
            if run
        )
        return f'<path class="{style}" d="{"".join(f"M{line}" for line in lines)}"/>'


def line_chart(title: str, unit: str, series: Sequence[Series]) -> Markup:
    """A chart over steps with labeled axes. At least one point must be finite."""
    values = [value for line in series for _, value in line.finite]
    y_ticks = ticks(min(values), max(values), most=100 if unit == "%" else math.inf)
    steps = [step for line in series for step, _ in line.points]
    low, high = min(steps), max(steps)
    # Steps count from 1, but the axis of a whole stage begins at 0.
    low = 0.0 if low <= 0.05 * high else low
    frame = _Frame((low, high if high > low else low + 1), (y_ticks[0], y_ticks[-1]))
    x_ticks = [tick for tick in ticks(low, high, whole=True) if low <= tick <= high]
    # Held-out points last, so that lines do not hide them.
    lines = sorted(series, key=lambda line: line.kind == "marks")
    parts = [*_axes(frame, x_ticks, y_ticks), *(_line(line, frame) for line in lines)]
    return _svg(f"{title}, {unit}, over steps" if unit else f"{title} over steps", parts)


def _svg(label: str, parts: Sequence[str]) -> Markup:
    return Markup(
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(visible_lines(label))}">{"".join(parts)}</svg>'
    )


@dataclass(frozen=True, slots=True)
class Path:
    """Named points in their order, finite, (x, y) with a label each: a policy over its steps."""

    label: str
    points: Sequence[tuple[float, float, str]]
    color: int = 1


def path_chart(title: str, x_label: str, paths: Sequence[Path]) -> Markup:
    """Points joined in their order, the first and last labelled. At least one path has a point."""
    every = [point for path in paths for point in path.points]
    x_ticks = ticks(min(x for x, _, _ in every), max(x for x, _, _ in every))
    y_ticks = ticks(min(y for _, y, _ in every), max(y for _, y, _ in every))
    frame = _Frame((x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1]))
    parts = _axes(frame, x_ticks, y_ticks, x_label)
    dots = [frame.at((x, y)) for x, y, _ in every]
    tags: list[_Box] = []
    names: list[str] = []
    for path in paths:
        parts.append(frame.path(f"link c{path.color}", [[(x, y) for x, y, _ in path.points]]))
        for number, (x, y, name) in enumerate(path.points):
            left, top = frame.at((x, y))
            is_end = number in (0, len(path.points) - 1)
            told = f"{path.label}, {name}: {short_number(x)}, {short_number(y)}"
            parts.append(
                f'<circle class="dot f{path.color}" cx="{left:.1f}" cy="{top:.1f}" '
                f'r="{4.4 if is_end else 3:.1f}"><title>{escape(visible_lines(told))}</title>'
                "</circle>"
            )
            if is_end:
                tags.append(_tag_box((left, top), _TAG_LETTER * len(name), dots, tags))
                names.append(
                    f'<text class="tag" x="{tags[-1].left:.1f}" y="{tags[-1].bottom - 2:.1f}">'
                    f"{escape(visible_lines(name))}</text>"
                )
    return _svg(title, [*parts, *names])


@dataclass(frozen=True, slots=True)
class _Box:
    """A label's place, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def hides(self, dot: Point) -> bool:
        """Whether it covers a part of a dot."""
        x, y = dot
        return self.left - _DOT < x < self.right + _DOT and self.top - _DOT < y < self.bottom + _DOT

    def overlaps(self, other: _Box) -> bool:
        """Whether both share a pixel."""
        is_beside = self.right <= other.left or other.right <= self.left
        return not (is_beside or self.bottom <= other.top or other.bottom <= self.top)


def _tag_box(at: Point, width: float, dots: Sequence[Point], tags: Sequence[_Box]) -> _Box:
    """Where the label of a point hides the fewest dots: around it, within the chart, over no other
    label if there is such a place."""
    x, y = at
    lefts = (x + 6, x - 6 - width, x - width / 2)
    tops = (
        y - 6 - _TAG_HEIGHT, y - _TAG_HEIGHT / 2, y + 6, y - 6 - 2 * _TAG_HEIGHT,
        y + 6 + _TAG_HEIGHT,
    )  # fmt: skip
    around = [_Box(left, top, left + width, top + _TAG_HEIGHT) for top in tops for left in lefts]

    def cost(box: _Box) -> tuple[bool, int, int]:
        """The point itself must not be hidden."""
        is_outside = box.left < _LEFT or box.right > _WIDTH or box.top < 0 or box.bottom > _BOTTOM
        return is_outside or box.hides(at), sum(map(box.overlaps, tags)), sum(map(box.hides, dots))

    return min(around, key=cost)


def histogram_chart(
    title: str,
    unit: str,
    low: float,
    high: float,
    counts: Sequence[int],
    *,
    whole: bool = False,
) -> Markup:
    """Bars over low..high, as wide as each other, of whole numbers if `whole`. At least one count
    is above 0."""
    y_ticks = ticks(0, max(counts), whole=True)
    x_ticks = [tick for tick in ticks(low, high, whole) if low <= tick <= high]
    frame = _Frame((low, high), (0.0, y_ticks[-1]))
    parts = _axes(frame, x_ticks, y_ticks, unit)
    width = (high - low) / len(counts)
    for number, count in enumerate(counts):
        if count:
            left, top = frame.at((low + number * width, count))
            right, bottom = frame.at((low + (number + 1) * width, 0.0))
            least = low + number * width
            from_ = f"{math.ceil(least)}" if whole else short_number(least)
            told = f"{from_} and above: {count}"
            parts.append(
                f'<rect class="f1" x="{left + 0.5:.1f}" y="{top:.1f}" '
                f'width="{max(1.0, right - left - 1):.1f}" height="{bottom - top:.1f}">'
                f"<title>{told}</title></rect>"
            )
    return _svg(title, parts)


def stacked_bar(label: str, parts: Sequence[tuple[int, str, float]]) -> Markup:
    """Shares of a whole as one bar.

    Args:
        parts: (color of the style sheet, name, positive value); at least one.
    """
    total = sum(value for _, _, value in parts)
    left, rects = 0.0, []
    for color, name, value in parts:
        width = 1000 * value / total
        rects.append(
            f'<rect class="f{color}" x="{left:.2f}" y="0" width="{width:.2f}" height="24">'
            f"<title>{escape(visible_lines(name))}: {value / total:.0%}</title></rect>"
        )
        left += width
    return Markup(
        f'<svg class="bar" viewBox="0 0 1000 24" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(visible_lines(label))}">{"".join(rects)}</svg>'
    )


def ticks(low: float, high: float, whole: bool = False, most: float = math.inf) -> list[float]:
    """Two to seven round, evenly spaced numbers around low..high; integers if `whole`.

    None is below 0 where nothing is, nor above `most`, which no value can exceed. Numbers that
    hardly differ get a wider axis, on which they do not look as if they did.
    """
    least, most = 0.0 if low >= 0 else -math.inf, most if high <= most else math.inf
    span, largest = high - low, max(abs(low), abs(high))
    if span <= largest * 1e-9 or span == 0:
        pad = largest * 0.1 or 1.0
        low, span = low - pad, 2 * pad
        high = low + span
    is_power = largest < 1e-2 or largest >= 1e5
    narrowest = largest * (_LEAST_SPAN_OF_POWERS if is_power else _LEAST_SPAN)
    if not whole and span < narrowest:
        low, high, span = low - (narrowest - span) / 2, high + (narrowest - span) / 2, narrowest
    magnitude = 10.0 ** math.floor(math.log10(span / 4))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if span / (m * magnitude) <= 5)
    if whole:
        step = max(1.0, float(round(step)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    numbers = (n * step for n in range(first, last + 1))
    return [n for n in numbers if least <= n <= most]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Centered mean over about a fifteenth of the finite points; the points themselves if few."""
    points = [point for point in points if math.isfinite(point[1])]
    if len(points) < _SMOOTH_FROM:
        return points
    half = max(1, len(points) // 30)
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    windows = ((max(0, i - half), min(len(points), i + half + 1)) for i in range(len(points)))
    means = [(sums[b] - sums[a]) / (b - a) for a, b in windows]
    return [(point[0], mean) for point, mean in zip(points, means, strict=True)]


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most two points per bucket, its lowest and highest, so that no spike is lost."""
    if len(points) <= 2 * _BUCKETS:
        return list(points)
    edges = [round(n * len(points) / _BUCKETS) for n in range(_BUCKETS + 1)]
    kept: list[Point] = []
    for a, b in pairwise(edges):
        by_value = sorted(range(a, b), key=lambda i: points[i][1])
        kept.extend(points[i] for i in sorted({by_value[0], by_value[-1]}))
    return kept


def _axes(
    frame: _Frame, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str = "step"
) -> list[str]:
    parts = []
    for tick in y_ticks:
        y = frame.at((frame.x[0], tick))[1]
        label = _tick_label(tick, y_ticks[1] - y_ticks[0])
        parts += [
            f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
            f'<text class="tick end" x="{_LEFT - 6}" y="{y + 3.5:.1f}">{label}</text>',
        ]
    for tick in x_ticks:
        x = frame.at((tick, frame.y[0]))[0]
        gap = x_ticks[1] - x_ticks[0] if len(x_ticks) > 1 else 1.0
        label = f"{tick:,.0f}" if x_label == "step" else _tick_label(tick, gap)
        parts.append(f'<text class="tick mid" x="{x:.1f}" y="{_BOTTOM + 14}">{label}</text>')
    middle = (_LEFT + _RIGHT) / 2
    name = escape(visible_lines(x_label))
    return [*parts, f'<text class="axis mid" x="{middle:.1f}" y="{_HEIGHT - 4}">{name}</text>']


def _tick_label(tick: float, gap: float) -> str:
    if tick == 0:
        return "0"
    if abs(tick) >= 1e5 or gap < 1e-4:
        digits = math.floor(math.log10(abs(tick)) + 1e-9) - _last_place(gap)
        return f"{tick:.{max(1, digits)}e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{tick:,.{max(0, -_last_place(gap))}f}"


def _last_place(gap: float) -> int:
    """The power of ten of a gap's last digit; a gap of 2.5 has two."""
    place = math.floor(math.log10(gap) + 1e-9)
    return place if math.isclose(gap, round(gap / 10.0**place) * 10.0**place) else place - 1


def _line(line: Series, frame: _Frame) -> str:
    """One series; a cross at the top edge marks a step whose value is not finite."""
    finite, parts = line.finite, []
    if line.kind == "marks":
        parts.append(frame.path(f"link c{line.color}", [finite]))
    elif line.kind == "exact":
        parts.append(frame.path(f"smooth c{line.color}", _runs(line.points)))
    else:
        if len(finite) >= _SMOOTH_FROM:
            parts.append(frame.path(f"raw c{line.color}", _runs(line.points)))
        parts.append(frame.path(f"smooth c{line.color}", [thinned(smoothed(line.points))]))
    if line.kind == "marks" or len(finite) == 1:
        for point in finite[:: max(1, len(finite) // _MAX_DOTS)]:
            x, y = frame.at(point)
            dot = f'<circle class="dot f{line.color}" cx="{x:.1f}" cy="{y:.1f}" r="3.2">'
            parts.append(f"{dot}{_tooltip(line, point)}</circle>")
    missing = [point for point in line.points if not math.isfinite(point[1])]
    for point in missing[:_MAX_CROSSES]:
        x, y = frame.at((point[0], frame.y[1]))
        cross = f'<path class="cross c{line.color}" d="M{x - 3:.1f} {y - 3:.1f}l6 6m0-6l-6 6">'
        parts.append(f"{cross}{_tooltip(line, point)}</path>")
    return "".join(parts)


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    """The runs of finite points: a line must not bridge missing ones."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [thinned(run) for run in runs if run]


def _tooltip(line: Series, point: Point) -> str:
    text = f"{visible_lines(line.label)}, step {point[0]:.0f}: {short_number(point[1])}"
    return f"<title>{escape(text)}</title>"
