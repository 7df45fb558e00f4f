"""An environment of two turns as the source of answers: the policy's tokens are not contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.engine.forward import response_logprobs
from tandem.engine.hybrid import RLHFEngine
from tandem.training.flight_recorder import rows_of
from tandem.training.make_engine import make_engine
from tandem.training.ppo_trainer import PPOTrainer
from tandem.types import Message, PromptRow, Rollout, TokenBatch
from tests.tiny import tiny_config
from tests.training.letter_rewards import early_letters


class Echo:
    """Answers, hears its own answer back, and answers again."""

    def __init__(self, engine: RLHFEngine) -> None:
        self.engine = engine

    def collect(
        self, prompts: Sequence[PromptRow], *, step: int, numbers: Sequence[int] | None = None
    ) -> Rollout:
        first = self.engine.rollout(prompts, step=2 * step, numbers=numbers)
        heard = [self.heard(first, row) for row in range(len(first))]
        last = self.engine.rollout(heard, step=2 * step + 1, numbers=numbers)

        def joined(name: str) -> Tensor:
            both: Tensor = getattr(last, name).clone()
            part: Tensor = getattr(first, name)
            both[:, : part.shape[1]] += part
            return both

        mask = last.batch.response_mask.clone()
        mask[:, : first.batch.token_ids.shape[1]] |= first.batch.response_mask
        names = ("rollout_logprobs", "sampled_logprobs", "rollout_entropy")
        return replace(
            last,
            batch=TokenBatch(last.batch.token_ids, last.batch.attention_mask, mask),
            group=first.group,
            **{name: joined(name) for name in names},
        )

    def heard(self, first: Rollout, row: int) -> PromptRow:
        prompt, text = first.prompts[row], first.responses[row]
        said = first.batch.token_ids[row][first.batch.attention_mask[row]].tolist()
        turn = self.engine.renderer.prompt([Message("user", text or "?")])
        spoken = Message("assistant", text), Message("user", text or "?")
        return replace(
            prompt, token_ids=(*said, *turn.token_ids), messages=(*prompt.messages, *spoken)
        )


@pytest.fixture
def trainer(tiny_model: str, tmp_path: Path) -> PPOTrainer:
    config = tiny_config(tmp_path, tiny_model, "unused")
    engine = make_engine(actor=tiny_model, config=config)
    return PPOTrainer(
        engine, config, num_steps=3, reward_function=early_letters, source=Echo(engine)
    )


def test_turns_pass_through_scoring_training_and_the_record(trainer: PPOTrainer) -> None:
    engine = trainer.engine
    prompts = [engine.renderer.prompt(f"Say {word}.") for word in ("cat", "green", "a", "house")]
    made = trainer.generate_experience(prompts, step=1)
    mask = made.batch.response_mask
    spans = [row["responses"] for row in rows_of(made.batch)]
    assert [len(turns) for turns in spans] == [2] * 4
    assert sum(end - begin for turns in spans for begin, end in turns) == int(mask.sum())

    # The sampler's log-probs of both turns are the training forward's over the whole dialog.
    with torch.no_grad():
        logprobs, _ = response_logprobs(engine.actor, made.batch)
    torch.testing.assert_close(made.old_logprobs, logprobs, atol=1e-5, rtol=1e-5)
    for name in ("advantages", "values", "returns", "rewards"):
        assert not bool(getattr(made, name)[~mask].any()), name
    # Only the last token of the last turn is paid the score.
    for row, turns in enumerate(spans):
        last = turns[-1][1] - 1
        penalty = -trainer.kl_coef * (logprobs[row] - made.ref_logprobs[row])[last]
        expected = float(made.scores[row] + penalty)
        assert float(made.rewards[row, last]) == pytest.approx(expected, abs=1e-5)

    metrics = trainer.train_rlhf(made, step=1)
    assert metrics["ratio_gap_before_update"] < 1e-5
    assert metrics["updates"] > 0
