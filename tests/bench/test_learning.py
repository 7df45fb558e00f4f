"""The learning bench runs: it broke once when reward functions moved into other processes."""

from __future__ import annotations

from bench import learning
from tandem.config.schema import PPOConfig, RunConfig
from tandem.config.updates import minibatch_size


def test_a_side_is_measured_from_its_first_answer() -> None:
    found = learning.main(
        [*"--tiny --threads 1 --seeds 1 --max-steps 2 --sides".split(), "tandem grpo", "plain ppo"]
    )
    for runs in found["sides"].values():
        (run,) = runs
        assert 1 <= len(run["curve"]) <= 2
        assert all(0 <= score <= 1 for score in run["curve"])
        assert run["cpu_seconds"] > 0


def test_our_knobs_are_the_defaults() -> None:
    ppo, size = PPOConfig(), minibatch_size(RunConfig(stages=("ppo",)))
    assert {"epochs": ppo.epochs, "minibatch_size": size, "lam": ppo.lam} == learning.OURS
