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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness import facts

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("sft", "reward", "dpo", "ppo")
PHASES = ("train", "generate", "score")
MEBIBYTE = 2**20
WORDS = "the cat sat on a green mat and then the sun came out over the hill"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure the stages, print a table; returns what --json writes."""
    options = _options(arguments)
    result: dict[str, Any] = {**facts(), "options": {k: str(v) for k, v in vars(options).items()}}
    result["stages"] = {}
    print(json.dumps({name: result[name] for name in result if name != "stages"}))
    print(f"{'stage':8}{'tokens/step':>12}" + "".join(f"{phase:>10}" for phase in PHASES) + "  MiB")
    with tempfile.TemporaryDirectory() as folder:
        for stage in options.stages:
            found = measure(stage, options, Path(folder))
            result["stages"][stage] = found
            cells = [found.get(phase) for phase in PHASES]
            shown = "".join(f"{c / MEBIBYTE:10,.0f}" if c else f"{'':>10}" for c in cells)
            print(f"{stage:8}{found['tokens']:12,.0f}{shown}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


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
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record["values"] for record in map(json.loads, lines) if record["stage"] == stage]
    found: dict[str, float] = {
        phase: max(step.get(f"peak_memory_bytes/{phase}", 0.0) for step in steps)
        for phase in PHASES
    }
    last = steps[-1]
    return found | {"tokens": last["tokens_per_second/train"] * last["seconds/train"]}


def _config(options: argparse.Namespace, folder: Path) -> Mapping[str, Any]:
    """Rows of one length, with texts mixed into PPO; no adapter, no offload: --knobs can."""
    words = (WORDS.split() * options.words)[: options.words]
    pairs = folder / "pairs.jsonl"
    with pairs.open("w", encoding="utf-8") as file:
        for i in range(200):
            row = {"prompt": f"{' '.join(words)} {i}", "chosen": f"{i} {' '.join(words)}"}
            file.write(json.dumps(row | {"rejected": f"not {row['chosen']}"}) + "\n")
    texts = folder / "texts.jsonl"
    lines = [json.dumps({"text": f"{i} {' '.join(2 * words)}"}) + "\n" for i in range(50)]
    texts.write_text("".join(lines), encoding="utf-8")
    fit = {"max_steps": options.steps, "epochs": 100, "batch_size": options.batch, "eval_every": 0}
    return {
        "actor_model": str(options.model),
        "data": [str(pairs)],
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
            "ptx_data": [str(texts)],
            "ptx_coef": 0.5,
            "ptx_batch_size": options.batch,
        },
        "sampling": {"max_new_tokens": options.words, "min_new_tokens": options.words},
        "log": {"tensorboard": False},
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("model", type=Path, help="a Hugging Face folder with its tokenizer")
    add("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--batch", type=int, default=8, help="rows, pairs or prompts of an optimizer step")
    add("--words", type=int, default=100, help="of a prompt, and tokens of an answer")
    add("--micro-batch-tokens", type=int, default=1024)
    add("--steps", type=int, default=2)
    add(
        "--knobs",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="of tandem train, as in lora.rank=8",
    )
    add("--json", type=Path, help="write everything there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
