"""Data and models that Python code gives a run in memory: written into its folder first.

    RUN/given/data-1.jsonl  ...            the rows
    RUN/given/actor_model/  reward_model/  Hugging Face folders

From then on the run reads them like any other file: `tandem eval`, `replay` and a resumed run find
them, ranks share them, and their digests say what a stage was made from. What is given again must
have the same content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.checkpoint.folder import MANIFEST, read_facts, together, write_folder
from tandem.config.schema import RunConfig
from tandem.data.reading.sources import parse_columns
from tandem.data.tools import without_nulls
from tandem.engine.module_scorer import RewardModule
from tandem.errors import CheckpointError, ConfigError, DataError, ModelError
from tandem.files import replace as replace_file
from tandem.files import sha256
from tandem.models.save import save_model
from tandem.models.twin import own_forwards
from tandem.parallel.world import World
from tandem.text import cause_of
from tandem.training.lineage import NAMED
from tandem.training.own_folder import GIVEN, require_run_folder

Rows = str | Path | Iterable[Mapping[str, Any]]
"""A data set: a name as in `--data`, or rows: a list of dicts, a `datasets.Dataset`."""
GivenModel = nn.Module | str | Path


def with_given(
    config: RunConfig,
    world: World,
    *,
    data: Rows | Sequence[Rows] | None = None,
    actor_model: GivenModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reward_model: GivenModel | None = None,
    reward_tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[RunConfig, RewardModule | None]:
    """The configuration that names what was given, once it is in the run's folder.

    Returns:
        it, and a reward model that is no transformers model and stays in memory.
    Raises:
        ConfigError: something was given twice, or a tokenizer is missing.
        DataError: rows that cannot be written as JSON.
        ModelError: a model that cannot be saved.
        CheckpointError: the run was begun with other content, or ranks have different content.
    """
    changes: dict[str, Any] = {}
    module = None
    named = {"data": data, "actor_model": actor_model, "reward_model": reward_model}
    for name, given in named.items():
        if given is not None and getattr(config, name):
            raise ConfigError(
                f"{name} must be given once; got {name}= and {getattr(config, name)!r} in the "
                "configuration. Remove one."
            )
    together(lambda: require_run_folder(Path(config.output_dir)), Path(config.output_dir), world)
    folder = Path(config.output_dir) / GIVEN
    if data is not None:
        changes["data"] = tuple(
            str(rows)
            if isinstance(rows, str | Path)
            else _kept_rows(_as_given(rows, config), folder / f"data-{number}.jsonl", world)
            for number, rows in enumerate(_data_sets(data), 1)
        )
    if actor_model is not None:
        changes["actor_model"] = _kept(actor_model, tokenizer, folder / "actor_model", world)
    if isinstance(reward_model, nn.Module) and not isinstance(reward_model, PreTrainedModel):
        module = RewardModule(reward_model, reward_tokenizer)
    elif reward_model is not None:
        own = reward_tokenizer or tokenizer
        changes["reward_model"] = _kept(reward_model, own, folder / "reward_model", world)
    return replace(config, **changes), module


def digest_of_module(module: nn.Module) -> str:
    """SHA-256 of a module's class and weights."""
    digest = hashlib.sha256(type(module).__qualname__.encode())
    for name, tensor in sorted(module.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        whole = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
        digest.update(whole.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _data_sets(data: Rows | Sequence[Rows]) -> list[Rows]:
    """The data sets: one on its own, or a list of them."""
    if isinstance(data, list | tuple) and data and not isinstance(data[0], Mapping):
        return list(data)
    return [data]  # type: ignore[list-item]


def _as_given(rows: Any, config: RunConfig) -> Any:
    """Rows, those of a `datasets.Dataset` without the nulls of its table in tools and calls."""
    if not hasattr(rows, "features"):
        return rows
    mapped = parse_columns(config.dataset.columns, "dataset.columns")
    return (without_nulls(row, mapped.get("tools", "tools")) for row in rows)


def _kept_rows(rows: Iterable[Mapping[str, Any]], path: Path, world: World) -> str:
    """Write rows as JSON lines, unless they are there already; the file."""
    if isinstance(rows, Mapping):
        names = ", ".join(map(repr, list(rows)[:3]))
        advice = "one of its data sets, as in data=splits['train']"
        if all(isinstance(column, list | tuple | np.ndarray) for column in rows.values()):
            advice = "a list of dicts, or datasets.Dataset.from_dict(data)"
        raise DataError(
            f"data= must be rows; got a {type(rows).__name__} with {names}. Give {advice}."
        )
    if hasattr(rows, "to_dict"):  # a table, which gives its columns' names in a loop
        raise DataError(
            f"data= must be rows; got a {type(rows).__name__}. Give data.to_dict('records')."
        )
    lines = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise DataError(
                f"data= row {number} must be a dict of columns; got {type(row).__name__}."
            )
        lines.append(_line_of(row, number))
    if not lines:
        raise DataError("data= must have at least one row; got none.")
    text = ("\n".join(lines) + "\n").encode(errors="surrogatepass")
    content = hashlib.sha256(text).hexdigest()
    _require_same_on_ranks("data=", content, world)

    def keep() -> None:
        if not world.is_keeper:
            return
        if path.exists():
            _require_content(path, "data=", sha256(path), content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)

    together(keep, path, world)
    return str(path)


def _line_of(row: Mapping[str, Any], number: int) -> str:
    """A row as JSON; numbers and arrays of NumPy and torch as Python's."""
    try:
        return json.dumps(dict(row), ensure_ascii=False, default=_plain)
    except (TypeError, ValueError):
        for name, value in row.items():
            try:
                json.dumps({name: value}, default=_plain)
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"data= row {number}, column {name!r} must hold texts, numbers, lists and "
                    f"dicts; got: {cause_of(error)}. Convert or remove that column."
                ) from None
        raise


def _plain(value: Any) -> Any:
    """What JSON can write of a value of NumPy or torch."""
    if isinstance(value, np.generic | np.ndarray | torch.Tensor):
        return value.tolist()
    raise TypeError(f"an object of type {type(value).__name__}")


def _kept(
    model: GivenModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path, world: World
) -> str:
    """Save a model in memory, unless it is there already; its folder. A name stays as it is."""
    what = f"{folder.name}="
    if not isinstance(model, nn.Module):
        return str(model)
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"{what} must be a transformers model, a folder or a hub name; got "
            f"{type(model).__name__}. Of a PEFT model, give model.merge_and_unload()."
        )
    if tokenizer is None:
        raise ConfigError(f"{what} a model in memory needs its tokenizer; got none. Pass it too.")
    if wrapped := own_forwards(model):
        raise ModelError(
            f"{what} must compute by the forward of its classes; got "
            f"{wrapped[0] or 'the model'!r} with a forward set on its object, which is not saved. "
            "Put it into a subclass, or undo it (del module.forward)."
        )
    told = hashlib.sha256(digest_of_module(model).encode())
    told.update(model.config.to_json_string().encode())
    told.update(repr((sorted(tokenizer.get_vocab().items()), tokenizer.chat_template)).encode())
    content = told.hexdigest()
    _require_same_on_ranks(what, content, world)
    found = bool(world.all_gather_object((folder / MANIFEST).exists())[0])
    if found:
        facts = read_facts(folder, world=world)
        together(
            lambda: _require_content(folder, what, facts.get("content", ""), content), folder, world
        )
        return str(folder)

    def fill(target: Path) -> None:
        if world.is_first:
            save_model(model, tokenizer, target)

    facts = {"content": content, NAMED: str(model.name_or_path)}
    write_folder(folder, fill, facts, world=world)
    return str(folder)


def _require_content(path: Path, what: str, before: str, now: str) -> None:
    if before != now:
        raise CheckpointError(
            f"{what} must have the content that {path.parent.parent} was begun with (SHA-256 "
            f"{before[:12]}..., kept in {path}); got other content ({now[:12]}...). Use another "
            "output_dir, or remove that run."
        )


def _require_same_on_ranks(what: str, content: str, world: World) -> None:
    if len(set(world.all_gather_object(content))) > 1:
        raise CheckpointError(
            f"{what} must be the same on every rank; got different content. Make it with one seed, "
            "or give a folder or file."
        )
