"""HH preferences: the reward model on held-out pairs, and PPO and DPO beside best-of-n.

    python examples/smollm2/hh.py --model MODEL --data helpful.jsonl.gz harmless.jsonl.gz
        --pairs 1200 --output runs/hh

One run makes SFT, reward model and PPO, a second one DPO from the same SFT policy and the same
pairs. Every policy answers the same held-out prompts; its place is the reward model's mean score
(in standard deviations of the SFT policy's) and its KL to the SFT policy in nats per answer. Best
of n answers of the SFT policy costs log n - (n - 1) / n nats. The result is OUTPUT/hh.json; the
same command continues what was stopped. `--stages sft reward` makes the reward model alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from measure import command, cpu_seconds, now, setup

from tandem import build_config, load_config, train
from tandem.engine.forward import response_logprobs
from tandem.training.comparing.best_of_n import best_of_n
from tandem.training.comparing.compare import answer, rewarding
from tandem.training.run_folder import Run
from tandem.training.run_stages import tokenizer_sources
from tandem.training.scored_answers import score_answers
from tandem.training.stage_data import prepare_rows


def subset(files: Sequence[Path], pairs: int, into: Path) -> Path:
    """The first rows of each file, `pairs` in all, as one file."""
    each, lines = -(-pairs // len(files)), []
    for file in files:
        is_packed = file.suffix == ".gz"
        with gzip.open(file, "rt") if is_packed else open(file, encoding="utf-8") as reader:
            lines += list(islice(reader, each))
    into.parent.mkdir(parents=True, exist_ok=True)
    into.write_text("".join(lines[:pairs]))
    return into


def knobs(options: argparse.Namespace, data: Path, stages: Sequence[str]) -> dict[str, Any]:
    """Both runs as a `--config` file would have them."""
    return {
        "seed": options.seed,
        "actor_model": str(options.model),
        "output_dir": str(options.output / "main"),
        "stages": list(stages),
        "data": [str(data)],
        "save_every": 20,
        "dtype": options.dtype,
        "micro_batch_tokens": 2048,
        "dataset": {
            "split": options.split,
            "heldout": options.heldout,
            "on_bad_row": "drop",
            "max_tokens": options.max_tokens,
            "max_prompt_tokens": options.max_tokens - options.max_new_tokens,
        },
        "sampling": {"max_new_tokens": options.max_new_tokens},
        "log": {"tensorboard": False, "print_samples_every": 0},
        "sft": {"learning_rate": options.sft_learning_rate, "batch_size": 16, "eval_every": 0},
        "reward": {
            "learning_rate": options.reward_learning_rate,
            "epochs": options.reward_epochs,
            "batch_size": 16,
            "eval_every": 25,
            "normalize_prompts": 32,
        },
        "dpo": {
            "learning_rate": options.dpo_learning_rate,
            "epochs": options.dpo_epochs,
            "batch_size": 16,
            "eval_every": 0,
        },
        "ppo": {
            "steps": options.ppo_steps,
            "prompts_per_step": 32,
            "minibatch_size": 32,
            "epochs": 1,
            "lam": 1.0,
            "kl_coef": 0.02,
            "actor": {"learning_rate": options.actor_learning_rate},
            "critic": {"learning_rate": 2 * options.actor_learning_rate},
            "eval_every": 0,
            "eval_prompts": options.prompts,
        },
    }


def reward_model(output: Path) -> dict[str, Any]:
    """Held-out accuracy as the stage logged it last and first, and what became of the rows."""
    lines = (output / "main/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    logged = [r["values"] for r in records if r["stage"] == "reward"]
    measured = [v for v in logged if "heldout_accuracy" in v]
    accuracy = measured[-1]["heldout_accuracy"]
    counts = json.loads((output / "main/data.json").read_text())["datasets"][0]
    kept = {name: counts[name] for name in ("rows", "used")}
    kept["dropped"] = {reason: told["count"] for reason, told in counts["dropped"].items()}
    return {"accuracy": accuracy, "first": measured[0]["heldout_accuracy"], "data": kept}


@torch.no_grad()
def places(options: argparse.Namespace) -> dict[str, Any]:
    """Each policy's reward and KL, and the frontier of best of n."""
    run = Run(load_config(options.output / "main/config.yaml"), print)
    rows = prepare_rows(run.config, *tokenizer_sources(run))
    run.note_data(rows)
    prompts = rows.heldout_prompts[: options.prompts]
    rl = run.config.ppo
    reference = run.placement.policy(str(options.output / "main/sft"), trained=False)
    folders = {"sft": "main/sft", "ppo": "main/ppo/actor", "dpo": "dpo/dpo"}
    found: dict[str, Any] = {"prompts": len(prompts), "policies": {}}
    with rewarding(run, rows) as (scorer, rewards, _):
        for label, folder in folders.items():
            if not (options.output / folder).is_dir():
                continue
            policy = run.placement.policy(str(options.output / folder), trained=False)
            samples = options.best_of if label == "sft" else 1
            rollout = answer(policy, prompts, rows, run.settings, samples)
            scored = score_answers(rollout, scorer, rows.renderer, rl, rewards, run.world).mixed
            kept, _ = response_logprobs(reference, rollout.batch)
            kl = ((rollout.rollout_logprobs - kept) * rollout.batch.response_mask).sum(dim=1)
            by_prompt = scored.view(len(prompts), samples)
            found["policies"][label] = {
                "reward": with_error(by_prompt.mean(dim=1).tolist()),
                "kl": with_error(kl.tolist()),
                "tokens": float(rollout.batch.response_mask.sum(dim=1).float().mean()),
            }
            if label == "sft":
                found["best_of_n"] = [asdict(point) for point in best_of_n(by_prompt)]
    return found


def with_error(values: Sequence[float]) -> list[float]:
    """Mean and standard error."""
    return [round(fmean(values), 4), round(stdev(values) / len(values) ** 0.5, 4)]


def main() -> None:
    """Train what is asked for, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--output", type=Path, default=Path("runs/hh"))
    stages = ("sft", "reward", "ppo", "dpo")
    parser.add_argument("--stages", nargs="+", choices=stages, default=list(stages))
    parser.add_argument("--pairs", type=int, default=1200, help="rows read, before any is dropped")
    parser.add_argument("--heldout", type=float, default=0.2)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    split = "shares of SFT, pairs (reward model and DPO) and PPO's prompts"
    parser.add_argument("--split", type=float, nargs=3, default=[2, 5, 3], help=split)
    parser.add_argument("--sft-learning-rate", type=float, default=1e-4)
    parser.add_argument("--reward-learning-rate", type=float, default=5e-5)
    parser.add_argument("--reward-epochs", type=float, default=1)
    parser.add_argument("--dpo-learning-rate", type=float, default=5e-6)
    parser.add_argument("--dpo-epochs", type=float, default=1)
    parser.add_argument("--actor-learning-rate", type=float, default=3e-6)
    parser.add_argument("--ppo-steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--best-of", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    options = parser.parse_args()
    data = subset(options.data, options.pairs, options.output / "pairs.jsonl")
    main_stages = [stage for stage in options.stages if stage != "dpo"]
    config = knobs(options, data, main_stages)
    train(build_config(config))
    if "dpo" in options.stages:
        second = {"actor_model": str(options.output / "main/sft"), "stages": ["dpo"]}
        train(build_config({**config, **second, "output_dir": str(options.output / "dpo")}))
    record: dict[str, Any] = {"seed": options.seed, "pairs_read": options.pairs}
    if "reward" in options.stages:
        record["reward_model"] = reward_model(options.output)
    if "ppo" in options.stages:
        record |= places(options)
    record |= {"cpu_seconds": round(cpu_seconds(), 1), "when": now(), **setup()}
    record["asked"] = {k: str(v) for k, v in vars(options).items()}
    (options.output / "hh.json").write_text(json.dumps(record, indent=1))
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    command(main)
