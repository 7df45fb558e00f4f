"""The knobs with which the embedded default shows all three steps in a few minutes on two cores."""

from __future__ import annotations

from tandem.config.dataset import DataConfig
from tandem.config.schema import (
    ActorOptimizerConfig,
    CriticOptimizerConfig,
    PPOConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    SFTConfig,
)


def demo_config(output_dir: str, actor_model: str = "") -> RunConfig:
    """The run of `make demo`, into `output_dir`.

    Learning rates are those of a small model with new weights, a hundred times a pretrained
    one's. The actor at 3e-4 needs kl_coef 0.1, which holds it near 1 nat per answer.

    Args:
        actor_model: folder of a model with new weights, made of `model_config` and
            `build_tokenizer`.
    """
    return RunConfig(
        actor_model=actor_model,
        data=("embedded",),
        output_dir=output_dir,
        device="cpu",
        save_every=0,
        dataset=DataConfig(split=(35, 45, 20), max_tokens=128, max_prompt_tokens=64),
        sft=SFTConfig(learning_rate=3e-3, batch_size=16, epochs=3, eval_every=300),
        reward=RewardConfig(
            learning_rate=1e-3, batch_size=32, epochs=1.25, eval_every=100, normalize_prompts=256
        ),
        ppo=PPOConfig(
            steps=40,
            prompts_per_step=64,
            minibatch_size=32,
            epochs=2,
            actor=ActorOptimizerConfig(learning_rate=3e-4),
            critic=CriticOptimizerConfig(learning_rate=1e-3),
            lam=1.0,
            kl_coef=0.1,
            eval_every=10,
            eval_prompts=128,
        ),
        sampling=SamplingConfig(max_new_tokens=48),
    )
