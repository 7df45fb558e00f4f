"""`tandem sweep`: its own flags taken off, the rest read as those of `tandem train`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.config.flags import Parser, parse_run_flags
from tandem.errors import ConfigError
from tandem.plan.cases import Axes, why_left_out
from tandem.plan.sweep import Sweep, planned, run_sweep

_USAGE = """usage: tandem sweep [CONFIG.yaml] --sweep-dir DIR [--num-gpus N] [flags of tandem train]

One run per case, one after another, of each of the config's steps: ZeRO stage x LoRA x offload x
hybrid engine, and variants of ZeRO++ and quantized frozen weights. The same command goes on where
it was stopped. DIR gets a folder per case, table.txt, table.csv and report.html.
"""


def sweep_command(args: Sequence[str]) -> int:
    """Run `tandem sweep ARGS`; 0 if every case ran, 1 if one failed.

    Raises:
        ConfigError: flags that cannot be, or no case at all.
    """
    if "--help" in args or "-h" in args:
        print(_parser().format_help(), end="")
        return 0
    sweep, dry = parse_sweep(args)
    if dry:
        cases, left_out = planned(sweep)
        for case in cases:
            knobs = " ".join(f"{name}={_shown(value)}" for name, value in case.knobs.items())
            ranks = "1 rank" if case.ranks == 1 else f"{case.ranks} ranks"
            print(f"{case.step}/{case.name}: {knobs}, {ranks}")
        for line in why_left_out(left_out):
            print(line)
        return 0
    results = run_sweep(sweep)
    return int(any(result.exit_code for result in results))


def parse_sweep(args: Sequence[str]) -> tuple[Sweep, bool]:
    """The sweep that flags describe, and whether only to show it.

    Raises:
        ConfigError: values that cannot be.
    """
    words = list(args)
    if words and not words[0].startswith("-"):
        words[:1] = ["--config", words[0]]
    options, rest = _parser().parse_known_args(words)
    if not options.sweep_dir:
        raise ConfigError("tandem sweep must get --sweep-dir DIR; got none. Name a folder.")
    config = parse_run_flags(rest, "train")
    if options.num_gpus < 1:
        raise ConfigError(f"--num-gpus must be at least 1; got {options.num_gpus}.")
    unknown = [stage for stage in options.sweep_stages if stage not in range(4)]
    if unknown:
        raise ConfigError(f"--sweep-stages must be within 0 to 3; got {unknown[0]}.")
    if min(options.sweep_lora) < 0:
        raise ConfigError(f"--sweep-lora must be at least 0; got {min(options.sweep_lora)}.")
    sweep = Sweep(
        config=config,
        folder=Path(options.sweep_dir).expanduser(),
        ranks=options.num_gpus,
        axes=Axes(
            stages=tuple(options.sweep_stages),
            lora=tuple(options.sweep_lora),
            offload=(False, True) if options.sweep_offload else (False,),
            variants=options.sweep_variants,
        ),
        only=tuple(options.sweep_only),
        retry_failed=options.retry_failed,
        keep_models=options.keep_models,
    )
    return sweep, options.dry_run


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tandem sweep",
        usage=argparse.SUPPRESS,
        description=_USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--sweep-dir", metavar="DIR", default="", help="where everything goes; must be given")
    add("--num-gpus", type=int, metavar="N", default=1, help="ranks of every case (1)")
    numbers: dict[str, Any] = {"type": int, "nargs": "+", "metavar": "N"}
    add("--sweep-stages", **numbers, default=[0, 1, 2, 3], help="ZeRO stages (0 1 2 3)")
    add("--sweep-lora", **numbers, default=[0, 128], help="ranks of LoRA; 0 is without (0 128)")
    switch = argparse.BooleanOptionalAction
    add("--sweep-offload", action=switch, default=True, help="cross with optimizer offload")
    add("--sweep-variants", action=switch, default=True, help="ZeRO++ and the like at stage 3")
    add(
        "--sweep-only",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="only cases with this in STEP/NAME",
    )
    add("--retry-failed", action="store_true", help="run failed cases again")
    add("--keep-models", action="store_true", help="keep the weights that cases make")
    add("--dry-run", action="store_true", help="show the cases and what is left out")
    return parser
