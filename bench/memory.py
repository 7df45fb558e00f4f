"""Peak memory per rank against the formula, and the largest model within a budget.

    python bench/memory.py                      # 20M and 100M, stages 0 to 3, LoRA, 1 and 2 ranks
    python bench/memory.py --models 20m --ranks 2 --json memory.json
    python bench/memory.py --largest 4 --knobs lora.rank=8 parallel.frozen_weights=nf4

Every case runs in processes of its own. docs/sweep.md says how to read the table.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.memory_case import Measured, MemoryCase, measure, save_models
from bench.models import Shape, llama
from bench.report import Report, count, parser, table
from tandem.errors import ConfigError
from tandem.generation.blocks import free_bytes
from tandem.memory.model import MemoryPlan
from tandem.memory.shape import shape_of
from tandem.plan.run import plan_memory

MEBIBYTE, GIBIBYTE = 2**20, 2**30


def _llama(width: int, layers: int, heads: int, vocabulary: int = 8192) -> Shape:
    return llama(width, 8 * width // 3 // 64 * 64, layers, heads, vocabulary)


MODELS: Mapping[str, Shape] = {
    "tiny": _llama(64, 2, 2, 512),
    "5m": _llama(256, 4, 4),
    "20m": _llama(384, 9, 6),
    "50m": _llama(512, 15, 8),
    "100m": _llama(768, 13, 12),
    "200m": _llama(1024, 15, 16),
    "400m": _llama(1024, 32, 16),
    "800m": _llama(1536, 28, 12),
    "1.3b": _llama(2048, 25, 16, 32000),
    "3b": _llama(2560, 38, 20, 32000),
    "7b": _llama(4096, 34, 32, 32000),
    "13b": _llama(5120, 41, 40, 32000),
    "30b": _llama(6656, 58, 52, 32000),
    "70b": _llama(8192, 85, 64, 32000),
}
"""Llamas of about these many parameters, the ladder that --largest climbs."""

# Beside every stage, full and LoRA: at the highest one.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "offload optimizer": {"parallel.offload": ["optimizer"]},
    "offload params": {"parallel.offload": ["optimizer", "params"]},
    "frozen int8": {"lora.rank": 8, "parallel.frozen_weights": "int8"},
    "frozen nf4": {"lora.rank": 8, "parallel.frozen_weights": "nf4"},
}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure the cases, or climb the ladder; returns what --json writes."""
    options = _options(arguments)
    report = Report(options)
    if options.largest:
        climb(options, report)
    else:
        compare(options, report)
    return report.end()


def compare(options: argparse.Namespace, report: Report) -> None:
    """Every case measured, beside what the formula says; the table grows line by line."""
    rows = report.result["cases"] = []
    for model, name, case in cases(options):
        where = f"{model} {name}, {case.ranks} rank(s)"
        try:
            row = row_of(model, name, case, run_case(case))
        except (RuntimeError, ConfigError) as error:
            report.print_line(f"{where}: failed: {error}")
            continue
        rows.append(row)
        report.print_line(f"{where}: {', '.join(' '.join(pair) for pair in _cells(row).items())}")
        report.keep()
    phases = list(dict.fromkeys(phase for row in rows for phase in row["formula"]))
    report.console.print(
        table(
            "peak memory per rank, MiB",
            "measured / formula (measured over formula)",
            ("model", "case"),
            ("ranks", *phases),
            (
                (row["model"], row["name"], str(row["ranks"]), *map(_cells(row).get, phases))
                for row in rows
            ),
        )
    )


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    pairs = {phase: (row["measured"][phase], of) for phase, of in row["formula"].items()}
    return {
        phase: f"{measured / MEBIBYTE:.0f} / {of / MEBIBYTE:.0f} ({measured / of:.2f})"
        for phase, (measured, of) in pairs.items()
    }


def run_case(case: MemoryCase) -> list[Measured]:
    """The case's peaks, rank by rank, of models that are written for it and removed again."""
    with tempfile.TemporaryDirectory() as folder:
        save_models(case, Path(folder))
        return measure(case, Path(folder))


def cases(options: argparse.Namespace) -> Iterator[tuple[str, str, MemoryCase]]:
    """(model, name, case): stages x LoRA, then the variants whose knobs exist."""
    for model in options.models:
        for ranks in options.ranks:
            stages = options.stages if ranks > 1 else [0]  # at one rank stages mean nothing
            for stage in stages:
                for rank in options.lora:
                    name = f"stage {stage}" + (f", LoRA {rank}" if rank else "")
                    yield model, name, _case(options, model, ranks, stage, {"lora.rank": rank})
            for variant, knobs in VARIANTS.items() if options.variants else ():
                stage = max(stages)
                name = f"stage {stage}, {variant}"
                yield model, name, _case(options, model, ranks, stage, knobs)


def row_of(model: str, name: str, case: MemoryCase, measured: list[Measured]) -> dict[str, Any]:
    """One case's bytes by phase, the formula's and the largest rank's."""
    plan = formula(case)
    by_phase = phases_of(plan)
    return {
        "model": model,
        "name": name,
        "ranks": case.ranks,
        "step": case.step,
        "case": case,
        "parameters": shape_of(case.model_config).parameters,
        "formula": by_phase,
        "parts": {"resting": plan.resting, **plan.phases},
        "measured": {p: max(m.peaks[p] for m in measured) for p in by_phase},
        "per_rank": [m.peaks for m in measured],
        "seconds_per_step": max(m.seconds for m in measured),
    }


def formula(case: MemoryCase) -> MemoryPlan:
    """What `tandem.plan` says of a case."""
    return plan_memory(
        case.config, case.step, case.model_config, ranks=case.ranks, prompt_tokens=case.prompt
    )


def phases_of(plan: MemoryPlan) -> dict[str, int]:
    """The formula's peaks by the phases that a run times: training is both of its models'."""
    peaks: dict[str, int] = {}
    for phase in ("load", *plan.phases):
        word = phase.split()[0]
        peaks[word] = max(peaks.get(word, 0), plan.peak(phase))
    return peaks


def climb(options: argparse.Namespace, report: Report) -> None:
    """The largest model of the ladder whose PPO stays within the budget, each one measured."""
    budget = options.largest * GIBIBYTE
    tried: list[dict[str, Any]] = []
    found = report.result["largest"] = {"budget_bytes": budget, "largest": None, "tried": tried}
    names = list(MODELS)
    for model in names[names.index(options.start) :]:
        ranks, stage = max(options.ranks), max(options.stages)
        case = _case(options, model, ranks, stage if ranks > 1 else 0, {})
        expected = max(phases_of(formula(case)).values())
        free = free_bytes(torch.device(options.device)) / (ranks if options.device == "cpu" else 1)
        if expected > min(1.5 * budget, free):
            report.print_line(
                f"{model}: not tried, the formula says {expected / GIBIBYTE:.2f} GiB a rank; "
                f"{free / GIBIBYTE:.2f} GiB are free"
            )
            break
        try:
            row = row_of(model, "largest", case, run_case(case))
        except RuntimeError as error:
            report.print_line(f"{model}: failed: {error}")
            break
        tried.append(row)
        report.keep()
        peak = max(row["measured"].values())
        report.print_line(
            f"{model}: {row['parameters'] / 1e6:.1f}M parameters, peak {peak / GIBIBYTE:.2f} GiB "
            f"a rank (formula {expected / GIBIBYTE:.2f}), {row['seconds_per_step']:.1f} s a step: "
            f"{'fits' if peak <= budget else 'does not fit'}"
        )
        if peak > budget:
            break
        found["largest"] = model
    report.print_line(
        f"largest within {options.largest:g} GiB a rank: {found['largest'] or 'none'}"
        + (f" with {' '.join(options.knobs)}" if options.knobs else "")
    )


def _case(
    options: argparse.Namespace, model: str, ranks: int, stage: int, knobs: Mapping[str, Any]
) -> MemoryCase:
    stages = {"parallel.actor_zero_stage": stage, "parallel.critic_zero_stage": stage}
    given = dict(_knob(text) for text in options.knobs)
    return MemoryCase(
        shape=MODELS[model],
        step="ppo" if options.largest else options.step,
        ranks=ranks,
        knobs={"device": options.device, **stages, **knobs, **given},
        prompts=options.prompts,
        prompt=options.prompt_tokens,
        new=options.new_tokens,
        micro_batch_tokens=options.micro_batch_tokens,
    )


def _knob(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--knobs must be NAME=VALUE, as in lora.rank=8; got {text!r}.")
    return name, yaml.safe_load(value)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    flags = parser(__doc__, "device micro-batch-tokens knobs")
    flags.set_defaults(micro_batch_tokens=256)
    add = flags.add_argument
    add("--models", nargs="+", choices=list(MODELS), default=["20m", "100m"])
    add("--ranks", nargs="+", type=count, default=[1, 2])
    add("--stages", nargs="+", type=int, choices=range(4), default=[0, 1, 2, 3])
    add("--lora", nargs="+", type=int, default=[0, 8], help="ranks of adapters; 0 is none")
    add("--step", choices=("sft", "ppo"), default="ppo")
    add("--no-variants", dest="variants", action="store_false", help="no offload, no quantization")
    add("--largest", type=float, metavar="GIB", help="climb the ladder of models to this budget")
    add("--start", choices=list(MODELS), default="20m", help="where --largest begins")
    add("--prompts", type=count, default=16, help="per step, over all ranks")
    add("--prompt-tokens", type=count, default=32)
    add("--new-tokens", type=count, default=32)
    options = flags.parse_args(arguments)
    if options.tiny:
        small = {"models": ["tiny"], "ranks": [1], "lora": [0], "variants": False, "prompts": 4}
        flags.set_defaults(**small)
        options = flags.parse_args(arguments)
    return options


if __name__ == "__main__":
    main()
