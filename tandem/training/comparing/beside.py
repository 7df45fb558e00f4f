"""Other models than a run's own in its evaluation: further policies, another reward model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tandem.checkpoint.beside import verify_beside
from tandem.engine.reference import require_same_tokens
from tandem.errors import ModelError
from tandem.models.checkpoint_ref import model_folders
from tandem.models.load import check_causal_lm, load_tokenizer, open_decoder
from tandem.models.scalar import check_scalar_model, has_scalar_head
from tandem.models.source import classifies
from tandem.text import visible
from tandem.training.comparing.compare import policies
from tandem.training.run_folder import Run
from tandem.training.run_stages import tokenizer_sources


def compare_beside(run: Run, models: Sequence[str], judge: str) -> None:
    """Let an evaluation of the run compare further models, too.

    Args:
        models: folders or hub names of policies or of adapters. judge: of a reward model that
            scores in place of the run's; empty: the run's own.
    Raises:
        ModelError: one of them cannot be what it is given for, or has other tokens than the run's.
        CheckpointError: a folder is damaged.
    """
    remote = run.config.trust_remote_code
    for model in (*models, *filter(None, [judge])):
        for folder in model_folders(model):
            verify_beside(folder, world=run.world)
    if models:
        own = load_tokenizer(tokenizer_sources(run)[0], trust_remote_code=remote)
    for model in models:
        check_causal_lm(model, trust_remote_code=remote)
        opened = open_decoder(model, trust_remote_code=remote)
        if (
            classifies(opened.adapter)
            if opened.adapter
            else has_scalar_head(opened.base, opened.config)
        ):
            raise ModelError(
                f"--model must be a language model or an adapter of one; got {visible(model)}, a "
                "reward model. Give it as --reward-model."
            )
        require_same_tokens(model, own, trust_remote_code=remote, role="--model")
        run.beside[_free_label(run, model)] = model
    if judge:
        check_scalar_model(judge, needs_head=True, trust_remote_code=remote)
        run.judge = judge


def _free_label(run: Run, model: str) -> str:
    """The last part of a model's name, which no other column of the table has."""
    taken = {label for label, _ in policies(run)} | {"reward model"}
    name = label = Path(model).absolute().name or model
    number = 1
    while label in taken:
        number += 1
        label = f"{name}-{number}"
    return label
