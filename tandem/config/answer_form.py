"""The form that answers must have: JSON of a schema, a regular expression, a choice, a grammar.

Grammars are written as llguidance reads them: Lark's notation, with %json for schemas. The library
is an optional one, and imported only where a form is asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tandem.config.form_limits import parser_limits, too_costly, too_long
from tandem.config.form_trial import tried
from tandem.errors import ConfigError
from tandem.text import first_line

if TYPE_CHECKING:
    from tandem.config.schema import SamplingConfig

SPACE = r"[ ]?|\n[ ]{0,24}"
"""White space between the parts of JSON. Without a bound a weak model may write it for ever."""
_LONGEST_SHOWN = 200


class FormError(ValueError):
    """A form that cannot be; the text says what it must be and what was found.

    found: the latter; "" where a form of its kind cannot be at all.
    """

    def __init__(self, must: str, found: str = "") -> None:
        super().__init__(f"{must}; got {found}" if found else must)
        self.found = found


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What whole answers must be.

    kind: of `text`; lark is in Lark's notation and made by Tandem, grammar is a user's in the same,
    and written is one as it came, in Lark's or llama.cpp's, until `check` reads it.
    other: a form that answers may have instead.
    """

    kind: Literal["json_schema", "regex", "lark", "grammar", "written"]
    text: str
    other: AnswerForm | None = None

    @staticmethod
    def of_json(schema: Mapping[str, Any] | bool | None = None) -> AnswerForm:
        """JSON that satisfies a schema; any object if None."""
        if schema is None:
            schema = {"type": "object"}
        elif isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        return AnswerForm("json_schema", json.dumps(schema))

    @staticmethod
    def of_regex(pattern: str) -> AnswerForm:
        """Texts that a regular expression describes from end to end."""
        return AnswerForm("regex", pattern)

    @staticmethod
    def of_choice(texts: Sequence[str]) -> AnswerForm:
        """One of these texts."""
        return AnswerForm("lark", f"start: {' | '.join(map(quoted, texts))}")

    @staticmethod
    def of_grammar(text: str) -> AnswerForm:
        """A grammar in Lark's notation or llama.cpp's (GBNF), which `check` reads: that may take
        a quarter of a second."""
        return AnswerForm("written", text)

    def or_else(self, other: AnswerForm) -> AnswerForm:
        """Answers of either form."""
        mine = other if self.other is None else self.other.or_else(other)
        return replace(self, other=mine)

    def grammars(self, name: str) -> list[dict[str, Any]]:
        """llguidance's grammars of this form, of which the first has that name."""
        from llguidance import LLMatcher

        one: dict[str, Any] = {"lark_grammar": self.text}
        if self.kind == "regex":
            one = json.loads(LLMatcher.grammar_from_regex(self.text))["grammars"][0]
        elif self.kind == "json_schema":
            spaced: Any = {"whitespace_pattern": SPACE}
            made = LLMatcher.grammar_from_json_schema(self.text, defaults=spaced)
            one = json.loads(made)["grammars"][0]
        if self.other is None:
            return [{**one, "name": name}]
        parts = f"{name}_a", f"{name}_b"
        either = {"name": name, "lark_grammar": f"start: @{parts[0]} | @{parts[1]}"}
        return [either, {**one, "name": parts[0]}, *self.other.grammars(parts[1])]

    @property
    def limits(self) -> dict[str, Any]:
        """The limits of llguidance's parser, by name."""
        each, has_rules = self, self.kind == "grammar"
        while each.other is not None:
            each = each.other
            has_rules |= each.kind == "grammar"
        return parser_limits(has_rules=has_rules)

    def check(self, seconds: float | None = None) -> AnswerForm:
        """The form itself, a grammar in Lark's notation.

        Args:
            seconds: that its trial may take; None: as long as it must.
        Raises:
            FormError: its grammar cannot be read or followed, or the library is missing.
            SlowFormError: its trial took longer.
        """
        require_library()
        if self.kind == "written":
            return self._read().check(seconds)
        if found := too_costly(self.kind, self.text):
            raise FormError(f"be {self._kind} that can be followed in time", found)
        try:
            grammars = [{"lark_grammar": "start: @answer"}, *self.grammars("answer")]
        except ValueError as error:
            raise FormError(f"be {self._kind}", _short(error)) from None
        if said := tried(json.dumps({"grammars": grammars}), self.limits, seconds):
            raise FormError(f"be {self._kind} that can be followed", _short(said))
        return self

    def _read(self) -> AnswerForm:
        """The grammar in Lark's notation."""
        from llguidance.gbnf_to_lark import any_to_lark

        if found := too_long(self.text):
            raise FormError("be a grammar that can be followed in time", found)
        try:
            return replace(self, kind="grammar", text=any_to_lark(self.text))
        except Exception as error:  # of a parser that raises many
            raise FormError("be a grammar", f"what cannot be read: {_short(error)}") from None

    @property
    def _kind(self) -> str:
        names = {"json_schema": "a JSON Schema", "regex": "a regular expression"}
        return names.get(self.kind, "a grammar")


def quoted(text: str) -> str:
    """A text as a grammar's literal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def require_library() -> None:
    """
    Raises:
        FormError: llguidance is not installed.
    """
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        raise FormError(
            f"be left out where llguidance is not installed, which finds the tokens that a form "
            f"allows ({first_line(error)}). Install it: pip install 'tandem-rlhf[forms]'"
        ) from None


def form_of(sampling: SamplingConfig) -> AnswerForm | None:
    """The form that a run asks its answers for; None without.

    Raises:
        FormError: it cannot be read; the text begins with the knob.
    """
    return _form(sampling.json_schema, sampling.regex)


def forget_forms() -> None:
    """Let files of schemas be read again: a run keeps the text that it began with."""
    _form.cache_clear()


def schema_digest(sampling: SamplingConfig) -> str:
    """SHA-256 of the schema in the file that `json_schema` names; "" if it names none.

    Raises:
        ConfigError: the file cannot be read.
    """
    value = sampling.json_schema
    if not value or value.lstrip().startswith("{"):
        return ""
    try:
        return hashlib.sha256(json.dumps(_schema(value)).encode()).hexdigest()
    except FormError as error:
        raise ConfigError(f"sampling.json_schema must {error}") from None


@lru_cache(maxsize=16)
def _form(schema: str, pattern: str) -> AnswerForm | None:
    if not schema and not pattern:
        return None
    knob = "sampling.json_schema" if schema else "sampling.regex"
    try:
        form = AnswerForm.of_json(_schema(schema)) if schema else AnswerForm.of_regex(pattern)
        return form.check()
    except FormError as error:
        advice = ". Change it: docs/answer_forms.md has the limits" if error.found else ""
        raise FormError(f"{knob} must {error}{advice}") from None


def _schema(value: str) -> Any:
    """The schema that a knob has: as JSON text, or in a file."""
    text = value
    if not value.lstrip().startswith("{"):
        try:
            text = Path(value).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise FormError(
                "be a JSON Schema, or a file of one that can be read",
                f"{value[:200]!a}: {_short(error)}",
            ) from None
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormError("be a JSON Schema", f"what is not JSON: {_short(error)}") from None
    if not isinstance(schema, dict):
        raise FormError("be a JSON Schema, an object", f"{text.strip()[:60]!a}")
    return schema


def _short(error: object) -> str:
    """What a library says, in one line."""
    said = " ".join(str(error).split())
    return said if len(said) <= _LONGEST_SHOWN else said[: _LONGEST_SHOWN - 3] + "..."
