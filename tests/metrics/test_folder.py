import json
import math

import pytest

from tandem.errors import CheckpointError
from tandem.metrics.folder import number_or_none, read_folder
from tests.jsonl import write_jsonl

from .runs import metrics_line


def test_there_must_be_a_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"^run folder must exist; got '.*gone'\. Give the"):
        read_folder(tmp_path / "gone")


def test_an_empty_folder_is_an_empty_run(tmp_path):
    folder = read_folder(tmp_path)
    assert folder.records == folder.samples == folder.alarms == folder.notices == ()
    assert folder.stages() == []


def test_damaged_files_are_named_and_the_others_still_read(tmp_path):
    (tmp_path / "config.yaml").write_text("a: [")
    (tmp_path / "data.json").write_text("{")
    (tmp_path / "evaluation.json").write_text("[1]")
    (tmp_path / "environment.json").write_bytes(b'{"cpu": "\xff"}')
    (tmp_path / "alarms.jsonl").write_text('3\n{"alarm": "x"}\n')
    write_jsonl(tmp_path / "metrics.jsonl", [{"stage": 1}, metrics_line("sft", 1, loss=1.0)])
    folder = read_folder(tmp_path)
    files = ("config.yaml", "data.json", "evaluation.json", "environment.json", "alarms.jsonl:1")
    for name in (*files, "metrics.jsonl:1"):
        assert any(name in notice for notice in folder.notices), name
    assert [stage.name for stage in folder.stages()] == ["sft"]
    assert len(folder.alarms) == 1


def test_a_line_that_is_not_an_object_is_named(tmp_path):
    (tmp_path / "samples.jsonl").write_text('[1]\n{"step": 1}\n')
    folder = read_folder(tmp_path)
    assert "samples.jsonl:1 must be one JSON object" in folder.notices[0]
    (tmp_path / "data.json").write_text("[1]")
    assert "must be a JSON object; got list. Remove it." in read_folder(tmp_path).notices[0]


def test_a_series_is_in_the_order_of_steps_and_the_last_record_of_a_step_counts(tmp_path):
    lines = [metrics_line("sft", step, loss=value) for step, value in ((2, 5.0), (1, 4.0))]
    lines += [metrics_line("sft", 2, loss="nan"), metrics_line("ppo", 1, reward=1.0)]
    write_jsonl(tmp_path / "metrics.jsonl", lines)
    (one, two) = read_folder(tmp_path).series("sft", "loss")
    assert one == (1.0, 4.0)
    assert math.isnan(two[1])


@pytest.mark.parametrize(
    ("value", "number"),
    [(1, 1.0), (0.5, 0.5), ("inf", math.inf), (True, None), ("1", None), (None, None), ([], None)],
)
def test_numbers_are_numbers_only(value, number):
    assert number_or_none(value) == number
    assert json.dumps(value) is not None
