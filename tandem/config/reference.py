"""docs/config.md, written from the schema."""

from __future__ import annotations

import sys
import typing
from typing import Literal

from tandem.config.flags import knob_docs, knob_types, show_value
from tandem.config.load import bounds_text, config_knobs
from tandem.config.nearest import SHORT_NAMES

_HEAD = """# Configuration

Every knob of a run, as a key of `--config run.yaml` (sections are nested mappings) and as a flag
(`--section.knob value`, some with a short name). Flags override the file; the resolved
configuration is saved as `config.yaml` in the run's folder and can be fed back.
This page is written from `tandem/config/schema.py`.
"""


def markdown() -> str:
    """The reference page, one table per section."""
    lines = [_HEAD]
    section = None
    docs, hints = knob_docs(), knob_types()
    for name, knob in config_knobs():
        here = name.rpartition(".")[0]
        if here != section:
            section = here
            lines += [f"## {here or 'run'}", "", "| knob | default | takes | meaning |"]
            lines += ["| --- | --- | --- | --- |"]
        short = f" (`--{SHORT_NAMES[name]}`)" if name in SHORT_NAMES else ""
        default = show_value(knob.default)
        takes = " ".join(filter(None, [_kind(hints[name]), bounds_text(knob)]))
        meaning = docs[name].replace("|", "\\|")
        lines.append(f"| `{name}`{short} | {default} | {takes} | {meaning} |")
        if _ends_section(name):
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _kind(hint: object) -> str:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return ", ".join(f"`{option}`" for option in typing.get_args(hint))
    if origin is tuple:
        return f"list of {_kind(typing.get_args(hint)[0])}"
    names: dict[object, str] = {int: "whole number", float: "number", str: "text", bool: "on/off"}
    return names[hint]


def _ends_section(name: str) -> bool:
    names = [knob for knob, _ in config_knobs()]
    following = names[names.index(name) + 1 :]
    return bool(following) and following[0].rpartition(".")[0] != name.rpartition(".")[0]


if __name__ == "__main__":
    sys.stdout.write(markdown())
