"""`tandem sweep`: its own flags; the others are those of `tandem train`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.config.flags import parse_run_flags, unknown_flags
from tandem.config.pages import Parser
from tandem.errors import ConfigError
from tandem.plan.cases import Axes, skip_reasons
from tandem.plan.sweep import Sweep, planned, run_sweep


def sweep_command(args: Sequence[str]) -> int:
    """Run `tandem sweep ARGS`; 0 if every case ran, 1 if one failed.

    Raises:
        ConfigError: wrong flags, or no case at all.
    """
    sweep, dry = parse_sweep(args)
    if dry:
        cases, skipped = planned(sweep)
        for case in cases:
            knobs = " ".join(f"{name}={_shown(value)}" for name, value in case.knobs.items())
            ranks = "1 rank" if case.ranks == 1 else f"{case.ranks} ranks"
            print(f"{case.stage}/{case.name}: {knobs}, {ranks}")
        for line in skip_reasons(skipped):
            print(line)
        return 0
    results = run_sweep(sweep)
    return int(any(result.exit_code for result in results))


def parse_sweep(args: Sequence[str]) -> tuple[Sweep, bool]:
    """The sweep that flags describe, and whether it is a dry run.

    Raises:
        ConfigError: wrong values.
    """
    words = list(args)
    if words and not words[0].startswith("-"):
        words[:1] = ["--config", words[0]]
    parser = _parser()
    options, rest = parser.parse_known_args(words)
    if not options.sweep_dir:
        parser.refuse_typo(unknown_flags(rest))
        raise ConfigError("tandem sweep must get --sweep-dir DIR; got none. Name a folder.")
    try:
        config = parse_run_flags(rest, "train", program="sweep")
    except ConfigError:
        parser.refuse_typo(unknown_flags(rest))
        raise
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


def _parser() -> Parser:
    parser = Parser(
        "sweep",
        "[CONFIG.yaml] --sweep-dir DIR [flags]",
        "One run per case, one after another, of each of the config's stages: ZeRO stage x LoRA x "
        "offload x hybrid engine, and variants of ZeRO++ and quantized frozen weights. The same "
        "command continues a stopped sweep. The flags of tandem train apply to every case.",
        "tandem sweep run.yaml --sweep-dir sweeps/first --num-gpus 8 --sweep-stages 2 3",
    )
    switch: dict[str, Any] = {"shown": "on", "action": argparse.BooleanOptionalAction}
    folder = "Where everything goes: a folder per case, table.txt, table.csv, report.html."
    offload = "Also with optimizer offload; --no-sweep-offload: only without."
    variants = "Also variants at ZeRO stage 3; --no-sweep-variants: without them."
    parser.section("sweep")
    parser.flag("--sweep-dir DIR", folder, shown="required")
    parser.flag("--num-gpus N", "Ranks of every case.", 1)
    parser.section("cases")
    parser.flag("--sweep-stages N ...", "ZeRO stages.", [0, 1, 2, 3])
    parser.flag("--sweep-lora N ...", "LoRA ranks; 0 is without LoRA.", [0, 128])
    parser.flag("--sweep-offload", offload, True, **switch)
    parser.flag("--sweep-variants", variants, True, **switch)
    only = "Only cases with one of these texts in STAGE/NAME."
    parser.flag("--sweep-only TEXT ...", only, [], shown="all")
    parser.section("running")
    for name, about in (
        ("--dry-run", "Show the cases, and those skipped and why; run nothing."),
        ("--retry-failed", "Run failed cases again."),
        ("--keep-models", "Keep the weights that cases produce."),
    ):
        parser.flag(name, about, False, shown="off", action="store_true")
    return parser
