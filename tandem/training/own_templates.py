"""The chat template of a run (`dataset.chat_template`): as configured, or as in its folder.

A folder's stages share one, for each starts from what another has learned in it. It is in the
manifests and checkpoints of the stages (`made_from`), and a copy of its file in the folder.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tandem.config.dataset import TOKENIZERS_OWN
from tandem.config.schema import RunConfig
from tandem.data.chat.own_template import (
    KEPT,
    KNOB,
    digest_of,
    is_gone,
    read_template,
    with_kept_template,
)
from tandem.errors import ConfigError
from tandem.files import replace as replace_file
from tandem.parallel.world import World
from tandem.text import visible
from tandem.training.provenance import recorded


def settle_template(config: RunConfig, world: World) -> tuple[RunConfig, str]:
    """The configuration with the template of its folder, where it names none or that one's file,
    which is gone; and a line about it for the user, or "".

    Raises:
        ConfigError: what it names is no template, or another one on some ranks.
    """
    folder, line = Path(config.output_dir), ""
    named = config.dataset.own_template
    if not named or is_gone(named):
        before = world.all_gather_object(_templates(folder))[0]
        if before and named in ("", *before.values()):
            stage, value = next(reversed(before.items()))
            dataset = replace(config.dataset, chat_template=value)
            config = with_kept_template(replace(config, dataset=dataset), folder)
            line = f"chat template: {visible(value)}, as for {stage} of {visible(str(folder))}"
    digests = world.all_gather_object(digest_of(read_template(config.dataset.own_template)))
    if len(set(digests)) > 1:
        raise ConfigError(
            f"{KNOB} must be the same file on every node; got other contents. Copy it from one to "
            "all."
        )
    return config, line


def keep_template(config: RunConfig) -> None:
    """Copy the template's file into the run's folder."""
    own = read_template(config.dataset.own_template)
    if own is not None and own.source and not own.built_in:
        replace_file(Path(config.output_dir) / KEPT, own.source.encode())


def _templates(folder: Path) -> dict[str, str]:
    """The template of each stage in the folder that had one of its own; the latest last."""
    return {
        stage: value
        for stage, value in recorded(folder, KNOB).items()
        if isinstance(value, str) and value not in ("", TOKENIZERS_OWN)
    }
