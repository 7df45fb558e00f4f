"""The form that a request asks answers to have: JSON, a grammar, or calls of tools.

The fields are OpenAI's and those of vLLM, SGLang, llama.cpp and TGI that mean the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tandem.config.answer_form import AnswerForm, FormError
from tandem.data.render import Renderer
from tandem.errors import GenerationError, TandemError
from tandem.generation.constrained import Constraint, constrainer_of
from tandem.serve import fields, unsupported
from tandem.serve.api_errors import ApiError
from tandem.serve.schemas import Json, flag, maybe, object_of

_MOST_CHOICES = 1000


@dataclass(frozen=True, slots=True)
class Wish:
    """What form answers must have.

    form: of their words; None: any. name: the field that asks for it. calls: whether they must be
    calls of tools. function: the one to call; "" for any. one: one call alone.
    """

    form: AnswerForm | None = None
    name: str = ""
    calls: bool = False
    function: str = ""
    one: bool = False


NO_WISH = Wish()


def read_wish(body: Mapping[str, Any]) -> Wish:
    """The form of words that a request asks for.

    Raises:
        ApiError: a field is wrong, or several ask for one.
    """
    found = [(name, form) for name in unsupported.FORMS if (form := _read(body, name))]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found[:2])
        raise ApiError(f"an answer can have one form; got {names}. Remove one.", found[1][0])
    for name, form in found:
        return Wish(form, name)
    return NO_WISH


def read_choice(body: Mapping[str, Any], tools: str, wish: Wish) -> Wish:
    """The wish with what `tool_choice` asks for beside it.

    Args:
        tools: that the request lists, as JSON text.
    Raises:
        ApiError: it is wrong, or names a function that is not listed.
    """
    one = fields.boolean(body, "parallel_tool_calls", default=True) is False
    choice, name = body.get("tool_choice"), "tool_choice"
    if choice in (None, "none", "auto"):
        if one and tools:
            raise unsupported.unsupported("parallel_tool_calls", False)
        return wish
    function: Any = ""
    if isinstance(choice, dict) and choice.get("type") == "function":
        named = choice.get("function", choice)
        function = named.get("name") if isinstance(named, dict) else None
        if not isinstance(function, str) or not function:
            raise fields.wrong(f"{name}.function", 'be {"name": ...}', named)
    elif choice not in ("required", "any"):
        raise unsupported.unsupported(name, choice)
    listed = [tool.get("function", {}).get("name") for tool in json.loads(tools or "[]")]
    if not listed:
        raise fields.wrong(name, "come with tools", choice)
    if function and function not in listed:
        known = ", ".join(map(str, listed))[:200]
        raise fields.wrong(name, f"name one of the tools, {known}", function)
    return Wish(wish.form, name, True, function, one)


def constraint_of(
    renderer: Renderer,
    wish: Wish,
    prompt: Sequence[int],
    *,
    tools: str = "",
    begun: Sequence[int] = (),
    is_chat: bool = True,
    seconds: float | None = None,
) -> Constraint | None:
    """What keeps an answer to a prompt in the form that is asked for; None if none is. It may take
    seconds, once for each tokenizer and each form.

    Args:
        prompt: token ids. tools: that are listed, as JSON text. begun: what the answer begins
            with, behind the prompt.
        is_chat: a turn of the assistant's is asked for, and not the prompt's continuation.
        seconds: that the trial of a form may take; None: as long as it must.
    Raises:
        SlowFormError: it took longer.
        ApiError: the form cannot be followed, or not be tried.
    """
    try:
        if wish.form is None and not wish.calls:
            return None
        form = wish.form.check(seconds) if wish.form is not None else None
        constrainer = constrainer_of(renderer)
        calls = constrainer.calls(tools, wish.function, one=wish.one)
        if calls is not None:
            form = calls if wish.calls or form is None else form.or_else(calls)
            form = _checked_tools(form, seconds)
        elif wish.calls or form is None:
            _no_calls(wish)
        return constrainer.answer(form, prompt, begun) if is_chat else constrainer.text(form)
    except FormError as error:
        raise ApiError(f"{wish.name} must {error}.", wish.name) from None
    except GenerationError as error:
        raise ApiError(f"{wish.name}: {error}", wish.name) from None
    except ApiError:
        raise
    except TandemError as error:
        raise ApiError(str(error), status=500) from None


def _checked_tools(form: AnswerForm, seconds: float | None) -> AnswerForm:
    """The form, of which calls of tools are a part."""
    try:
        return form.check(seconds)
    except FormError as error:
        if not error.found:
            raise
        raise ApiError(
            f"tools must have schemas that can be followed; got {error.found}.", "tools"
        ) from None


def _no_calls(wish: Wish) -> NoReturn:
    raise ApiError(
        "tool_choice must be auto with this model, whose chat template does not show how calls are "
        f"written; got {wish.function or 'required'}.",
        "tool_choice",
    )


def described() -> Json:
    """The fields as JSON Schema, by name."""
    text: Json = {"type": ["string", "null"]}
    schema: Json = {"type": ["object", "boolean", "string", "null"]}
    grammar: Json = {"type": ["string", "object", "null"]}
    texts = {"type": "string", "minLength": 1}
    choice = maybe({"type": "array", "items": texts, "minItems": 1, "maxItems": _MOST_CHOICES})
    given = {"json": schema, "regex": text, "choice": choice, "grammar": grammar,
             "json_object": flag()}  # fmt: skip
    structured = {**object_of(given), "additionalProperties": False}
    kinds = [
        object_of({"type": {"const": "text"}}, "type"),
        object_of({"type": {"const": "json_object"}, "schema": schema}, "type"),
        object_of({"type": {"const": "json_schema"}, "json_schema": {}, "schema": {}}, "type"),
        object_of({"type": {"const": "grammar"}, "grammar": grammar}, "type", "grammar"),
    ]
    return {
        "response_format": maybe({"anyOf": kinds}),
        "structured_outputs": maybe(structured),
        **dict.fromkeys(("guided_json", "json_schema"), schema),
        **dict.fromkeys(("guided_regex", "regex"), text),
        "guided_choice": choice,
        **dict.fromkeys(("guided_grammar", "ebnf", "grammar"), grammar),
    }


def described_choice() -> Json:
    """`tool_choice` as JSON Schema."""
    named = object_of({"name": {"type": "string", "minLength": 1}}, "name")
    function = object_of({"type": {"const": "function"}, "function": named}, "type")
    return {"anyOf": [{"enum": [None, "none", "auto", "required", "any"]}, function]}


def _read(body: Mapping[str, Any], name: str) -> AnswerForm | None:
    value = body.get(name)
    if value is None or value == "":
        return None
    try:
        return _READERS[name](value)
    except _WrongError as error:
        raise fields.wrong(name, error.rule, error.value) from None


class _WrongError(Exception):
    """A field's value breaks a rule."""

    def __init__(self, rule: str, value: Any) -> None:
        self.rule, self.value = rule, value


def _format(value: Any) -> AnswerForm | None:
    """OpenAI's `response_format`; a schema may stand beside the type, as llama.cpp takes it."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _schema(value["schema"]) if value.get("schema") is not None else AnswerForm.of_json()
    if kind == "json_schema":
        inner = value.get("json_schema", value)
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if schema is None:
            raise _WrongError('have {"json_schema": {"schema": ...}} with type json_schema', value)
        return _schema(schema)
    if kind == "grammar":
        return _grammar(value.get("grammar"))
    raise _WrongError("be of type text, json_object, json_schema or grammar", value)


def _schema(value: Any) -> AnswerForm:
    """A JSON Schema, or its text."""
    schema = value
    if isinstance(value, str):
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError):
            raise _WrongError("be a JSON Schema", value) from None
    if not isinstance(schema, dict | bool):
        raise _WrongError("be a JSON Schema", value)
    return AnswerForm.of_json(schema)


def _regex(value: Any) -> AnswerForm:
    return AnswerForm.of_regex(_text(value, "be a regular expression"))


def _choice(value: Any) -> AnswerForm:
    listed = isinstance(value, list) and 0 < len(value) <= _MOST_CHOICES
    if not listed or not all(isinstance(each, str) and each for each in value):
        raise _WrongError(f"list 1 to {_MOST_CHOICES} texts", value)
    return AnswerForm.of_choice(value)


def _grammar(value: Any) -> AnswerForm:
    """A grammar's text, or what TGI takes: {"type": "json" or "regex", "value": ...}."""
    if isinstance(value, dict) and value.get("type") in ("json", "json_object", "regex"):
        return (
            _regex(value.get("value")) if value["type"] == "regex" else _schema(value.get("value"))
        )
    return AnswerForm.of_grammar(_text(value, "be a grammar, in Lark's notation or in GBNF"))


def _structured(value: Any) -> AnswerForm | None:
    """vLLM's `structured_outputs`."""
    rule = f"have one of {', '.join(_STRUCTURED)}"
    if not isinstance(value, dict):
        raise _WrongError(rule, value)
    given = {key: each for key, each in value.items() if each is not None and each is not False}
    if len(given) != 1 or not given.keys() <= _STRUCTURED.keys():
        raise _WrongError(rule, value)
    return next(_STRUCTURED[key](each) for key, each in given.items())


def _any_object(value: Any) -> AnswerForm:
    if value is not True:
        raise _WrongError("have json_object: true", value)
    return AnswerForm.of_json()


def _text(value: Any, rule: str) -> str:
    if not isinstance(value, str) or not value:
        raise _WrongError(rule, value)
    return value


_STRUCTURED = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _any_object,
}
_READERS = {
    "response_format": _format,
    "structured_outputs": _structured,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _grammar,
    "grammar": _grammar,
}
