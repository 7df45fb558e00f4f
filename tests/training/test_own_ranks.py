"""A program of the user's own under torchrun, which gives its ranks nothing but an environment."""

from __future__ import annotations

import pytest
import torch

from tandem.config.load import build_config
from tandem.engine.forward import whole_weights
from tandem.errors import ConfigError
from tandem.parallel.world import World
from tandem.training.make_engine import make_engine
from tandem.training.ppo_trainer import PPOTrainer
from tests.ranks import on_ranks

TEXTS = ("Say cat.", "Say sun.", "Name a tree.", "What is rain?")


def brevity(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    return [-len(text) / 100 for text in completions]


def stepped(
    world: World, model: str, by_rank: bool, is_launched: bool = True
) -> tuple[int, list[torch.Tensor]]:
    """The ranks of the engine, and the actor's weights after a step; no world is given to it."""
    with pytest.MonkeyPatch.context() as patch:
        if is_launched:
            patch.setenv("WORLD_SIZE", str(world.size))
            patch.setenv("RANK", str(world.rank))
        ppo = {"prompts_per_step": 4, "minibatch_size": 4, "actor": {"learning_rate": 1e-2}}
        config = build_config({"ppo": ppo, "sampling": {"max_new_tokens": 6}, "dtype": "fp32"})
        engine = make_engine(config, model)
        trainer = PPOTrainer(engine, config, num_steps=1, reward_function=brevity)
        own = f" {world.rank}" if by_rank else ""
        prompts = [engine.renderer.prompt(text + own) for text in TEXTS]
        trainer.train_rlhf(trainer.generate_experience(prompts, step=1), step=1)
        with whole_weights(engine.actor):
            return engine.world.size, [p.detach().clone() for p in engine.actor.parameters()]


def test_the_ranks_train_one_model(tiny_model: str) -> None:
    _, alone = stepped(World(), tiny_model, False, is_launched=False)
    for size, weights in on_ranks(2, stepped, tiny_model, False):
        assert size == 2
        for one, other in zip(weights, alone, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def refused(world: World, model: str) -> str:
    with pytest.raises(ConfigError) as error:
        stepped(world, model, True)
    return str(error.value)


def test_ranks_with_prompts_of_their_own_are_refused(tiny_model: str) -> None:
    for message in on_ranks(2, refused, tiny_model):
        assert message.startswith("every rank must be given the same prompts")
        assert "got others on rank 1 than on rank 0" in message
