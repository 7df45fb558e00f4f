"""YAML in and out, and every complaint about a configuration at once."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import stat
import types
import typing
from collections.abc import Mapping
from os.path import expanduser
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml

from tandem.config.nearest import listed, nearest_knobs
from tandem.config.parallel import frozen_base_problems
from tandem.config.schema import OptimizerConfig, PPOConfig, RunConfig
from tandem.config.stages import are_apart, in_order, of_family, ways
from tandem.errors import ConfigError

T = TypeVar("T")


def load_config(path: str | Path) -> RunConfig:
    """Read a YAML file of knobs; missing ones keep their defaults.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong (all of them listed, an
            unknown key with the nearest known one). Ranges are checked by `check_config`, after
            flags have had their say.
    """
    return build_config(read_file(path), where=f"{path}: ")


def read_file(path: str | Path) -> Any:
    """What a YAML file holds, not yet a configuration.

    Raises:
        ConfigError: it cannot be read, or is no YAML.
    """
    path = Path(expanduser(path))
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(0, "not a file")  # a pipe or a device may never end
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--config must be a readable YAML file; got {path} ({error.strerror}). Check the path."
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also a name with a NUL in it
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or "not UTF-8 text"
        raise ConfigError(f"{path}{line} must be YAML; got: {problem}. Fix the file.") from None
    return {} if raw is None else raw


def build_config(values: Any, *, where: str = "") -> RunConfig:
    """A configuration from nested plain values; missing knobs keep their defaults.

    Args:
        where: begins every complaint, such as "run.yaml: ".
    Raises:
        ConfigError: keys or types that cannot be, all of them.
    """
    config, problems = build(values)
    if problems:
        raise ConfigError("; ".join(f"{where}{problem}" for problem in problems))
    return config


def build(values: Any) -> tuple[RunConfig, list[str]]:
    """As `build_config`, but with the complaints beside it; wrong knobs have their defaults."""
    problems: list[str] = []
    return _build(RunConfig, values, "", problems), problems


def dump_config(config: RunConfig) -> str:
    """The whole configuration as YAML that `load_config` reads back to an equal one."""
    # Escapes: YAML would fold some line breaks of Unicode into spaces.
    return yaml.safe_dump(plain_values(config), sort_keys=False, allow_unicode=False)


def check_ranges(section: Any, prefix: str = "") -> None:
    """Check the ranges of one section's knobs.

    Raises:
        ConfigError: one message with all that is wrong.
    """
    problems = list(range_problems(section, prefix))
    if problems:
        raise ConfigError("; ".join(problems))


def check_config(config: RunConfig) -> None:
    """Check every type, every range and every rule between knobs.

    Raises:
        ConfigError: one message with all that is wrong.
    """
    wrong_types = list(_type_problems(config))
    if problems := wrong_types or [*range_problems(config), *_rule_problems(config)]:
        raise ConfigError("; ".join(problems))


def check_values(config: RunConfig) -> None:
    """Check every type and every range, but no rule between knobs.

    Raises:
        ConfigError: one message with all that is wrong.
    """
    if problems := list(_type_problems(config)) or list(range_problems(config)):
        raise ConfigError("; ".join(problems))


def config_knobs(
    cls: type = RunConfig, prefix: str = ""
) -> typing.Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Every knob as (dotted name, field), in the order of the schema."""
    for f in dataclasses.fields(cls):
        nested = typing.get_type_hints(cls)[f.name]
        if dataclasses.is_dataclass(nested):
            yield from config_knobs(typing.cast(type, nested), f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", f


def changed_knobs(config: Any, default: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """What differs between two configurations: dotted name -> (value in config, in default)."""
    changed: dict[str, tuple[Any, Any]] = {}
    for f in dataclasses.fields(config):
        ours, theirs = getattr(config, f.name), getattr(default, f.name)
        if dataclasses.is_dataclass(ours):
            changed |= changed_knobs(ours, theirs, f"{prefix}{f.name}.")
        elif ours != theirs:
            changed[f"{prefix}{f.name}"] = (ours, theirs)
    return changed


def type_hints(cls: type) -> dict[str, Any]:
    """The types of a section's knobs by name; a list of choices is one of Literals."""
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if choices := f.metadata.get("choices"):
            hints[f.name] = types.GenericAlias(tuple, (Literal.__getitem__(choices()), ...))
    return hints


def plain_values(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists: what YAML can say."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_values(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [plain_values(item) for item in value]
    return value


def _build(cls: type[T], raw: Any, prefix: str, problems: list[str]) -> T:
    """One dataclass from a mapping, noting every problem and going on."""
    if not isinstance(raw, Mapping):
        section = prefix.rstrip(".") or "the file"
        problems.append(f"{section} must be a mapping of knobs; got {raw!r}. Write `knob: value`")
        return cls()
    hints = type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in hints:
            problems.append(f"{prefix}{key} is not a knob. {_hint(f'{prefix}{key}', hints)}")
        elif dataclasses.is_dataclass(hints[key]):
            values[key] = _build(typing.cast(type, hints[key]), value, f"{prefix}{key}.", problems)
        else:
            try:
                values[key] = _convert(value, hints[key])
            except ValueError as error:
                problems.append(f"{prefix}{key} must be {error}; got {value!r}")
    return cls(**values)


def _hint(name: str, here: typing.Iterable[str]) -> str:
    """What may have been meant by a key; else the keys that there are in its section."""
    sections = [f.name for f in dataclasses.fields(RunConfig) if f.default is dataclasses.MISSING]
    near = nearest_knobs(name, [knob for knob, _ in config_knobs()])
    near = near or difflib.get_close_matches(name, sections, n=1)
    return f"Did you mean {listed(near)}?" if near else f"Known here: {', '.join(here)}."


def _convert(value: Any, hint: Any) -> Any:
    """`value` as the type that the knob has; ValueError names what is expected."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        options = typing.get_args(hint)
        if value in options and not isinstance(value, bool):
            return value
        near = difflib.get_close_matches(str(value), [str(option) for option in options], n=1)
        hint_text = f" (did you mean {near[0]}?)" if near else ""
        named = ", ".join(str(option) or "''" for option in options)
        raise ValueError(f"one of {named}{hint_text}")
    if origin in (Union, types.UnionType):
        raise AssertionError("knobs have one type each")
    if origin is tuple:
        item_hint = typing.get_args(hint)[0]
        if item_hint is str and isinstance(value, str):
            return (value,)
        if not isinstance(value, list | tuple):
            raise ValueError("a list")
        items = tuple(_convert(item, item_hint) for item in value)
        if Ellipsis not in typing.get_args(hint) and len(items) != len(typing.get_args(hint)):
            raise ValueError(f"a list of {len(typing.get_args(hint))}")
        return items
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):
        try:
            return float(value)  # YAML 1.1 reads 1e-5 as text
        except ValueError:
            raise ValueError("a number") from None
    if type(value) is hint:
        return value
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    raise ValueError(names[hint])


_SYMBOLS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def _type_problems(config: RunConfig) -> typing.Iterator[str]:
    """Knobs of another type, in a configuration that was written in Python."""
    yield from build(plain_values(config))[1]
    for name, knob in config_knobs():
        value = operator.attrgetter(name)(config)
        if isinstance(knob.default, tuple) and isinstance(value, str | list):
            items = (value,) if isinstance(value, str) else tuple(value)
            yield f"{name} must be a tuple; got {value!r}. Write {items!r}"


def range_problems(config: Any, prefix: str = "") -> typing.Iterator[str]:
    """What is out of range in a section and in those below it."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from range_problems(value, f"{prefix}{f.name}.")
            continue
        bounds: dict[str, float] = f.metadata.get("bounds", {})
        holds = {
            "ge": lambda v, b: v >= b,
            "gt": lambda v, b: v > b,
            "le": lambda v, b: v <= b,
            "lt": lambda v, b: v < b,
        }
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{prefix}{f.name} must be finite; got {value}"
        elif any(not holds[name](value, bound) for name, bound in bounds.items()):
            yield f"{prefix}{f.name} must be {bounds_text(f)}; got {value!r}"


def bounds_text(knob: dataclasses.Field[Any]) -> str:
    """A knob's range in words, such as ">= 0 and < 1"; empty if it has none."""
    bounds: dict[str, float] = knob.metadata.get("bounds", {})
    return " and ".join(f"{_SYMBOLS[name]} {bound:g}" for name, bound in bounds.items())


def _rule_problems(config: RunConfig) -> typing.Iterator[str]:
    """Rules that tie knobs together: a knob that would be ignored is an error."""
    ppo, steps = config.ppo, config.steps
    if not _is_path(config.output_dir):
        shown = ascii(config.output_dir[:80])
        yield (
            "output_dir must be a path that prints, of names of at most 200 bytes; got "
            f"{shown}. Choose another"
        )
    elif Path(config.output_dir).parts[:1] and Path(config.output_dir).parts[0].startswith("~"):
        yield (
            "output_dir must begin with a home folder that there is, where it begins with ~; got "
            f"{config.output_dir[:80]!a}. Write the whole path"
        )
    if not steps:
        yield "steps must name at least one step; got none. Use e.g. --steps sft reward ppo"
    if len(set(steps)) != len(steps):
        yield f"steps must name each step once; got {' '.join(steps)}"
    yield from _order_problems(steps)
    rl = of_family(steps, "rl")
    if rl and (config.dropout > 0 or config.lora.dropout > 0):
        yield (
            f"dropout and lora.dropout must be 0 where {rl[0].name} is among the steps (two "
            f"forwards of one policy must agree); got {config.dropout:g} and "
            f"{config.lora.dropout:g}"
        )
    split = config.dataset.split
    if split and (len(split) != 3 or any(share < 0 for share in split)):
        yield (
            "dataset.split must be three shares >= 0 (SFT, reward model, PPO); "
            f"got {','.join(f'{share:g}' for share in split)}. Use e.g. 2,4,4"
        )
    elif split and sum(split) <= 0:
        yield "dataset.split must have a share above 0; got 0,0,0. Use e.g. 2,4,4"
    if not all(0 <= beta < 1 for o in _optimizers(config) for beta in o.betas):
        yield "betas must be within [0, 1)"
    if ppo.kl_target > 0 and ppo.kl_coef == 0:
        yield "ppo.kl_coef must be > 0 when ppo.kl_target steers it; got 0"
    if ppo.kl_in == "loss" and ppo.kl_estimator == "k1":
        yield (
            "ppo.kl_estimator must be k2 or k3 when ppo.kl_in is loss; got k1, whose gradient "
            "there is zero on average"
        )
    rollout_size = ppo.prompts_per_step * config.sampling.samples_per_prompt
    if ppo.minibatch_size > rollout_size:
        yield (
            "ppo.minibatch_size must be at most ppo.prompts_per_step * "
            f"sampling.samples_per_prompt ({rollout_size}); got {ppo.minibatch_size}. "
            f"Give --ppo.minibatch-size {rollout_size} or less"
        )
    yield from _parallel_problems(config)
    if config.sampling.min_new_tokens > config.sampling.max_new_tokens:
        yield (
            "sampling.min_new_tokens must be at most sampling.max_new_tokens "
            f"({config.sampling.max_new_tokens}); got {config.sampling.min_new_tokens}"
        )
    yield from _unread(ppo)
    if rl and ppo.reward_model_weight == 0 and not ppo.reward_function:
        yield "ppo.reward_model_weight must be > 0 without a ppo.reward_function; got 0"


def _order_problems(steps: typing.Sequence[str]) -> typing.Iterator[str]:
    """Steps that are not in their order, or cannot be in one run."""
    stages = in_order(steps)
    apart = [(a, b) for a in stages for b in stages if a is not b and are_apart(a, b)]
    if not apart and list(dict.fromkeys(steps)) == [stage.name for stage in stages]:
        return
    orders = ", or ".join(" ".join(way) for way in sorted(ways(), key=len, reverse=True))
    problem = f"steps must be in the order {orders}; got {' '.join(steps)}"
    if apart:
        one, other = apart[0]
        both = " and ".join(name for name in one.after if name in other.after)
        problem += (
            f". {one.name} and {other.name}{f' both start from {both}' if both else ''}: "
            "run them in two folders"
        )
    yield problem


def _parallel_problems(config: RunConfig) -> typing.Iterator[str]:
    yield from frozen_base_problems(config.parallel, config.lora.rank)
    if config.parallel.inference_tp_size > 1 and not config.hybrid_engine:
        yield (
            "parallel.inference_tp_size must be 1 where hybrid_engine is off (slices are of "
            f"Tandem's engine); got {config.parallel.inference_tp_size}"
        )


_READ_WITH = {
    "ptx_coef": "ptx_data",
    "ptx_batch_size": "ptx_data",
    "ema_decay": "ema",
    "kl_horizon": "kl_target",
    "reward_function_weight": "reward_function",
}
"""Knobs of PPO that mean something only where another is set."""


def _unread(ppo: PPOConfig) -> typing.Iterator[str]:
    """What was set although nothing will read it."""
    defaults = PPOConfig()
    for name, needed in _READ_WITH.items():
        if getattr(ppo, name) != getattr(defaults, name) and not getattr(ppo, needed):
            yield (
                f"ppo.{name} must go with ppo.{needed}, without which nothing reads it; got "
                f"{getattr(ppo, name):g}. Set ppo.{needed}, or remove ppo.{name}"
            )


def _is_path(text: str) -> bool:
    """Whether a folder can be made there whose name can be shown and written down."""
    if not text.strip() or not text.isprintable():
        return False
    encoded = text.encode()
    return len(encoded) < 2000 and max(map(len, encoded.split(b"/"))) <= 200


def _optimizers(section: Any) -> typing.Iterator[OptimizerConfig]:
    """Every optimizer's knobs, in a section and in those below it."""
    if isinstance(section, OptimizerConfig):
        yield section
    elif dataclasses.is_dataclass(section):
        for f in dataclasses.fields(section):
            yield from _optimizers(getattr(section, f.name))
