"""The chat template of a run (`dataset.chat_template`): as configured, or as in its folder.

A folder's stages share one, for each starts from what another has learned in it. It is in the
manifests and checkpoints of the stages (`made_from`), and a copy of its file in the folder.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tandem.checkpoint.folder import MANIFEST, read_manifest
from tandem.checkpoint.state import newest_numbers
from tandem.config.dataset import TOKENIZERS_OWN
from tandem.config.schema import RunConfig
from tandem.config.stages import stage_names
from tandem.data.own_template import KEPT, KNOB, digest_of, is_gone, kept_with, read_template
from tandem.errors import CheckpointError, ConfigError
from tandem.files import replace as replace_file
from tandem.parallel.world import World
from tandem.text import visible


def settle_template(config: RunConfig, world: World) -> tuple[RunConfig, str]:
    """The configuration with the template of its folder, where it names none or that one's file,
    which is gone; and a line about it for the user, or "".

    Raises:
        ConfigError: what it names is no template, or another one on some ranks.
    """
    folder, line = Path(config.output_dir), ""
    named = config.dataset.own_template
    if not named or is_gone(named):
        recorded = world.all_gather_object(_recorded(folder))[0]
        if recorded and named in ("", *recorded.values()):
            stage, value = next(iter(recorded.items()))
            dataset = kept_with(replace(config.dataset, chat_template=value), folder)
            config = replace(config, dataset=dataset)
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
    if own is not None and not own.built_in:
        replace_file(Path(config.output_dir) / KEPT, own.source.encode())


def with_kept_template(config: RunConfig, run: Path) -> RunConfig:
    """A finished run's configuration with the copy of its template in place of the file."""
    return replace(config, dataset=kept_with(config.dataset, run))


def _recorded(folder: Path) -> dict[str, str]:
    """The template of each stage in the folder, finished or not, that had one of its own; the
    latest first."""
    found = {}
    for stage in reversed(stage_names()):
        facts = newest_numbers(folder / "checkpoints" / stage) or {}
        if (folder / stage / MANIFEST).exists():
            try:
                facts = read_manifest(folder / stage).facts
            except CheckpointError:
                continue  # reported when the stage itself is read
        value = (facts.get("made_from") or {}).get(KNOB)
        if isinstance(value, str) and value not in ("", TOKENIZERS_OWN):
            found[stage] = value
    return found
