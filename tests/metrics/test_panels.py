from tandem.metrics.metric import STAGES
from tandem.metrics.names import find_metric
from tandem.metrics.panels import PANELS


def test_every_stage_draws_declared_metrics_of_its_own_in_one_unit():
    assert set(PANELS) == set(STAGES)
    for stage, panels in PANELS.items():
        for panel in panels:
            metrics = [find_metric(name) for name, _ in panel.lines]
            assert all(stage in metric.stages for metric in metrics)
            assert len({metric.unit for metric in metrics}) == 1, panel.title
            assert len(panel.lines) <= 4


def test_one_axis_holds_what_is_measured_alike():
    """Training rewards have the missing-EOS penalty taken off, held-out ones have not."""
    together = [{name for name, _ in panel.lines} for panel in PANELS["ppo"]]
    assert not any({"reward", "heldout_reward"} <= names for names in together)
    assert any({"reward_before_penalty", "heldout_reward"} <= names for names in together)
