"""Flags on top of a configuration: `--section.knob value` for every knob, short names for some.

The knobs are read off the schema, so there is no second list of them to keep true.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import textwrap
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, NoReturn

from tandem.config.load import build_config, config_knobs, load_config, plain_values
from tandem.config.schema import RunConfig
from tandem.errors import ConfigError

SHORT_NAMES = {
    "dataset.split": "data-split",
    "dataset.columns": "columns",
    "dataset.on_bad_row": "on-bad-row",
    "dataset.max_tokens": "max-tokens",
    "dataset.max_prompt_tokens": "max-prompt-tokens",
    "lora.rank": "lora-rank",
    "sampling.max_new_tokens": "max-new-tokens",
    "ppo.steps": "ppo-steps",
    "ppo.kl_coef": "kl-coef",
    "ppo.reward_function": "reward-function",
    "ppo.ema": "ema",
    "ppo.ptx_data": "ptx-data",
    "ppo.ptx_coef": "ptx-coef",
    "parallel.actor_zero_stage": "actor-zero-stage",
    "parallel.critic_zero_stage": "critic-zero-stage",
    "parallel.replicas": "replicas",
    "parallel.offload": "offload",
    "parallel.zero_hpz": "zero-hpz",
    "parallel.zero_quantized_weights": "zero-quantized-weights",
    "parallel.zero_quantized_gradients": "zero-quantized-gradients",
    "parallel.zero_gradient_bits": "zero-gradient-bits",
    "parallel.zero_forced": "zero-forced",
    "parallel.inference_tp_size": "inference-tp-size",
    "parallel.frozen_weights": "frozen-weights",
    "parallel.shared_base": "shared-base",
    "log.tensorboard": "tensorboard",
}
"""Dotted knob to the flag that people reach for; the dotted flag works too."""


def parse_run_flags(argv: Sequence[str], command: str) -> RunConfig:
    """The configuration that flags, over `--config FILE`, over the defaults, describe.

    Args:
        command: `train`, or the name of a single step, which then is the run's only one.
    Raises:
        ConfigError: an unknown flag (with the nearest one), or values that cannot be; all at once.
    """
    parser = _Parser(prog=f"tandem {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    hints = knob_types()
    for name, hint in hints.items():
        options = [f"--{_dashed(name)}"]
        if name in SHORT_NAMES:
            options.append(f"--{SHORT_NAMES[name]}")
        if hint is bool:
            parser.add_argument(*options, dest=name, action=argparse.BooleanOptionalAction)
        elif typing.get_origin(hint) is tuple:
            parser.add_argument(*options, dest=name, nargs="*")
        else:
            parser.add_argument(*options, dest=name)
    given = vars(parser.parse_args([_dashed_flag(arg) for arg in argv]))
    path = given.pop("config")
    values = plain_values(load_config(path) if path else RunConfig())
    for name, value in given.items():
        if value is not None:
            _put(values, name, _read(value, hints[name]))
    if command != "train":
        if given["steps"] is not None:
            raise ConfigError(
                f"--steps must go with tandem train; tandem {command} runs {command} alone."
            )
        values["steps"] = [command]
    return build_config(values, where="")


def help_page(command: str, summary: str, *, everything: bool) -> str:
    """Help for `tandem COMMAND`: the common knobs, or every one by section."""
    lines = [f"usage: tandem {command} [--config FILE.yaml] [flags]", "", summary, ""]
    docs = knob_docs()
    section = None
    for name, knob in config_knobs():
        if not everything and not knob.metadata.get("common"):
            continue
        if everything and name.rpartition(".")[0] != section:
            section = name.rpartition(".")[0]
            lines += ["", f"{section or 'run'}:"]
        flag = f"--{_dashed(name)}" if everything else f"--{SHORT_NAMES.get(name, _dashed(name))}"
        about = docs[name] if everything else docs[name].split(". ")[0].rstrip(".") + "."
        lines += [f"  {flag} {_value_word(name)}".rstrip()]
        text = f"{about} [{show_value(knob.default)}]"
        lines += textwrap.wrap(text, 92, initial_indent=" " * 6, subsequent_indent=" " * 6)
    if not everything:
        lines += ["", f"All flags: tandem {command} --help-all. Each is a key of --config too."]
    return "\n".join(lines)


@cache
def knob_types() -> dict[str, Any]:
    """Every knob's type by dotted name."""
    return {name: _hint_of(name) for name, _ in config_knobs()}


@cache
def knob_docs() -> dict[str, str]:
    """Every knob's sentence by dotted name: the string below it in the schema."""
    docs: dict[str, str] = {}
    for name, _ in config_knobs():
        cls = _class_of(name)
        docs[name] = _class_docs(cls)[name.rpartition(".")[2]]
    return docs


def show_value(value: Any) -> str:
    """A value as one would write it on the command line."""
    if isinstance(value, tuple):
        return " ".join(show_value(item) for item in value) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if value != "" else "none"


class _Parser(argparse.ArgumentParser):
    """argparse that names the nearest flag and raises one line instead of printing usage."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            self._refuse(rest)
        return parsed

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}. See {self.prog} --help.")

    def _refuse(self, rest: Sequence[str]) -> NoReturn:
        problems = []
        known = [option for action in self._actions for option in action.option_strings]
        for before, word in zip([None, *rest], rest, strict=False):
            if not word.startswith("-"):
                if before is None or not before.startswith("-"):  # else an unknown flag's value
                    problems.append(f"{word!r} belongs to no flag")
                continue
            flag = word.split("=")[0]
            near = difflib.get_close_matches(flag, known, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]}?" if near else f"See {self.prog} --help-all."
            problems.append(f"{flag} is not a flag of {self.prog}. {hint}")
        raise ConfigError("; ".join(problems))


def _hint_of(dotted: str) -> Any:
    return typing.get_type_hints(_class_of(dotted))[dotted.rpartition(".")[2]]


@cache
def _class_of(dotted: str) -> type:
    cls: type = RunConfig
    for part in dotted.split(".")[:-1]:
        cls = typing.get_type_hints(cls)[part]
    return cls


@cache
def _class_docs(cls: type) -> Mapping[str, str]:
    """Attribute docstrings of a dataclass, those of its bases included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
            ):
                docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def _read(value: Any, hint: Any) -> Any:
    """A flag's text as YAML would have given it; what it is not stays text, to be refused."""
    if hint is bool:
        return value
    if typing.get_origin(hint) is tuple:
        item_hint = typing.get_args(hint)[0]
        words = value
        if item_hint is not str:  # 2,4,4 is as good as 2 4 4; a path may hold a comma
            words = [word for words in value for word in words.split(",") if word]
        return [_read(word, item_hint) for word in words]
    if typing.get_origin(hint) is Literal:
        return next((option for option in typing.get_args(hint) if str(option) == value), value)
    if hint is int:
        try:
            return int(value)
        except ValueError:
            return value
    return value


def _put(values: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, name = dotted.split(".")
    for section in sections:
        values = values[section]
    values[name] = value


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _dashed_flag(arg: str) -> str:
    """--data_split and --data-split are one flag; values are left alone."""
    if not arg.startswith("--"):
        return arg
    flag, equals, value = arg.partition("=")
    return f"{_dashed(flag)}{equals}{value}"


def _value_word(name: str) -> str:
    """What follows a flag, for help."""
    hint = knob_types()[name]
    if hint is bool:
        return "| --no-..."
    if typing.get_origin(hint) is Literal:
        return "|".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return "A B ..."
    return {int: "N", float: "X", str: "TEXT"}[hint]
