"""The flags of `tandem push`."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.config.pages import Parser, home_path
from tandem.config.spellings import listed
from tandem.config.stages import latest_first
from tandem.imports import loading


def push_command(args: Sequence[str], summary: str) -> int:
    """Parse the flags and upload; returns the exit code.

    Args:
        summary: what the command does, for its help page.
    Raises:
        ConfigError: a flag is wrong.
        ModelError: there is no such model, or the hub refuses it.
    """
    usage, example = "PATH REPO [flags]", "tandem push runs/first you/assistant --dry-run"
    parser = Parser("push", usage, summary, example).section("what")
    models = f"Which model of a run: {listed(latest_first())}."
    parser.flag("PATH", "A model's folder, or a run's.", type=home_path)
    parser.flag("REPO", "OWNER/NAME on the hub; made if it is missing.")
    parser.flag("--model NAME", models, shown="the first of these that is finished")
    about = "Only the LoRA adapter in the folder."
    parser.flag("--adapter", about, False, shown="off", action="store_true")
    parser.section("how")
    about = "Make a new repository public."
    parser.flag("--public", about, False, shown="off: private", action="store_true")
    about = "List the files and upload nothing."
    parser.flag("--dry-run", about, False, shown="off", action="store_true")
    options = parser.parse_args(args)
    with loading("push"):
        from tandem.serve.push import push

    push(
        options.path,
        options.repo,
        which=options.model,
        adapter=options.adapter,
        public=options.public,
        dry_run=options.dry_run,
    )
    return 0
