"""Flags on top of a configuration: `--section.knob value` for every knob, short names for some.

The knobs are read off the schema, so there is no second list of them to maintain.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import textwrap
import typing
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.config.idle_flags import idle_lines
from tandem.config.knob_facts import knob_docs, knob_types, value_word
from tandem.config.load import (
    build,
    check_config,
    config_knobs,
    plain_values,
    range_problems,
    read_named,
    set_knob,
    show_note,
    without_presets,
)
from tandem.config.nearest import SHORT_NAMES, advice, empty_list, file_hint
from tandem.config.pages import flag_lines
from tandem.config.schema import RunConfig
from tandem.config.spellings import (
    SWITCH,
    asks_nothing,
    conversion,
    dashed,
    knob_meant,
    listed,
    note_of,
    plain,
    value_meant,
    without_no,
)
from tandem.config.stages import (
    DEFAULT,
    defaults_of,
    of_family,
    rl_stage,
    sections,
    stage_names,
    stage_of,
)
from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Reader:
    """A command that trains nothing and reads some knobs of a run.

    stage: the one whose section it reads. reads: whether it reads a knob, by its dotted name.
    shorts: its own short flags, by knob. start: what flags are applied to, instead of --config.
    """

    stage: str
    reads: Callable[[str], bool]
    shorts: Mapping[str, str]
    start: RunConfig


def parse_run_flags(
    argv: Sequence[str],
    command: str,
    *,
    wrong: Sequence[str] = (),
    note: Callable[[str], None] = show_note,
    reader: Reader | None = None,
    program: str = "",
) -> RunConfig:
    """The configuration from flags, over `--config FILE`, over the defaults.

    Args:
        command: `train`, or the name of a single stage, which then is the run's only one.
        wrong: problems with the rest of the command line, to be reported together with these.
        note: gets one line on names that were read as others (earlier ones, other trainers').
        reader: what the command reads, if it is neither.
        program: the command that was typed, if it is another one that takes `command`'s flags.
    Raises:
        ConfigError: all unknown flags (with the nearest ones), wrong types and ranges in flags and
            file at once; if there are none, what is wrong between knobs.
    """
    hints = knob_types()
    line = _CommandLine(command, argv, reader=reader, program=program)
    stages = [command if reader is None else reader.stage]
    own = "" if command == "train" else stages[0]
    config, values, notes, in_file = read_named(line.given.get("config"), own)
    if reader is not None:
        config, values = reader.start, plain_values(reader.start)
    if command == "train":
        stages = _read(line.given.get("stages", config.stages), hints["stages"])
        if (section := rl_stage(stages).section) != rl_stage(DEFAULT).section:
            line = _CommandLine(command, argv, section, program=program)
    given = {name: value for name, value in line.given.items() if name != "config"}
    problems = [*wrong, *line.problems, *_without_a_reader(line.undotted, stages), *in_file]
    if reader is not None:
        unread = [name for name in line.given if not reader.reads(name)]
        problems += [f"{_flag(name)} is not read by tandem {command}. Remove it" for name in unread]
    values = without_presets(plain_values(config), values)
    for name, value in given.items():
        set_knob(values, name, _read(value, hints[name]))
    if command != "train":
        if "stages" in given and reader is None:
            problems.append(
                f"--stages must go with tandem train; tandem {command} runs {command} alone"
            )
        values["stages"] = stages
    config, mistakes = build(values)
    problems += mistakes
    idle = idle_lines(given, stages, config) if reader is None and not problems else []
    if notes := [*line.notes, *notes, *idle]:
        note("; ".join(notes))
    if problems:
        problems += range_problems(config)
        raise ConfigError("; ".join(problem.rstrip(".") for problem in problems))
    check_config(config)
    return config


def with_flags(argv: Sequence[str], command: str, flags: Sequence[str]) -> list[str]:
    """A run's command line with further flags, in place of those that set the same knobs."""
    newer = _CommandLine(command, flags).given
    parts = _CommandLine(command, argv).parts
    return [*(word for name, words in parts if name not in newer for word in words), *flags]


def unknown_flags(argv: Sequence[str]) -> list[str]:
    """Those of a command line's words that set no knob of a run."""
    return [words[0] for name, words in _CommandLine("train", argv).parts if not name]


def _without_a_reader(undotted: Mapping[str, str], stages: Sequence[str]) -> list[str]:
    """Complaints about flags without a section that would set an RL stage's knob, where that stage
    does not run: nothing would come of them.

    Args:
        undotted: the flag as written, to the knob that it sets.
    """
    of_rl = {stage.section for stage in of_family(stage_names(), "rl")}
    running = {stage.section for stage in of_family(stages, "rl")}
    problems = []
    for flag, knob in undotted.items():
        section = knob.partition(".")[0]
        if section in of_rl - running and set(stages) <= set(stage_names()):
            rl = of_family(stage_names(), "rl")
            owners = [s.name for s in rl if s.section == section and s.reads(knob)]
            problems.append(
                f"{flag} must go with a stage that reads {knob} ({listed(owners)}); got stages "
                f"{', '.join(stages)}. Remove it, or add that stage"
            )
    return problems


def help_page(command: str, summary: str, *, everything: bool) -> str:
    """Help for `tandem COMMAND`: the common knobs of its stages, or every one by section."""
    usage = f"usage: tandem {command} [--config FILE.yaml] [flags]"
    lines = [usage, "", *textwrap.wrap(summary, 79), ""]
    docs = knob_docs()
    shorts = short_flags("" if command == "train" else stage_of(command).section)
    section = None
    for name, knob in config_knobs():
        if not everything and not _is_common(name, knob, command):
            continue
        if everything and name.rpartition(".")[0] != section:
            section = name.rpartition(".")[0]
            lines += ["", f"{section or 'run'}:"]
        flag = _flag(name) if everything else shorts.get(name, _flag(name))
        about = docs[name] if everything else _in_short(docs[name])
        default = defaults_of([command]).get(name, knob.default)
        lines += flag_lines(f"{flag} {value_word(name)}".rstrip(), about, show_value(default))
    if everything:
        return "\n".join(lines)
    lines += ["", f"All flags: tandem {command} --help-all. Each is also a key of --config."]
    lines += ["Hugging Face's and TRL's names are accepted where they mean the same."]
    if command == "train":
        pages = ", ".join(f"tandem {name} --help" for name in stage_names())
        about = f"Learning rates, batch sizes and epochs: {pages}; the same flags work here."
        lines += textwrap.wrap(about, 79)
        example = "Example: tandem train --actor-model MODEL --data prefs.jsonl --stages sft dpo"
        lines += ["", example]
    return "\n".join(lines)


def _in_short(doc: str) -> str:
    """A knob's first sentence, and the one that says what its default stands for, if one does."""
    first, *others = doc.split(". ")
    meant = [sentence for sentence in others if sentence.startswith(("0: ", "Empty: "))]
    return ". ".join([first, *meant]).rstrip(".") + "."


def _is_common(name: str, knob: dataclasses.Field[Any], command: str) -> bool:
    """Whether a knob is on a command's first help page: it is common there, and is read there."""
    section, common = name.split(".")[0], knob.metadata["common"]
    if command == "train":  # the stages that it runs by default; others have pages of their own
        shown = {stage_of(name).section for name in DEFAULT}
        return command in common and (section in shown or section not in sections())
    stage = stage_of(command)
    return stage.reads(name) and not stage.commons.isdisjoint(common)


def show_value(value: Any) -> str:
    """A value as one would write it on the command line."""
    if isinstance(value, tuple):
        return " ".join(show_value(item) for item in value) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if value != "" else "none"


class _CommandLine:
    """The flags of a run command, read. It collects every mistake and names the nearest flag.

    given: the flags' texts by dotted knob: a list for a tuple, else one text. notes: one on each
    that had another name. problems: what is wrong. undotted: flags without a section, as written,
    to the knobs that they set. parts: all words in their order, each flag with its values, behind
    its knob ("": none).

    Args:
        rl: the section whose knobs short flags set; empty: the command's, or the default's.
        reader, program: as for `parse_run_flags`.
    """

    def __init__(
        self, command: str, argv: Sequence[str], rl: str = "", *, reader: Reader | None = None,
        program: str = "",
    ) -> None:  # fmt: skip
        self.given: dict[str, Any] = {}
        self.notes: list[str] = []
        self.problems: list[str] = []
        self.undotted: dict[str, str] = {}
        self.parts: list[tuple[str, list[str]]] = []
        self._command, self._program = command, program or command
        self._rl = rl
        stage = command if reader is None else reader.stage
        self._stage = "" if stage == "train" else stage
        self._section = stage_of(stage).section if self._stage else ""
        self._read_knobs = [n for n in knob_types() if reader is None or reader.reads(n)]
        self._help = "--help-all" if reader is None else "--help"
        self._shorts = short_flags(rl or self._section) | dict(reader.shorts if reader else {})
        self._flags = {"--config": "config"}
        for name in knob_types():
            self._flags |= {_flag(name): name, self._shorts.get(name, _flag(name)): name}
        self._read(argv)

    def _read(self, argv: Sequence[str]) -> None:
        words = deque(argv)
        while words:
            word = words.popleft()
            if not word.startswith("-"):
                self.parts.append(("", [word]))
                self.problems.append(self._stray(word))
                continue
            flag, equals, value = word.partition("=")
            values = [value] if equals else []
            name, negated = self._knob(flag)
            if name and "." not in plain(flag.lstrip("-")):
                self.undotted[flag] = name
            is_list = typing.get_origin(knob_types().get(name)) is tuple
            while words and not equals and _is_value(words[0]):
                if values and not is_list and (name or "=" in words[0]):
                    break
                values.append(words.popleft())
            self.parts.append((name, [word, *values] if not equals else [word]))
            if name in self.given:
                self.problems.append(self._again(name, flag, values if is_list else []))
            if not name:
                self.problems += self._unknown(flag, values)
            elif is_list and not values:
                self.given.pop(name, None)
                self.problems.append(empty_list(_flag(name), knob_types()[name]))
            elif is_list:
                self.given[name] = values
            elif knob_types().get(name) is bool:
                off = " ".join([flag, *values]) if values else "off"  # the former is refused
                self.given[name] = off if negated else (values or ["on"])[0]
            elif values:
                is_ours = dashed(flag) in self._flags
                self.given[name] = values[0] if is_ours else value_meant(flag[2:], values[0])
            else:
                self.given.pop(name, None)
                self.problems.append(f"{_flag(name)} must have a value; got none")

    def _knob(self, flag: str) -> tuple[str, bool]:
        """The knob that a flag sets and whether it is `--no-knob`; "" for an unknown flag."""
        ours = dashed(flag)
        if ours in self._flags:
            return self._flags[ours], False
        negated = ours.startswith("--no-")
        name = ours.removeprefix("--no-" if negated else "--")
        knob = self._flags.get(f"--{name}", "")
        is_alias = not knob
        knob = knob or self._meant(name)
        if not knob or (negated and knob_types().get(knob) is not bool):
            return "", negated
        if is_alias:
            self.notes.append(note_of(name, flag, f"--{'no-' * negated}{dashed(knob)}"))
        return knob, negated

    def _meant(self, name: str) -> str:
        """The knob that another trainer's name means here: the RL stage's that runs, not that of
        the default one."""
        knob = knob_meant(name, knob_types(), self._section)
        of_default = knob.startswith(f"{rl_stage(DEFAULT).section}.")
        if self._rl and of_default and "." not in plain(name):
            return knob_meant(name, knob_types(), self._rl)
        return knob

    def _again(self, name: str, flag: str, values: Sequence[str]) -> str:
        """What is wrong with a flag whose knob was given before; `values` of a list."""
        same = "" if flag == _flag(name) else f" ({_flag(name)})"
        problem = f"{flag}{same} must be given once; got it twice. "
        if not values:
            return f"{problem}Remove one"
        both = shlex.join([*self.given[name], *values])
        return f"{problem}A list takes all its values behind one: {flag} {both}"

    def _stray(self, word: str) -> str:
        """What is wrong with a word that no flag takes, such as verl's `data.train_files=F`."""
        name, equals, value = word.partition("=")
        hint = file_hint(word)
        if equals:
            is_off = asks_nothing(name, value, self._section)
            is_known = is_off or f"--{dashed(name)}" in self._flags or self._meant(name)
            hint = f"Write --{word}" if is_known else self._hint(f"--{name}")
        return f"{word!r} belongs to no flag. {hint}".rstrip(" .")

    def _unknown(self, flag: str, values: Sequence[str]) -> list[str]:
        """What is wrong with an unknown flag: nothing if it switches off what is off anyway."""
        name = without_no(flag.lstrip("-"), self._section)
        if len(name) < len(flag.lstrip("-")):  # --no-fp16 False does not say which is meant
            values = ["" if values else "off"]
        if asks_nothing(name, " ".join(values), self._section):
            return []
        own = f"tandem {self._program} --help, or " * (self._program != self._command)
        hint = self._hint(flag) or f"See {own}tandem {self._command} {self._help}."
        return [f"{flag} is not a flag of tandem {self._program}. {hint}"]

    def _hint(self, flag: str) -> str:
        """What to write instead of an unknown flag; empty if nothing is close."""
        name = without_no(flag.lstrip("-"), self._section)
        own = [self._stage] if self._stage else [*DEFAULT]
        if self._rl:  # in place of the default one
            rest = [stage for stage in own if stage != rl_stage(DEFAULT).name]
            own = [self._rl] if conversion(name, self._rl) else [*rest, self._rl]
        spell = _flag if "." in flag else lambda name: self._shorts.get(name, _flag(name))
        return advice(name, self._read_knobs, own, spell)


def _is_value(word: str) -> bool:
    """Whether a word can be a flag's value: it is no flag, but may be a negative number."""
    return not word.startswith("-") or bool(re.fullmatch(r"-\.?\d.*|-", word))


def _read(value: Any, hint: Any) -> Any:
    """A flag's text as YAML would have read it; anything else stays text, to be refused."""
    if hint is bool:
        return SWITCH.get(value.lower(), value)
    if typing.get_origin(hint) is tuple:
        item_hint = typing.get_args(hint)[0]
        if value == [""]:
            return []
        if item_hint is not str:  # 2,4,4 is as good as 2 4 4; a path may hold a comma
            value = [word for words in value for word in words.split(",") if word]
        return [_read(word, item_hint) for word in value]
    if typing.get_origin(hint) is Literal:
        return next((option for option in typing.get_args(hint) if str(option) == value), value)
    try:
        return int(value) if hint is int else value
    except ValueError:
        return value


def _flag(name: str) -> str:
    return f"--{dashed(name)}"


def short_flags(section: str) -> dict[str, str]:
    """Dotted knob -> short flag in a command whose own section is `section`. A knob of the same
    name in that section takes the short flag of another stage's, such as --kl-coef in `tandem
    grpo`."""
    shorts = dict(SHORT_NAMES)
    for knob, text in SHORT_NAMES.items():
        other, _, last = knob.partition(".")
        own = f"{section}.{last}"
        if other != section and other in sections() and own in knob_types():
            del shorts[knob]
            shorts[own] = text.replace(f"{other}-", f"{section}-")
    return {knob: f"--{text}" for knob, text in shorts.items()}
