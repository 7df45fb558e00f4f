"""A user's Python function as a reward: found by name, called on a rollout, its answers checked."""

from __future__ import annotations

import importlib
import importlib.util
import math
import numbers
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.errors import ConfigError, DataError
from tandem.types import Rollout

RewardFunction = Callable[..., list[float | None]]


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
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            if spec is None or spec.loader is None or not Path(where).is_file():
                raise ConfigError(f"{problem}: no file {where}. Check the path.")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except ImportError as error:
        raise ConfigError(f"{problem}: {error}. Check the name, or install it.") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{problem}: {where} has no function {attribute}. Check its spelling.")
    return function


def function_scores(function: RewardFunction, rollout: Rollout) -> Tensor:
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
    columns["messages"] = [
        [{"role": m.role, "content": m.content} for m in prompt.messages]
        for prompt in rollout.prompts
    ]
    prompts = [prompt.messages[-1].content for prompt in rollout.prompts]
    label = getattr(function, "__name__", str(function))
    try:
        rewards = function(prompts, list(rollout.responses), **columns)
    except Exception as error:  # whatever a user's code does is told to them, by its name
        raise DataError(
            f"reward function {label} must score the rollout; it raised "
            f"{type(error).__name__}: {error}. Mend the function (--debug shows where)."
        ) from error
    if not isinstance(rewards, list | tuple) or len(rewards) != len(rollout):
        found = f"{len(rewards)}" if isinstance(rewards, list | tuple) else type(rewards).__name__
        raise DataError(
            f"reward function {label} must return a list of {len(rollout)} numbers or None; "
            f"got {found}."
        )
    for i, value in enumerate(rewards):
        good = isinstance(value, numbers.Real) and math.isfinite(value)
        if value is not None and not good:
            raise DataError(
                f"reward function {label} must return finite numbers or None; got {value!r} for "
                f"the answer {rollout.responses[i][:60]!r}."
            )
    return torch.tensor(
        [math.nan if value is None else float(value) for value in rewards],
        dtype=torch.float32,
        device=rollout.batch.token_ids.device,
    )
