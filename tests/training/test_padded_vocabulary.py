"""A run whose model has more embeddings than its tokenizer has tokens, by one process and by ranks.

The model likes the others best by far. None of them is ever sampled, and PPO's old log-probs are
those of the training forward all the same: both are of all outputs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.config.schema import ParallelConfig, RunConfig
from tandem.engine import rollouts
from tandem.generation.generator import generate
from tandem.parallel.world import World
from tandem.types import Rollout
from tests.ranks import on_ranks
from tests.tiny import PADDING, save_padded_model, tiny_config, tiny_tokenizer
from tests.training.runs import assert_same_run, ran, records

NEVER = f"never drawn: the policy's last {PADDING} tokens, which its tokenizer lacks"


def ran_watched(world: World | None, config: RunConfig) -> tuple[int, list[str]]:
    """How many answers a run drew, all of the tokenizer's tokens, and its lines."""
    drawn, lines, known = [0], list[str](), len(tiny_tokenizer())

    def watched(*given: Any, **how: Any) -> Rollout:
        made = generate(*given, **how)
        assert int(made.batch.token_ids.max()) < known
        mask = made.batch.response_mask
        others = (made.sampled_logprobs - made.rollout_logprobs)[mask]
        assert float(others.mean()) > 0.1, "of nats: the others have much of the probability"
        drawn[0] += len(made)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollouts, "generate", watched)
        ran(config, world, lines)
    return drawn[0], lines


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, preferences: str) -> RunConfig:
    """A run of all steps by one process."""
    folder = tmp_path_factory.mktemp("padded")
    model = save_padded_model(folder / "model")
    config = tiny_config(
        folder / "run", model, preferences,
        ppo__steps=2, ppo__ema=True, sft__max_steps=2, reward__max_steps=2,
    )  # fmt: skip
    drawn, lines = ran_watched(None, config)
    assert drawn >= 16
    assert any(NEVER in line for line in lines)
    return config


def test_old_log_probs_are_those_of_the_training_forward(alone: RunConfig) -> None:
    found = [r["values"] for r in records(Path(alone.output_dir)) if r["stage"] == "ppo"]
    gaps = [v["ratio_gap_before_update"] for v in found if "ratio_gap_before_update" in v]
    assert gaps
    assert max(gaps) < 1e-5
    assert all(v["old_logprobs_sampled"] == 1 for v in found if "old_logprobs_sampled" in v)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "slices"), [(1, 1), (2, 1), (3, 1), (3, 2)])
def test_ranks_leave_what_one_process_leaves(
    tmp_path: Path, alone: RunConfig, stage: int, slices: int
) -> None:
    parallel = ParallelConfig(
        actor_zero_stage=stage, critic_zero_stage=stage, inference_tp_size=slices
    )
    config = replace(alone, output_dir=str(tmp_path / "ranks"), parallel=parallel)
    for drawn, _ in on_ranks(2, ran_watched, config):
        assert drawn >= 8
    assert_same_run(tmp_path / "ranks", Path(alone.output_dir))
