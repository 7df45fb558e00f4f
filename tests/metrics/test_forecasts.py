"""Predicted beside measured, and the memory by part."""

from pathlib import Path

from tandem.metrics.folder import read_folder
from tandem.metrics.forecasts import prediction_tables

from .runs import write_lines


def test_the_parts_and_the_process_make_what_is_predicted(tmp_path: Path) -> None:
    line = {
        "stage": "sft", "phase": "train", "measured_bytes": 430 * 2**20,
        "predicted_bytes": 400 * 2**20,
        "parts": {"activations": 30 * 2**20, "gradient under way": 20 * 2**20},
    }  # fmt: skip
    write_lines(tmp_path / "predictions.jsonl", [line])
    ((table,),) = [prediction_tables(read_folder(tmp_path))]
    (bar,) = table["bars"]
    assert bar["legend"] == [
        (1, "process and allocator", "350 MiB"),
        (2, "activations", "30 MiB"),
        (3, "one weight's gradient", "20 MiB"),
    ]
