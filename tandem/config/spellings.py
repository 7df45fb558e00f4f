"""Other names for knobs: our own earlier ones, and those of Hugging Face, TRL, LLaMA-Factory,
axolotl, OpenRLHF, DeepSpeed-Chat and verl.

A name with exactly our meaning is an alias: flags and YAML accept it, with a note. A name with
another meaning is refused with the right knob and how to convert the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.config.stages import DEFAULT, of_family, stage_names, stage_of
from tandem.config.stages import sections as stage_sections
from tandem.yaml_text import shipped_table

_TABLES: dict[str, Any] = shipped_table(Path(__file__).with_name("spellings.yaml"))
RENAMED: dict[str, str] = _TABLES["renamed"]
"""Knobs under their earlier names, as runs have saved them."""
ALIASES: dict[str, tuple[str, str]] = {
    name: (use, "") if isinstance(use, str) else (use[0], use[1])
    for name, use in _TABLES["aliases"].items()
}
"""Name elsewhere -> (our knob, or the end of several knobs' names; a remark)."""
CONVERSIONS: dict[str, tuple[str, str]] = {
    name: (ends, advice) for name, (ends, advice) in _TABLES["conversions"].items()
} | {name: ("", answer) for answer, names in _TABLES["needless"].items() for name in names.split()}
"""Name elsewhere -> (knobs to use, by the ends of their names; how to convert). A dotted name is
that name in one section, or for the command of one stage."""

OFF_ANYWAY = frozenset(_TABLES["off_anyway"].split())
"""Names above with which false or 0 asks for what holds anyway."""

MINUS_ONE_IS_OFF = frozenset(_TABLES["minus_one_is_off"].split())
"""Names above with which -1 means what 0 means here."""

SWITCH = dict.fromkeys(("on", "true", "yes", "1"), True)
SWITCH |= dict.fromkeys(("off", "false", "no", "0"), False)
"""What a switch's words mean."""

VERL, OPENRLHF = (
    {name: use if isinstance(use, str) else (use[0], use[1]) for name, use in _TABLES[who].items()}
    for who in ("verl", "openrlhf")
)
"""A dotted name of theirs -> the name above that it is read as, or the end of the names of knobs
with exactly its meaning, or knobs and how to convert."""
_DOTTED: dict[str, str | tuple[str, str]] = VERL | OPENRLHF
_ANSWERED = {*ALIASES, *(name.rpartition(".")[2] for name in CONVERSIONS)}

_AND = "and"
_OF_ALL_STAGES = ("stages",)
"""What a command of one stage does not take: there an earlier name of it means something else."""


def spelled(name: str) -> str:
    """A flag's or a key's name with underscores."""
    return name.replace("-", "_")


def dashed(name: str) -> str:
    """A flag's or a key's name with dashes."""
    return name.replace("_", "-")


def plain(name: str) -> str:
    """A name with underscores; a dotted one of verl's or OpenRLHF's as what it is read as."""
    use = _DOTTED.get(spelled(name))
    return use if isinstance(use, str) else spelled(name)


def with_dotted(values: Mapping[Any, Any], sections: Sequence[str]) -> dict[Any, Any]:
    """A copy in which what verl's file nests has dotted names, as on its command line, and what
    axolotl's has under `trl` has none.

    Args:
        sections: our own, which stay.
    """
    flat: dict[Any, Any] = {}
    for key, value in values.items():
        is_verl = any(name.startswith(f"{key}.") for name in VERL) and key not in sections
        if isinstance(value, Mapping) and (is_verl or key == "trl"):
            flat |= _leaves(value, f"{key}.") if is_verl else value
        else:
            flat[key] = value
    return flat


def _leaves(values: Mapping[Any, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        is_nested = isinstance(value, Mapping) and value
        found |= _leaves(value, f"{prefix}{key}.") if is_nested else {f"{prefix}{key}": value}
    return found


def knob_meant(name: str, known: Iterable[str], section: str = "") -> str:
    """The one knob that another name stands for; empty if there is none, or more than one.

    Args:
        name: what was written; a dotted one must be in its knob's section.
        known: every knob's dotted name.
        section: the command's own, which a name without a dot may omit. Other commands' sections
            are ignored: this command does not read them.
    """
    is_exact, name = _is_exact(name), plain(name)
    if name in _DOTTED:
        return ""
    if name in RENAMED and not (section and RENAMED[name] in _OF_ALL_STAGES):
        return RENAMED[name]
    inside, _, last = ("", "", name) if is_exact else name.rpartition(".")
    section = inside or section
    if not is_exact and (conversion(name, section) or (not section and _converted_somewhere(last))):
        return ""
    knobs = ending(name, known) if is_exact else alias_knobs(last, known)
    if not section:
        knobs = [k for k in knobs if _section(k) not in _other_rl()] or knobs
    if section:
        own = within([section], knobs)
        knobs = own if inside or own else [k for k in knobs if _section(k) not in stage_sections()]
    return knobs[0] if len(knobs) == 1 else ""


def exact_knobs(name: str, known: Iterable[str]) -> list[str]:
    """The knobs that have exactly the meaning of a dotted name of verl's or OpenRLHF's, by the end
    of theirs; none for another name, and for one that is read as a name of the tables above."""
    return ending(plain(name), known) if _is_exact(name) else []


def _is_exact(name: str) -> bool:
    use = _DOTTED.get(spelled(name))
    return isinstance(use, str) and use not in _ANSWERED


def alias_knobs(last: str, known: Iterable[str]) -> list[str]:
    """The knobs that a name without a section may stand for with exactly the same meaning."""
    if last not in ALIASES:
        return []
    knobs = ending(ALIASES[last][0], known)
    return [knob for knob in knobs if f"{_section(knob)}.{last}" not in CONVERSIONS]


def conversion(name: str, section: str = "") -> tuple[str, str] | None:
    """The entry of `CONVERSIONS` for a name in a section (its own, if it is dotted)."""
    name = plain(name)
    if isinstance(use := _DOTTED.get(name), tuple):
        return use
    inside, _, last = name.rpartition(".")
    return CONVERSIONS.get(f"{inside or section}.{last}") or CONVERSIONS.get(last)


def asks_nothing(name: str, value: Any, section: str = "") -> bool:
    """Whether another trainer's name asks, with this value, for nothing but what holds anyway: it
    is not set, or it switches off what is off here."""
    if value is None:
        return conversion(name, section) is not None
    is_off = _is_zero(value_meant(name, value)) or SWITCH.get(str(value).lower()) is False
    name = plain(name)
    return is_off and not OFF_ANYWAY.isdisjoint((name, name.rpartition(".")[2]))


def value_meant(name: str, value: Any) -> Any:
    """What a value of another trainer's name is here: 0 for a -1 that switches it off."""
    is_off = plain(name).rpartition(".")[2] in MINUS_ONE_IS_OFF and str(value) == "-1"
    return type(value)(0) if is_off else value


def _is_zero(value: Any) -> bool:
    """Whether it is a number that is 0, as a number or in words."""
    try:
        return float(value) == 0
    except (TypeError, ValueError, OverflowError):
        return False


def without_no(name: str, section: str = "") -> str:
    """A flag's name without the `no` before it, by which Hugging Face's flags are switched off,
    unless it is a part of the name (`no_cuda`)."""
    name = spelled(name)
    return name if conversion(name, section) else name.removeprefix("no_")


def section_meant(name: str, stage: str) -> str:
    """The section of a name that stands without one, for the command of a stage: the stage itself
    where `CONVERSIONS` has the name for that command."""
    return stage if f"{stage}.{plain(name)}" in CONVERSIONS else stage_of(stage).section


def conversion_advice(
    name: str, known: Iterable[str], sections: Sequence[str], spell: Callable[[str], str]
) -> list[str]:
    """Sentences that say which knobs to use instead; none if no conversion is known.

    Args:
        sections: the command's own; their knobs are preferred. With exactly one, the name's meaning
            is clear; otherwise there is a sentence for each section in which it differs.
        spell: a knob's name as the user writes it, as a key or as a flag.
    """
    name = plain(name)
    inside, _, last = name.rpartition(".")
    sections = [inside] if inside and name not in _DOTTED else sections
    if found := conversion(name, sections[0] if len(sections) == 1 else ""):
        ends, advice = found
        knobs = ending(ends, known)
        return (
            [f"Use {_spelled_out(ends, within(sections, knobs) or knobs, spell)}: {advice}."]
            if ends
            else [advice]
        )
    if len(sections) == 1:
        return []
    return [
        f"In {_section(dotted)} use {_spelled_out(ends, ending(ends, known), spell)}: {advice}."
        for dotted, (ends, advice) in CONVERSIONS.items()
        if dotted.endswith(f".{last}") and _section(dotted) in {*_default_sections(), *sections}
    ]


def _spelled_out(ends: str, knobs: Sequence[str], spell: Callable[[str], str]) -> str:
    """The knobs to use; all of them, or one, as their entry says."""
    return listed([spell(knob) for knob in knobs], _AND if _AND in ends.split() else "or")


def note_of(name: str, written: str, ours: str) -> str:
    """The note on a name that was read as a knob.

    Args:
        written, ours: the name and the knob's, as the user writes them: as keys, or as flags.
    """
    name = plain(name)
    if name in RENAMED:
        return f"{written} is now {ours}"
    _, remark = ALIASES.get(name.rpartition(".")[2], ("", ""))
    return f"{written} is read as {ours}" + (f" ({remark})" if remark else "")


def ending(ends: str, known: Iterable[str]) -> list[str]:
    """The knobs whose dotted name is or ends with one of `ends` (separated by spaces or `and`)."""
    wanted = [f".{end}" for end in ends.split() if end != _AND]
    return [knob for knob in known if any(f".{knob}".endswith(end) for end in wanted)]


def within(sections: Sequence[str], names: Sequence[str]) -> list[str]:
    """The knobs that are in one of the sections."""
    return [name for name in names if any(name.startswith(f"{part}.") for part in sections)]


def listed(names: Sequence[str], word: str = "or") -> str:
    """`a`, `a or b`, `a, b or c`."""
    return f" {word} ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else ""


def _section(knob: str) -> str:
    return knob.partition(".")[0]


def _converted_somewhere(last: str) -> bool:
    return any(f"{section}.{last}" in CONVERSIONS for section in _default_sections())


def _other_rl() -> frozenset[str]:
    """Sections of RL stages that do not run by default. A name without a section means the default
    RL stage's."""
    rl = {stage.section for stage in of_family(stage_names(), "rl")}
    return frozenset(rl - _default_sections())


def _default_sections() -> frozenset[str]:
    return frozenset(stage_of(name).section for name in DEFAULT)
