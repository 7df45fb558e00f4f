"""One arm: SFT, PPO, GRPO or RLOO on one task, for so many CPU minutes.

    python examples/smollm2/arm.py sft  --model MODEL --task sums --budget 4 --seed 1
    python examples/smollm2/arm.py grpo --model runs/smollm2/sums-sft-1/model --task sums --budget 8

The same command continues a run that was stopped or killed, from its newest checkpoint and with the
CPU seconds that are left. The step in which the budget ends is the last one. In the arm's folder,
model/ is then the policy as a Hugging Face folder, arm.json says what was run, and run/ is Tandem's
own folder of the run, whose metrics.jsonl has every step.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from measure import Budget, command, now, setup
from safetensors.torch import load_file
from tasks import TASKS, Task
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem import build_config, save_model, train
from tandem.errors import ConfigError, Stopped

ENDLESS = 100_000
"""Steps: the budget ends a run."""

CONSTANT = {"schedule": "constant", "warmup": 0}


def stage_of(algorithm: str) -> str:
    """The stage that runs an algorithm."""
    return algorithm if algorithm in ("sft", "ppo") else "grpo"


def knobs(algorithm: str, task: Task, options: argparse.Namespace) -> dict[str, Any]:
    """The run as a `--config` file would have it.

    All RL arms have the same rollouts (16 prompts x 4 answers), one update per rollout, the same
    learning rate and no KL, so that what differs is the advantage.
    """
    common = {
        "seed": options.seed,
        "actor_model": str(options.model),
        "output_dir": str(options.output / "run"),
        "stages": [stage_of(algorithm)],
        "save_every": options.save_every,
        "dtype": options.dtype,
        "micro_batch_tokens": 1024,
        "dataset": {"heldout": 0, "max_prompt_tokens": 320},
        "scoring": {"workers": 1},
        "sampling": {"max_new_tokens": task.max_new_tokens, "samples_per_prompt": 4},
        "log": {"tensorboard": False},
    }
    rate = options.learning_rate or (1e-4 if algorithm == "sft" else 1e-5)
    if algorithm == "sft":
        stage = {"learning_rate": rate, "epochs": ENDLESS, "batch_size": 32, "eval_every": 0}
        return {**common, "data": [task.sft_data()], "sft": {**CONSTANT, **stage}}
    shared: dict[str, Any] = {
        "steps": ENDLESS,
        "prompts_per_step": 16,
        "minibatch_size": 64,
        "epochs": 1,
        "reward_function": [task.reward],
        "eval_every": 0,
        "eval_prompts": 0,
        "missing_eos_penalty": 0,
        "actor": {"learning_rate": rate, **CONSTANT},
    }
    if algorithm == "ppo":
        critic = {"learning_rate": 2 * rate, **CONSTANT}
        own = {"critic": critic, "lam": 1.0, "kl_coef": 0, "critic_warmup_steps": 1}
    else:
        own = {"algorithm": algorithm, "kl": "none"}
    return {**common, "data": [task.data()], stage_of(algorithm): {**shared, **own}}


def run(config: dict[str, Any], budget: Budget) -> float:
    """Train until the budget is spent; the CPU seconds."""
    if budget.before >= budget.limit:  # done: looking at it again costs the arm nothing
        return budget.before
    budget.start()
    try:
        train(build_config(config))
    except Stopped as stopped:
        print(f"stopped {stopped}")
    return budget.end()


def check_same(file: Path, config: dict[str, Any]) -> None:
    """Stop if the arm in this folder is done and was another one."""
    done = json.loads(file.read_text())["config"] if file.exists() else config
    free = ("output_dir", "save_every")
    apart = [k for k in config if k not in free and done.get(k) != config[k]]
    if apart:
        raise ConfigError(f"{file} has an arm with another {', '.join(apart)}. Change --output.")


def newest_step(run_folder: Path, stage: str) -> int:
    """The step of the newest checkpoint."""
    folder = run_folder / "checkpoints" / stage
    steps = [int(path.name.removeprefix("step-")) for path in folder.glob("step-??????")]
    if not steps:
        sys.exit(f"{run_folder} has no checkpoint: not one step fits into the budget")
    return max(steps)


def export(arm: Path, stage: str, source: Path) -> int:
    """Write the policy of the newest checkpoint to ARM/model; its step."""
    step = newest_step(arm / "run", stage)
    checkpoint = arm / "run" / "checkpoints" / stage / f"step-{step:06d}"
    part = "model" if stage == "sft" else "actor"
    model = AutoModelForCausalLM.from_pretrained(source, dtype="float32")
    model.load_state_dict(load_file(checkpoint / f"{part}.safetensors"), strict=False)
    save_model(model, AutoTokenizer.from_pretrained(source), arm / "model")
    return step


def main() -> None:
    """Read the command line, train, export."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("algorithm", choices=("sft", "ppo", "grpo", "rloo"))
    parser.add_argument("--model", type=Path, required=True, help="the folder to start from")
    parser.add_argument("--task", choices=TASKS, default="sums")
    parser.add_argument("--budget", type=float, default=8, help="CPU minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=0)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--output", type=Path, help="default: runs/smollm2/TASK-ALGORITHM-SEED")
    options = parser.parse_args()
    name = f"{options.task}-{options.algorithm}-{options.seed}"
    options.output = options.output or Path("runs/smollm2", name)
    stage = stage_of(options.algorithm)
    config, made_by = knobs(options.algorithm, TASKS[options.task], options), setup()
    check_same(options.output / "arm.json", config)
    spent = run(config, Budget(options.output / "budget.json", options.budget))
    step = export(options.output, stage, options.model)
    record = {
        "arm": options.algorithm,
        "task": options.task,
        "seed": options.seed,
        "steps": step,
        "cpu_seconds": round(spent, 1),
        "budget_minutes": options.budget,
        "when": now(),
        **made_by,
        "config": config,
    }
    (options.output / "arm.json").write_text(json.dumps(record, indent=1))
    print(f"{name}: {step} steps in {spent:.0f} CPU seconds; the policy is {options.output}/model")


if __name__ == "__main__":
    command(main)
