import pytest

from tandem.config.stages import FAMILIES, stage_of
from tandem.errors import ConfigError
from tandem.metrics.metric import PHASES
from tandem.metrics.names import METRIC, find_metric, title_of
from tandem.metrics.table import METRICS


def test_one_name_has_one_meaning():
    assert len(METRIC) == len(METRICS)
    meanings = [metric.meaning for metric in METRICS]
    assert all(meanings)
    for metric in METRICS:
        assert metric.unit
        assert metric.families
        assert set(metric.families) <= set(FAMILIES)


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


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("heldout_reward", "Held-out reward"),
        ("heldout_loss/politeness", "Held-out cross-entropy: politeness"),
        ("seconds/train", "Time: train"),
        ("kl_coef", "KL coefficient"),
        ("response_tokens", "Answer length"),
        ("rule: manner", "rule: manner"),
    ],
)
def test_titles_are_plain_words(name, title):
    assert title_of(name) == title


def test_the_loss_of_a_stage_on_pairs_is_not_called_as_that_of_an_evaluation() -> None:
    assert title_of("heldout_loss", "pairs") == "Held-out preference loss"
    assert title_of("heldout_loss/sums", "pairs") == "Held-out preference loss: sums"
    assert title_of("heldout_loss", "supervised") == title_of("heldout_loss")


def test_a_chart_holds_few_lines_of_one_unit():
    for family in FAMILIES:
        charts = {}
        for metric in METRICS:
            if metric.chart and family in metric.families:
                charts.setdefault(metric.chart, []).append(metric)
        assert charts
        for title, metrics in charts.items():
            assert len({metric.unit for metric in metrics}) == 1, title
            assert len(metrics) <= 4


def test_rewards_with_and_without_penalty_do_not_share_an_axis():
    """Training rewards have the missing-EOS penalty subtracted, held-out ones have not."""
    charts = {name: METRIC[name].chart for name in METRIC}
    assert charts["reward_before_penalty"] == charts["heldout_reward"] != charts["reward"] != ""


def test_a_stage_that_does_not_log_is_refused():
    assert stage_of("sft").family == "supervised"
    with pytest.raises(ConfigError, match=r"^stage must be one of sft, .*; got 'SFT'\. Use one\."):
        stage_of("SFT")
