"""RLHF with your own loop: an engine, a trainer, and a reward in plain Python.

python examples/custom_loop.py MODEL_FOLDER [NUM_STEPS]
"""

import sys

from tandem import PPOTrainer, build_config, make_engine, save_model


def brevity(prompts, completions, **columns):
    """The shorter the answer, the higher the reward."""
    return [-len(text) / 100 for text in completions]


def main(model: str, num_steps: int = 20, output: str = "runs/custom") -> list[float]:
    """Train MODEL to be brief; return the mean reward of every step."""
    config = build_config({"ppo": {"prompts_per_step": 32}})
    engine = make_engine(config, model)
    trainer = PPOTrainer(engine, config, num_steps=num_steps, reward_function=brevity)
    questions = ["What is rain?", "Who are you?", "Name a colour.", "Is a cat an animal?"] * 8
    prompts = [engine.renderer.prompt(text) for text in questions]
    rewards = []
    for step in range(1, num_steps + 1):
        experience = trainer.generate_experience(prompts, step=step)
        metrics = trainer.train_rlhf(experience, step=step)
        rewards.append(experience.metrics["reward"])
        print(f"{step}: reward {rewards[-1]:.3f}, policy loss {metrics['policy_loss']:.4f}")
    save_model(engine.actor, engine.tokenizer, output)
    return rewards


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:3]))
