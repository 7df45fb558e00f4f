"""A chat template of the user's own, in place of the tokenizers' (`dataset.chat_template`).

It is a file, a folder with one, or one that comes with Tandem. A tokenizer is given it before
anything is rendered and is saved with it: nothing needs the file again. No torch: plans read it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.config.dataset import TOKENIZERS_OWN, DataConfig
from tandem.config.schema import RunConfig
from tandem.data.chat.default_template import (
    CHATML_TEMPLATE,
    CHATML_TOKENS,
    DEFAULT_TEMPLATE,
    PLAIN_TEMPLATE,
)
from tandem.data.chat.template_limits import sandbox
from tandem.data.excerpt import excerpt
from tandem.errors import ConfigError, ModelError
from tandem.files import file_near
from tandem.named_functions import name_and_options
from tandem.text import first_line, visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KNOB = "dataset.chat_template"
KEPT = "chat_template.jinja"
"""The copy in a run's folder: its models can be evaluated without the file."""
BUILT_IN = {"default": DEFAULT_TEMPLATE, "chatml": CHATML_TEMPLATE, "none": PLAIN_TEMPLATE}
_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
"""Where a folder may hold a template, the preferred place first."""
_GIVEN = frozenset("messages tools add_generation_prompt bos_token eos_token PREFIX".split())
"""Variables that are given to a template for each conversation."""
PROBES = ("yes", "hello", "a", "x", "1")
"""Texts of which every tokenizer has some."""


@dataclass(frozen=True, slots=True)
class OwnTemplate:
    """A template that `dataset.chat_template` names.

    name: for messages. source: the jinja template; "": each tokenizer's own. built_in: it comes
    with Tandem, and PREFIX in it stands for what a tokenizer puts before a text. variables: names
    and values that are set before it. advice: what to do where it cannot be used.
    """

    name: str
    source: str
    built_in: bool = False
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def advice(self) -> str:
        """What to do where it cannot be used."""
        if self.variables:
            return "Set others, or correct the template in a file of your own."
        return "Give a file of your own." if self.built_in else "Correct that file."

    def filled(self, before: str, own: str = "") -> str:
        """The template for a tokenizer that puts `before` before a text, and has its own."""
        source = self.source or own
        if self.built_in:
            source = source.replace("PREFIX", json.dumps(before))
        return setting(self.variables) + source


def read_template(value: str) -> OwnTemplate | None:
    """The template that a value of `dataset.own_template` stands for; None for "".

    Raises:
        ConfigError: there is no such file, it holds no template, or one that is not jinja or does
            not read the messages, or a variable that is set.
    """
    if not value:
        return None
    named, variables = in_parts(value)
    if named == TOKENIZERS_OWN:
        return OwnTemplate(f"chat template {visible(value)}", "", variables=variables)
    if named in BUILT_IN:
        name = f"chat template {named}"
        if problem := _not_read(name, BUILT_IN[named], dict(variables)):
            raise ConfigError(problem)
        return OwnTemplate(name, BUILT_IN[named], built_in=True)
    path = _existing(named)
    source, file = _text_in(path)
    name = f"chat template {visible(str(file))}"
    if problem := _problem(source):
        raise ConfigError(f"{name} must be a Jinja template of `messages`; got {problem}.")
    if problem := _not_read(name, source, dict(variables)):
        raise ConfigError(problem)
    return OwnTemplate(name, source, variables=variables)


def in_parts(value: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """What stands before `?variable=value&...`, and the variables with values as jinja has them:
    true, false, none, numbers, and any other text.

    Raises:
        ConfigError: something else is behind the question mark.
    """
    if "?" not in value or "{" in value or _exists(value):
        return value, ()
    problem = f"{KNOB} must have variables as ?name=value&name=value; got {excerpt(value, 200)}"
    named, options = name_and_options(value, problem)
    if problem := _not_left_open(options):
        advice = f"Write e.g. {TOKENIZERS_OWN}?enable_thinking=false."
        raise ConfigError(f"{KNOB} {problem}. {advice}")
    return named, tuple((name, _literal(text)) for name, text in options.items())


def given_variables(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Variables from JSON, with values as jinja has them.

    Raises:
        ConfigError: a name or a value that none can have; the text begins with "must".
    """
    if problem := _not_left_open(values):
        raise ConfigError(f"{problem}.")
    found = []
    for name, value in values.items():
        if isinstance(value, dict | list):
            raise ConfigError(
                f"must set variables to true, false, null, numbers or texts; got {name}: "
                f"{excerpt(json.dumps(value))}."
            )
        found.append((name, "none" if value is None else _jinja(value)))
    return tuple(found)


def _not_left_open(names: Iterable[str]) -> str:
    """What is wrong with the names of variables; "" if nothing is."""
    wrong = next((name for name in names if not name.isidentifier() or name in _GIVEN), None)
    if wrong is None:
        return ""
    return f"must set variables that a template leaves to its caller; got {excerpt(wrong)}"


def setting(variables: Sequence[tuple[str, str]]) -> str:
    """Jinja that sets variables, and writes nothing."""
    if not variables:
        return ""
    # What stands last is no block, behind which jinja would drop a line break.
    return "".join(f"{{% set {name} = {value} %}}" for name, value in variables) + "{{ '' }}"


_ONE = re.compile(r'\{% set (\w+) = ("(?:[^"\\]|\\.)*"|[\w.+-]+) %\}')
_SETTING = re.compile(rf"(?:{_ONE.pattern})+\{{\{{ '' \}}\}}")


def _literal(text: str) -> str:
    plain = text.lower()
    if plain in ("true", "false", "none", "null"):
        return plain.replace("null", "none")
    try:
        number = int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return _jinja(text)
    return _jinja(number if isfinite(number) else text)


def _jinja(value: float | str) -> str:
    """A boolean, a number or a text in jinja, which reads JSON's but for escapes of two units."""
    return json.dumps(value, ensure_ascii=False)


def _not_read(name: str, source: str, variables: Iterable[str]) -> str:
    """The message of a template that does not read one of the variables that are set; "" if it
    reads all."""
    read = _variables_of(source)
    variable = next((each for each in variables if each not in read), None)
    if variable is None:
        return ""
    known = sorted(read - _GIVEN)
    near = get_close_matches(variable, known, 1)
    advice = f"Did you mean {near[0]}?" if near else "Remove it."
    reads = ", ".join(known) if known else "none"
    return (
        f"{name} must read the variables that are set; got {variable}, it reads {reads}. {advice}"
    )


def _variables_of(source: str) -> set[str]:
    """What a template leaves to its caller."""
    from jinja2 import meta

    return meta.find_undeclared_variables(sandbox().parse(source))


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
        ModelError: it has no tokens for ChatML, or no template that reads the variables.
    """
    if own is None or (unless_its_own and tokenizer.chat_template):
        return None
    if not own.source:
        own = _with_variables(tokenizer, own)
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


def _with_variables(tokenizer: PreTrainedTokenizerBase, own: OwnTemplate) -> OwnTemplate:
    """The tokenizer's own template with variables set."""
    source = tokenizer.get_chat_template() if tokenizer.chat_template else DEFAULT_TEMPLATE
    name = f"{own.name} of {tokenizer.name_or_path!r}"
    variables = dict(own.variables)
    if begun := _SETTING.match(source):  # it is a run's model, saved with some
        variables = dict(_ONE.findall(begun[0])) | variables
        source = source[begun.end() :]
    problem = ""
    with suppress(Exception):  # no jinja: its renderer says what is wrong
        problem = _not_read(name, source, variables)
    if problem:
        raise ModelError(problem)
    return replace(own, name=name, source=source, variables=tuple(variables.items()))


def digest_of(own: OwnTemplate | None) -> str:
    """SHA-256 of a template with what is set before it; "" for none."""
    if own is None:
        return ""
    return hashlib.sha256((setting(own.variables) + own.source).encode()).hexdigest()


def kept_with(config: DataConfig, run: Path) -> DataConfig:
    """The same with the copy in a run's folder, if that has one, in place of the file."""
    named, mark, variables = config.own_template.partition("?")
    kept = run / KEPT
    if named in ("", TOKENIZERS_OWN, *BUILT_IN) or not kept.is_file():
        return config
    return replace(config, chat_template=f"{kept}{mark}{variables}")


def with_kept_template(config: RunConfig, run: Path) -> RunConfig:
    """A run's configuration with the copy in its folder in place of the file, as `kept_with`."""
    return replace(config, dataset=kept_with(config.dataset, run))


def is_gone(value: str) -> bool:
    """Whether a value of `dataset.own_template` is a file or folder that does not exist."""
    named = value.partition("?")[0]
    return named not in (TOKENIZERS_OWN, *BUILT_IN) and not (_exists(value) or _exists(named))


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # a name too long, or with NUL
        return False


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
    return file_near(path)


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
