"""`tandem doctor`: what this machine is, what Tandem uses of it, how fast, and what is missing."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tandem import processor
from tandem.files import cache_folder, existing
from tandem.generation.blocks import free_bytes
from tandem.ops import gpu, native
from tandem.ops.rates import ProductRate, memory_rate, product_rate
from tandem.text import counted

_SHAPES = ((768, 128, 352), (64, 512, 1376), (768, 512, 1376), (768, 576, 1536))
"""Rows, inputs, outputs: layers of models of 1M, 22M (decoding, training) and 135M weights."""
_DTYPES = (torch.float32, torch.bfloat16)

_NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "tensorboard")
_OPTIONAL = {
    "datasets": "pip install datasets, to read data sets of the hub",
    "pyarrow": "pip install pyarrow, to read Parquet files",
    "wandb": "pip install wandb, to log to Weights & Biases",
}


def doctor(*, speed: bool, as_json: bool) -> int:
    """Show this machine; 0, or 1 where a needed package is missing.

    Args:
        speed: measure products and memory.
    """
    facts = examine(speed=speed)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _show(facts)
    return int(any(facts["versions"][name] is None for name in _NEEDED))


def examine(*, speed: bool) -> dict[str, Any]:
    """Everything that the command shows, as JSON has it."""
    cache, why_no_cache, cache_bytes = _cache()
    rates, memory = _measured() if speed else ([], None)
    return {
        "processor": processor.kind(),
        "cores": processor.num_cores(),
        "threads": torch.get_num_threads(),
        "instruction_sets": native.instruction_sets(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "native": {
            "available": native.available(),
            "why_not": native.why_not(),
            "why_no_amx": {
                name: torch.ops.tandem.why_no_amx(name == "bf16") if native.available() else None
                for name in ("fp32", "bf16")
            },
            "compiler": native.compiler(),
            "cache_folder": cache,
            "why_no_cache_folder": why_no_cache,
        },
        "products": [dataclasses.asdict(rate) for rate in rates],
        "memory_bytes_per_second": memory,
        "gpus": _gpus(),
        "why_no_gpu_kernels": gpu.why_not() if torch.cuda.is_available() else None,
        "versions": {name: _version(name) for name in (*_NEEDED, *_OPTIONAL, "tandem-rlhf")},
        "free_memory_bytes": free_bytes(torch.device("cpu")),
        "free_disk_bytes": shutil.disk_usage(Path.cwd()).free,
        "free_cache_disk_bytes": cache_bytes,
        "missing": _missing(),
    }


def _measured() -> tuple[list[ProductRate], float]:
    """Products and memory; what is being measured is said before, where the page does not go."""

    def say(what: str) -> None:
        print(f"tandem doctor: measuring {what} ...", file=sys.stderr, flush=True)

    say("products and memory, about 15 s, on a busy machine minutes (--no-speed leaves it out)")
    rates = []
    for dtype in _DTYPES:
        say(f"{str(dtype).removeprefix('torch.')} products")
        rates += [product_rate(*shape, dtype) for shape in _SHAPES]
    say("memory")
    return rates, memory_rate()


def _cache() -> tuple[str | None, str, int | None]:
    """The folder for what is built and measured, or why there is none; the bytes free there."""
    try:
        folder = cache_folder()
        return str(folder), "", shutil.disk_usage(existing(folder)).free
    except OSError as error:
        return None, str(error), None


def _missing() -> list[str]:
    """What is not here, and how to get it."""
    missing = []
    if not native.available():
        missing.append(f"C++ operations: {native.why_not()}.")
    if native.compiler() is None:
        missing.append("C++ compiler: apt install g++, or set CXX.")
    if torch.cuda.is_available() and (fault := gpu.why_not()):
        missing.append(f"GPU kernels: {fault}.")
    missing += [f"{name}: pip install {name}." for name in _NEEDED if _version(name) is None]
    missing += [f"{name} (optional): {how}." for name, how in _OPTIONAL.items()
                if _version(name) is None]  # fmt: skip
    return missing


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = []
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        found.append({"name": card.name, "memory_bytes": card.total_memory,
                      "capability": f"{card.major}.{card.minor}"})  # fmt: skip
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _show(facts: Mapping[str, Any]) -> None:
    console = Console(highlight=False)
    built = facts["native"]
    gpus = ", ".join(
        f"{card['name']} ({card['memory_bytes'] / 2**30:.0f} GiB)" for card in facts["gpus"]
    )
    cache_bytes = facts["free_cache_disk_bytes"]
    cores = f"{counted(facts['cores'], 'core')}, {counted(facts['threads'], 'torch thread')}"
    rows = {
        "processor": f"{facts['processor']}, {cores}",
        "instructions": ", ".join(facts["instruction_sets"]) or "not listed by this system",
        "C++ operations": "built" if built["available"] else f"not built: {built['why_not']}",
        "matrix unit": "; ".join(
            f"{name}: " + {"": "AMX", None: "not used"}.get(why, f"AMX not used: {why}")
            for name, why in built["why_no_amx"].items()
        ),
        "compiler": built["compiler"] or "none found",
        "GPUs": gpus or "none",
        **({"GPU kernels": facts["why_no_gpu_kernels"] or "run"} if gpus else {}),
        "versions": ", ".join(
            f"{name} {version}" for name, version in facts["versions"].items() if version
        ),
        "system": f"Python {facts['python']}, {facts['system']}",
        "free": f"{facts['free_memory_bytes'] / 2**30:.1f} GiB of memory, "
        f"{facts['free_disk_bytes'] / 2**30:.0f} GiB of disk here"
        + ("" if cache_bytes is None else f", {cache_bytes / 2**30:.0f} GiB for the cache"),
        "cache folder": built["cache_folder"] or f"none: {built['why_no_cache_folder']}",
    }
    if facts["memory_bytes_per_second"]:
        rows["memory"] = (
            f"copies {facts['memory_bytes_per_second'] / 1e9:.1f} GB/s, read and written"
        )
    for name, text in rows.items():
        console.print(f"{name:15} {text}", markup=False, soft_wrap=True)
    if facts["products"]:
        rates = [ProductRate(**rate) for rate in facts["products"]]
        console.print(rates_table(rates))
        if line := bf16_advice(rates):
            console.print(line, markup=False, soft_wrap=True)
    for line in facts["missing"] or ["nothing"]:
        console.print(f"{'missing':15} {line}", markup=False, soft_wrap=True)


def bf16_advice(rates: Sequence[ProductRate]) -> str:
    """One line where bf16 is worth choosing on this processor, else nothing.

    It is where the products of a training step are twice as fast in every shape that was measured
    in both types: what is not a product costs as much in either.
    """
    fp32, bf16 = ({(r.rows, r.inputs, r.outputs): r.training for r in rates if r.dtype == dtype}
                  for dtype in ("fp32", "bf16"))  # fmt: skip
    gains = [bf16[shape] / fp32[shape] for shape in fp32.keys() & bf16.keys()]
    if not gains or min(gains) < 2:
        return ""
    return (
        f"bf16            products of training run at {min(gains):.1f} to {max(gains):.1f} times "
        "fp32's rate here: --dtype bf16 (the default on a CPU stays fp32)"
    )


def rates_table(rates: Sequence[ProductRate]) -> Table:
    """A row per product: GFLOP/s of Tandem's and torch's, forward alone and with both gradients."""
    table = Table(title="Products, GFLOP per CPU second", title_justify="left", box=None)
    for heading in ("rows x in x out", "type"):
        table.add_column(heading)
    for heading in ("forward", "torch", "with backward", "torch"):
        table.add_column(heading, justify="right")
    table.add_column("cut", no_wrap=True)
    for rate in rates:
        figures = (rate.forward, rate.torch_forward, rate.training, rate.torch_training)
        table.add_row(
            f"{rate.rows}x{rate.inputs}x{rate.outputs}",
            rate.dtype,
            *(f"{figure:.0f}" for figure in figures),
            rate.cut or "-",
        )
    return table
