import json
import math

import pytest

from tandem.errors import CheckpointError
from tandem.metrics.records import (
    cut_lines,
    json_line,
    parse_record,
    read_lines,
    read_metrics,
)
from tests.jsonl import write_jsonl

from .runs import metrics_line


def test_no_file_is_no_records(tmp_path):
    assert read_metrics(tmp_path) == []


def test_records_come_back_as_written_non_finite_ones_too(tmp_path):
    lines = [metrics_line("sft", 1, loss=2.5, grad_norm="nan"), metrics_line("sft", 2, loss="-inf")]
    write_jsonl(tmp_path / "metrics.jsonl", lines)
    first, second = read_metrics(tmp_path)
    assert (first.stage, first.step, first.time) == ("sft", 1, 1.7e9 + 1)
    assert first.values["loss"] == 2.5
    assert math.isnan(first.values["grad_norm"])
    assert second.values["loss"] == -math.inf


def test_a_half_written_last_line_is_ignored(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_jsonl(path, [metrics_line("sft", 1, loss=1.0), metrics_line("sft", 2, loss=1.0)])
    whole = path.read_bytes()
    for length in range(whole.index(b"\n") + 1, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert [r.step for r in read_metrics(tmp_path)] == [1]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        json.dumps(metrics_line("sft", 1)) + '\n\n{"stage": 3\n' + json.dumps(metrics_line("a", 2))
    )
    with pytest.raises(
        CheckpointError,
        match=r"metrics.jsonl:3 must be one JSON object .*; got '{\"stage\": 3'\. Remove that line",
    ):
        read_metrics(tmp_path)
    skipped = []
    assert len(read_lines(path, dict, skipped)) == 2
    assert len(skipped) == 1


def test_a_damaged_last_line_that_was_whole_is_named_and_kept_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_jsonl(path, [metrics_line("sft", 1, loss=1.0), metrics_line("sft", 2, loss=1.0)])
    whole = path.read_bytes()
    damaged = whole[:-2] + b"~\n"
    path.write_bytes(damaged)
    skipped = []
    assert [record.step for record in read_lines(path, parse_record, skipped)] == [1]
    assert [text.partition(" ")[0] for text in skipped] == [f"{path}:2"]
    said = cut_lines(path, lambda stage, step: True, parse_record)
    assert "1 damaged lines (2) were moved to metrics.jsonl.damaged" in said
    assert whole.startswith(path.read_bytes())
    assert damaged.endswith((tmp_path / "metrics.jsonl.damaged").read_bytes())


def test_cutting_keeps_other_lines_byte_for_byte(tmp_path):
    path = tmp_path / "samples.jsonl"
    lines = [
        {"stage": s, "step": n, "prompt": "ü \u2028 😀"} for s in ("sft", "ppo") for n in (1, 2)
    ]
    path.write_text("".join(map(json_line, lines)) + '{"stage": "ppo", "st')
    cut_lines(path, lambda stage, step: stage == "sft" or step < 2)
    assert path.read_text("utf-8") == "".join(map(json_line, lines[:3]))
    assert list(tmp_path.iterdir()) == [path]


def test_damaged_lines_are_moved_to_another_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = [json_line(metrics_line("sft", n)) for n in (1, 2)]
    bad = ['{"stage": 3', '{"stage": "sft", "step": 2, "time": 0, "values": 7}', "[" * 100_000]
    path.write_text(good[0] + "".join(f"{line}\n" for line in bad) + good[1])
    notice = cut_lines(path, lambda stage, step: True, parse_record)
    assert notice == (
        f"{path}: 3 damaged lines (2, 3, 4) were moved to metrics.jsonl.damaged; the run continues"
    )
    assert path.read_text() == "".join(good)
    assert (tmp_path / "metrics.jsonl.damaged").read_text().split() == "\n".join(bad).split()
    assert cut_lines(path, lambda stage, step: True, parse_record) == ""


def test_a_last_line_without_its_newline_is_completed(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"stage": "ppo", "step": 1}')
    cut_lines(path, lambda stage, step: True)
    assert path.read_text() == '{"stage": "ppo", "step": 1}\n'


def test_lines_are_strict_json_and_safe_to_print():
    line = {
        "values": {"a": math.nan, "b": -math.inf},
        "list": [math.inf],
        "text": "\x1b\x9b\u2028\ud800日",
    }
    text = json_line(line)
    text.encode()
    assert "日" in text
    assert not any(c in text for c in "\x1b\x9b\u2028\ud800")
    assert len(text.splitlines()) == 1

    def refuse(constant):
        raise AssertionError(constant)

    back = json.loads(text, parse_constant=refuse)
    assert back["text"] == line["text"]
    assert back["values"] == {"a": "nan", "b": "-inf"}
    assert back["list"] == ["inf"]


def test_cutting_does_not_write_what_another_program_has_spaced(tmp_path):
    """Lines are kept as they are, not written anew from what they say."""
    path = tmp_path / "metrics.jsonl"
    text = '{"stage":"sft","step":1,"time":0,"values":{"loss":2.50}}\n'
    path.write_text(text)
    before = path.stat().st_ino
    assert cut_lines(path, keep=lambda stage, step: True, parse=parse_record) == ""
    assert (path.read_text(), path.stat().st_ino) == (text, before)
