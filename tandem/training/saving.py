"""Models, sharded or not, to folders that from_pretrained opens."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.checkpoint.folder import require_space, together
from tandem.config.schema import RunConfig
from tandem.config.stages import stage_of
from tandem.data.render import Renderer
from tandem.devices import DTYPES
from tandem.models.folder import read_object
from tandem.models.save import save_model, saved_bytes
from tandem.models.source import saved_dtype
from tandem.models.weight_files import Writers
from tandem.parallel.dtensor import gathered_to
from tandem.parallel.masters import exactly
from tandem.parallel.shard import shards_of


class Rendered(Protocol):
    """What says how a policy's texts became tokens: a run's rows, or an engine."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's."""

    @property
    def renderer(self) -> Renderer:
        """The policy's."""


def with_template(tokenizer: PreTrainedTokenizerBase, renderer: Renderer) -> Any:
    """A copy of the tokenizer with the chat template in use, marked for trainers that learn from
    the assistant's words alone."""
    tokenizer = copy.copy(tokenizer)
    if not isinstance(tokenizer.chat_template, dict):  # several by name stay as they are
        tokenizer.chat_template = renderer.chat_template
    return tokenizer


def rounded_away(run: Path, stage: str, config: RunConfig) -> str:
    """Behind "saved in FOLDER": that the model's files round what was trained in float32, as they
    do for a checkpoint of a smaller type; "" where they do not, and of adapters, whose own numbers
    are what was trained."""
    file = run / stage_of(stage).model_folder / "config.json"
    adapts = config.lora.of(stage_of(stage).trains[0]).rank > 0
    if config.save_dtype != "auto" or adapts or not file.is_file():
        return ""
    short = {"bfloat16": "bf16", "float16": "fp16"}.get(str(read_object(file).get("dtype")))
    if short is None:
        return ""
    return f" in {short}, as its checkpoint is (--save-dtype fp32 keeps what that rounds away)"


def save_policy(
    model: PreTrainedModel,
    rows: Rendered,
    folder: Path,
    masters: Mapping[nn.Parameter, Tensor] | None = None,
    save_dtype: str = "auto",
) -> None:
    """Save a policy with the EOS tokens and the chat template that it was trained with, so that any
    `generate` stops there."""
    tokenizer = with_template(rows.tokenizer, rows.renderer)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = list(rows.renderer.stop_token_ids)
        model.generation_config.pad_token_id = rows.renderer.pad_token_id
    save_anywhere(model, tokenizer, folder, masters, save_dtype)


def save_anywhere(
    model: PreTrainedModel,
    tokenizer: Any,
    folder: Path,
    masters: Mapping[nn.Parameter, Tensor] | None = None,
    save_dtype: str = "auto",
) -> None:
    """`models.save.save_model` for sharded weights too: all ranks call it and share the files.

    Args:
        masters: float32 values of weights in a smaller dtype; these are saved.
        save_dtype: the knob; auto is the dtype of the checkpoint that the model came from.
    Raises:
        CheckpointError: a rank could not write, or the disk is full.
    """
    shards = shards_of(model)
    shards.reshard()
    world = shards.world
    dtype = saved_dtype(model) if save_dtype == "auto" else DTYPES[save_dtype]
    require_space(folder, saved_bytes(model, dtype), world)
    ranks = world.seeing(0)  # others get a copy of the finished folder

    def gather(weight: Tensor, writer: int) -> Tensor | None:
        return gathered_to(weight, ranks[writer])

    own = ranks.index(world.rank) if world.rank in ranks else -1
    writers = Writers(own, len(ranks), gather)
    with exactly(masters or {}):
        together(
            lambda: save_model(model, tokenizer, folder, dtype=dtype, writers=writers),
            folder,
            world,
        )
