import pytest

from tandem.errors import ConfigError
from tandem.metrics.metric import PHASES, STAGES
from tandem.metrics.names import METRIC, METRICS, check_stage, find_metric


def test_one_name_has_one_meaning():
    assert len(METRIC) == len(METRICS)
    meanings = [metric.meaning for metric in METRICS]
    assert all(meanings)
    for metric in METRICS:
        assert metric.unit
        assert metric.stages
        assert set(metric.stages) <= set(STAGES)


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("loss", "loss"),
        ("heldout_accuracy", "heldout_accuracy"),
        ("heldout_accuracy/any set/with slash", "heldout_accuracy/*"),
        *[(f"seconds/{phase}", "seconds/*") for phase in PHASES],
    ],
)
def test_a_declared_name_is_found(name, declared):
    assert find_metric(name) is METRIC[declared]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("los", "loss"),
        ("seconds/training", "seconds/train"),
        ("heldout_acuracy", "heldout_accuracy"),
        ("seconds", "seconds/score"),
        ("seconds/*", "seconds/save"),
        ("heldout_accuracy/", "heldout_accuracy"),
        ("loss/x", "loss"),
    ],
)
def test_an_undeclared_name_is_refused_with_the_nearest(name, nearest):
    with pytest.raises(ConfigError, match=r"^metric name must be declared in .*; got ") as error:
        find_metric(name)
    assert repr(name) in str(error.value)
    assert nearest.split("/")[0] in str(error.value)


def test_a_stage_that_does_not_log_is_refused():
    assert check_stage("sft") == "sft"
    with pytest.raises(ConfigError, match=r"^stage must be one of sft, .*; got 'SFT'\. Use one\."):
        check_stage("SFT")
