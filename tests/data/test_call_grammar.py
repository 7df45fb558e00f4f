"""Calls as a form: what templates write is taken, and what is taken reads back."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from tandem.data.argument_types import argument_types
from tandem.data.chat.call_grammar import calls_form
from tandem.data.chat.call_probe import reader_of
from tandem.data.chat.call_reader import Called, CallReader
from tandem.data.chat.grammar_text import GrammarText
from tandem.data.control import ControlTokens
from tests.data.built_tokenizers import byte_level
from tests.data.test_call_reader import CALLS, FORMS, SINGLE, Template

llguidance = pytest.importorskip("llguidance")
pytest.importorskip("llguidance.hf")


def function(name: str, properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required), **more}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


ONLY = {"additionalProperties": False}
TEXT = {"type": "string"}
TOOLS = [
    function("add", {"a": {"type": "integer"}, "b": {"type": "number"}}, "a", **ONLY),
    function("say", {"text": TEXT, "loud": {"type": "boolean"}, "how": {"enum": ["x", 3]}}, "text",
             **ONLY),
    {"type": "function", "function": {"name": "now"}},
    function("put", {"where": {"$ref": "#/$defs/w"}, "text": TEXT}, "text",
             **{"$defs": {"w": {"type": "object"}}, **ONLY}),
]  # fmt: skip
MARKS = ("[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</arg_value>", "</parameter>", "<|call|>")


@cache
def tokenizer(special: bool) -> Any:
    """One in which the marks of templates are tokens."""
    made = byte_level()
    made.add_tokens([AddedToken(text, normalized=False, special=special) for text in MARKS],
                    special_tokens=special)  # fmt: skip
    return made


@cache
def followed(special: bool) -> tuple[Any, GrammarText]:
    """What follows grammars over that tokenizer, and what writes texts into them."""
    known = llguidance.hf.from_tokenizer(tokenizer(special))
    return known, GrammarText(ControlTokens(tokenizer(special)), known.is_special_token)


def matcher(form_name: str, special: bool, tools: Sequence[Any] = TOOLS, **how: Any) -> Any:
    found, (known, writing) = reader(form_name), followed(special)
    assert found.shape is not None
    form = calls_form(found.shape, writing, json.dumps(tools), **how)
    assert form is not None
    return llguidance.LLMatcher(known, json.dumps({"grammars": form.check().grammars("answer")}))


@cache
def reader(name: str) -> CallReader:
    found = reader_of(Template(FORMS[name]))
    assert found is not None
    return found


def takes(one: Any, special: bool, text: str) -> bool:
    ids = tokenizer(special).encode(text, add_special_tokens=False)
    return one.try_consume_tokens(ids) == len(ids) and one.is_accepting()


@pytest.mark.parametrize("special", [False, True], ids=["added", "special"])
@pytest.mark.parametrize("name", FORMS)
def test_what_the_template_writes_is_taken(name: str, special: bool) -> None:
    write = Template(FORMS[name])
    whole = matcher(name, special)
    for calls in ([CALLS[0]], [CALLS[1]], [CALLS[2]], [CALLS[3]], CALLS[:2], CALLS):
        text = write(calls) if len(calls) == 1 or name not in SINGLE else ""
        if name == "arguments as text":  # objects are what is asked for, and read back as well
            text = text.replace("\\", "").replace('"{', "{").replace('}"', "}")
            text = "" if "said" in text else text  # with quotes in a text
        if not text:
            continue
        assert takes(whole.deep_copy(), special, text), text
        assert not takes(whole.deep_copy(), special, text[:-1])
        alone = matcher(name, special, one=True)
        assert takes(alone, special, text) == (len(calls) == 1)
        named = matcher(name, special, name="say")
        assert takes(named, special, text) == all(call.name == "say" for call in calls)
    for wrong in (Called("sub", {}), Called("add", {"b": 2.0}), Called("add", {"a": "x"}),
                  Called("now", {"a": 1})):  # fmt: skip
        assert not takes(whole.deep_copy(), special, write([wrong]))


@pytest.mark.parametrize("special", [False, True], ids=["added", "special"])
@pytest.mark.parametrize("name", FORMS)
def test_whatever_is_taken_reads_back_as_calls(name: str, special: bool) -> None:
    chance, known, types = (
        random.Random(name),
        followed(special)[0],
        argument_types(json.dumps(TOOLS)),
    )
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}
    numbers = []
    for trial in range(24):
        one = matcher(name, special, one=trial % 2 == 1)
        ids: list[int] = []
        while len(ids) < 300 and not (one.is_accepting() and chance.random() < 0.3):
            mask = np.frombuffer(one.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(mask, bitorder="little").nonzero()[0].tolist()
            # Short words of few letters, else a text never comes to its end.
            common = [i for i in allowed if known.decode_bytes([i]) in b'"}</> \n12ab']
            token = chance.choice(common if common and chance.random() < 0.8 else allowed)
            if token == known.eos_token or not one.consume_token(token):
                break
            ids.append(token)
        if not one.is_accepting():
            continue
        text = known.decode_bytes(ids).decode("utf-8", "replace")
        words, calls = reader(name).read(text, types)
        assert words == ""
        assert calls
        assert len(calls) == 1 or trial % 2 == 0
        for call in calls:
            schema = schemas[call.name]
            assert call.arguments.keys() <= schema.get("properties", {}).keys()
            assert set(schema.get("required", ())) <= call.arguments.keys()
            if call.name == "add":
                assert isinstance(call.arguments["a"], int)
            if call.name == "say":
                assert isinstance(call.arguments["text"], str)
                assert call.arguments.get("how", "x") in ("x", 3)
        numbers.append(len(calls))
    assert len(numbers) > 5


def test_a_listed_thing_that_is_no_function_cannot_be_called() -> None:
    found, writing = reader("hermes").shape, followed(False)[1]
    assert found is not None
    assert calls_form(found, writing, '[{"type": "search"}]') is None
    assert calls_form(found, writing, json.dumps(TOOLS), "sub") is None
