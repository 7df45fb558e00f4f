import pytest

from tandem.metrics.cost import time_per_phase, total_seconds
from tandem.metrics.folder import read_folder

from .runs import metrics_line, write_lines


def stage(path, *steps):
    write_lines(
        path / "metrics.jsonl",
        [metrics_line("ppo", n, **values) for n, values in enumerate(steps, start=1)],
    )
    return read_folder(path)


def test_rates_are_over_all_steps_not_a_mean_of_rates(tmp_path):
    rate = "tokens_per_second/generate"
    folder = stage(
        tmp_path,
        {"seconds/generate": 1.0, rate: 100.0, "peak_memory_bytes/generate": 2**30},
        {"seconds/generate": 3.0, rate: 500.0, "peak_memory_bytes/generate": 2**29},
    )
    (view,) = time_per_phase(folder)
    (row,) = view.rows
    assert row.tokens == "400"
    assert row.memory == "1.00 GiB"
    assert (row.seconds, row.share, row.samples) == ("4.00 s", "100 %", "")


def test_what_no_phase_covers_is_named(tmp_path):
    folder = stage(tmp_path, {"seconds/step": 10.0, "seconds/train": 6.0, "seconds/save": 0.0})
    (view,) = time_per_phase(folder)
    assert [(r.phase, r.share) for r in view.rows] == [("train", "60 %"), ("other", "40 %")]


@pytest.mark.parametrize(
    ("values", "total"),
    [
        ({"seconds/step": 10.0, "seconds/train": 6.0}, 10.0),
        ({"seconds/step": 6.0, "seconds/train": 6.0, "seconds/evaluate": 3.0}, 9.0),
        ({"seconds/train": 6.0}, 6.0),
        ({"reward": 1.0}, 0.0),
        ({"seconds/step": "nan", "seconds/train": 2.0}, 2.0),
    ],
)
def test_the_time_of_a_stage_is_its_steps_or_its_phases(tmp_path, values, total):
    assert total_seconds(stage(tmp_path, values), "ppo") == total


def test_a_phase_has_one_colour_in_every_stage(tmp_path):
    write_lines(
        tmp_path / "metrics.jsonl",
        [
            metrics_line("sft", 1, **{"seconds/train": 1.0}),
            metrics_line("ppo", 1, **{"seconds/generate": 1.0, "seconds/train": 1.0}),
        ],
    )
    sft, ppo = time_per_phase(read_folder(tmp_path))
    colours = [{row.phase: row.colour for row in view.rows}["train"] for view in (sft, ppo)]
    assert colours[0] == colours[1]
    assert 'class="f3"' in sft.bar
