"""Forward and backward over ragged rows: Tandem's packed forward beside Hugging Face's padded one.

    python bench/packed.py --shapes llama-22m --rounds 7 --json packed.json

bench/README.md says what is the same on both sides and how to read the table.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from transformers import LlamaForCausalLM

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness import Cost, Stopwatch, alternate, facts
from bench.plain_hf_supervised import Settings, language_loss, row_chunks
from bench.ragged import PAD, SHAPES, apart, llama_config, ragged_rows
from bench.training_table import show, summary
from tandem.engine.allocator import keep_freed_memory
from tandem.engine.forward import deal_batch, response_logprobs
from tandem.objectives.losses import sft_loss
from tandem.parallel.world import World
from tandem.types import TokenBatch, TokenRow

AGREEMENT = {"fp32": 1e-5, "bf16": 3e-2}
"""How far the two gradients may be apart, relative to the padded one's size."""

MICRO_BATCH_TOKENS = (768, 1536, 3072, 6144)
"""Padded tokens per forward that the padded side is tried with; it gets its fastest."""

NUM_ROWS = {"llama-2.2m": 64, "llama-22m": 32}


@dataclass(frozen=True, kw_only=True)
class PackedWork:
    """Rows whose answers' mean cross-entropy is differentiated once."""

    shape: Mapping[str, Any]
    num_rows: int
    dtype: Literal["fp32", "bf16"] = "fp32"
    device: Literal["cpu", "cuda"] = "cpu"
    prompt_tokens: tuple[int, int] = (32, 64)
    max_answer_tokens: int = 128
    seed: int = 1


class Sides:
    """Both ways to the same gradient, each on a model of its own with the same weights."""

    def __init__(self, work: PackedWork) -> None:
        self.work = work
        torch.manual_seed(work.seed)
        self.plain = LlamaForCausalLM(llama_config(work.shape))
        self.plain.to(work.device)  # type: ignore[arg-type]
        self.tandem = copy.deepcopy(self.plain)
        if work.dtype == "bf16":
            self.tandem.to(torch.bfloat16)
        self.rows: list[TokenRow] = ragged_rows(
            work.num_rows,
            work.shape["vocab_size"],
            prompt_tokens=work.prompt_tokens,
            max_answer_tokens=work.max_answer_tokens,
            seed=work.seed,
        )
        self.batch = TokenBatch.from_rows(self.rows, PAD).to(work.device)
        self.denominator = self.batch.num_response_tokens

    def run_tandem(self, micro_batch_tokens: int) -> dict[str, Cost]:
        """The gradient by `response_logprobs`, into a model without one; what it cost."""
        self.tandem.zero_grad(set_to_none=True)
        watch = Stopwatch()
        with watch("train"):
            for chosen, _ in deal_batch(self.batch, micro_batch_tokens, World()):
                part = self.batch.select(chosen)
                logprobs, _ = response_logprobs(self.tandem, part)
                loss = sft_loss(logprobs, part.response_mask)
                (loss / self.denominator).backward()
        return watch.take()

    def run_plain(self, micro_batch_tokens: int) -> dict[str, Cost]:
        """As `run_tandem`, by the model's own padded forward and cross-entropy."""
        self.plain.zero_grad(set_to_none=True)
        watch = Stopwatch()
        settings = Settings(
            micro_batch_tokens=micro_batch_tokens,
            learning_rate=0.0,
            betas=(0.0, 0.0),
            max_grad_norm=1.0,
            pad_token_id=PAD,
            bf16=self.work.dtype == "bf16",
        )
        with watch("train"):
            for rows in row_chunks(self.rows, micro_batch_tokens):
                loss = language_loss(self.plain, rows, settings)
                (loss / self.denominator).backward()
        return watch.take()

    def gradients_apart(self, micro_batch_tokens: int) -> float:
        """How far the two gradients are apart.

        Raises:
            RuntimeError: further than AGREEMENT, or a parameter has a gradient on one side only.
        """
        self.run_tandem(micro_batch_tokens)
        self.run_plain(micro_batch_tokens)
        pairs = list(zip(self.tandem.parameters(), self.plain.parameters(), strict=True))
        ours = [p.grad for p, _ in pairs if p.grad is not None]
        theirs = [p.grad for _, p in pairs if p.grad is not None]
        distance = apart(ours, theirs) if len(ours) == len(theirs) == len(pairs) else float("inf")
        limit = AGREEMENT[self.work.dtype]
        if not distance <= limit:
            raise RuntimeError(
                f"gradients must agree to {limit:g} on both sides; got {distance:.3g} apart."
            )
        return distance

    def fastest(self, candidates: Sequence[int]) -> int:
        """The micro-batch with which the padded side takes the least CPU time."""
        self.run_plain(candidates[0])
        seconds = {
            tokens: statistics.median(self.run_plain(tokens)["total"].cpu for _ in range(3))
            for tokens in candidates
        }
        return min(seconds, key=seconds.__getitem__)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Check, measure, show; returns what --json writes."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    kept = keep_freed_memory() if options.keep_freed_memory else False
    console = Console()
    result = {**facts(), "keeps_freed_memory": kept, "rows": {}}
    for name in options.shapes:
        work = PackedWork(
            shape=SHAPES[name],
            num_rows=options.sequences or NUM_ROWS[name],
            dtype=options.dtype,
            device=options.device,
        )
        row = measure(work, options.rounds, options.micro_batch_tokens)
        result["rows"][name] = row
        show(console, f"{name}: forward and backward, {work.num_rows} rows, {work.dtype}", row)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def measure(work: PackedWork, rounds: int, micro_batch_tokens: int | None) -> dict[str, Any]:
    """Check that the gradients agree, then time both sides over the same rows."""
    sides = Sides(work)
    tokens = micro_batch_tokens or sides.fastest(MICRO_BATCH_TOKENS)
    distance = sides.gradients_apart(tokens)
    costs = alternate(
        {"tandem": lambda: sides.run_tandem(tokens), "hf": lambda: sides.run_plain(tokens)}, rounds
    )
    real = sum(map(len, sides.rows))
    chunks = [list(map(len, rows)) for rows in row_chunks(sides.rows, tokens)]
    return {
        "work": asdict(work),
        "micro_batch_tokens": tokens,
        "padding": sum(len(lengths) * max(lengths) for lengths in chunks) / real,
        "apart": {"gradients": distance},
        "tokens": real,
        "rounds": {
            side: [asdict(one["total"]) for one in of_side] for side, of_side in costs.items()
        },
        "summary": summary(real, costs),
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--shapes", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    add("--sequences", type=int, help="rows; 64 for llama-2.2m and 32 for llama-22m by default")
    add("--rounds", type=int, default=5, help="gradients of each side that are measured")
    add("--threads", type=int, default=1, help="of torch, for both sides")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="compute type")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--micro-batch-tokens", type=int, help="padded tokens per forward, for both sides")
    add(
        "--default-allocator",
        dest="keep_freed_memory",
        action="store_false",
        help="leave the C library's allocator as it is, for both sides",
    )
    add("--json", type=Path, help="write everything there too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
