"""docs/config.md, written from the schema."""

from __future__ import annotations

import sys
import typing
from typing import Literal

from tandem.config.flags import knob_docs, knob_types, show_value
from tandem.config.load import bounds_text, config_knobs
from tandem.config.nearest import SHORT_NAMES
from tandem.config.spellings import ALIASES, CONVERSIONS, RENAMED, alias_knobs, ending

_HEAD = """# Configuration

Every knob of a run, as a key of `--config run.yaml` (sections are nested mappings) and as a flag
(`--section.knob value`, some with a short name). Flags override the file; the resolved
configuration is saved as `config.yaml` in the run's folder and can be fed back.
This page is written from `tandem/config/schema.py`.
"""

_ALIASES = """## Names from other trainers

Flags and files take these names of Hugging Face, TRL and OpenRLHF, and say with a note which knob
they were read as. Where several knobs are listed, the name is taken in the section of one
(`sft: {warmup_ratio: 0.1}`) and as a flag of a command that has one of them
(`tandem sft --warmup-ratio 0.1`); elsewhere it is refused with their names.
"""

_CONVERSIONS = """These mean something else there, or nothing here. They are refused with this
advice; a name with a dot is meant in that section alone.
"""

_RENAMED = """## Earlier names

Flags and files take these too, with a note, and a run that was saved under them goes on.
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
    return "\n".join([*lines, "", *_other_names()]).rstrip() + "\n"


def _other_names() -> list[str]:
    """The tables of names from other trainers and of earlier names."""
    known = list(knob_types())
    lines = [_ALIASES, "| name | knob | |", "| --- | --- | --- |"]
    lines += [
        f"| `{name}` | {_knobs(alias_knobs(name, known))} | {ALIASES[name][1]} |"
        for name in sorted(ALIASES.keys() - {old.rpartition(".")[2] for old in RENAMED})
    ]
    lines += ["", _CONVERSIONS, "| name | use | |", "| --- | --- | --- |"]
    lines += [
        f"| `{name}` | {_knobs(ending(ends, known))} | {advice} |"
        for name, (ends, advice) in sorted(CONVERSIONS.items())
    ]
    lines += ["", _RENAMED, "| earlier | now |", "| --- | --- |"]
    return lines + [f"| `{old}` | `{new}` |" for old, new in RENAMED.items()]


def _knobs(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


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
