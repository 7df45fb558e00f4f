"""DeepSpeed-Chat's Tables 1 to 6: hours by hardware and model, ours beside theirs.

A model of *their* system, fitted on their own cells: decoding bound by launches, memory or network;
training at a share of the peak that grows with width and batch; what does not fit is offloaded.
Every hardware is predicted with constants fitted on the others. Beside it stands what Tandem would
need by its own constants, which nothing of theirs was fitted to.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tandem.config.flags import parse_run_flags
from tandem.config.schema import RunConfig
from tandem.config.stages import rl_stage
from tandem.memory.dimensions import Shape
from tandem.plan.layouts import Laid, layouts
from tandem.predict.hardware import Hardware, find_hardware
from tandem.predict.memory import Models
from tandem.predict.models import config_of, shape_for
from tandem.predict.rows import Rows
from tandem.predict.seconds import PCIE_RATE
from tandem.yaml_text import shipped_table

FILE = Path(__file__).with_name("seed_tables.yaml")
_TOKENS, _NEW, _PAIRS_PER_STEP = 512, 256, 1024
_SECOND = 0.331e9
"""Weights of an OPT-350M, which is critic and reward model."""

Params = dict[str, float]
# Centre and spread (a factor) of what a constant can be, before any cell is seen.
_PRIORS: Mapping[str, tuple[float, float]] = {
    "mfu": (0.40, 1.4),  # share of the peak in training, of a wide model and a large batch
    "narrow": (1500.0, 2.0),  # width at which half of that is reached
    "few": (4.0, 2.0),  # pairs per GPU at which half of it is reached
    "read": (0.70, 1.3),  # share of the memory's bandwidth in decoding
    "launch": (4.5e-4, 1.6),  # seconds per layer and token
    "reduce": (1.0e-4, 2.0),  # seconds of an all-reduce between GPUs that share a model
    "network": (60e9, 1.6),  # bytes per second and GPU between nodes: 8 cards of 25 GB/s, a third
    "host": (40e9, 2.0),  # bytes per second of AdamW on the host, per node
    "held": (12.0, 1.6),  # bytes of logits and the like per token and entry of the vocabulary
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One entry of a table. hours and dollars: theirs."""

    hardware: str
    count: int
    model: str
    hours: float
    dollars: float


@cache
def _file() -> Any:
    return shipped_table(FILE)


def cells() -> list[Cell]:
    """Every cell, in the tables' order."""
    return [Cell(*row) for row in _file()["cells"]]


@cache
def _shape(model: str, *, scalar: bool = False) -> Shape:
    return shape_for(config_of(f"facebook/opt-{model}"), scalar=scalar)


def their_hours(cell: Cell, params: Params, pairs: int) -> float:
    """Hours of a cell by the model of their system; infinite if nothing fits."""
    hardware = find_hardware(f"{cell.count}x{cell.hardware}")
    shape = _shape(cell.model)
    best = min(
        _seconds_per_pair(shape, hardware, params, offloads, parts)
        for offloads in (0, 1, 2)
        for parts in (1, 2, 4, 8)
        if parts <= cell.count
    )
    return pairs / cell.count * best / 3600


def _seconds_per_pair(
    shape: Shape, hardware: Hardware, p: Params, offloads: int, parts: int
) -> float:
    """Of one GPU: generation, scoring and training of a pair.

    Args:
        offloads: 1 moves the optimizer to the host, 2 the reference too.
        parts: GPUs that hold a model together while it generates.
    """
    n, layers, width, count = shape.parameters, shape.layers, shape.width, hardware.count
    # From 13B on they train adapters of rank 128.
    trained = 18 * 128 * width * layers if n > 1e10 else n
    states = (2 * n + (0 if offloads else 14) * trained) / count
    states += (2 * n if offloads < 2 else 0.0) / count + 18 * _SECOND / count
    free = hardware.memory * 0.90 - states
    whole = 2 * n / parts if count > 1 else 0.0
    kept = _TOKENS * (2 * width * layers + shape.vocabulary * p["held"])
    batch = min(
        (free - whole) / (4 * layers * width * _TOKENS),
        (free - 4 * n / layers) / kept,
        _PAIRS_PER_STEP / count,
        256.0,
    )
    if batch < 0.5:
        return math.inf
    batch = max(1.0, batch)
    bandwidth = hardware.bandwidth * p["read"]
    keys = 4 * layers * width * 384 * batch
    peak = hardware.flops["fp16"]
    step = layers * p["launch"] + (2 * n / parts + keys) / bandwidth
    step += 2 * n * batch / (0.6 * peak) + (2 * layers * p["reduce"] if parts > 1 else 0.0)
    share = p["mfu"] * width / (width + p["narrow"]) * batch / (batch + p["few"])
    seconds = _NEW * step / batch + 2 * n * _NEW / (0.6 * peak)
    seconds += 12 * (n + _SECOND) * _TOKENS / (peak * share)
    if count > 1:
        link = hardware.link * 0.5 if count <= hardware.per_node else p["network"]
        moved = 8 * n if n > 2e10 else 4 * n  # ZeRO-3 above 13B, ZeRO-2 below
        seconds += moved / link / batch
    if offloads:
        devices = min(count, hardware.per_node)
        seconds += 28 * trained / (p["host"] / devices) / count / batch
        seconds += (offloads - 1) * 2 * n / PCIE_RATE / count / batch
    return seconds


def fit(of: Sequence[Cell], pairs: int, seed: int = 1, tries: int = 1500) -> Params:
    """The constants with the smallest sum of absolute log errors and squared distance from the
    priors, by random search that narrows."""
    draw = random.Random(seed)
    best = {name: centre for name, (centre, _) in _PRIORS.items()}
    least = _cost(of, best, pairs)
    for number in range(tries):
        scale = 0.8 * (1 - number / tries) + 0.03
        names = draw.sample(list(_PRIORS), draw.choice((1, 2, 3, len(_PRIORS))))
        changed = {
            name: value * _PRIORS[name][1] ** (draw.gauss(0, scale)) if name in names else value
            for name, value in best.items()
        }
        changed["mfu"] = min(changed["mfu"], 0.7)
        changed["read"] = min(changed["read"], 0.95)
        cost = _cost(of, changed, pairs)
        if cost < least:
            best, least = changed, cost
    return {name: float(f"{value:.4g}") for name, value in best.items()}


def _cost(of: Sequence[Cell], params: Params, pairs: int) -> float:
    errors = [math.log(their_hours(cell, params, pairs) / cell.hours) for cell in of]
    off = sum(min(abs(error), 3.0) for error in errors)
    away = sum(
        (math.log(params[name] / centre) / math.log(spread)) ** 2
        for name, (centre, spread) in _PRIORS.items()
    )
    return off + 0.1 * away


def refit_tables() -> dict[str, Params]:
    """Constants with each hardware left out, and of all cells; reading: the README's."""
    pairs, every = int(_file()["pairs"]["readme"]), cells()
    found = {"all": fit(every, pairs)}
    for name in dict.fromkeys(cell.hardware for cell in every):
        found[name] = fit([cell for cell in every if cell.hardware != name], pairs)
    return found


def write_constants(found: Mapping[str, Params]) -> None:
    """Keep fitted constants in the package's file."""
    text = FILE.read_text("utf-8")
    head = text[: text.index("constants:")]
    FILE.write_text(head + yaml.safe_dump({"constants": dict(found)}, sort_keys=False), "utf-8")


def table_rows() -> list[dict[str, Any]]:
    """Every cell: their hours, ours with that hardware left out, the ratio, and what Tandem would
    need by its own constants, in which layout."""
    pairs, constants = _file()["pairs"], _file()["constants"]
    rows = []
    for cell in cells():
        ours = their_hours(cell, constants[cell.hardware], pairs["readme"])
        hours, layout = tandem_way(cell, pairs["readme"]) or (None, None)
        rows.append({
            "hardware": cell.hardware, "gpus": cell.count, "model": cell.model,
            "theirs_hours": cell.hours, "ours_hours": ours, "ratio": ours / cell.hours,
            "tandem_hours": hours, "tandem_layout": layout,
            "theirs_dollars": cell.dollars or None,
        })  # fmt: skip
    return rows


def tandem_way(cell: Cell, pairs: int) -> tuple[float, str] | None:
    """What Tandem would need for a cell, in hours, and the flags of the layout, the fastest that
    fits. None if none that was tried does."""
    hardware = find_hardware(f"{cell.count}x{cell.hardware}")
    dtype = "fp16" if cell.hardware.startswith("V100") else "bf16"
    config = _tandem_config(dtype, adapters=_shape(cell.model).parameters > 1e10)
    models = {config.stages[0]: Models(_shape(cell.model), _shape("350m", scalar=True), "opt")}
    rows = {config.stages[0]: Rows(tokens=256, longest=256)}
    found = layouts(config, models, rows, hardware, cell.count, trains_alike=True, few=True)
    fastest = min((laid for laid in found if laid.fits()), key=_step_seconds, default=None)
    if fastest is None:
        return None
    return _step_seconds(fastest) * pairs / _PAIRS_PER_STEP / 3600, fastest.flags()


def _step_seconds(laid: Laid) -> float:
    return laid.stages[0].step_seconds


@cache
def _tandem_config(dtype: str, *, adapters: bool) -> RunConfig:
    """A run like theirs: answers of 256 tokens, 1,024 pairs per step, one epoch."""
    flags = [
        "--stages", rl_stage(()).name, "--max-new-tokens", "256", "--ppo-steps", "1",
        "--ppo.epochs", "1", "--ppo.prompts-per-step", "1024", "--ppo.minibatch-size", "1024",
        "--reward-model", "facebook/opt-350m", "--save-every", "0", "--dtype", dtype,
        "--gradient-checkpointing",
        *(["--lora-rank", "128"] if adapters else []),
    ]  # fmt: skip
    return parse_run_flags(flags, "train", note=lambda line: None)


def show_tables(*, as_json: bool) -> int:
    """Print the comparison."""
    rows, pairs = table_rows(), _file()["pairs"]
    if as_json:
        print(json.dumps({"pairs": pairs, "cells": rows}, indent=1, allow_nan=False))
        return 0
    titles = f"{'hardware':>14} {'OPT':>5} {'theirs':>8} {'ours':>8} {'ratio':>6} {'Tandem':>8}"
    print(f"{titles}  its layout")
    for row in rows:
        alone = "-" if row["tandem_hours"] is None else f"{row['tandem_hours']:.2f} h"
        print(
            f"{row['gpus']:>3}x{row['hardware']:<10} {row['model']:>5} "
            f"{row['theirs_hours']:>6.2f} h {row['ours_hours']:>6.2f} h "
            f"{row['ratio']:>6.2f} {alone:>8}  {row['tandem_layout'] or ''}".rstrip()
        )
    within = {share: sum(abs(r["ratio"] - 1) <= share for r in rows) for share in (0.25, 0.5)}
    print(
        f"ours: a model of their system, each hardware with constants fitted on the others: "
        f"{within[0.25]} of {len(rows)} within 25 %, {within[0.5]} within 50 %.\n"
        f"Their data: {pairs['readme']:,} pairs (README) are taken; the blog's {pairs['blog']:,} "
        f"would be {pairs['blog'] / pairs['readme']:.3f} of every time in our columns.\n"
        "Tandem: by its own constants, which no GPU run has confirmed yet, in the fastest layout "
        "tried, beside --gradient-checkpointing and from 13B on --lora-rank 128; '-': none fits."
    )
    return 0
