"""What a GPU is to show, in one command: generation, a PPO step, the time to switch modes.

    python bench/gpu.py --json bench-gpu.json
    python bench/gpu.py --tiny --device cpu --json tried.json     # the same way without a GPU

OPT-1.3B's and Llama-7B's shapes with random weights in bf16: prompts of 256 tokens and 256 new
ones, beside Hugging Face's `generate` and transformers' continuous batching; then PPO's step with
an actor of 1.3B and a critic of 350M beside the plain loop. Every measurement is a process of its
own, so that none finds memory taken; one that fails is named, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.generation import measure_row
from bench.generation_work import GPU_ROWS, SHAPES, GenerationWork
from bench.gpu_step3 import OPT_350M, measured
from bench.harness import facts, in_child
from bench.same import agreement
from bench.work import MICRO_BATCH_TOKENS, Work
from bench.work import SHAPES as LLAMAS

BATCHES = (8, 16, 32, 64, 128, 256, 512)
RAGGED_BATCH = 64
PEERS = (("hf", "hf-static"), ("hf-cb",))
"""Who is measured beside Tandem in one process; continuous batching keeps its cache there."""
PARTS = ("generation", "agreement", "step3")
_SMALL = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY: Mapping[str, Mapping[str, Any]] = {
    "opt-1.3b": {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32, **_SMALL},
    "llama-7b": {"model_type": "llama", "intermediate_size": 48, **_SMALL},
    "opt-350m": {
        "model_type": "opt",
        "ffn_dim": 48,
        "word_embed_proj_dim": 16,
        "do_layer_norm_before": False,
        **_SMALL,
    },
}
"""Shapes by the names of those that they stand for, to try the command with."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure part by part, show each; returns what --json writes."""
    options = _options(arguments)
    console = Console()
    result: dict[str, Any] = {**facts(), "tiny": options.tiny, "device": options.device}

    def keep() -> None:  # after every measurement: a long run that is stopped keeps what it has
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

    if "generation" in options.parts:
        result["generation"] = {}
        for name, work in generation_rows(options):
            for peers in PEERS:
                console.print(f"{name}, {', '.join(peers)} ...", style="dim")
                row = _tried(generation_row, work, _settings(options, peers))
                result["generation"].setdefault(name, {})[" ".join(peers)] = row
                keep()
        show_generation(console, result["generation"])
    if "agreement" in options.parts:
        console.print("a PPO step's numbers on both sides ...", style="dim")
        result["agreement"] = _tried(agreement, _agreement_work(options))
        console.print(f"a PPO step on both sides, apart: {result['agreement']}")
        keep()
    if "step3" in options.parts:
        work, critic = step3_work(options)
        result["step3"] = {"work": {"num_prompts": work.num_prompts, "dtype": work.dtype}}
        for side in ("tandem", "plain"):
            console.print(f"a PPO step, {side} ...", style="dim")
            result["step3"][side] = _tried(measured, side, work, critic, options.rounds)
            keep()
        show_step3(console, result["step3"])
    machine = result["machine"]
    console.print(
        f"{machine['gpu'] if options.device == 'cuda' else machine['cpu']}; torch "
        f"{result['versions']['torch']}, transformers {result['versions']['transformers']}; commit "
        f"{result['commit'][:12] or 'unknown'}"
        f"{' with changes' if result['uncommitted_changes'] else ''}"
    )
    keep()
    return result


def generation_rows(options: argparse.Namespace) -> Iterator[tuple[str, GenerationWork]]:
    """Every model at every batch with answers of one length, and once with ragged ones."""
    for name, work in GPU_ROWS.items():
        row = replace(work, device=options.device)
        if options.tiny:
            row = replace(row, shape=TINY[name], prompt_tokens=(8, 8), max_new_tokens=8)
        for batch in options.batch:
            yield f"{name}, batch {batch}", replace(row, num_prompts=batch)
        ragged = min(RAGGED_BATCH, max(options.batch))
        yield f"{name}, batch {ragged}, ragged", replace(row, num_prompts=ragged, ends=True)


def generation_row(work: GenerationWork, settings: argparse.Namespace) -> dict[str, Any]:
    """`measure_row`, with no share of the limit for ragged answers, which it is not meant for."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    row = measure_row(work, settings)
    for of in row["summary"].values():
        if work.ends:
            of["share_of_limit"] = None
    return row


def step3_work(options: argparse.Namespace) -> tuple[Work, Mapping[str, Any]]:
    """The PPO step, its actor's shape within, and the shape of critic and reward model."""
    work = Work(
        shape=SHAPES["opt-1.3b"],
        num_prompts=options.pairs,
        prompt_tokens=(256,),
        max_new_tokens=256,
        minibatch_size=options.pairs,
        micro_batch_tokens=options.micro_batch_tokens,
        dtype="bf16",
        device=options.device,
    )
    if not options.tiny:
        return work, OPT_350M
    tiny = replace(work, shape=TINY["opt-1.3b"], prompt_tokens=(8,), max_new_tokens=8)
    return tiny, TINY["opt-350m"]


def show_generation(console: Console, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Decoded tokens per second (on a CPU: all answers' tokens), ratios, shares of the limit."""
    table = Table(
        title="generation, tokens per second",
        caption="ratio: Tandem's rate / the side's in each round, median; limit: share of the "
        "time that reading weights, keys and values takes at least",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("row", "side"):
        table.add_column(heading, no_wrap=True)
    for heading in ("tokens/s", "ratio", "limit"):
        table.add_column(heading, justify="right")
    for name, groups in rows.items():
        for peers, row in groups.items():
            if "failed" in row:
                table.add_row(name, peers, row["failed"])
                continue
            for side, of in row["summary"].items():
                share = of["share_of_limit"]
                table.add_row(
                    name,
                    side,
                    f"{of['tokens_per_wall_second']:.0f}",
                    "" if side == "tandem" else f"{of['wall_ratio']['median']:.2f}",
                    "" if share is None else f"{share:.0%}",
                )
            for side, reason in row["absent"].items():
                table.add_row(name, side, reason)
    console.print(table)


def show_step3(console: Console, result: Mapping[str, Any]) -> None:
    """Pairs per second of both sides, and what switching modes costs."""
    for side in ("tandem", "plain"):
        of = result[side]
        text = of.get("failed") or (
            f"{of['pairs_per_second']:.2f} pairs/s, {of['step_seconds']:.2f} s a step"
        )
        console.print(f"PPO step, {side}: {text}")
        if "switch" in of:
            console.print(
                f"switching to generation and back: {of['switch']['seconds'] * 1000:.1f} ms, "
                f"{of['switch']['share_of_step']:.2%} of a step"
            )


def _tried(function: Any, *arguments: Any) -> dict[str, Any]:
    """What the function returns in a process of its own, or why it failed."""
    try:
        answer: dict[str, Any] = in_child(_caught, function, arguments)
    except RuntimeError as error:  # the process died
        return {"failed": str(error)}
    return answer


def _caught(function: Any, arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        # One row may find too little memory, or its peer a defect: the others are still measured.
        return {"failed": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}


def _settings(options: argparse.Namespace, peers: Sequence[str]) -> argparse.Namespace:
    """What `measure_row` reads."""
    return argparse.Namespace(
        sides=["tandem", *peers], slots=0, rounds=options.rounds, bandwidth=options.bandwidth
    )


def _agreement_work(options: argparse.Namespace) -> Work:
    return Work(
        shape=LLAMAS["a"],
        mode="ragged",
        num_prompts=8,
        max_new_tokens=16,
        micro_batch_tokens=MICRO_BATCH_TOKENS["a"],
        device=options.device,
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--device", choices=("cpu", "cuda"), default="cuda")
    add("--tiny", action="store_true", help="small shapes and short answers: does all of it run?")
    add("--batch", nargs="+", type=int, help="prompts side by side; 8 to 512 by default")
    add("--pairs", type=int, help="prompts of the PPO step; 64 by default")
    add("--micro-batch-tokens", type=int, default=8192, help="of the PPO step, for both sides")
    add("--rounds", type=int, default=3, help="measurements of each side, after one before")
    add("--bandwidth", type=float, help="of the GPU's memory, TB/s; measured by default")
    add("--json", type=Path, help="write everything there too")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device must be available; got cuda, but no GPU was found. Use --device cpu")
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu must come with --tiny; got it alone. The shapes are a GPU's")
    options.batch = options.batch or ([2, 4] if options.tiny else list(BATCHES))
    options.pairs = options.pairs or (4 if options.tiny else 64)
    return options


if __name__ == "__main__":
    main()
