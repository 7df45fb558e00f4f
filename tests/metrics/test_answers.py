import json

import pytest

from tandem.metrics.answers import ANSWERS_FILE, AnswerLines
from tandem.metrics.log import MetricLog
from tests.jsonl import read_jsonl


def steps(path, stage="ppo"):
    lines = read_jsonl(path)
    return [line["step"] for line in lines if line["stage"] == stage]


def write(path, first, last, limit=3000, stage="ppo"):
    lines = AnswerLines(path, stage, limit)
    notices = []
    for step in range(first, last + 1):
        if lines.is_due(step):
            notices.append(lines.write(step, [{"reward": [0.5] * 10}, {"reward": [1.5] * 10}]))
    return [notice for notice in notices if notice]


def test_a_file_that_is_full_keeps_every_second_step_of_the_whole_training(tmp_path):
    path = tmp_path / ANSWERS_FILE
    notices = write(path, 1, 200)
    assert path.stat().st_size <= 3000
    kept = steps(path)
    every = json.loads(path.read_text("utf-8").splitlines()[-1])["every"]
    assert every > 1
    assert kept == [step for n in range(every, 201, every) for step in (n, n)]
    assert notices
    assert f"every {every}th step" in notices[-1]


@pytest.mark.parametrize("stopped", [7, 40, 41, 150])
def test_a_continued_file_goes_on_as_if_never_stopped(tmp_path, stopped):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    write(whole, 1, 200)
    write(parts, 1, stopped)
    write(parts, stopped + 1, 200)
    assert parts.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("limit", [1, 150, 500])
@pytest.mark.parametrize(("killed", "saved"), [(8, 5), (40, 12), (33, 31), (150, 2)])
def test_so_does_one_whose_every_line_is_after_the_checkpoint(tmp_path, limit, killed, saved):
    """A step's lines take up a third of the limit or more: few steps are kept, the last ones."""

    def logged(folder, first, last, start_step):
        options = {"tensorboard": False, "console": False, "record_bytes": limit}
        with MetricLog(folder, "ppo", 200, start_step=start_step, **options) as log:
            for step in range(first, last + 1):
                log.record(step, ANSWERS_FILE, lambda: [{"reward": [0.5] * 10}] * 2)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    logged(whole, 1, 200, 0)
    logged(parts, 1, killed, 0)
    logged(parts, saved + 1, 200, saved)
    content = (whole / ANSWERS_FILE).read_bytes()
    assert content
    assert (parts / ANSWERS_FILE).read_bytes() == content


def test_thinning_leaves_the_lines_of_other_stages(tmp_path):
    path = tmp_path / ANSWERS_FILE
    write(path, 1, 5, stage="grpo")
    write(path, 1, 100)
    assert steps(path, "grpo") == [n for n in range(1, 6) for _ in range(2)]


def test_a_limit_of_0_records_nothing_and_makes_nothing(tmp_path):
    def never():
        raise AssertionError("made for nothing")

    with MetricLog(tmp_path, "ppo", 3, tensorboard=False, console=False) as log:
        log.record(1, ANSWERS_FILE, never)
    assert not (tmp_path / ANSWERS_FILE).exists()


def test_continuing_cuts_the_later_lines_of_this_stage_and_half_a_line(tmp_path):
    def open_log(start):
        return MetricLog(
            tmp_path, "ppo", 9, tensorboard=False, console=False, start_step=start,
            record_bytes=10**6,
        )  # fmt: skip

    with open_log(0) as log:
        for step in range(6):
            log.record(step, ANSWERS_FILE, lambda: [{"reward": [1.0]}])
    path = tmp_path / ANSWERS_FILE
    with path.open("ab") as file:
        file.write(b'{"stage": "ppo", "st')
    with open_log(3) as log:
        assert steps(path) == [0, 1, 2, 3]
        log.record(4, ANSWERS_FILE, lambda: [{"reward": [2.0]}])
    assert steps(path) == [0, 1, 2, 3, 4]
