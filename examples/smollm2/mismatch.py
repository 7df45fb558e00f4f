"""How far the sampler's log-probs are from the trainer's over a run, exact and with noise.

    python examples/smollm2/mismatch.py --model MODEL --task sums --steps 20 --into mismatch.jsonl

The same GRPO run twice: once with Tandem's sampler, once with a sampler that reads the policy's
weights rounded to bfloat16, as a separate serving engine in half precision would, while the trainer
stays in float32. The trainer's own log-probs are the old ones in both, so the noisy run is off
policy and its ratios do not show it. Every step appends a line with the mean and the largest
difference in nats. A run that the file has in full is not repeated; one that was stopped begins
again.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from measure import append_line, command, cpu_seconds, now, setup
from tasks import TASKS

from tandem import PPOTrainer, PromptRow, RLHFEngine, Rollout, build_config, make_engine


@contextmanager
def rounded(model: torch.nn.Module, step: int) -> Iterator[None]:
    """Weights rounded once more to bfloat16 in this block, and put back after it.

    Weights that are bfloat16 already first get a relative error below 2**-8, at most one unit in
    their last place, as another order of casts would leave them.
    """
    kept = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    noise = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for weight in model.parameters():
            exact = weight.float()
            if weight.dtype == torch.bfloat16:
                exact *= 1 + (torch.rand(exact.shape, generator=noise) * 2 - 1) / 256
            weight.copy_(exact.bfloat16())
    try:
        yield
    finally:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(kept[name])


class NoisySampler:
    """A source of answers whose weights are not quite the trainer's."""

    def __init__(self, engine: RLHFEngine) -> None:
        self._engine = engine

    def collect(
        self, prompts: Sequence[PromptRow], *, step: int, numbers: Sequence[int] | None = None
    ) -> Rollout:
        """The engine's rollout, by rounded weights."""
        with rounded(self._engine.actor, step):
            return self._engine.rollout(prompts, step=step, numbers=numbers)


def gaps(engine: RLHFEngine, rollout: Rollout) -> dict[str, float]:
    """Mean and largest difference of the sampler's log-probs from the trainer's, in nats."""
    with torch.no_grad():
        trained, _ = engine.actor_logprobs(rollout.batch, with_entropy=False)
    mask = rollout.batch.response_mask.bool()
    apart = (trained - rollout.rollout_logprobs)[mask].abs()
    return {"mean_gap": float(apart.mean()), "max_gap": float(apart.max())}


def has_all(file: Path, asked: dict[str, Any], steps: int) -> bool:
    """Whether the file has all steps of a run; if only some, they are removed: it begins again."""
    lines = file.read_text().splitlines() if file.exists() else []
    records = [json.loads(line) for line in lines]
    same = [asked.items() <= {**asked, **record}.items() for record in records]
    found = {r["step"] for r, is_same in zip(records, same, strict=True) if is_same}
    if found >= set(range(1, steps + 1)):
        return True
    if found:
        beside = file.with_suffix(".tmp")
        others = [line for line, is_same in zip(lines, same, strict=True) if not is_same]
        beside.write_text("".join(f"{line}\n" for line in others))
        os.replace(beside, file)
    return False


def run(is_noisy: bool, options: argparse.Namespace) -> None:
    """One of the two runs, step by step."""
    task = TASKS[options.task]
    asked = {
        "run": "bf16-sampler" if is_noisy else "exact",
        "dtype": options.dtype,
        "seed": options.seed,
        "task": options.task,
        "model": str(options.model),
        "learning_rate": options.learning_rate,
        "prompts": options.prompts,
    }
    if has_all(options.into, asked, options.steps):
        print(f"{options.into} has {asked['run']} already")
        return
    config = build_config(knobs(options))
    torch.manual_seed(options.seed)
    engine = make_engine(config, str(options.model), has_critic=False, has_reference=False)
    trainer = PPOTrainer(
        engine,
        config,
        num_steps=options.steps,
        reward_function=task.reward,
        source=NoisySampler(engine) if is_noisy else None,
    )
    rows = task.training_rows()
    prompts = [
        engine.renderer.prompt(row["prompt"], {k: row[k] for k in row if k != "prompt"})
        for row in rows
    ]
    per_step = config.grpo.prompts_per_step
    for step in range(1, options.steps + 1):
        first = (step - 1) * per_step % len(prompts)
        experience = trainer.generate_experience(prompts[first : first + per_step], step=step)
        found = gaps(engine, experience.rollout)
        metrics = trainer.train_rlhf(experience, step=step)
        record = {
            **asked,
            "step": step,
            **found,
            "reward": experience.metrics["reward"],
            "entropy": experience.metrics["entropy"],
            "ratio_max": metrics.get("ratio_max"),  # no update where no group had a signal
            "cpu_seconds": round(cpu_seconds(), 1),
            "when": now(),
            **setup(),
        }
        append_line(options.into, record)
        print(json.dumps({name: record[name] for name in ("run", "step", *found, "reward")}))


def knobs(options: argparse.Namespace) -> dict[str, Any]:
    """arm.py's GRPO, with the trainer's own forward as the old log-probs."""
    return {
        "seed": options.seed,
        "stages": ["grpo"],
        "dtype": options.dtype,
        "micro_batch_tokens": 1024,
        "scoring": {"workers": 1},
        "sampling": {
            "max_new_tokens": TASKS[options.task].max_new_tokens,
            "samples_per_prompt": 4,
        },
        "grpo": {
            "algorithm": "grpo",
            "kl": "none",
            "prompts_per_step": options.prompts,
            "minibatch_size": 4 * options.prompts,
            "epochs": 1,
            "old_logprobs": "forward",
            "actor": {
                "learning_rate": options.learning_rate,
                "schedule": "constant",
                "warmup": 0,
            },
        },
    }


def main() -> None:
    """Read the command line; run what the file does not have in full."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--task", choices=TASKS, default="sums")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--into", type=Path, default=Path("runs/smollm2/mismatch.jsonl"))
    options = parser.parse_args()
    for is_noisy in (False, True):
        run(is_noisy, options)


if __name__ == "__main__":
    command(main)
