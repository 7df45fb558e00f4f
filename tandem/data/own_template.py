"""A chat template of the user's own, in place of the tokenizers' (`dataset.chat_template`).

It is a file, a folder with one, or one that comes with Tandem. A tokenizer is given it before
anything is rendered and is saved with it: nothing needs the file again. No torch: plans read it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.config.dataset import TOKENIZERS_OWN, DataConfig
from tandem.config.schema import RunConfig
from tandem.data.default_template import (
    CHATML_TEMPLATE,
    CHATML_TOKENS,
    DEFAULT_TEMPLATE,
    PLAIN_TEMPLATE,
)
from tandem.data.excerpt import excerpt
from tandem.data.template_limits import sandbox
from tandem.errors import ConfigError, ModelError
from tandem.text import first_line, visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KNOB = "dataset.chat_template"
KEPT = "chat_template.jinja"
"""The copy in a run's folder: its models can be evaluated without the file."""
BUILT_IN = {"default": DEFAULT_TEMPLATE, "chatml": CHATML_TEMPLATE, "none": PLAIN_TEMPLATE}
_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
"""Where a folder may hold a template, the preferred place first."""
PROBES = ("yes", "hello", "a", "x", "1")
"""Texts of which every tokenizer has some."""


@dataclass(frozen=True, slots=True)
class OwnTemplate:
    """A template that `dataset.chat_template` names.

    name: for messages. source: the jinja template. built_in: it comes with Tandem, and PREFIX in it
    stands for what a tokenizer puts before a text. advice: what to do where it cannot be used.
    """

    name: str
    source: str
    built_in: bool = False

    @property
    def advice(self) -> str:
        """What to do where it cannot be used."""
        return "Give a file of your own." if self.built_in else "Correct that file."

    def filled(self, before: str) -> str:
        """The template for a tokenizer that puts `before` before a text."""
        return self.source.replace("PREFIX", json.dumps(before)) if self.built_in else self.source


def read_template(value: str) -> OwnTemplate | None:
    """The template that a value of `dataset.own_template` stands for; None for "".

    Raises:
        ConfigError: there is no such file, it holds no template, or one that is not jinja or does
            not read the messages.
    """
    if not value:
        return None
    if value in BUILT_IN:
        return OwnTemplate(f"chat template {value}", BUILT_IN[value], built_in=True)
    path = _existing(value)
    source, file = _text_in(path)
    name = f"chat template {visible(str(file))}"
    if problem := _problem(source):
        raise ConfigError(f"{name} must be a Jinja template of `messages`; got {problem}.")
    return OwnTemplate(name, source)


def put_template(
    tokenizer: PreTrainedTokenizerBase, own: OwnTemplate | None, *, unless_its_own: bool = False
) -> OwnTemplate | None:
    """Give a tokenizer the template, in place; nothing happens without one.

    Args:
        unless_its_own: leave a tokenizer that has a template alone: a finished reward model scores
            what it was trained on.
    Returns:
        the template that it was given, if it was.
    Raises:
        ModelError: it has no tokens for ChatML.
    """
    if own is None or (unless_its_own and tokenizer.chat_template):
        return None
    if own.source == BUILT_IN["chatml"]:
        lacking = [token for token in CHATML_TOKENS if token not in tokenizer.get_vocab()]
        if lacking:
            raise ModelError(
                f"{own.name} must go with a tokenizer that has the tokens "
                f"{' and '.join(CHATML_TOKENS)}; got {tokenizer.name_or_path!r}, which lacks "
                f"{lacking[0]}. Use {KNOB} default."
            )
    tokenizer.chat_template = own.filled(text_before(tokenizer)[1])
    return own


def digest_of(own: OwnTemplate | None) -> str:
    """SHA-256 of a template; "" for none."""
    return hashlib.sha256(own.source.encode()).hexdigest() if own else ""


def kept_with(config: DataConfig, run: Path) -> DataConfig:
    """The same with the copy in a run's folder, if that has one, in place of the file."""
    value = config.own_template
    kept = run / KEPT
    if not value or value in BUILT_IN or not kept.is_file():
        return config
    return replace(config, chat_template=str(kept))


def with_kept_template(config: RunConfig, run: Path) -> RunConfig:
    """A run's configuration with the copy in its folder in place of the file, as `kept_with`."""
    return replace(config, dataset=kept_with(config.dataset, run))


def is_gone(value: str) -> bool:
    """Whether a value of `dataset.own_template` is a file or folder that does not exist."""
    try:
        return value not in BUILT_IN and not Path(value).exists()
    except (OSError, ValueError):  # a name too long, or with NUL
        return True


def text_before(tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], str]:
    """Ids that the tokenizer puts before every text (its BOS, or none), and their text."""
    for probe in PROBES:
        plain = tokenizer.encode(probe, add_special_tokens=False)
        whole = tokenizer.encode(probe)
        if plain:
            n = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
            return tuple(whole[:n]), "".join(tokenizer.convert_ids_to_tokens(whole[:n]))
    return (), ""


def template_in(folder: Path, settings: Mapping[str, Any]) -> str:
    """The template of the tokenizer in a folder; "" if it has none.

    Args:
        settings: what its tokenizer_config.json says.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8-sig", errors="replace")
    return _template_of(settings)


def settings_in(file: Path) -> Mapping[str, Any]:
    """A JSON file's object; empty if there is none."""
    try:
        found = json.loads(file.read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _template_of(settings: Mapping[str, Any]) -> str:
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        default = [e for e in template if isinstance(e, dict) and e.get("name") == "default"]
        template = default[-1].get("template") if default else None
    return template if isinstance(template, str) else ""


def _existing(value: str) -> Path:
    path = Path(value)
    try:
        if path.exists():
            return path
        is_link = path.is_symlink()
    except (OSError, ValueError):  # a name too long, or with NUL
        is_link = False
    if is_link:
        advice = "It is a link to a file that is not there."
    elif "{{" in value or "{%" in value:
        advice = "Write the template to a file, and give that."
    elif near := _nearest(path, value):
        advice = f"Did you mean {visible(near)}?"
    elif path.suffix or "/" in value:
        advice = "Check the path."
    else:
        advice = "Save that template as a file, and give it."
    raise ConfigError(
        f"{KNOB} must be a file with a Jinja template, a folder with one, {TOKENIZERS_OWN}, "
        f"{', '.join(BUILT_IN)}; got {excerpt(value, 200)}, which does not exist. {advice}"
    )


def _nearest(path: Path, value: str) -> str:
    if near := get_close_matches(value.lower(), [TOKENIZERS_OWN, *BUILT_IN], 1, cutoff=0.75):
        return near[0]
    try:
        here = [found.name for found in path.parent.iterdir()]
    except (OSError, ValueError):
        return ""
    near = get_close_matches(path.name, here, 1, cutoff=0.8)
    return str(path.parent / near[0]) if near else ""


def _text_in(path: Path) -> tuple[str, Path]:
    """The template that a file or a folder holds, and the file that it is in."""
    if path.is_dir():
        for name in _FILES:
            file = path / name
            if file.is_file() and (file.suffix == ".jinja" or _template_of(settings_in(file))):
                return _text_in(file)
        raise ConfigError(
            f"{KNOB} {visible(str(path))} must be a folder with a template in {_FILES[0]}, "
            f"{_FILES[1]} or {_FILES[2]}; got none. Give the file."
        )
    try:
        if not path.is_file():
            raise ValueError("no plain file")
        text = path.read_text("utf-8-sig")  # a mark at its beginning is no part of it
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or first_line(error)
        raise ConfigError(
            f"{KNOB} {visible(str(path))} must be a text file in UTF-8; got {visible(cause)}. "
            "Give a file with a Jinja template."
        ) from None
    if path.suffix == ".json":
        text = _template_of(settings_in(path))
        if not text:
            raise ConfigError(
                f"{KNOB} {visible(str(path))} must be a JSON object with a text chat_template; "
                "got none. Give a file with a Jinja template."
            )
    return text, path


def _problem(source: str) -> str:
    """What is wrong with a template that nothing was rendered by yet; "" if nothing is."""
    from jinja2 import TemplateSyntaxError, meta

    if not source.strip():
        return "an empty one"
    try:
        parsed = sandbox().parse(source)
        variables = meta.find_undeclared_variables(parsed)
    except TemplateSyntaxError as error:
        return f"{excerpt(error.message or 'a syntax error', 200)} in line {error.lineno}"
    except Exception as error:  # nested too deeply to be parsed
        return f"{type(error).__name__}: {excerpt(first_line(error))}"
    return "" if "messages" in variables else "one that does not read them"
