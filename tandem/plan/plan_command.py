"""`tandem plan`: what a run needs, before it starts."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tandem.config.flags import parse_run_flags, unknown_flags
from tandem.config.pages import Parser
from tandem.config.schema import RunConfig
from tandem.config.stages import STAGES, in_order
from tandem.errors import ConfigError
from tandem.plan.layout_flags import memory_bytes
from tandem.plan.layouts import Laid, ModelsOf, can_slice, layouts, predict_run
from tandem.plan.lengths import rows_by_stage
from tandem.plan.show import plan_notes, plan_values, show_plan
from tandem.predict.hardware import Hardware, find_hardware, hardware_names
from tandem.predict.machine import this_machine
from tandem.predict.memory import Models
from tandem.predict.models import config_of, config_of_shape, configs_beside, ladder
from tandem.predict.room import room_for
from tandem.predict.rows import Rows


def plan_command(args: Sequence[str]) -> int:
    """Run `tandem plan ARGS`; 0 if the run fits, 1 if it does not, or its models not on the disk.

    Raises:
        ConfigError, ModelError, DataError: wrong flags, no such model or hardware, data that cannot
            be read.
    """
    words = list(args)
    if words and not words[0].startswith("-"):
        words[:1] = ["--config", words[0]]
    options, rest = _parser().parse_known_args(words)
    if options.tables:
        return _tables(options)
    if options.grade or options.refit is not None:
        return _graded(options)
    limit = memory_bytes(options.memory_limit) if options.memory_limit else None
    if options.price < 0:
        raise ConfigError(f"--price must not be negative; got {options.price}.")
    if options.num_gpus is not None and options.num_gpus < 1:
        raise ConfigError(f"--num-gpus must be at least 1; got {options.num_gpus}.")
    asked = _asked(options, rest)
    if options.largest:
        return _largest(asked, limit, as_json=options.json)
    laid = asked.laid(asked.config, asked.models)
    others = asked.layouts(limit)
    sources = [f"{name}: {rows.source}" for name, rows in asked.rows.items()]
    notes = plan_notes(laid, sources, asked.models.values())
    room = room_for(laid.stages, Path(asked.config.output_dir)) if not options.hardware else None
    if room is not None and room.problem:
        notes.insert(0, f"disk: {room.problem}; give another --output-dir or free some space")
    if options.json:
        print(json.dumps(plan_values(laid, others, limit, notes), indent=1, allow_nan=False))
    else:
        show_plan(laid, others, limit, notes)
    return int(not laid.fits(limit) or (room is not None and not room.takes_models))


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be planned: configuration, hardware, ranks, models and rows of each stage."""

    config: RunConfig
    hardware: Hardware
    ranks: int
    models: ModelsOf
    rows: Mapping[str, Rows]
    policy: Mapping[str, Any]

    def laid(self, config: RunConfig, models: ModelsOf) -> Laid:
        """The run predicted with some configuration and models."""
        stages = predict_run(config, models, self.rows, self.hardware, self.ranks)
        return Laid({}, config, stages)

    def layouts(self, limit: float | None, *, trains_alike: bool = False) -> list[Laid]:
        """Every layout, as `plan.layouts.layouts` gives them."""
        return layouts(
            self.config,
            self.models,
            self.rows,
            self.hardware,
            self.ranks,
            trains_alike=trains_alike,
            limit=limit,
        )


def asked_of(
    config: RunConfig,
    hardware: Hardware,
    ranks: int = 0,
    *,
    policy: Mapping[str, Any] | None = None,
) -> Asked:
    """What a configuration asks for on some hardware.

    Args:
        ranks: 0: one per device.
        policy: the policy's config; None: of actor_model, or of the reward model in a run that
            trains nothing else.
    Raises:
        ConfigError, ModelError, DataError: no model is named, it is not found, data are wrong.
    """
    named = config.actor_model or config.reward_model
    if policy is None:
        require_model(config)
        policy = config_of(named)
    value = config_of(config.reward_model) if config.reward_model else policy
    models = models_of(config, policy, value)
    ranks, parts = ranks or hardware.count, config.parallel.inference_tp_size
    if ranks % parts:
        raise ConfigError(
            f"--inference-tp-size must divide the ranks; got {parts} for {ranks}. Use a divisor, "
            "or say with --num-gpus how many there are."
        )
    if not can_slice(config, models):
        shape, parallel = next(iter(models.values())).policy, config.parallel
        if not shape.is_sliceable:
            raise ConfigError(
                "--inference-tp-size must be 1 for a model that generation cannot slice; got "
                f"{parts} for {policy.get('model_type')!r}. Remove it."
            )
        raise ConfigError(
            "--inference-tp-size must divide the policy's heads, key/value heads (or be a multiple "
            "of them) and inner widths, with --frozen-weights into whole blocks; got "
            f"{parallel.inference_tp_size} for {shape.heads}, {shape.kv_heads} and "
            f"{', '.join(map(str, dict.fromkeys(shape.sliced_widths)))}. "
            "Use a divisor."
        )
    rows = rows_by_stage(config, named)
    return Asked(config, hardware, ranks, models, rows, policy)


def require_model(config: RunConfig) -> None:
    """Refuse a configuration that names no model.

    Raises:
        ConfigError: it does.
    """
    if not (config.actor_model or config.reward_model):
        raise ConfigError(
            "tandem plan must know the model; got none. Give --actor-model FOLDER_OR_NAME, "
            "--config FILE, or --shape layers=N,width=N,..."
        )


def models_of(config: RunConfig, policy: Mapping[str, Any], value: Mapping[str, Any]) -> ModelsOf:
    """The models of each stage; the critic has the reward model's shape unless it is named."""
    found = Models.of(policy, value, **configs_beside(config))
    return {stage.name: found for stage in in_order(config.stages)}


def _asked(options: Any, rest: Sequence[str]) -> Asked:
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)  # noqa: E731
    try:
        config = parse_run_flags(rest, "train", note=say, program="plan")
    except ConfigError:
        _parser().refuse_typo(unknown_flags(rest))
        raise
    if options.no_data:
        config = replace(config, data=(), sft_data=(), eval_data=())
        mixing = {stage.section for stage in STAGES if "ptx_data" in stage.data}
        config = replace(config, **{
            section: replace(getattr(config, section), ptx_data=()) for section in mixing
        })  # fmt: skip
    if not math.isfinite(options.price):
        raise ConfigError(f"--price must be a finite number; got {options.price}.")
    price = options.price or None
    policy = config_of_shape(options.shape) if options.shape else None
    if policy is None:
        require_model(config)
        policy = config_of(config.actor_model or config.reward_model)  # before a measurement
    if options.hardware:
        hardware = find_hardware(options.hardware, price)
    else:
        hardware = this_machine(say, config.device)
        if price is not None:
            hardware = replace(hardware, price=price, priced="by --price")
    if options.num_gpus and not hardware.on_cpu and options.num_gpus != hardware.count:
        raise ConfigError(
            f"--num-gpus must be left out or {hardware.count}, the devices of --hardware "
            f"{options.hardware}; got {options.num_gpus}. Write {options.num_gpus}xNAME."
        )
    ranks = options.num_gpus or (1 if hardware.on_cpu else hardware.count)
    return asked_of(config, hardware, ranks, policy=policy)


def _tables(options: Any) -> int:
    from tandem.plan import seed_tables

    if options.refit is not None:
        seed_tables.write_constants(seed_tables.refit_tables())
    return seed_tables.show_tables(as_json=options.json)


def _graded(options: Any) -> int:
    """Errors of runs, or constants fitted to them."""
    from tandem.plan.grade import grade_table, grade_values, refit

    if options.refit is None:
        runs = [Path(run) for run in options.grade]
        if options.json:
            print(json.dumps(grade_values(runs), indent=1, allow_nan=False))
        else:
            print(grade_table(runs))
        return 0
    if not options.refit:
        raise ConfigError("--refit must get folders of runs; got none. Write --refit runs/*.")
    print(yaml.safe_dump(refit([Path(run) for run in options.refit]), sort_keys=False), end="")
    return 0


def _largest(asked: Asked, limit: float | None, *, as_json: bool) -> int:
    """The largest published size of the family that fits, and by which knobs."""
    found: list[dict[str, Any]] = []
    for name, config in reversed(ladder(asked.policy)):
        value = config if not asked.config.reward_model else None
        models = models_of(asked.config, config, value or config_of(asked.config.reward_model))
        ways = replace(asked, models=models).layouts(limit)
        fitting = [way for way in ways if way.fits(limit)]
        same = [way for way in fitting if way.trains_alike]
        if fitting:
            full = same[0] if same else None
            best = full or fitting[0]
            found.append({"model": name, "fits": True, "peak_bytes": best.peak,
                          "seconds": best.seconds, "flags": best.flags(),
                          "host_bytes": max(stage.host for stage in best.stages),
                          "full": None if full is None else full.flags()})  # fmt: skip
            if full is not None:
                break
        else:
            smallest = min(ways, key=lambda way: way.peak)
            found.append({"model": name, "fits": False, "peak_bytes": smallest.peak})
    if as_json:
        print(json.dumps(found, indent=1, allow_nan=False))
    else:
        print("\n".join(_largest_line(entry) for entry in found))
    return int(not any(entry["fits"] for entry in found))


def _largest_line(entry: Mapping[str, Any]) -> str:
    peak = f"{entry['peak_bytes'] / 2**30:,.1f} GiB a rank"
    if not entry["fits"]:
        return f"{entry['model']}: does not fit; at least {peak}"
    host = f" and {entry['host_bytes'] / 2**30:,.1f} GiB of the host" if entry["host_bytes"] else ""
    return f"{entry['model']}: fits, {peak}{host}: {entry['flags']}" + (
        "" if entry["full"] else " (not with full weights)"
    )


def _parser() -> Parser:
    parser = Parser(
        "plan",
        "[CONFIG.yaml] [flags]",
        "What a run needs, before it starts: memory, time, disk and price of every stage and "
        "phase, and the layouts that fit. Needs a model's config only. The flags of tandem train "
        "describe the run.",
        "tandem plan --actor-model facebook/opt-13b --hardware 8xA100-80G",
    )
    names = ", ".join(hardware_names())
    shape = "A model in numbers: layers, width, and if you like heads, kv_heads, inner, vocabulary."
    limit = "Bytes that a rank may hold, as 2GiB."
    parser.section("what")
    parser.flag("--shape NAME=N,...", shape, shown="--actor-model's")
    where = f"COUNTxNAME of {names}; or a YAML file."
    parser.flag("--hardware NAME", where, shown="this machine")
    parser.flag("--num-gpus N", "Ranks.", None, type=int, shown="one per device; 1 on a CPU")
    parser.flag("--price X", "Dollars per hour and device.", 0.0, shown="the table's")
    parser.flag("--memory-limit SIZE", limit, shown="the device's memory")
    on: dict[str, Any] = {"shown": "off", "action": "store_true"}
    no_data = "Read no data: rows as long as the limits (dataset.max_tokens, max_prompt_tokens)."
    parser.flag("--no-data", no_data, False, **on)
    parser.section("answers")
    parser.flag("--largest", "The family's largest published size that fits.", False, **on)
    tables = "DeepSpeed-Chat's Tables 1 to 6: ours beside theirs."
    grade = "Errors of the predictions of these runs."
    refit = "Print constants (predict/constants.yaml) fitted to these runs; with --tables: theirs."
    parser.flag("--tables", tables, False, **on)
    parser.flag("--grade RUN ...", grade, [], shown="none", nargs="+")
    parser.flag("--refit RUN ...", refit, None, shown="none", nargs="*", type=str)
    parser.flag("--json", "Print the figures as JSON.", False, **on)
    return parser
