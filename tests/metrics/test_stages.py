"""A stage is its record: with it alone, logs, alarms and report know a new one."""

import pytest

from tandem.config import stages
from tandem.metrics.folder import finished_stages
from tandem.metrics.log import MetricLog
from tandem.metrics.report import write_report


@pytest.fixture
def slic(monkeypatch):
    stage = stages.Stage(
        name="slic",
        title="Likelihood calibration",
        short="SLiC",
        help="A test.",
        prepare="nowhere:nothing",
        family="pairs",
        share="pairs",
        section="dpo",
    )
    monkeypatch.setattr(stages, "STAGES", (*stages.STAGES, stage))


def test_a_new_stage_needs_its_record_alone(tmp_path, slic, capsys):
    with MetricLog(tmp_path, "slic", 60, tensorboard=False) as log:
        log.log(0, {"heldout_accuracy": 0.5})
        for step in range(1, 60):
            log.log(step, {"loss": 0.69, "accuracy": 0.4, "seconds/train": 1.0})
        raised = log.log(60, {"loss": 0.69, "heldout_accuracy": 0.51})
    assert [alarm.alarm for alarm in raised] == ["heldout-accuracy-chance"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "slic 60/60 loss 0.690 acc - | held-out acc 0.510" in printed
    assert "ALARM accuracy-chance" in printed
    (tmp_path / "slic").mkdir()
    (tmp_path / "slic" / "MANIFEST.json").write_text('{"sha256": "0a"}')
    assert finished_stages(tmp_path) == {"slic": "0a"}
    page = write_report(tmp_path).read_text("utf-8")
    for shown in (
        "<h3>Likelihood calibration</h3>",
        "SLiC model: held-out accuracy",
        "Accuracy on pairs",
        "time per phase",
    ):
        assert shown in page, shown


def test_a_stage_without_a_record_is_left_out_of_the_report(tmp_path, slic, monkeypatch):
    with MetricLog(tmp_path, "slic", 1, tensorboard=False, console=False) as log:
        log.log(1, {"loss": 0.69})
    monkeypatch.undo()
    assert "Likelihood cal" not in write_report(tmp_path).read_text("utf-8")
