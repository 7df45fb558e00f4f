"""Generation, Tandem beside Hugging Face: useful tokens per second, alternating in one run.

    python bench/generation.py --rows llama-2.2m-fp32 llama-22m-fp32 --rounds 7 --json made.json

bench/README.md says what is the same for all sides and how to read the tables.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.generation_sides import (
    SIDES,
    Answers,
    GenerationStart,
    GenerationWork,
    TandemSide,
    generation_start,
)
from bench.harness import Rounds, compare, measure, ready, require_close
from bench.limits import copy_bandwidth, decode_bytes, gemm_rate, product_seconds, real_flops
from bench.models import HYBRIDS, SHAPES, tiny
from bench.report import Report, count, parser, sides_table

AGREEMENT = {"fp32": 1e-4, "bf16": 0.2}
"""How far Tandem's log-prob of a token may be from that of Hugging Face's own forward, in nats."""

CHECKED_ANSWERS = 4


def _cpu_rows() -> dict[str, GenerationWork]:
    rows = {
        f"stories260k-{num_prompts}": GenerationWork(
            shape=SHAPES["stories260k"], num_prompts=num_prompts
        )
        for num_prompts in (64, 256)
    }
    large = {"opt-125m": 32, "smollm2": 16}  # and how many prompts
    large |= dict.fromkeys(HYBRIDS, 16)
    for name in ("llama-2.2m", "llama-22m", *large):
        row = GenerationWork(shape=SHAPES[name])
        if name in large:
            row = replace(row, num_prompts=large[name], max_new_tokens=64)
        rows[f"{name}-fp32"], rows[f"{name}-bf16"] = row, replace(row, dtype="bf16")
    samples: dict[str, Any] = {"samples_per_prompt": 8, "prompt_tokens": (128, 192)}
    for name, num_prompts in (("llama-2.2m", 32), ("llama-22m", 16)):
        rows[f"{name}-8-samples"] = GenerationWork(
            shape=SHAPES[name], num_prompts=num_prompts, **samples
        )
    return rows


CPU_ROWS: Mapping[str, GenerationWork] = _cpu_rows()
GPU_ROWS: Mapping[str, GenerationWork] = {
    name: GenerationWork(
        shape=SHAPES[name],
        dtype="bf16",
        device="cuda",
        prompt_tokens=(256, 256),
        max_new_tokens=256,
        ends=False,
    )
    for name in ("opt-1.3b", "llama-7b")
}
GPU_BATCHES = (8, 32, 128, 512)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Check and measure row by row, show each; returns what --json writes."""
    options = _options(arguments)
    report = Report(options)
    rows = report.result["rows"] = {}
    for name, work in rows_of(options).items():
        report.print_line(f"{name} ...")
        row = rows[name] = measure_row(work, options.sides, options.rounds, options.bandwidth)
        least, most = work.prompt_tokens
        samples = f" x {work.samples_per_prompt}" if work.samples_per_prompt > 1 else ""
        title = f"{work.num_prompts} prompts{samples} of {least}-{most} tokens, {work.dtype}"
        title += f", adapters of rank {work.lora_rank}" * bool(work.lora_rank)
        report.console.print(
            sides_table(
                f"{name}: {title}",
                f"{options.rounds} round(s); mean: tokens of an answer",
                {name: row["summary"]},
                "row",
                {
                    "mean": lambda of: f"{of['answer_tokens']:.1f}",
                    "limit": lambda of: f"{of['share_of_limit']:.0%}",
                },
            )
        )
        limit = row["limit"]
        report.print_line(
            f"limit: {limit['bytes_per_second'] / 1e12:.2f} TB/s; rates are of decoding"
            if work.device == "cuda"
            else f"limit: {limit['flops_per_cpu_second'] / 1e9:.0f} GFLOP per CPU second"
        )
        if "products" in row:
            made = row["products"]
            ratios = [f"{ratio:.2f} times {side}" for side, ratio in made["cpu_ratios"].items()]
            rate = f"{made['tokens_per_cpu_second']:.0f} tokens per CPU second"
            report.print_line(f"Tandem's products alone: {', '.join([rate, *ratios])}")
        for side, reason in row["absent"].items():
            report.print_line(f"{side} is unavailable: {reason}")
        report.keep()
    return report.end()


def measure_row(
    work: GenerationWork, names: Sequence[str], rounds: int, bandwidth: float | None = None
) -> dict[str, Any]:
    """Check, warm up and measure one row; all that is known of it.

    Args:
        names: of SIDES. bandwidth: of a GPU's memory, TB/s; measured if None.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    start = generation_start(work)
    distance = agreement(work, start)
    makers = {name: lambda name=name: SIDES[name](work, start) for name in names}
    found = ready(makers, required=("tandem", "hf"))
    answers, costs = measure(found.sides, rounds)
    if work.ends:
        require_same_lengths(answers)
    if work.device == "cuda":
        limit = {
            "bytes_per_second": bandwidth * 1e12 if bandwidth else copy_bandwidth("cuda"),
            "decode_bytes": decode_bytes(
                start.model,
                statistics.mean(work.prompt_tokens),
                work.max_new_tokens - 1,
                work.num_answers,
            ),
        }
    else:
        limit = {"flops_per_cpu_second": gemm_rate(work.dtype)}
    tokens = {side: [sum(map(len, one)) for one in of] for side, of in answers.items()}
    table = summary(work, start, answers, costs, limit)
    products = {} if work.device == "cuda" else {"products": _products(start, answers, table)}
    return {
        "work": work,
        "apart": distance,
        "absent": found.absent,
        "limit": limit,
        "tokens": tokens,
        "rounds": costs,
        "summary": table,
        **products,
    }


def _products(
    start: GenerationStart,
    answers: Mapping[str, Sequence[Answers]],
    table: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Tandem's rate if all but its matrix products cost nothing, and its ratio to other sides'.

    The work is that of its last round's answers.
    """
    lengths = list(map(len, answers["tandem"][-1]))
    seconds = product_seconds(start.model, [len(row) for row in start.prompts], lengths)
    rate = sum(lengths) / seconds
    return {
        "tokens_per_cpu_second": rate,
        "cpu_ratios": {
            side: rate / of["tokens_per_cpu_second"]
            for side, of in table.items()
            if side != "tandem"
        },
    }


def summary(
    work: GenerationWork,
    start: GenerationStart,
    answers: Mapping[str, Sequence[Answers]],
    costs: Rounds,
    limit: Mapping[str, float],
) -> dict[str, dict[str, Any]]:
    """By side: rates and ratios, the mean length, and the share of the limit.

    On a GPU they are of decoding: what is left of the time after a first token, and its tokens.
    """
    lengths = {side: [list(map(len, one)) for one in of] for side, of in answers.items()}
    phase = "generate"
    tokens = {side: [float(sum(one)) for one in of] for side, of in lengths.items()}
    if work.device == "cuda":
        phase = "decode"
        tokens = {side: [n - work.num_answers for n in of] for side, of in tokens.items()}
        costs = {
            side: [{phase: one["generate"] - one["prefill"]} for one in of]
            for side, of in costs.items()
        }
    table = compare(costs, tokens, phase)
    prompts = [len(row) for row in start.prompts]
    for side, of in table.items():
        of["answer_tokens"] = statistics.mean(n for one in lengths[side] for n in one)
        if work.device == "cuda":
            least = limit["decode_bytes"] / limit["bytes_per_second"]
            of["share_of_limit"] = least / of["wall_seconds"]
        else:
            of["share_of_limit"] = statistics.median(
                real_flops(start.model, prompts, one) / cost.cpu / limit["flops_per_cpu_second"]
                for one, cost in zip(lengths[side], (c[phase] for c in costs[side]), strict=True)
            )
    return table


@torch.no_grad()
def agreement(work: GenerationWork, start: GenerationStart) -> float:
    """The largest difference of Tandem's log-probs from a forward of Hugging Face's.

    One answer at a time and without padding, so that the reference has none of its own.

    Raises:
        RuntimeError: it is more than AGREEMENT.
    """
    rollout = TandemSide(work, start).generate(0, min(work.max_new_tokens, 32))
    worst = 0.0
    for i in range(min(CHECKED_ANSWERS, len(rollout))):
        mask = rollout.batch.response_mask[i]
        token_ids = rollout.batch.token_ids[i, : int(mask.nonzero().max()) + 1]
        logits = start.model(token_ids[None], use_cache=False).logits[0, :-1].float()
        logprobs = logits.log_softmax(dim=-1).gather(1, token_ids[1:, None]).squeeze(1)
        ours, chosen = rollout.rollout_logprobs[i, mask], mask[1 : len(token_ids)]
        worst = max(worst, float((ours - logprobs[chosen]).abs().max()))
    require_close({"log-probs of sampled tokens": worst}, AGREEMENT[work.dtype])
    return worst


def require_same_lengths(answers: Mapping[str, Sequence[Sequence[Sequence[int]]]]) -> None:
    """Sides sample lengths of their own: their means may differ by chance only.

    Raises:
        RuntimeError: two means are more than 5 standard errors apart.
    """
    lengths = {side: [len(a) for one in rounds for a in one] for side, rounds in answers.items()}
    first = next(iter(lengths))
    for side, tokens in lengths.items():
        pair = (tokens, lengths[first])
        error = math.sqrt(sum(statistics.pvariance(ns) / len(ns) for ns in pair))
        apart = abs(statistics.mean(tokens) - statistics.mean(lengths[first]))
        if apart > 5 * max(error, 1e-9):
            raise RuntimeError(
                f"answers of {side} and {first} must be equally long but for chance; got means "
                f"{apart:.1f} tokens apart, with a standard error of {error:.1f}."
            )


def rows_of(options: argparse.Namespace) -> dict[str, GenerationWork]:
    """The rows that the flags ask for."""
    known = GPU_ROWS if options.device == "cuda" else CPU_ROWS
    asked = {"slots": options.slots, "lora_rank": options.lora_rank}
    rows = {name: replace(known[name], **asked) for name in options.rows or known}
    if options.model:
        for name in rows:
            if "stories260k" in name:
                rows[name] = replace(rows[name], folder=str(options.model))
    if options.tiny:
        small: dict[str, Any] = {"num_prompts": 4, "prompt_tokens": (3, 7), "max_new_tokens": 8}
        rows = {k: replace(work, shape=tiny(work.shape), **small) for k, work in rows.items()}
    batches = options.batch or (GPU_BATCHES if options.device == "cuda" else ())
    if not batches:
        return rows
    # Of few answers the mean length is chance, so here every answer takes all its tokens.
    return {
        f"{name}-batch-{batch}": replace(work, num_prompts=batch, ends=False)
        for name, work in rows.items()
        for batch in batches
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    flags = parser(__doc__, "rounds threads device default-allocator")
    add = flags.add_argument
    add("--rows", nargs="+", metavar="ROW", help=", ".join((*CPU_ROWS, *GPU_ROWS)))
    default = [side for side in SIDES if side != "hf-compile"]  # it compiles for minutes
    add("--sides", nargs="+", choices=SIDES, default=default)
    add("--slots", type=count, default=0, help="answers side by side in Tandem; all by default")
    add("--lora-rank", type=int, default=0, help="rank of live adapters on every layer; none")
    add("--model", type=Path, help="folder of the real stories260K, for its two rows")
    usual = ", ".join(map(str, GPU_BATCHES))
    add("--batch", nargs="+", type=count, help=f"prompts; by default a row's own, on a GPU {usual}")
    add("--bandwidth", type=float, help="of the GPU's memory, TB/s; measured by default")
    options = flags.parse_args(arguments)
    known = GPU_ROWS if options.device == "cuda" else CPU_ROWS
    for name in options.rows or ():
        if name not in known:
            flags.error(f"--rows must be of {', '.join(known)}; got {name}")
    return options


if __name__ == "__main__":
    main()
