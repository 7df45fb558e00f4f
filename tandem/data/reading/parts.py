"""Which part of a data set a name asks for: `NAME@CONFIGURATION/SPLIT`.

Both are as on Hugging Face's hub: a configuration is a set of files that the data set's card
declares, or one of its folders; a split is for training, testing, and so on. Either may be missing:
`NAME@CONFIGURATION`, `NAME@/SPLIT`. What follows the last @ of a name is a part only if there is no
file or folder of the whole name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import yaml

from tandem.data.excerpt import excerpt
from tandem.data.reading import gym
from tandem.errors import ConfigError, DataError
from tandem.text import visible

ENDINGS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".txt", ".parquet")
"""Of the files that can be read, but for .gz."""
EMBEDDED = "embedded"
"""The name of the built-in data set."""
_HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}
"""Words in a file's name or folder that name its split, as for Hugging Face's hub."""
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Part:
    """A data set, or a part of one.

    base: the file, folder or hub name. config, split: "" where none is named; the configuration may
    be a folder's path. text: all of it, as written.
    """

    base: str
    config: str = ""
    split: str = ""
    text: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether neither is named."""
        return not (self.config or self.split)

    def with_config(self, config: str) -> str:
        """How to write another configuration, with the same split."""
        return f"{self.base}@{config}/{self.split}" if self.split else f"{self.base}@{config}"

    def with_split(self, split: str) -> str:
        """How to write another split, of the same configuration."""
        return f"{self.base}@{self.config}/{split}"


def part_of(path: str) -> Part:
    """Read `NAME@CONFIGURATION/SPLIT`; a path that exists, or whose beginning does not and is no
    hub name, is whole.

    Example: part_of("openai/gsm8k@main/test") has base "openai/gsm8k", config "main", split "test".
    Raises:
        ConfigError: nothing follows the @.
    """
    base, mark, tail = path.rpartition("@")
    is_path = not mark or path.startswith(gym.PREFIX) or format_of(Path(tail)) in ENDINGS
    if is_path or _exists(path) or not (_exists(base) or looks_like_hub_name(base)):
        return Part(path, text=path)
    config, slash, split = tail.rpartition("/")
    part = Part(base, config, split, path) if slash else Part(base, tail, "", path)
    if part.is_whole:
        raise ConfigError(
            f"data set {excerpt(path)} must name a configuration or a split behind the @; got "
            f"none. Write {visible(base)}@CONFIGURATION or {visible(base)}@/SPLIT."
        )
    return part


def looks_like_hub_name(text: str) -> bool:
    """Whether it can be a data set on the hub rather than a file's path."""
    return bool(_HUB_NAME.fullmatch(text)) and format_of(Path(text)) not in ENDINGS


def format_of(path: Path) -> str:
    """The ending that says how to read a file, in lower case, without .gz."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def declared(folder: Path) -> list[str]:
    """The configurations that the card of a folder, its README.md, declares."""
    try:
        text = (folder / "README.md").read_text("utf-8")
        head = re.match(r"---[ \t]*\r?\n(.*?)\r?\n---", text, re.DOTALL)
        card = yaml.safe_load(head[1]) if head else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return []
    configs = card.get("configs") if isinstance(card, dict) else None
    if not isinstance(configs, list):
        return []
    names = [c.get("config_name", "default") for c in configs if isinstance(c, dict)]
    return [name for name in names if isinstance(name, str)]


def split_of(file: Path) -> str:
    """The split that a file's name names, else its innermost folder's that does; "" for none or
    several."""
    for part in reversed(file.parts):
        # test.jsonl, test-00000-of-00002.parquet, test_prefs, squad_test; not unit_test_generation.
        words = re.split(r"[^a-z0-9]+", re.sub(r"(\.[a-z]+)+$", "", part.lower()))
        words = [word for word in words if not re.fullmatch(r"\d+|of", word)]
        if named := {_SPLITS[word] for word in (words[:1] + words[-1:]) if word in _SPLITS}:
            return named.pop() if len(named) == 1 else ""
    return ""


def of_split(files: Sequence[Path], split: str) -> tuple[list[Path], list[str]]:
    """The files, by their paths in the data set, that are of a split, and the splits that there
    are: train, test and validation under any of their names, others by a file's or folder's own."""
    exact: dict[str, list[Path]] = {}
    usual: dict[str, list[Path]] = {}
    for file in files:
        stem = re.sub(r"-\d+-of-\d+$", "", re.sub(r"(\.[A-Za-z]+)+$", "", file.name))
        for name in dict.fromkeys((stem, *file.parts[:-1])):
            exact.setdefault(name, []).append(file)
        usual.setdefault(split_of(file), []).append(file)
    usual.pop("", None)
    found = usual.get(_SPLITS.get(split.lower(), ""), []) or exact.get(split, [])
    more = [name for name, held in exact.items() if split_of(Path(name)) and name not in _SPLITS]
    return found, [*usual, *more]


def unknown(part: Part, what: str, given: str, known: Iterable[str]) -> DataError:
    """The error for a configuration or a split that a data set does not have.

    Args:
        what: "configuration" or "split". given: its name, "" where one must be named.
        known: those that there are.
    """
    names = list(dict.fromkeys(known))
    write = part.with_split if what == "split" else part.with_config
    near = get_close_matches(given, names, 1, cutoff=0.6)
    shown = ", ".join(map(visible, names[:_SHOWN])) + ", ..." * (len(names) > _SHOWN)
    shown = shown or "it has none"
    if near:
        advice = f"Did you mean {visible(write(near[0]))}?"
    elif names:
        advice = f"Write e.g. {visible(write(names[0]))}."
    else:
        advice = f"Write {visible(part.base)}, or give its files."
    why = ", since none is named train" if what == "split" and not given else ""
    return DataError(
        f"data set {visible(part.text)} must name one of its {what}s{why} ({shown}); got "
        f"{excerpt(given) if given else 'none'}. {advice}"
    )


def _exists(path: str) -> bool:
    try:
        return bool(path) and Path(path).expanduser().exists()
    except (RuntimeError, OSError, ValueError):  # refused where it is read
        return False
