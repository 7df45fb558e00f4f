"""RLHF with your own loop: an engine, a trainer, and a reward in plain Python.

python examples/custom_loop.py MODEL_FOLDER [NUM_STEPS]

The loop is yours; TrackedLoop adds what a run has around it: run the same command again to continue
a stopped one. It leaves runs/custom/ppo/actor, a Hugging Face folder, and runs/custom/report.html.
"""

import sys

from tandem import PPOTrainer, TrackedLoop, build_config, make_engine


def brevity(prompts, completions, **columns):
    """The shorter the answer, the higher the reward."""
    return [-len(text) / 100 for text in completions]


def main(model: str, num_steps: int = 20, output: str = "runs/custom") -> list[float]:
    """Train MODEL to be brief; return the mean reward of every step."""
    settings = {"actor_model": model, "ppo": {"prompts_per_step": 32}, "output_dir": output}
    config = build_config(settings)
    engine = make_engine(config, model)
    trainer = PPOTrainer(engine, config, num_steps=num_steps, reward_function=brevity)
    questions = ["What is rain?", "Who are you?", "Name a colour.", "Is a cat an animal?"] * 8
    prompts = [engine.renderer.prompt(text) for text in questions]
    rewards = []
    loop = TrackedLoop(trainer, num_steps)
    for step in loop:
        experience = trainer.generate_experience(prompts, step=step)
        metrics = trainer.train_rlhf(experience, step=step)
        rewards.append(experience.metrics["reward"])
        loop.log(metrics, experience)
    return rewards


if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:3]))
