"""A user's Python function as a reward: found by name, called on a rollout, its answers checked."""

from __future__ import annotations

import importlib.util
import inspect
import math
import numbers
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tandem.errors import ConfigError, DataError, Stopped
from tandem.parallel.world import World
from tandem.text import one_line
from tandem.types import PromptRow, Rollout

RewardFunction = Callable[..., list[float | None]]
_GIVEN = {"prompts", "completions", "messages"}
"""What every reward function is given beside the data's columns."""
OVERDUE_SECONDS = 60.0
"""After which a line says that a reward function is still running; then after twice that again."""
_MOST = 1e15
"""Size of a reward whose squares and sums over a rollout are still float32 numbers."""


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
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | Stopped):
            raise
        raise ConfigError(
            f"{problem}: {type(error).__name__}: {one_line(error)}. Fix the file, or its name "
            "(--debug shows where)."
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{problem}: {where} has no function {attribute}. Check its spelling.")
    return function


def source_files(name: str) -> list[Path]:
    """The Python files that the behaviour of `load_reward_function(name)` comes from, sorted: its
    module's, and those of the modules that it has imported, and so on. Python's own, installed
    packages and Tandem are left out, unless the function itself is in one.
    """
    load_reward_function(name)
    where = name.rpartition(":")[0]
    root = sys.modules[_module_name(where) if where.endswith(".py") else where]
    package = root.__name__.partition(".")[0]
    found: dict[str, ModuleType] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        file = getattr(module, "__file__", None) or ""
        top = module.__name__.partition(".")[0]
        if module is not root and (top == "tandem" or (top != package and _is_library(file))):
            continue
        if not file.endswith(".py") or file in found:
            continue
        found[file] = module
        homes = [_home(value) for value in list(vars(module).values())]
        waiting += [sys.modules[home] for home in homes if home in sys.modules]
    return [Path(file) for file in sorted(found)]


def _is_library(file: str) -> bool:
    parts = Path(file).parts
    is_installed = "site-packages" in parts or "dist-packages" in parts
    return is_installed or file.startswith(sysconfig.get_path("stdlib"))


def _home(value: Any) -> str:
    """The module that a value is, or that a function or class was defined in."""
    try:
        name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    except Exception:  # an object of the user's may answer with anything
        return ""
    return name if isinstance(name, str) else ""


def _module_name(path: str) -> str:
    return f"tandem_reward_{Path(path).stem}"


def _module_from_file(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}")
    name = _module_name(path)
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
    scores, problem = world.all_gather_object((scores, problem))[0]
    if problem:
        raise DataError(problem)
    return torch.tensor(scores, device=rollout.batch.token_ids.device)


def columns_problem(function: RewardFunction, prompts: Sequence[PromptRow]) -> str:
    """What keeps `function` from being called with the columns of the prompts, or ""."""
    columns = {name for prompt in prompts for name in prompt.columns}
    if taken := sorted(columns & _GIVEN):
        return (
            f"data columns must not be named {', '.join(taken)}, which a reward function is given "
            "anyway; got such columns. Rename them in the data"
        )
    try:
        inspect.signature(function).bind([], [], **{name: [] for name in columns | {"messages"}})
    except TypeError as error:
        label = getattr(function, "__name__", str(function))
        return (
            f"reward function {label} must take prompts, completions and the data's columns "
            f"({', '.join(sorted(columns)) or 'none'}); got: {error}. Name its parameters as the "
            "columns, with **columns for the rest"
        )
    except ValueError:  # something without a signature, which the first call will tell of
        pass
    return ""


def _called(function: RewardFunction, rollout: Rollout) -> Tensor:
    """(B,) float32 rewards of a rollout's answers; NaN where the function says None.

    The function is called once as f(prompts, completions, **columns): `prompts` the text of each
    conversation's last user turn, `completions` the answers without their stop token, and one list
    per column that the data's rows have (None where a row lacks it), `messages` among them: the
    whole conversation as role and content dicts.

    Raises:
        DataError: it raises, or returns anything but one finite number or None per answer.
    """
    if problem := columns_problem(function, rollout.prompts):
        raise DataError(f"{problem}.")
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
    dtype = torch.get_default_dtype()
    try:
        with _shown_while_it_runs(label, len(rollout)):
            rewards = function(prompts, list(rollout.responses), **columns)
    # Whatever a user's code does is told to them, by its name; SystemExit too.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | Stopped):
            raise
        raise DataError(
            f"reward function {label} must score the rollout; it raised "
            f"{type(error).__name__}: {one_line(error)}. Fix the function (--debug shows where)."
        ) from error
    finally:
        torch.set_default_dtype(dtype)
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
        if number is not None and not _is_reward(number):
            raise DataError(
                f"reward function {label} must return finite numbers or None; got {_shown(value)} "
                f"for the answer {response[:60]!r}. Keep rewards within {_MOST:g}."
            )
        scores.append(math.nan if number is None else float(number))
    return torch.tensor(scores, dtype=torch.float32, device=rollout.batch.token_ids.device)


def _is_reward(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and abs(float(value)) <= _MOST
    except OverflowError:  # an integer beyond every float
        return False


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.100}"
    except Exception:  # an object of the user's may answer with anything; so may 10**5000
        return type(value).__name__


@contextmanager
def _shown_while_it_runs(label: str, num_answers: int) -> Iterator[None]:
    """Say so, ever more rarely, where a reward function takes long: it may wait for something."""
    done = threading.Event()
    start = time.monotonic()

    def watch() -> None:
        pause = OVERDUE_SECONDS
        while not done.wait(pause):
            seconds = time.monotonic() - start
            print(
                f"reward function {label} has run for {seconds:.0f} s on {num_answers} answers and "
                "has not returned. Ctrl-C stops the run; the same command continues.",
                flush=True,
            )
            pause *= 2

    thread = threading.Thread(target=watch, name="reward function watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
