"""Peak memory per rank against the formula, and the largest model within a budget.

    python bench/memory.py                      # 20M and 100M, stages 0 to 3, LoRA, 1 and 2 ranks
    python bench/memory.py --models 20m --ranks 2 --json memory.json
    python bench/memory.py --largest 4 --knobs lora.rank=8 parallel.frozen_weights=nf4

Every case runs in processes of its own. docs/sweep.md says how to read the table.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.harness import facts
from bench.memory_case import Measured, MemoryCase, measure, save_models
from tandem.errors import ConfigError
from tandem.generation.blocks import free_bytes
from tandem.plan.memory import MemoryPlan
from tandem.plan.run import plan_memory
from tandem.plan.shape import shape_of

MEBIBYTE, GIBIBYTE = 2**20, 2**30


def _llama(width: int, layers: int, heads: int, vocabulary: int = 8192) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 8 * width // 3 // 64 * 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": True,
    }


MODELS: Mapping[str, Mapping[str, Any]] = {
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
    console = Console(width=None if sys.stdout.isatty() else 160)
    result: dict[str, Any] = {**facts()}
    if options.largest:
        result["largest"] = climb(options, console)
    else:
        result["cases"] = compare(options, console)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def compare(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Every case measured, beside what the formula says; the table grows line by line."""
    rows = []
    for model, name, case in cases(options, console):
        try:
            rows.append(row_of(model, name, case, run_case(case)))
        except (RuntimeError, ConfigError) as error:
            console.print(f"{model} {name}, {case.ranks} rank(s): failed: {error}", style="red")
            continue
        console.print(_line(rows[-1]), style="dim", highlight=False)
    console.print(_table(rows))
    return rows


def run_case(case: MemoryCase) -> list[Measured]:
    """The case's peaks, rank by rank, of models that are written for it and removed again."""
    with tempfile.TemporaryDirectory() as folder:
        save_models(case, Path(folder))
        return measure(case, Path(folder))


def cases(options: argparse.Namespace, console: Console) -> Iterator[tuple[str, str, MemoryCase]]:
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
        "case": {**asdict(case), "knobs": dict(case.knobs), "shape": dict(case.shape)},
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


def climb(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The largest model of the ladder whose step 3 stays within the budget, each one measured."""
    budget = options.largest * GIBIBYTE
    tried: list[dict[str, Any]] = []
    best = None
    names = list(MODELS)
    for model in names[names.index(options.start) :]:
        ranks, stage = max(options.ranks), max(options.stages)
        case = _case(options, model, ranks, stage if ranks > 1 else 0, {})
        plan = formula(case)
        expected = max(phases_of(plan).values())
        if expected > 1.5 * budget:
            console.print(f"{model}: not tried, the formula says {expected / GIBIBYTE:.2f} GiB")
            break
        room = free_bytes(torch.device(options.device)) / (ranks if options.device == "cpu" else 1)
        if expected > room:
            console.print(
                f"{model}: not tried, the formula says {expected / GIBIBYTE:.2f} GiB a rank and "
                f"{room / GIBIBYTE:.2f} GiB are free"
            )
            break
        try:
            row = row_of(model, "largest", case, run_case(case))
        except RuntimeError as error:
            console.print(f"{model}: failed: {error}", style="red")
            break
        tried.append(row)
        peak = max(row["measured"].values())
        fits = peak <= budget
        console.print(
            f"{model}: {row['parameters'] / 1e6:.1f}M parameters, peak {peak / GIBIBYTE:.2f} GiB "
            f"a rank (formula {expected / GIBIBYTE:.2f}), {row['seconds_per_step']:.1f} s a step: "
            f"{'fits' if fits else 'does not fit'}",
            highlight=False,
        )
        if not fits:
            break
        best = model
    console.print(
        f"largest within {options.largest:g} GiB a rank: {best or 'none'}"
        + (f" with {' '.join(options.knobs)}" if options.knobs else "")
    )
    return {"budget_bytes": budget, "largest": best, "tried": tried}


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


def _line(row: Mapping[str, Any]) -> str:
    parts = [
        f"{phase} {row['measured'][phase] / MEBIBYTE:.0f} ({bytes_ / MEBIBYTE:.0f})"
        for phase, bytes_ in row["formula"].items()
    ]
    return f"{row['model']} {row['name']}, {row['ranks']} rank(s): {', '.join(parts)} MiB"


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        title="peak memory per rank, MiB: measured / formula (measured over formula)",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    phases = list(dict.fromkeys(phase for row in rows for phase in row["formula"]))
    for name in ("model", "ranks", "case", *phases):
        table.add_column(name, justify="right" if name in ("ranks", *phases) else "left")
    for row in rows:
        cells = [
            f"{row['measured'][p] / MEBIBYTE:.0f} / {row['formula'][p] / MEBIBYTE:.0f} "
            f"({row['measured'][p] / row['formula'][p]:.2f})"
            for p in phases
        ]
        table.add_row(row["model"], str(row["ranks"]), row["name"], *cells)
    return table


def _knob(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--knobs must be NAME=VALUE, as in lora.rank=8; got {text!r}.")
    return name, yaml.safe_load(value)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=list(MODELS), default=["20m", "100m"])
    add("--ranks", nargs="+", type=int, default=[1, 2])
    add("--stages", nargs="+", type=int, choices=range(4), default=[0, 1, 2, 3])
    add("--lora", nargs="+", type=int, default=[0, 8], help="ranks of adapters; 0 is none")
    add("--step", choices=("sft", "ppo"), default="ppo")
    add("--no-variants", dest="variants", action="store_false", help="no offload, no quantization")
    add("--largest", type=float, metavar="GIB", help="climb the ladder of models to this budget")
    add("--start", choices=list(MODELS), default="20m", help="where --largest begins")
    add("--knobs", nargs="*", default=[], metavar="NAME=VALUE", help="set in every case")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--prompts", type=int, default=16, help="per step, over all ranks")
    add("--prompt-tokens", type=int, default=32)
    add("--new-tokens", type=int, default=32)
    add("--micro-batch-tokens", type=int, default=256)
    add("--json", type=Path, help="write everything there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
