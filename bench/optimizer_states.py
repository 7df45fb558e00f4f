"""What smaller optimizer states cost in learning: the same run with fp32, bf16 and 8-bit moments.

    python bench/optimizer_states.py --seeds 1 2 3 --json states.json

A random Llama learns a language that can be learned: each token is a fixed function of the one
before with probability 0.8, else uniform. Every run of a seed has the same weights, rows and
schedule, so runs differ by the states' rounding alone. Shown per kind: the held-out loss, its
difference to fp32 of the same seed, how far fp32's own seeds are apart, the bytes per weight as
allocated, and seconds of the optimizer's step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness import now
from bench.models import SHAPES, model_config, random_model, tiny
from bench.report import Report, count, parser, table
from tandem.config.optimizer import OptimizerConfig
from tandem.config.parallel import OptimizerStates, ParallelConfig
from tandem.engine.learner import Learner

KINDS: tuple[OptimizerStates, ...] = get_args(OptimizerStates)
ROWS, TOKENS, HELD_OUT = 16, 24, 128


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Train every kind of every seed, show the table; returns what --json writes."""
    options = _options(arguments)
    report = Report(options)
    runs: dict[OptimizerStates, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for seed in options.seeds:
        for kind in KINDS:
            report.print_line(f"seed {seed}, {kind} ...")
            runs[kind].append(learned(kind, seed, options))
    report.result["runs"] = runs
    exact = [one["loss"] for one in runs["fp32"]]
    lines = []
    for kind in KINDS:
        of = runs[kind]
        apart = [one["loss"] - other for one, other in zip(of, exact, strict=True)]
        lines.append(
            (
                kind,
                f"{statistics.mean(one['loss'] for one in of):.4f}",
                f"{statistics.mean(apart):+.4f}",
                f"{max(map(abs, apart)):.4f}",
                f"{of[0]['bytes_per_weight']:.2f}",
                f"{statistics.median(one['step_seconds'] for one in of) * 1000:.1f}",
            )
        )
    spread = max(exact) - min(exact)
    report.print_line(f"fp32's own seeds are {spread:.4f} apart")
    report.console.print(
        table(
            f"held-out loss after {options.steps} steps, nats per token",
            "to fp32: difference to the run with fp32 states of the same seed",
            ("states",),
            ("loss", "to fp32, mean", "largest", "bytes/weight", "step ms"),
            lines,
        )
    )
    return report.end()


def learned(kind: OptimizerStates, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """One run: its held-out loss, bytes and seconds."""
    shape = tiny(SHAPES["a"]) if options.tiny else SHAPES["a"]
    model = random_model(model_config(shape, TOKENS), seed=seed).to(options.device)
    vocabulary = model.config.vocab_size
    settings = OptimizerConfig(learning_rate=2e-3, betas=(0.9, options.beta2), weight_decay=0.01)
    parallel = ParallelConfig(optimizer_states=kind)
    learner = Learner("sft", model, settings, options.steps, parallel=parallel)
    seconds = []
    for step in range(options.steps):
        ids = sentences(ROWS, vocabulary, seed=1000 * seed + step).to(options.device)
        learner.backward(loss_sum(model, ids), ROWS * (TOKENS - 1))
        begin = now()
        learner.step()
        seconds.append(now() - begin)
    held = sentences(HELD_OUT, vocabulary, seed=-1).to(options.device)
    with torch.no_grad():
        loss = sum(float(loss_sum(model, part)) for part in held.split(ROWS))
    state = learner.state_tensors()
    num_bytes = sum(t.nbytes for name, t in state.items() if name.startswith("exp_avg"))
    return {
        "loss": loss / (HELD_OUT * (TOKENS - 1)),
        "bytes_per_weight": num_bytes / sum(p.numel() for p in learner.parameters),
        "step_seconds": statistics.median(seconds),
    }


def sentences(rows: int, vocabulary: int, seed: int) -> Tensor:
    """(rows, TOKENS) ids: the next is (5 x + 1) mod V with probability 0.8, else any."""
    generator = torch.Generator().manual_seed(seed % 2**31)
    ids = torch.randint(0, vocabulary, (rows, TOKENS), generator=generator)
    follows = torch.rand(rows, TOKENS, generator=generator) < 0.8
    for t in range(1, TOKENS):
        ids[:, t] = torch.where(follows[:, t], (5 * ids[:, t - 1] + 1) % vocabulary, ids[:, t])
    return ids


def loss_sum(model: nn.Module, ids: Tensor) -> Tensor:
    """The sum of -log p over all tokens but the first of each row."""
    logits = model(input_ids=ids, use_cache=False).logits.float()
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    flags = parser(__doc__, "threads device default-allocator")
    add = flags.add_argument
    add("--seeds", nargs="+", type=count, default=[1, 2, 3])
    add("--steps", type=count, default=200)
    add("--beta2", type=float, default=0.95, help="of the second moment; 0.999 changes slowest")
    return flags.parse_args(arguments)


if __name__ == "__main__":
    main()
