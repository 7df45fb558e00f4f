import importlib
import json
import math
import sys
import types

import pytest

from tandem.errors import ConfigError
from tandem.metrics.log import MetricLog
from tandem.metrics.sinks import missing_trackers


def scalars(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    assert tag in events.Tags()["scalars"]
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_reads_what_was_logged(tmp_path):
    with MetricLog(tmp_path, "sft", 3, tensorboard=True, console=False) as log:
        log.log(1, {"loss": 2.0, "seconds/train": 0.5})
        log.log(2, {"loss": math.nan})
    folder = tmp_path / "tensorboard" / "sft"
    (first, second) = scalars(folder, "sft/loss")
    assert first == (1, 2.0)
    assert second[0] == 2
    assert math.isnan(second[1])
    assert scalars(folder, "sft-cost/seconds/train") == [(1, 0.5)]


def test_tensorboard_groups_related_numbers(tmp_path):
    names = {
        "skipped": "ppo",
        "reward_before_penalty": "ppo-reward",
        "kl": "ppo-kl",
        "policy_loss": "ppo-update",
        "eos_rate": "ppo-answers",
        "heldout_reward": "ppo-held-out",
        "tflops/generate": "ppo-cost",
    }
    with MetricLog(tmp_path, "ppo", 3, tensorboard=True, console=False) as log:
        log.log(1, dict.fromkeys(names, 2.0))
    for name, heading in names.items():
        assert scalars(tmp_path / "tensorboard" / "ppo", f"{heading}/{name}") == [(1, 2.0)]


@pytest.mark.parametrize(("start", "steps"), [(2, [1, 2, 3]), (0, [3])])
def test_tensorboard_purges_the_steps_that_are_repeated(tmp_path, start, steps):
    with MetricLog(tmp_path, "sft", 9, tensorboard=True, console=False) as log:
        for step in range(1, 6):
            log.log(step, {"loss": 1.0})
    with MetricLog(tmp_path, "sft", 9, tensorboard=True, console=False, start_step=start) as log:
        log.log(3, {"loss": 7.0})
    found = scalars(tmp_path / "tensorboard" / "sft", "sft/loss")
    assert [step for step, _ in found] == steps
    assert found[-1] == (3, 7.0)


def test_tensorboard_purges_also_where_the_clock_was_set_back(tmp_path, monkeypatch):
    """Files are read by their names, which begin with the time."""
    for now, start, steps in ((2000.9, 0, range(1, 6)), (1000.0, 2, (3,)), (1000.0, 3, (4,))):
        monkeypatch.setattr("time.time", lambda now=now: now)
        log = MetricLog(tmp_path, "sft", 9, tensorboard=True, console=False, start_step=start)
        with log:
            for step in steps:
                log.log(step, {"loss": float(step + 10 * start)})
    found = scalars(tmp_path / "tensorboard" / "sft", "sft/loss")
    assert found == [(1, 1.0), (2, 2.0), (3, 23.0), (4, 34.0)]


def test_a_missing_tensorboard_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(
        ConfigError,
        match=r"^log.tensorboard must be off .*; got on\. Run `pip install tensorboard`",
    ):
        MetricLog(tmp_path, "sft", 1, tensorboard=True, console=False)


def test_tensorboard_is_not_imported_when_it_is_off(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with MetricLog(tmp_path, "sft", 1, tensorboard=False, console=False) as log:
        log.log(1, {"loss": 1.0})


def test_a_missing_wandb_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ConfigError, match=r"^log.wandb must be empty .*; got 'proj'\. Run `pip install wandb`"
    ):
        MetricLog(tmp_path, "sft", 1, tensorboard=False, wandb="proj", console=False)


def test_missing_trackers_are_found_without_importing_them(tmp_path, monkeypatch):
    assert missing_trackers(tensorboard=True, wandb="") == []
    for package in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    assert missing_trackers(tensorboard=False, wandb="") == []
    found = missing_trackers(tensorboard=True, wandb="proj")
    assert [line.split(" must ")[0] for line in found] == ["log.tensorboard", "log.wandb"]
    assert "got 'proj'. Run `pip install wandb`" in found[1]
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    assert missing_trackers(tensorboard=False, wandb="proj") == []


def test_a_folder_of_wandbs_runs_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert len(missing_trackers(tensorboard=False, wandb="proj")) == 1
    (tmp_path / "wandb/__init__.py").write_text("raise SystemExit")
    importlib.invalidate_caches()
    assert missing_trackers(tensorboard=False, wandb="proj") == []


ANSWERS = {"sft": {"text": "No *idea*\n\x1b[31m", "score": 0.5}, "ppo": {"text": "", "score": None}}


def test_tensorboard_shows_samples_and_histograms(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricLog(tmp_path, "ppo", 3, tensorboard=True, console=False) as log:
        log.log(1, {"reward": 1.0})
        log.sample(1, "What?", ANSWERS)
        log.histogram(1, {"scores": [1.0, 2.0, 2.0, math.nan], "none": [math.inf]})
    events = EventAccumulator(str(tmp_path / "tensorboard/ppo"))
    events.Reload()
    (text,) = events.Tensors("ppo/samples")
    assert text.step == 1
    shown = text.tensor_proto.string_val[0].decode()
    assert "**prompt**\n\n    What?" in shown
    assert "**sft (0.5000)**\n\n    No *idea*\n" in shown
    assert "\x1b" not in shown
    assert events.Tags()["histograms"] == ["ppo/scores"]
    (spread,) = events.Histograms("ppo/scores")
    histogram = spread.histogram_value
    assert (histogram.min, histogram.max, histogram.num) == (1.0, 2.0, 3)
    assert sum(histogram.bucket) == 3


class FakeTable:
    def __init__(self, columns):
        self.rows = [tuple(columns)]

    def add_data(self, *row):
        self.rows.append(row)


def test_wandb_gets_samples_as_a_table_and_histograms(tmp_path, wandb_runs):
    with open_wandb(tmp_path) as log:
        log.sample(4, "What?", ANSWERS)
        log.histogram(4, {"scores": [1.0, 2.0]})
    samples, spread = wandb_runs[0].logged
    assert samples["ppo/step"] == 4
    assert samples["ppo/samples"].rows[1:] == [
        ("What?", "sft", "No *idea*\n\x1b[31m", 0.5),
        ("What?", "ppo", "", None),
    ]
    assert spread == {"ppo/step": 4, "ppo/scores": ([1.0, 2.0], 30)}


class FakeRun:
    def __init__(self, **settings):
        self.settings = settings
        self.logged = []
        self.metrics = []
        self.exit_code = None

    def define_metric(self, name, step_metric):
        self.metrics.append((name, step_metric))

    def log(self, values):
        self.logged.append(values)

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def wandb_runs(monkeypatch):
    runs = []
    fake = types.ModuleType("wandb")
    fake.Table = FakeTable
    fake.Histogram = lambda numbers, num_bins: (numbers, num_bins)
    fake.init = lambda **settings: runs.append(FakeRun(**settings)) or runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return runs


def open_wandb(path, stage="ppo", start_step=0):
    return MetricLog(
        path, stage, 9, tensorboard=False, wandb="proj", console=False, start_step=start_step
    )


def test_wandb_shows_the_runs_knobs(tmp_path, wandb_runs):
    (tmp_path / "config.yaml").write_text("seed: 7\nsft: {learning_rate: 1.0e-4}\n")
    open_wandb(tmp_path).close()
    assert wandb_runs[0].settings["config"] == {"seed": 7, "sft": {"learning_rate": 1e-4}}


def test_wandb_gets_every_record_with_its_own_step(tmp_path, wandb_runs):
    with open_wandb(tmp_path) as log:
        log.log(4, {"reward": 0.5})
    (run,) = wandb_runs
    assert run.logged == [{"ppo/step": 4, "ppo/reward": 0.5}]
    assert run.metrics == [("ppo/*", "ppo/step")]
    assert run.settings["project"] == "proj"
    assert run.settings["group"] == tmp_path.name
    assert run.exit_code == 0


def test_wandb_continues_its_run_and_starts_a_new_one_from_step_0(tmp_path, wandb_runs):
    for stage, start in (("sft", 0), ("ppo", 0), ("ppo", 3), ("ppo", 0)):
        open_wandb(tmp_path, stage, start).close()
    sft, first, continued, restarted = (run.settings["id"] for run in wandb_runs)
    assert continued == first
    assert len({sft, first, restarted}) == 3
    assert json.loads((tmp_path / "wandb.json").read_text()) == {"sft": sft, "ppo": restarted}


def test_a_stage_that_fails_is_marked_as_failed(tmp_path, wandb_runs):
    with pytest.raises(RuntimeError), open_wandb(tmp_path):
        raise RuntimeError
    assert wandb_runs[0].exit_code == 1
