import math

import numpy as np
import pytest
import torch

from tandem.errors import ConfigError
from tandem.metrics.alarms import Alarm
from tandem.metrics.log import MetricLog, read_metrics
from tests.jsonl import read_jsonl


def open_log(path, stage="sft", **settings):
    settings = {"tensorboard": False, "console": False, **settings}
    return MetricLog(path, stage, 10, **settings)


def test_a_record_is_on_disk_before_log_returns(tmp_path):
    with open_log(tmp_path / "new" / "run") as log:
        log.log(1, {"loss": 2.5, "tokens": torch.tensor(7), "grad_norm": np.float32(0.5)})
        (line,) = read_jsonl(tmp_path / "new" / "run" / "metrics.jsonl")
        assert line["stage"] == "sft"
        assert line["step"] == 1
        assert line["values"] == {"loss": 2.5, "tokens": 7.0, "grad_norm": 0.5}
        assert 1.7e9 < line["time"] < 1e11
        assert log.history[0].values["loss"] == 2.5


def test_what_is_not_finite_is_never_written_as_a_number(tmp_path):
    with open_log(tmp_path) as log:
        log.log(1, {"loss": math.nan, "grad_norm": math.inf})
    values = read_jsonl(tmp_path / "metrics.jsonl")[0]["values"]
    assert values == {"loss": "nan", "grad_norm": "inf"}
    assert math.isnan(read_metrics(tmp_path)[0].values["loss"])


def test_an_unknown_name_or_stage_is_refused_and_nothing_written(tmp_path):
    with open_log(tmp_path) as log:
        with pytest.raises(ConfigError, match="got 'lss'"):
            log.log(1, {"loss": 1.0, "lss": 1.0})
        assert not (tmp_path / "metrics.jsonl").exists()
        assert log.history == []
    with pytest.raises(ConfigError, match="got 'train'"):
        open_log(tmp_path, stage="train")


def test_continuing_removes_only_this_stages_later_steps(tmp_path):
    for stage in ("sft", "ppo"):
        with open_log(tmp_path, stage) as log:
            for step in range(4):
                log.log(step, {"heldout_loss": 1.0} if stage == "sft" else {"reward": 1.0})
                log.sample(step, "p", {"a": {"text": "t", "score": None}})
                log.alarm(Alarm(stage, step, "x", 1.0, 0.0, "y"))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "ppo", "step": 4, "ti')
    with open_log(tmp_path, "ppo", start_step=2) as log:
        assert [r.step for r in log.history] == [0, 1, 2]
        log.log(3, {"reward": 9.0})
    for name in ("metrics.jsonl", "samples.jsonl", "alarms.jsonl"):
        steps = [(line["stage"], line["step"]) for line in read_jsonl(tmp_path / name)]
        again = [("ppo", 3)] if name == "metrics.jsonl" else []
        assert steps == [("sft", n) for n in range(4)] + [("ppo", n) for n in range(3)] + again
    assert read_metrics(tmp_path)[-1].values["reward"] == 9.0


def test_a_damaged_line_does_not_stop_the_run(tmp_path, capsys):
    with open_log(tmp_path) as log:
        log.log(1, {"loss": 2.0})
        log.sample(1, "p", {"a": {"text": "t", "score": None}})
    for name in ("metrics.jsonl", "samples.jsonl"):
        content = (tmp_path / name).read_text()
        (tmp_path / name).write_text("\x1b[31m{\n" + content)
    capsys.readouterr()
    with open_log(tmp_path, start_step=1, console=True) as log:
        assert [r.step for r in log.history] == [1]
    said = capsys.readouterr().out.replace("\n", "")
    assert said.count("1 damaged lines (1) were moved to") == 2
    assert "\x1b" not in said


def test_steps_that_another_folder_has_are_named(tmp_path, capsys):
    """Of a run whose nodes share no file system, and come in another order."""
    with open_log(tmp_path) as log:
        log.log(0, {"heldout_loss": 2.0})
        log.log(1, {"loss": 2.0})
    said = []
    for done in (1, 4):
        with open_log(tmp_path, start_step=done, console=True) as log:
            log.log(done + 1, {"loss": 2.0})
        said.append(capsys.readouterr().out.replace("\n", ""))
    assert "has nothing of" not in said[0]
    assert "metrics.jsonl has nothing of steps 3 to 4 of sft: another node" in said[1]


def test_records_share_the_texts_of_their_names(tmp_path):
    """A long run keeps all of its records."""
    with open_log(tmp_path) as log:
        for step in range(3):
            log.log(step, {"/".join(["peak_memory_bytes", "train"]): 1.0})
        kept = [*log.history, *read_metrics(tmp_path)]
    assert len(kept) == 6
    assert len({id(name) for record in kept for name in record.values}) == 1


def test_starting_over_removes_the_stages_step_0_too(tmp_path):
    for _ in range(2):
        with open_log(tmp_path) as log:
            log.log(0, {"heldout_loss": 2.0})
            log.log(1, {"loss": 2.0})
    assert [r.step for r in read_metrics(tmp_path)] == [0, 1]


def test_samples_keep_the_text_as_it_was(tmp_path):
    prompt, answer = "hi \x1b[2J\u202e\n日本", "a\ud800b\r"
    with open_log(tmp_path, "ppo") as log:
        log.sample(3, prompt, {"sample 1": {"text": answer, "score": math.nan}})
    (line,) = read_jsonl(tmp_path / "samples.jsonl")
    assert line["prompt"] == prompt
    assert line["answers"]["sample 1"] == {"text": answer, "score": "nan"}


def test_alarms_are_raised_once_and_kept(tmp_path):
    with open_log(tmp_path, "ppo") as log:
        assert log.log(1, {"kl": 1.0}) == []
        assert [alarm.alarm for alarm in log.log(2, {"kl": 30.0})] == ["kl-high"]
        assert log.log(3, {"kl": 31.0}) == []
    (line,) = read_jsonl(tmp_path / "alarms.jsonl")
    assert (line["stage"], line["step"], line["alarm"]) == ("ppo", 2, "kl-high")
    assert (line["value"], line["threshold"]) == (30.0, 25.0)
    assert "kl_coef" in line["advice"]


def test_an_alarm_is_not_raised_again_after_a_restart(tmp_path):
    with open_log(tmp_path, "ppo") as log:
        log.log(1, {"kl": 30.0})
    with open_log(tmp_path, "ppo", start_step=1) as log:
        assert log.log(2, {"kl": 30.0}) == []
    assert len(read_jsonl(tmp_path / "alarms.jsonl")) == 1


def test_own_thresholds_replace_the_published_ones(tmp_path):
    with open_log(tmp_path, "ppo", thresholds={"kl-high": 2.0}) as log:
        (alarm,) = log.log(1, {"kl": 3.0})
    assert alarm.threshold == 2.0
