"""Peak memory of every stage's own training loop on a real model.

    python bench/memory_stages.py MODEL_FOLDER [--dtype bf16] [--stages sft reward]

Each stage is a `tandem train` in a process of its own, over rows of one length, and what it says
of itself in metrics.jsonl is shown: resident memory of the process, libraries included (on a GPU
what torch's allocator held), by phase, the highest of all steps. bench/memory.py compares random
models with the formula instead.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.report import ROOT, Report, count, parser, table
from tandem.metrics.records import read_metrics

STAGES = ("sft", "reward", "dpo", "ppo")
PHASES = ("train", "generate", "score")
WORDS = "the cat sat on a green mat and then the sun came out over the hill"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure the stages, print a table; returns what --json writes."""
    options = _options(arguments)
    report = Report(options)
    stages = report.result["stages"] = {}
    with tempfile.TemporaryDirectory() as folder:
        for stage in options.stages:
            report.print_line(f"{stage} ...")
            stages[stage] = measure(stage, options, Path(folder))
            report.keep()
    rows = [
        (stage, f"{of['tokens']:,.0f}", *(f"{of[p] / 2**20:,.0f}" if of[p] else "" for p in PHASES))
        for stage, of in stages.items()
    ]
    report.console.print(
        table("peak memory, MiB", "", ("stage",), ("tokens a step", *PHASES), rows)
    )
    return report.end()


def measure(stage: str, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Highest peak of any step by phase in bytes, and the tokens of a step.

    Raises:
        RuntimeError: the run failed; its last lines say why.
    """
    config, run = folder / f"{stage}.yaml", folder / stage
    rewards = folder / "reward" / "reward"
    if stage == "ppo" and not rewards.exists():
        measure("reward", options, folder)
    config.write_text(json.dumps(_config(options, folder)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "tandem", "train", "--config", str(config), "--output-dir", str(run),
         "--steps", stage, *(["--reward-model", str(rewards)] if stage == "ppo" else []),
         *[f"--{knob}" for knob in options.knobs]],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{stage} must train; got exit code {done.returncode}: {done.stderr}")
    steps = [record.values for record in read_metrics(str(run)) if record.stage == stage]
    found: dict[str, float] = {
        phase: max(step.get(f"peak_memory_bytes/{phase}", 0.0) for step in steps)
        for phase in PHASES
    }
    last = steps[-1]
    return found | {"tokens": last["tokens_per_second/train"] * last["seconds/train"]}


def _config(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Rows of one length, with texts mixed into PPO; no adapter, no offload: --knobs can."""
    words = " ".join((WORDS.split() * options.words)[: options.words])
    pairs = [
        {"prompt": f"{words} {i}", "chosen": f"{i} {words}", "rejected": f"not {i} {words}"}
        for i in range(200)
    ]
    texts = [{"text": f"{i} {words} {words}"} for i in range(50)]
    for name, rows in (("pairs", pairs), ("texts", texts)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    fit = {"max_steps": options.steps, "epochs": 100, "batch_size": options.batch, "eval_every": 0}
    return {
        "actor_model": str(options.model),
        "data": [str(folder / "pairs.jsonl")],
        "dtype": options.dtype,
        "device": options.device,
        "micro_batch_tokens": options.micro_batch_tokens,
        "save_every": 10**6,
        "dataset": {"heldout": 0.02, "max_tokens": 2048, "max_prompt_tokens": 1024},
        "sft": fit,
        "reward": {**fit, "normalize_prompts": 2},
        "dpo": fit,
        "ppo": {
            "steps": options.steps,
            "prompts_per_step": options.batch,
            "minibatch_size": options.batch,
            "epochs": 1,
            "eval_prompts": 0,
            "ptx_data": [str(folder / "texts.jsonl")],
            "ptx_coef": 0.5,
            "ptx_batch_size": options.batch,
        },
        "sampling": {"max_new_tokens": options.words, "min_new_tokens": options.words},
        "log": {"tensorboard": False},
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    flags = parser(__doc__, "device micro-batch-tokens knobs")
    flags.set_defaults(micro_batch_tokens=1024)
    add = flags.add_argument
    add("model", type=Path, help="a Hugging Face folder with its tokenizer")
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32")
    add("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    add("--batch", type=count, default=8, help="rows, pairs or prompts of an optimizer step")
    add("--words", type=count, default=100, help="of a prompt, and tokens of an answer")
    add("--steps", type=count, default=2)
    options = flags.parse_args(arguments)
    if options.tiny:
        flags.set_defaults(batch=2, words=15, steps=1)
        options = flags.parse_args(arguments)
    return options


if __name__ == "__main__":
    main()
