"""Models to folders that anyone opens, wherever their weights lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.checkpoint.folder import require_space, together
from tandem.data.render import Renderer
from tandem.models.save import save_model, saved_bytes
from tandem.models.weight_files import Writers
from tandem.parallel.pieces import gathered_to
from tandem.parallel.shard import shards_of
from tandem.training.rows import StepRows


def with_template(tokenizer: PreTrainedTokenizerBase, renderer: Renderer) -> Any:
    """The tokenizer with the chat template in use, where it brought none."""
    if not tokenizer.chat_template:
        tokenizer.chat_template = renderer.chat_template
    return tokenizer


def save_policy(model: PreTrainedModel, rows: StepRows, folder: Path) -> None:
    """Save a policy so that anyone's `generate` stops where it was taught to stop, with the chat
    template that it was taught."""
    tokenizer = with_template(rows.tokenizer, rows.renderer)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = list(rows.renderer.stop_token_ids)
        model.generation_config.pad_token_id = rows.renderer.pad_token_id
    save_anywhere(model, tokenizer, folder)


def save_anywhere(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """`models.save.save_model`, wherever the weights lie: all ranks call it and share the files.

    Raises:
        CheckpointError: the disk refused a rank, or has no room.
    """
    shards = shards_of(model)
    shards.rest()
    world = shards.world
    require_space(folder, saved_bytes(model), world)
    ranks = world.seeing(0)  # others get a copy of the finished folder

    def gather(weight: Tensor, writer: int) -> Tensor | None:
        return gathered_to(weight, ranks[writer])

    own = ranks.index(world.rank) if world.rank in ranks else -1
    writers = Writers(own, len(ranks), gather)
    together(lambda: save_model(model, tokenizer, folder, writers=writers), folder, world)
