"""The GRPO or RLOO arm with TRL 1.16: same task, model, rollouts, learning rate and CPU minutes.

    pip install trl==1.16.0
    python examples/smollm2/trl_arm.py grpo --model MODEL --task sums --budget 8 --seed 1

As in arm.py the CPU seconds count from the start of the process, and the step in which they end is
the last one. A run that was stopped begins again: TRL is asked to save nothing on the way.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from datasets import Dataset
from measure import append_line, command, cpu_seconds, now, setup
from tasks import TASKS, Task
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer


class StopAtBudget(TrainerCallback):
    """Ends training after the step in which the CPU seconds are spent, and logs every step."""

    def __init__(self, limit: float, file: Path) -> None:
        self.limit = limit
        self.file = file

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> Any:
        """Ask the trainer to stop."""
        if cpu_seconds() > self.limit:
            control.should_training_stop = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        """One line of metrics."""
        values = dict(logs or {})
        values["cpu_seconds"] = round(cpu_seconds(), 1)
        append_line(self.file, {"stage": "trl", "step": state.global_step, "values": values})


def reward_of(task: Task) -> Any:
    """The task's strict reward, as TRL calls it."""

    def strict(completions: list[Any], **columns: Any) -> list[float]:
        texts = [turns[0]["content"] for turns in completions]
        needed = {name: columns[name] for name in ("answer", "reasoning_gym") if name in columns}
        rows = [dict(zip(needed, each, strict=True)) for each in zip(*needed.values(), strict=True)]
        return [task.strict(text, row) for text, row in zip(texts, rows, strict=True)]

    return strict


def settings(task: Task, options: argparse.Namespace) -> dict[str, Any]:
    """arm.py's knobs by TRL's names: 16 prompts x 4 answers, one update each, AdamW's betas.

    Micro-batches of 16 answers keep the peak of memory near that of arm.py.
    """
    return {
        "output_dir": str(options.output / "run"),
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 4,
        "num_generations": 4,
        "max_completion_length": task.max_new_tokens,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "beta": 0.0,
        "max_steps": 100_000,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "bf16": options.dtype == "bf16",
        "use_cpu": True,
        "seed": options.seed,
    }


def main() -> None:
    """Read the command line, train, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("algorithm", choices=("grpo", "rloo"))
    parser.add_argument("--model", type=Path, required=True, help="the folder to start from")
    parser.add_argument("--task", choices=TASKS, default="sums")
    parser.add_argument("--budget", type=float, default=8, help="CPU minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument(
        "--dtype", default="fp32", choices=("fp32", "bf16"), help="bf16: autocast, weights fp32"
    )
    parser.add_argument("--output", type=Path, help="default: runs/smollm2/TASK-trl-ALGORITHM-SEED")
    options = parser.parse_args()
    name = f"{options.task}-trl-{options.algorithm}-{options.seed}"
    options.output = options.output or Path("runs/smollm2", name)
    task, made_by = TASKS[options.task], setup()
    rows = task.training_rows()
    for row in rows:
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    kinds = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
    trainer_class, config_class = kinds[options.algorithm]
    config = settings(task, options)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    trainer = trainer_class(
        model=str(options.model),
        args=config_class(**config),
        reward_funcs=reward_of(task),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[StopAtBudget(options.budget * 60, options.output / "metrics.jsonl")],
    )
    trainer.train()
    spent = cpu_seconds()
    trainer.model.save_pretrained(options.output / "model")
    tokenizer.save_pretrained(options.output / "model")
    record = {
        "arm": f"trl-{options.algorithm}",
        "task": options.task,
        "seed": options.seed,
        "steps": trainer.state.global_step,
        "cpu_seconds": round(spent, 1),
        "budget_minutes": options.budget,
        "trl": version("trl"),
        "when": now(),
        **made_by,
        "config": config,
    }
    (options.output / "arm.json").write_text(json.dumps(record, indent=1))
    print(f"{name}: {record['steps']} steps in {spent:.0f} CPU seconds")


if __name__ == "__main__":
    command(main)
