"""A supervised stage with weights in slices for generation: none is gathered whole."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from tandem.config.schema import ParallelConfig, RunConfig
from tandem.engine import forward
from tandem.parallel.world import World
from tests.ranks import on_ranks
from tests.tiny import tiny_config
from tests.training.runs import ran


def ran_without_whole_weights(world: World, config: RunConfig) -> str:
    def whole_weights(model: PreTrainedModel) -> AbstractContextManager[None]:
        raise AssertionError("every weight was gathered on every rank")

    forward.whole_weights = whole_weights
    lines: list[str] = []
    ran(config, world, lines)
    return "\n".join(lines)


def test_sft_of_a_model_that_no_rank_holds_whole(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["sft"], sft__max_steps=1,
        ppo__eval_prompts=2,
    )  # fmt: skip
    parallel = ParallelConfig(actor_zero_stage=3, critic_zero_stage=3, inference_tp_size=2)
    said = on_ranks(2, ran_without_whole_weights, replace(config, parallel=parallel))[0]
    assert "sft: done in" in said
