"""Constants fitted to runs: what the runs need changes, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random

import pytest
import yaml

from tandem.plan.fitting import coefficients, non_negative
from tandem.plan.grade import refit
from tandem.predict.constants import CONSTANTS, SHIPPED
from tandem.predict.record import Outcome, add_outcomes

CPU = "this machine (AMD EPYC: Zen 4 with AVX2)"
SECTION = CPU[CPU.index("Zen") : -1]
KNOWN = yaml.safe_load(SHIPPED.read_text("utf-8"))
PRESENT = KNOWN[f"cpu {SECTION}"]["train"]
RUN = Outcome(
    stage="sft", phase="train", ranks=1, hardware=CPU, dtype="fp32", predicted_bytes=4e8,
    measured_bytes=4e8, slack_bytes=0.0,
)  # fmt: skip


def terms(seed: int) -> dict[str, float]:
    """Kinds of work that come together: every one grows with the size of the model, so only their
    sum is told well."""
    random = Random(seed)
    size = 10 ** random.uniform(-2, 0)
    return {
        name: size * random.uniform(0.9, 1.1) / max(value, 0.5)
        for name, value in PRESENT.items()
        if name != "first"
    }


def seconds(known: Mapping[str, float], found: Mapping[str, float]) -> float:
    return sum(known[name] * value for name, value in found.items())


def runs(known: Mapping[str, float], noise: float = 0.0, number: int = 30) -> list[Outcome]:
    random = Random(0)
    made = [terms(seed) for seed in range(number)]
    return [
        replace(RUN, terms=t, cpu_seconds=seconds(known, t) * (1 + random.uniform(-noise, noise)))
        for t in made
    ]


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    """A new folder each time, where runs may be written."""
    return (tmp_path / str(number) for number in count())


def recorded(made: list[Outcome], folder: Path) -> list[Path]:
    """The runs in folders, as `--refit` gets them; each with a line on the whole stage."""
    for number, run in enumerate(made):
        own = folder / str(number)
        own.mkdir(parents=True)
        add_outcomes(own, [run, replace(run, phase="stage", terms={})])
    return sorted(folder.iterdir())


def test_runs_that_the_coefficients_explain_leave_them() -> None:
    assert coefficients(runs(PRESENT), PRESENT) == {n: PRESENT[n] for n in terms(0)}
    assert coefficients(runs(PRESENT, noise=0.02), PRESENT) == {n: PRESENT[n] for n in terms(0)}


def test_the_same_runs_twice_change_nothing_more() -> None:
    slower = {name: 1.6 * value for name, value in PRESENT.items()}
    made = runs(slower, noise=0.2)
    once = coefficients(made, PRESENT)
    assert once != {name: PRESENT[name] for name in once}
    assert coefficients(made, once) == once


def test_what_runs_do_not_tell_apart_stays_near() -> None:
    """All twice as slow: no coefficient runs away, though every one alone would explain it."""
    slower = {name: 2 * value for name, value in PRESENT.items()}
    found = coefficients(runs(slower, noise=0.1), PRESENT)
    for run in runs(slower):
        assert seconds(found, run.terms) == pytest.approx(run.cpu_seconds, rel=0.1)
    moved = {name: value for name, value in found.items() if PRESENT[name] >= 0.5}
    assert all(PRESENT[name] <= value <= 8 * PRESENT[name] for name, value in moved.items()), found
    assert found["products"] == pytest.approx(PRESENT["products"], rel=0.2), "measured by itself"


def test_one_that_the_runs_tell_is_found() -> None:
    known = dict.fromkeys(PRESENT, 0.0) | {"layers": 7.0, "logits": 2.0}
    random = Random(1)
    made = []
    for _ in range(30):
        found = {"layers": random.uniform(0, 1), "logits": random.uniform(0, 1)}
        made.append(replace(RUN, terms=found, cpu_seconds=seconds(known, found)))
    fitted = coefficients(made, PRESENT)
    assert fitted["layers"] == pytest.approx(7.0, rel=0.15)
    assert fitted["logits"] == pytest.approx(2.0, rel=0.15)


def test_constants_that_explain_all_runs_stay_as_they_are(folders: Iterator[Path]) -> None:
    slack = KNOWN[f"cpu {SECTION}"]["slack_mib"]["step"] * 2**20
    made = [replace(run, slack_bytes=slack) for run in runs(PRESENT)]
    assert refit(recorded(made, next(folders))) == KNOWN


def test_runs_that_were_fitted_are_not_fitted_again(
    folders: Iterator[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is memory that was missing when they were predicted added twice."""
    slower = {name: 1.6 * value for name, value in PRESENT.items()}
    made = [replace(run, measured_bytes=4e8 + 2**23) for run in runs(slower, noise=0.2)]
    made += [replace(run, ranks=2, measured_bytes=4e8 + 2**24) for run in made]
    own = recorded(made, next(folders))
    once = refit(own)
    section = once[f"cpu {SECTION}"]
    assert (section["slack_mib"]["step"], section["slack_mib"]["per_rank"]) == (8.0, 8.0)
    file = tmp_path / "once.yaml"
    file.write_text(yaml.safe_dump(once), "utf-8")
    monkeypatch.setenv(CONSTANTS, str(file))
    assert refit(own) == once


def test_records_from_before_slack_was_kept_were_predicted_with_what_is_there(
    folders: Iterator[Path],
) -> None:
    made = [replace(run, slack_bytes=None, measured_bytes=4e8 + 2**20) for run in runs(PRESENT)]
    fitted = refit(recorded(made, next(folders)))[f"cpu {SECTION}"]["slack_mib"]
    before = KNOWN[f"cpu {SECTION}"]["slack_mib"]
    assert fitted["step"] == pytest.approx(before["step"] + 1)


def test_non_negative_least_squares() -> None:
    assert non_negative([[1, 0], [0, 1], [1, 1]], [2, -1, 1]) == pytest.approx([1.5, 0])
    assert non_negative([[1, 0], [1, 0]], [1, 3]) == pytest.approx([2, 0]), "nothing of the second"
    assert non_negative([[1, 1], [1, 1]], [2, 2]).sum() == pytest.approx(2)
    for seed in range(50):
        random = Random(seed)
        matrix = [[random.gauss(0, 1) for _ in range(6)] for _ in range(9)]
        target = [random.gauss(0, 1) for _ in range(9)]
        found = non_negative(matrix, target)
        gradient = [
            sum(row[i] * (sum(map(float.__mul__, row, found)) - b)
                for row, b in zip(matrix, target, strict=True))
            for i in range(6)
        ]  # fmt: skip
        for value, slope in zip(found, gradient, strict=True):
            assert value >= 0
            assert abs(slope) < 1e-9 if value > 0 else slope > -1e-9
