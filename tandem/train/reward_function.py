"""A user's Python function as a reward: found by name, called on a rollout, its answers checked."""

from __future__ import annotations

import importlib.util
import math
import numbers
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tandem.errors import ConfigError, DataError
from tandem.parallel.world import World
from tandem.types import Rollout

RewardFunction = Callable[..., list[float | None]]


@cache
def load_reward_function(name: str) -> RewardFunction:
    """The function that `file.py:name` or `package.module:name` names.

    Raises:
        ConfigError: there is no such file, module or function.
    """
    where, _, attribute = name.rpartition(":")
    problem = f"ppo.reward_function must be file.py:function or module:function; got {name!r}"
    if not where or not attribute:
        raise ConfigError(f"{problem}. Write e.g. rewards.py:my_reward.")
    try:
        module = _module_from_file(where) if where.endswith(".py") else import_module(where)
    # Whatever a user's file does when it runs is told to them in one line, SystemExit too.
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{problem}: {type(error).__name__}: {error}. Fix the file, or its name "
            "(--debug shows where)."
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{problem}: {where} has no function {attribute}. Check its spelling.")
    return function


def _module_from_file(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}")
    name = f"tandem_reward_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def function_scores(
    function: RewardFunction, rollout: Rollout, world: World | None = None
) -> Tensor:
    """As `_called`, once for all ranks: the first calls the function, all get its numbers.

    Raises:
        DataError: on every rank, what the function did wrong on the first.
    """
    world = world or World()
    scores: list[float] = []
    problem = ""
    if world.is_first:
        try:
            scores = _called(function, rollout).tolist()
        except DataError as error:
            if world.size == 1:
                raise
            problem = str(error)
    scores, problem = world.collect((scores, problem))[0]
    if problem:
        raise DataError(problem)
    return torch.tensor(scores, device=rollout.batch.token_ids.device)


def _called(function: RewardFunction, rollout: Rollout) -> Tensor:
    """(B,) float32 rewards of a rollout's answers; NaN where the function says None.

    The function is called once as f(prompts, completions, **columns): `prompts` the text of each
    conversation's last user turn, `completions` the answers without their stop token, and one list
    per column that the data's rows have (None where a row lacks it), `messages` among them: the
    whole conversation as role and content dicts.

    Raises:
        DataError: it raises, or returns anything but one finite number or None per answer.
    """
    columns: dict[str, list[Any]] = {
        name: [prompt.columns.get(name) for prompt in rollout.prompts]
        for name in sorted({name for prompt in rollout.prompts for name in prompt.columns})
    }
    taken = {"prompts", "completions", "messages"} & columns.keys()
    if taken:
        raise DataError(
            f"data columns must not be named {', '.join(sorted(taken))}, which a reward function "
            "is given anyway; rename them in the data."
        )
    columns["messages"] = [
        [{"role": m.role, "content": m.content} for m in prompt.messages]
        for prompt in rollout.prompts
    ]
    prompts = [prompt.messages[-1].content for prompt in rollout.prompts]
    label = getattr(function, "__name__", str(function))
    try:
        rewards = function(prompts, list(rollout.responses), **columns)
    # Whatever a user's code does is told to them, by its name; SystemExit too.
    except (Exception, SystemExit) as error:
        raise DataError(
            f"reward function {label} must score the rollout; it raised "
            f"{type(error).__name__}: {error}. Fix the function (--debug shows where)."
        ) from error
    if hasattr(rewards, "tolist"):  # arrays and tensors are as good as lists
        rewards = rewards.tolist()
    if not isinstance(rewards, list | tuple) or len(rewards) != len(rollout):
        found = f"{len(rewards)}" if isinstance(rewards, list | tuple) else type(rewards).__name__
        raise DataError(
            f"reward function {label} must return a list of {len(rollout)} numbers or None; "
            f"got {found}."
        )
    scores = []
    value: Any
    for response, value in zip(rollout.responses, rewards, strict=True):
        number: Any = value.item() if hasattr(value, "item") else value
        if number is not None and not _is_finite_number(number):
            raise DataError(
                f"reward function {label} must return finite numbers or None; got {value!r} for "
                f"the answer {response[:60]!r}."
            )
        scores.append(math.nan if number is None else float(number))
    return torch.tensor(scores, dtype=torch.float32, device=rollout.batch.token_ids.device)


def _is_finite_number(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False
