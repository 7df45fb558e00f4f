"""The collapse table: one switch at a time, on the same seed and data.

    python examples/smollm2/collapse.py --model MODEL --output runs/collapse --steps 60
        [--data FILE_OR_TASK] [--reward tandem:exact_number] [--only grpo none ...]

The first arm is GRPO (advantages over the group's deviation, a mean over tokens, KL k2 in the
loss); each of the others differs from it in one knob, but the two of PPO, which differ from each
other in lambda. KL is measured against the starting policy in all of them. What an arm has done is
in OUTPUT/ARM/metrics.jsonl; the same command continues it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from measure import append_line, command, cpu_seconds, now, setup
from tasks import TASKS

from tandem import build_config, train
from tandem.errors import ConfigError

GRPO = {
    "algorithm": "grpo",
    "kl": "k2-in-loss",
    "advantage_scale": "group-std",
    "normalization": "token",
}
ARMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "kl-k1-in-reward": {"kl": "k1-in-reward"},
    "kl-k3-in-loss": {"kl": "forward-k3-in-loss"},
    "kl-none": {"kl_coef": 1e-9},
    "no-group-std": {"advantage_scale": "none"},
    "sequence-mean": {"normalization": "sequence"},
    "ppo-lambda-0.95": {"lam": 0.95},
    "ppo-lambda-1": {"lam": 1.0},
}
"""What each arm changes. A KL of weight 1e-9 stands for none, so that the reference is there to
measure it."""


def knobs(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """The arm as a `--config` file would have it."""
    changed = ARMS[arm]
    is_ppo = arm.startswith("ppo")
    rate = options.learning_rate
    rl: dict[str, Any] = {
        "steps": options.steps,
        "prompts_per_step": 16,
        "minibatch_size": options.minibatch_size,
        "epochs": 1,
        "kl_coef": options.kl_coef,
        "reward_function": [options.reward],
        "missing_eos_penalty": 0,
        "eval_every": 0,
        "eval_prompts": 0,
        "actor": {"learning_rate": rate, "schedule": "constant"},
    }
    if is_ppo:
        rl |= {"kl_in": "loss", "critic": {"learning_rate": 2 * rate, "schedule": "constant"}}
    else:
        rl |= GRPO
    rl |= changed
    stage = "ppo" if is_ppo else "grpo"
    return {
        "seed": options.seed,
        "actor_model": str(options.model),
        "output_dir": str(options.output / arm),
        "stages": [stage],
        "data": [options.data],
        "save_every": options.steps // 3 or 1,
        "dtype": options.dtype,
        "dataset": {"heldout": 0, "max_prompt_tokens": 320},
        "scoring": {"workers": 1},
        "sampling": {"max_new_tokens": options.max_new_tokens, "samples_per_prompt": 4},
        "log": {"tensorboard": False, "print_samples_every": 0},
        stage: rl,
    }


def points(folder: Path) -> list[dict[str, float]]:
    """reward, KL, entropy and length of every step, from a run's own log."""
    found = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        values = record["values"]
        if "reward" in values:
            names = ("reward", "kl", "entropy", "response_tokens", "ratio_max", "rollout_gap")
            found.append({"step": record["step"]} | {n: values[n] for n in names if n in values})
    return found


def check_same(file: Path, arm: str, done: dict[str, Any], asked: dict[str, Any]) -> None:
    """Stop if an arm that is done was made with other options than those asked for."""
    apart = [k for k in asked if k not in ("only", "output", "model") and done.get(k) != asked[k]]
    if apart:
        told = ", ".join(f"{k} {done.get(k)}, not {asked[k]}" for k in apart)
        raise ConfigError(
            f"{file} must have one set of options; {arm} has {told}. Change --output."
        )


def main() -> None:
    """Run the arms that are not in OUTPUT/collapse.jsonl yet."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("runs/collapse"))
    parser.add_argument("--data", default=TASKS["sums"].data())
    parser.add_argument("--reward", default=TASKS["sums"].reward)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--kl-coef", type=float, default=0.05)
    parser.add_argument("--minibatch-size", type=int, default=64, help="64: one update a rollout")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS))
    options = parser.parse_args()
    file = options.output / "collapse.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    done = {record["arm"]: record["asked"] for record in map(json.loads, lines)}
    asked = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    for arm in options.only:
        if arm in done:
            check_same(file, arm, done[arm], asked)
            continue
        before = cpu_seconds()
        train(build_config(knobs(arm, options)))
        record = {
            "arm": arm,
            "changed": ARMS[arm],
            "points": points(options.output / arm),
            "cpu_seconds": round(cpu_seconds() - before, 1),
            "asked": asked,
            "when": now(),
            **setup(),
        }
        append_line(file, record)


if __name__ == "__main__":
    command(main)
