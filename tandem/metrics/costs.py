"""Metrics of what a phase costs: a part of the table in `tandem.metrics.table`."""

from __future__ import annotations

from tandem.config.stages import FAMILIES
from tandem.metrics.metric import PHASES, Metric, grouped

# fmt: off
COSTS = grouped("cost",
    Metric("seconds/*", "seconds", FAMILIES, "lower",
        "Wall time of a phase since the last log line; `step` is all of it.", members=PHASES,
        title="Time"),
    Metric("tokens_per_second/*", "tokens/s", FAMILIES, "higher",
        "Tokens per second of a phase, padding excluded: `generate` counts sampled tokens, `score` "
        "those of all answers and prompts, also where a function alone scores them, the other "
        "phases all tokens that they process, those of mixed texts among them.",
        members=PHASES, chart="Speed"),
    Metric("samples_per_second/*", "samples/s", FAMILIES, "higher",
        "Sequences per second of a phase; rows (pairs, rankings, answers) in stages on pairs.",
        members=PHASES),
    Metric("tflops/*", "TFLOP/s", FAMILIES, "higher",
        "Model FLOP/s of a phase over all ranks: its forward and backward passes without "
        "recomputation, the vocabulary head only for the tokens that go through it. `step`: "
        "the FLOPs of all phases over the time of the whole step.", members=PHASES),
    Metric("peak_memory_bytes/*", "bytes", FAMILIES, "lower",
        "Peak memory during a phase: torch's allocator on CUDA, otherwise the process's "
        "resident set (since its start where the system cannot reset the peak), with what it "
        "keeps of memory that phases before have freed.",
        members=PHASES, title="Peak memory"),
)
# fmt: on
