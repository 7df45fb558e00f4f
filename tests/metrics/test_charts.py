import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.metrics.charts import (
    Path,
    Series,
    line_chart,
    path_chart,
    smoothed,
    stacked_bar,
    thinned,
    ticks,
)


def numbers(path):
    return [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", path)]


@given(
    st.floats(-1e6, 1e6, allow_subnormal=False),
    st.floats(0, 1e6, allow_subnormal=False).filter(lambda w: w == 0 or w > 1e-3),
)
def test_ticks_enclose_the_data_evenly(low, width):
    found = ticks(low, low + width)
    assert 2 <= len(found) <= 8
    assert found[0] <= low + 1e-6 * (abs(low) + width + 1)
    assert found[-1] >= low + width - 1e-6 * (abs(low) + width + 1)
    gaps = {round((b - a) / (found[1] - found[0]), 6) for a, b in pairwise(found)}
    assert gaps == {1.0}


def test_ticks_are_round_and_whole_where_asked():
    assert ticks(0.0, 0.9) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(0, 3, whole=True) == [0, 1, 2, 3]
    assert ticks(5.0, 5.0)[0] < 5.0 < ticks(5.0, 5.0)[-1]
    assert ticks(0.0, 0.0)[0] == 0.0 < ticks(0.0, 0.0)[-1]


def test_an_axis_does_not_go_where_no_value_can_be() -> None:
    assert ticks(100, 100, most=100) == [90, 95, 100]
    assert ticks(0.05, 0.4)[0] == 0
    assert ticks(-0.05, 0.4)[0] < 0
    assert ticks(90, 101, most=100)[-1] > 100


def test_smoothing_is_the_mean_of_a_window():
    points = [(float(i), float(i % 7)) for i in range(90)]
    found = smoothed(points)
    half = 3
    for i, (step, value) in enumerate(found):
        window = [v for _, v in points[max(0, i - half) : i + half + 1]]
        assert step == i
        assert value == pytest.approx(sum(window) / len(window))
    assert smoothed(points[:10]) == points[:10]
    assert (0.0, math.nan) not in smoothed([(0.0, math.nan), (1.0, 2.0)])


def test_thinning_keeps_every_spike():
    points = [(float(i), 0.0) for i in range(10_000)]
    points[1234] = (1234.0, 50.0)
    points[7777] = (7777.0, -50.0)
    found = thinned(points)
    assert len(found) <= 320
    assert {(1234.0, 50.0), (7777.0, -50.0)} <= set(found)
    assert found == sorted(found)


def test_points_lie_where_the_axes_say():
    chart = line_chart("Loss", "nats", [Series("a", [(0.0, 0.0), (10.0, 1.0)])])
    root = ElementTree.fromstring(chart)
    (line,) = [p for p in root.iter("path") if p.get("class") == "smooth c1"]
    x0, y0, x1, y1 = numbers(line.get("d"))
    grid = {t.text: float(t.get("y")) - 3.5 for t in root.iter("text") if "end" in t.get("class")}
    assert y0 == pytest.approx(grid["0"], abs=0.1)
    assert y1 == pytest.approx(grid["1.0"], abs=0.1)
    steps = {t.text: float(t.get("x")) for t in root.iter("text") if t.get("class") == "tick mid"}
    assert (x0, x1) == pytest.approx((steps["0"], steps["10"]), abs=0.1)
    assert root.get("aria-label") == "Loss, nats, over steps"


def test_a_number_that_is_not_finite_is_a_gap_and_a_cross_never_a_zero():
    points = [(float(i), 5.0 + i % 3) for i in range(1, 41)]
    points[19] = (20.0, math.nan)
    root = ElementTree.fromstring(line_chart("t", "", [Series("loss", points)]))
    raw = next(p for p in root.iter("path") if p.get("class") == "raw c1")
    assert raw.get("d").count("M") == 2
    cross = next(p for p in root.iter("path") if p.get("class") == "cross c1")
    assert cross.find("title").text == "loss, step 20: nan"
    assert all(float(t.text) >= 5 for t in root.iter("text") if t.get("class") == "tick end")


def test_measured_points_are_dots_above_the_lines():
    series = [
        Series("held-out", [(1.0, 1.0), (5.0, 2.0)], "marks", 1),
        Series("training", [(1.0, 1.0), (5.0, 2.0)], "noisy", 2),
    ]
    root = ElementTree.fromstring(line_chart("t", "", series))
    order = [(e.tag, e.get("class")) for e in root if e.tag in ("path", "circle")]
    assert order == [
        ("path", "smooth c2"),
        ("path", "link c1"),
        ("circle", "dot f1"),
        ("circle", "dot f1"),
    ]


def test_a_schedule_is_drawn_as_it_is():
    points = [(float(i), float(min(i, 5))) for i in range(1, 61)]
    exact = ElementTree.fromstring(line_chart("t", "", [Series("lr", points, "exact")]))
    (line,) = exact.findall("path")
    assert len(numbers(line.get("d"))) == 2 * len(points)


def test_one_point_alone_can_be_seen():
    root = ElementTree.fromstring(line_chart("t", "", [Series("a", [(3.0, 1.5)])]))
    assert len(root.findall("circle")) == 1


@pytest.mark.parametrize("scale", [1e-9, 1e-4, 1.55e-3, 1.0, 1e7])
@pytest.mark.parametrize("ratio", [1.0001, 1.01, 1.15, 1.3])
def test_axis_labels_differ_from_each_other(scale, ratio):
    chart = line_chart("t", "", [Series("a", [(0.0, scale), (9.0, ratio * scale)])])
    labels = [t.text for t in ElementTree.fromstring(chart).iter("text") if "end" in t.get("class")]
    assert len(labels) == len(set(labels)) >= 3
    assert max(map(len, labels)) * 6 <= 54  # pixels; what is longer would be cut off


def test_the_bar_shares_its_length():
    root = ElementTree.fromstring(stacked_bar("time", [(1, "generate", 3.0), (3, "train", 1.0)]))
    rects = list(root.iter("rect"))
    assert [float(r.get("width")) for r in rects] == [750.0, 250.0]
    assert [float(r.get("x")) for r in rects] == [0.0, 750.0]
    assert [r.get("class") for r in rects] == ["f1", "f3"]
    assert rects[0].find("title").text == "generate: 75%"


def test_labels_cannot_break_out():
    evil = "\"><script>alert(1)</script>\x1b'"
    point = [(1.0, 1.0)]
    for svg in (
        line_chart(evil, evil, [Series(evil, [*point, (2.0, math.nan)], "marks")]),
        stacked_bar(evil, [(1, evil, 1.0)]),
    ):
        root = ElementTree.fromstring(svg)
        assert not list(root.iter("script"))
        assert "<script" not in svg
        assert "\x1b" not in svg


def _labels(svg: str) -> list[tuple[str, float, float, float]]:
    """Text, left, baseline and right of each label of a point, as wide as its letters."""
    found = re.findall(r'<text class="tag" x="([\d.-]+)" y="([\d.-]+)">([^<]*)<', svg)
    return [(text, float(x), float(y), float(x) + 5.8 * len(text)) for x, y, text in found]


def _dots(svg: str) -> list[tuple[float, float]]:
    return [
        (float(x), float(y))
        for x, y in re.findall(r'<circle class="dot f\d" cx="([\d.-]+)" cy="([\d.-]+)"', svg)
    ]


@pytest.mark.parametrize(
    "points",
    [
        # The end at the right edge, its neighbours to the left of it.
        [(0.0, 0.05), (0.82, 0.66), (1.1, 0.68), (1.06, 0.70), (1.15, 0.70)],
        # It goes back to where it began.
        [(0.0, 0.1), (0.5, 0.5), (0.01, 0.12)],
        [(0.0, 1.0), (1.0, 0.0)],
        [(0.3, 0.3)],
    ],
)
def test_a_label_of_a_path_covers_no_dot_and_no_label(points: list[tuple[float, float]]) -> None:
    path = Path("ppo", [(x, y, f"step {n}") for n, (x, y) in enumerate(points)])
    svg = str(path_chart("Reward against KL", "KL", [path]))
    labels, dots = _labels(svg), _dots(svg)
    assert len(dots) == len(points)
    assert [text for text, *_ in labels] == [f"step {n}" for n in sorted({0, len(points) - 1})]
    for _, left, base, right in labels:
        assert 0 <= left < right <= 360
        assert 9 < base <= 158
        assert not any(left < x < right and base - 9 < y < base for x, y in dots)
    for (_, left, base, right), (_, other_left, other_base, other_right) in pairwise(labels):
        is_beside = right <= other_left or other_right <= left
        assert is_beside or abs(base - other_base) >= 10
