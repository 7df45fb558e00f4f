"""Predicted beside measured, and the memory by part."""

from pathlib import Path

from tandem.metrics.folder import read_folder
from tandem.metrics.forecasts import prediction_tables
from tandem.metrics.report import render
from tests.jsonl import write_jsonl


def test_the_parts_and_the_process_make_what_is_predicted(tmp_path: Path) -> None:
    line = {
        "stage": "sft", "phase": "train", "measured_bytes": 430 * 2**20,
        "predicted_bytes": 400 * 2**20,
        "parts": {"activations": 30 * 2**20, "gradient under way": 20 * 2**20},
    }  # fmt: skip
    write_jsonl(tmp_path / "predictions.jsonl", [line])
    ((table,),) = [prediction_tables(read_folder(tmp_path))]
    (bar,) = table["bars"]
    assert bar["legend"] == [
        (1, "process and allocator", "350 MiB"),
        (2, "activations", "30 MiB"),
        (3, "one weight's gradient", "20 MiB"),
    ]


def test_what_was_not_predicted_is_left_empty(tmp_path: Path) -> None:
    lines = [
        {"stage": "sft", "phase": "train", "measured_bytes": 4000 * 2**20,
         "predicted_bytes": 3999 * 2**20, "cpu_seconds": 2.0, "predicted_seconds": None},
        {"stage": "sft", "phase": "evaluate", "measured_bytes": 4000 * 2**20,
         "predicted_bytes": 0.0, "cpu_seconds": 3.0, "predicted_seconds": None},
    ]  # fmt: skip
    write_jsonl(tmp_path / "predictions.jsonl", lines)
    (table,) = prediction_tables(read_folder(tmp_path))
    assert not table["is_timed"]
    assert [row["cells"] for row in table["rows"]] == [
        ["3.91 GiB", "3.91 GiB", "+0 %", "2.00 s", "", ""],
        ["3.91 GiB", "", "", "3.00 s", "", ""],
    ]


def test_predicted_times_have_their_columns_only_where_there_are_some(tmp_path: Path) -> None:
    line = {"stage": "sft", "phase": "train", "measured_bytes": 2**20, "predicted_bytes": 2**20,
            "cpu_seconds": 2.0}  # fmt: skip
    for seconds, columns in ((None, 5), (3.0, 7)):
        write_jsonl(tmp_path / "predictions.jsonl", [line | {"predicted_seconds": seconds}])
        page = render(read_folder(tmp_path))
        head, _, rest = page[page.index('id="forecast"') :].partition("</thead>")
        assert head.count("<th>") + head.count("<th ") == columns
        section = rest.partition("</table>")[0]
        assert ("+50 %" in section) == (columns == 7)
