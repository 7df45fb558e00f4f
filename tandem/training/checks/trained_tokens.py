"""What a run with adapters says of the embeddings of tokens: which are trained, which should be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tandem.config.dataset import CONTROL
from tandem.config.schema import RunConfig
from tandem.config.stages import leaving
from tandem.data.render import Renderer
from tandem.data.trained_tokens import token_ids_of
from tandem.errors import ConfigError, ModelError
from tandem.models.meta_init import WeightFiles
from tandem.text import visible
from tandem.training.stage_data import StepRows

_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_ROWS_AT_ONCE = 8192
_ALIKE = 0.01
"""Distance to the nearest other row, over the row's norm. In SmolLM2 those of control tokens that
no text had are below 0.0005, since all of them were moved alike, and no trained token's is below
0.1."""
_SMALL = 0.25
"""Of the median norm. No row of SmolLM2 is below 0.5; new ones of a resized model can be."""


def token_problems(config: RunConfig, rows: StepRows) -> list[str]:
    """What is wrong with `lora.train_tokens`, for the tokenizers of what is trained."""
    problems = []
    used = [rows.renderer]
    if leaving(config.stages, "reward model"):  # one that is finished keeps its own tokenizer
        used.append(rows.reward_renderer)
    for renderer in used:
        try:
            token_ids_of(config.lora.train_tokens, renderer)
        except ConfigError as error:
            problems.append(str(error).rstrip("."))
    return list(dict.fromkeys(problems))


def token_lines(config: RunConfig, renderer: Renderer, model: str) -> Iterator[str]:
    """Lines on the tokens whose rows are trained beside adapters, and on control tokens of the chat
    template that look untrained in the model and are not among them.

    Args:
        model: that the run starts from; one that is not a folder of whole weights is not looked at.
    """
    if not config.lora.rank:
        return
    trained = token_ids_of(config.lora.train_tokens, renderer)
    if trained:
        yield f"adapters: beside them the embeddings of {_listed(trained, renderer)} are trained"
    others = [i for i in renderer.control_ids if i not in trained]
    found = untrained(Path(model).expanduser(), others) if others else []
    if found:
        yield (
            f"note: the embeddings of the chat template's {_listed(found, renderer)} look "
            f"untrained in {visible(model)} (nearly those of other tokens, or far smaller than "
            "most), and adapters do not train them. To train them too give --lora.train-tokens "
            f"{CONTROL}"
        )


def untrained(folder: Path, token_ids: Sequence[int]) -> list[int]:
    """Those of some tokens whose embeddings look as if no text had them; none where the folder's
    weights cannot be read."""
    if not (folder / "config.json").is_file():
        return []
    try:
        files = WeightFiles(folder)
        name = next(
            name
            for name, shape in files.shapes.items()
            if name.endswith(_NAMES) and len(shape) == 2 and shape[0] > max(token_ids)
        )
        count = files.shapes[name][0]
        ours = torch.cat([files.rows(name, i, i + 1) for i in token_ids])
        nearest = torch.full((len(token_ids),), torch.inf)
        norms: list[Tensor] = []
        for first in range(0, count, _ROWS_AT_ONCE):
            rows = files.rows(name, first, min(count, first + _ROWS_AT_ONCE))
            norms.append(rows.norm(dim=1))
            apart = torch.cdist(ours, rows)
            for place, token in enumerate(token_ids):
                if first <= token < first + len(rows):
                    apart[place, token - first] = torch.inf
            nearest = torch.minimum(nearest, apart.amin(1))
    except (ModelError, OSError, StopIteration):
        return []
    usual, own = torch.cat(norms).median(), ours.norm(dim=1)
    is_new = (nearest <= _ALIKE * own) | (own < _SMALL * usual)
    return [token for token, new in zip(token_ids, is_new.tolist(), strict=True) if new]


def _listed(token_ids: Sequence[int], renderer: Renderer) -> str:
    names = {i: token for token, i in renderer.vocabulary.items()}
    return ", ".join(f"{visible(names.get(i, '?'))} ({i})" for i in token_ids)
