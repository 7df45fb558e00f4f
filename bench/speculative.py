"""Speculative decoding against one token a step: answers in turns, of a real model.

    python bench/speculative.py MODEL --temperatures 0.01 1 --answers 1 4 --json made.json

MODEL is a folder with a chat template; a random model neither repeats itself nor its prompt. Its
prompts ask for a text in other words, an answer from it, code, a list and a story, or are those of
--prompts, JSON lines with a `prompt` each. Each round answers all of them, as many at a
time as --answers says, with and without drafts (tandem/generation/speculative.py), in CPU seconds
of this process. The bench ends if one token differs.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import PreTrainedModel

from bench.report import Report, count, parser, table
from tandem.config.schema import SamplingConfig
from tandem.data.render import Renderer
from tandem.generation.stops import Stops
from tandem.generation.streaming import Conversations
from tandem.models.load import load_causal_lm, load_tokenizer
from tandem.types import Message

_TEXT = (
    "The library opens at nine in the morning and closes at six in the evening. On Fridays it "
    "stays open until eight. Children under twelve need a grown-up with them. Books may be kept "
    "for four weeks, films for one. Who brings a book back late pays ten cents a day."
)
PROMPTS = (
    f"Put this text in other words, sentence by sentence:\n\n{_TEXT}",
    f"Correct the spelling of this text and write all of it out again:\n\n{_TEXT}",
    f"When does the library close on Fridays? Answer from this text:\n\n{_TEXT}",
    "Write a Python function that reads a file and returns how often each word occurs in it.",
    "List ten things that one needs for a week in a tent, each with a reason.",
    "Tell a story about a bird that wanted to see the other side of the sea.",
)
"""Two repeat the prompt, one quotes it, two repeat their own form, one does neither."""


@dataclass
class Side:
    """What one way of answering took, by rounds: CPU seconds and steps; and its tokens."""

    seconds: list[float]
    steps: list[int]
    tokens: list[list[int]]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure every temperature and number of answers both ways; returns what --json writes."""
    flags = parser(__doc__, "rounds threads dtype")
    flags.add_argument("model", type=Path, help="a folder with a chat template")
    flags.add_argument("--prompts", type=Path, help="JSON lines, each with a `prompt`")
    flags.add_argument("--temperatures", nargs="+", type=float, default=[0.01, 1.0])
    flags.add_argument("--answers", nargs="+", type=count, default=[1, 4], help="side by side")
    flags.add_argument("--max-tokens", type=count, default=120, help="of an answer")
    options = flags.parse_args(arguments)
    report = Report(options)
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    model = load_causal_lm(str(options.model), dtype=dtype).eval()
    prompts = PROMPTS
    if options.prompts:
        texts = options.prompts.read_text("utf-8").splitlines()
        prompts = tuple(json.loads(text)["prompt"] for text in texts)
    rows = report.result["rows"] = {}
    for temperature, answers in product(options.temperatures, options.answers):
        name = f"temperature {temperature:g}, {answers} side by side"
        rows[name] = measured(model, options, prompts, temperature, answers)
    left, right = ["answers"], ["tokens / CPU s", "without", "ratio", "least-most", "tokens a step"]
    lines = [
        [
            name,
            f"{row['tokens_per_cpu_second']:.1f}",
            f"{row['without']:.1f}",
            f"{row['ratio']:.2f}",
            f"{min(row['ratios']):.2f}-{max(row['ratios']):.2f}",
            f"{row['tokens_per_step']:.2f}",
        ]
        for name, row in rows.items()
    ]
    title = f"{options.model.name}, {options.dtype}, {len(prompts)} prompts"
    report.console.print(table(title, f"{options.rounds} round(s)", left, right, lines))
    return report.end()


def measured(
    model: PreTrainedModel, options: Any, prompts: Sequence[str], temperature: float, answers: int
) -> dict[str, Any]:
    """Both ways in turns; the medians.

    Raises:
        SystemExit: a token differs.
    """
    renderer = Renderer(load_tokenizer(str(options.model)))
    sampling = SamplingConfig(max_new_tokens=options.max_tokens, temperature=temperature)
    rows = [renderer.prompt([Message("user", text)]).token_ids for text in prompts]
    longest = max(map(len, rows)) + options.max_tokens
    sides = {speculates: Side([], [], []) for speculates in (False, True)}
    for _ in range(options.rounds + 1):
        for speculates, side in sides.items():
            begin, steps, handles = time.process_time(), 0, []
            with Conversations(
                model, Stops.of(renderer), slots=answers, max_tokens=longest, speculate=speculates
            ) as talk:
                for i, row in enumerate(rows):
                    handles.append(talk.submit(row, sampling, seed=i))
                while talk.busy:
                    talk.step()
                    steps += 1
            side.seconds.append(time.process_time() - begin)
            side.steps.append(steps)
            side.tokens = [handle.token_ids for handle in handles]
    plain, ahead = sides[False], sides[True]
    if plain.tokens != ahead.tokens:
        raise SystemExit(f"temperature {temperature}: answers with drafts must be those without.")
    tokens = sum(map(len, plain.tokens))
    ratios = [a / b for a, b in zip(plain.seconds[1:], ahead.seconds[1:], strict=True)]
    return {
        "tokens": tokens,
        "tokens_per_cpu_second": tokens / statistics.median(ahead.seconds[1:]),
        "without": tokens / statistics.median(plain.seconds[1:]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "steps": {"with": ahead.steps[1:], "without": plain.steps[1:]},
        "tokens_per_step": tokens / statistics.median(ahead.steps[1:]),
    }


if __name__ == "__main__":
    main()
