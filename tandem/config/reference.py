"""docs/config.md, written from the schema."""

from __future__ import annotations

import sys
import typing
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal

from tandem.config.flags import show_value
from tandem.config.knob import bounds_text
from tandem.config.knob_facts import knob_docs, knob_types
from tandem.config.load import config_knobs
from tandem.config.nearest import SHORT_NAMES
from tandem.config.spellings import (
    ALIASES,
    CONVERSIONS,
    OPENRLHF,
    RENAMED,
    VERL,
    alias_knobs,
    ending,
    exact_knobs,
)

_HEAD = """# Configuration

Every knob of a run, as a key of `--config run.yaml` (sections are nested mappings) and as a flag
(`--section.knob value`, some with a short name). Flags override the file; the resolved
configuration is saved as `config.yaml` in the run's folder and can be used as a `--config` again.
A flag is given once, and a list takes all its values behind one: `--data A B`; `--data ''` is an
empty list.
This page is generated from `tandem/config/schema.py`.
"""

_ALIASES = """## Names from other trainers

Flags and files accept these names of Hugging Face, TRL, LLaMA-Factory, axolotl, OpenRLHF and
DeepSpeed-Chat, with a note that says which knob they were read as. Where several knobs are listed,
the name is accepted in the section of one (`sft: {warmup_ratio: 0.1}`), and by a command that has
exactly one of them, as a flag (`tandem sft --warmup-ratio 0.1`) and outside all sections of its
file; elsewhere it is refused with the knobs' names.
"""

_CONVERSIONS = """These mean something else there, or nothing here. They are refused with this
advice; a name with a dot applies to that section only. A switch that is off here anyway, such as
`load_in_8bit`, may stand in a file or on the command line as false.
"""

_VERL = """### verl's names

Dotted, as in `--data.train_files F`, or nested in a file. One with a name of the tables above is
read or answered like that name.
"""

_OPENRLHF = """### OpenRLHF's names

Those of version 0.11 and later, dotted, as in `--actor.adam.lr 1e-6`; read or answered likewise.
Earlier versions' are in the tables above.
"""

_RENAMED = """## Earlier names

Flags and files still accept these, with a note, and runs saved with them can be continued.
"""


def markdown() -> str:
    """The reference page, one table per section."""
    parts = [_HEAD]
    docs, hints = knob_docs(), knob_types()
    for section, knobs in groupby(config_knobs(), lambda knob: knob[0].rpartition(".")[0]):
        rows = []
        for name, knob in knobs:
            short = f" (`--{SHORT_NAMES[name]}`)" if name in SHORT_NAMES else ""
            takes = " ".join(filter(None, [_kind(hints[name]), bounds_text(knob)]))
            default, meaning = show_value(knob.default), docs[name].replace("|", "\\|")
            rows.append((f"`{name}`{short}", default, takes, meaning))
        parts += [f"## {section or 'run'}\n", _table(("knob", "default", "takes", "meaning"), rows)]
    return "\n".join([*parts, *_other_names()]).rstrip() + "\n"


def _other_names() -> list[str]:
    """The tables of names from other trainers and of earlier names."""
    known = list(knob_types())
    aliases = [
        (f"`{name}`", _knobs(alias_knobs(name, known)), ALIASES[name][1])
        for name in sorted(ALIASES.keys() - {old.rpartition(".")[2] for old in RENAMED})
    ]
    conversions = [
        (f"`{name}`", _knobs(ending(ends, known)), advice)
        for name, (ends, advice) in sorted(CONVERSIONS.items())
    ]
    renamed = [(f"`{old}`", f"`{new}`") for old, new in RENAMED.items()]
    return [
        *(_ALIASES, _table(("name", "knob", ""), aliases)),
        *(_CONVERSIONS, _table(("name", "use", ""), conversions)),
        *(_VERL, _dotted(VERL, known)),
        *(_OPENRLHF, _dotted(OPENRLHF, known)),
        *(_RENAMED, _table(("earlier", "now"), renamed)),
    ]


def _dotted(names: Mapping[str, str | tuple[str, str]], known: Sequence[str]) -> str:
    """The table of another trainer's dotted names."""
    rows = []
    for name, use in sorted(names.items()):
        if isinstance(use, tuple):
            rows.append((f"`{name}`", _knobs(ending(use[0], known)), use[1]))
        else:
            rows.append((f"`{name}`", _knobs(exact_knobs(name, known)) or f"`{use}`", ""))
    return _table(("name", "like, or use", ""), rows)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


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


if __name__ == "__main__":
    sys.stdout.write(markdown())
