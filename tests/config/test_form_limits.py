"""What a form may cost."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.config import form_trial
from tandem.config.answer_form import AnswerForm, FormError
from tandem.config.form_limits import (
    MOST_GRAMMAR_LETTERS,
    MOST_LETTERS,
    MOST_OPTIONAL,
    MOST_RULE_LETTERS,
)
from tandem.errors import TandemError

pytest.importorskip("llguidance")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 999983},
        {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]},
        {"items": [{"multipleOf": 2000}, {"multipleOf": 0.01}]},
    ],
)
def test_numbers_of_many_remainders_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(
        FormError, match="in time; got multipleOf with a common multiple above 10000"
    ):
        AnswerForm.of_json(schema).check()
    inside = AnswerForm.of_grammar(f'start: "x" y | %json {{"const": 1}}\ny: %json \n'
                                   f"{json.dumps(schema)}")  # fmt: skip
    with pytest.raises(FormError, match="in time; got multipleOf"):
        inside.check()


def test_common_steps_are_followed() -> None:
    for step in (1, 5, 0.01, 0.5, 100, 2.5):
        AnswerForm.of_json({"type": "number", "multipleOf": step}).check()
    AnswerForm.of_json({"properties": {"multipleOf": {"type": "integer"}}}).check()


def test_long_forms_are_refused() -> None:
    with pytest.raises(FormError, match=r"in time; got 8,2\d\d letters beside its texts, which"):
        AnswerForm.of_grammar("start: " + "x? " * (MOST_RULE_LETTERS // 3) + '\nx: "a"').check()
    with pytest.raises(FormError, match="be a grammar"):  # a quote that does not end
        AnswerForm.of_grammar('start: "' + '\\"' * 60_000 + "\\").check()
    with pytest.raises(FormError, match="in time; got 131,08"):
        AnswerForm.of_grammar(f'start: "{"a" * MOST_GRAMMAR_LETTERS}"').check()
    with pytest.raises(FormError, match="in time; got 1,048,577 letters"):
        AnswerForm.of_regex("a" * (MOST_LETTERS + 1)).check()
    AnswerForm.of_choice([f"{i}" + '"' * 100 for i in range(1000)]).check()


def test_a_schema_may_be_a_boolean() -> None:
    AnswerForm.of_json(True).check()
    with pytest.raises(FormError, match="a JSON Schema that can be followed; got "):
        AnswerForm.of_json(False).check()


def chained(depth: int) -> AnswerForm:
    """Objects in objects, each by `$ref`."""
    rules: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(depth)
    }
    return AnswerForm.of_json({"$defs": {**rules, f"d{depth}": {}}, "$ref": "#/$defs/d0"})


def test_a_form_that_ends_the_process_that_reads_it_is_refused() -> None:
    """llguidance runs out of stack at some thousand."""
    chained(60).check()
    for depth in (3000, 12_000):
        with pytest.raises(FormError, match="be followed; got one that is nested too deep or"):
            chained(depth).check()


def test_a_form_that_takes_long_to_read_is_refused() -> None:
    """Each pattern is compared with every other: minutes for thousands."""
    ends = [f"{i:03}" for i in range(1000)]
    many = {f"^{end}[a-z]*{end}$": {"type": "string"} for end in ends}
    with pytest.raises(FormError, match="got one that takes more than 2 s to read"):
        AnswerForm.of_json({"type": "object", "patternProperties": many}).check()
    few = dict(list(many.items())[:20])
    AnswerForm.of_json({"type": "object", "patternProperties": few}).check()


@pytest.mark.parametrize(
    "schema",
    [
        '{"multipleOf": 1e999}',
        f'{{"allOf": [{{"multipleOf": {"9" * 3000}}}, {{"multipleOf": {"7" * 3000}}}]}}',
        '{"type": "object", "required": "%s"}' % ("é" * 120),
    ],
    ids=["infinite", "long", "a panic of the library's"],
)
def test_what_the_library_or_python_cannot_read_is_refused_in_one_line(schema: str) -> None:
    with pytest.raises(FormError, match="be a JSON Schema that can be followed") as caught:
        AnswerForm.of_json(json.loads(schema)).check()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_boolean_multiple_is_the_librarys_to_refuse() -> None:
    with pytest.raises(FormError, match="a JSON Schema that can be followed; got "):
        AnswerForm.of_json({"type": "integer", "multipleOf": True}).check()


def optional(number: int, **more: Any) -> dict[str, Any]:
    properties = {f"p{i}": {"type": "string"} for i in range(number)}
    return {"type": "object", "properties": properties, "required": ["p0", "p0", "other"], **more}


def test_an_object_with_many_optional_properties_is_refused_with_what_to_do() -> None:
    most = MOST_OPTIONAL + 1
    AnswerForm.of_json(optional(most)).check()
    AnswerForm.of_json(optional(2000, required=[f"p{i}" for i in range(2000)])).check()
    said = (
        "got an object with 201 optional properties, which may be at most 200: name more of them "
        "in `required`, or group them in objects"
    )
    with pytest.raises(FormError, match=said):
        AnswerForm.of_json({"type": "array", "items": optional(most + 1)}).check()
    with pytest.raises(FormError, match=said):
        AnswerForm.of_grammar(f"start: %json {json.dumps(optional(most + 1))}").check()


def lists_of_themselves(number: int) -> list[dict[str, Any]]:
    return [{"type": "array", "items": {"$ref": "#"}, "minItems": i} for i in range(number)]


def test_many_ways_that_begin_alike_are_refused() -> None:
    """A step takes seconds at some five hundred, and hours at ten thousand."""
    said = "alternatives that are objects or lists, beyond the first of each"
    lists = lists_of_themselves
    for schema in (
        {"anyOf": lists(258)},
        {"properties": {"a": {"oneOf": lists(150)}, "b": {"anyOf": lists(109)}}},
        {"allOf": [{"anyOf": lists(17)}, {"anyOf": lists(17)}]},
        {"anyOf": lists(17), "oneOf": lists(17)},
        {"$defs": {"a/b": {"anyOf": lists(17)}}, "anyOf": lists(17), "$ref": "#/$defs/a~1b"},
        {"anyOf": [{"anyOf": lists(20)} for _ in range(20)]},
        {"anyOf": lists(17), "allOf": [{"$ref": "#/items/0"}], "items": [{"anyOf": lists(17)}]},
    ):
        with pytest.raises(FormError, match=said):
            AnswerForm.of_json(schema).check()
    AnswerForm.of_json({"anyOf": lists(256)}).check()
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(20_000)}
    with pytest.raises(FormError, match="got one that is nested too deep"):
        AnswerForm.of_json({"$defs": {**chain, "d20000": {}}, "allOf": [chain["d0"]]}).check()
    nullable: dict[str, Any] = {"anyOf": [{"$ref": "#"}, {"type": "null"}, {"enum": [1, "a"]}]}
    properties = {f"p{i}": nullable for i in range(1000)}
    required = list(properties)
    AnswerForm.of_json({"type": "object", "properties": properties, "required": required}).check()
    with pytest.raises(FormError, match="got 1,001 rules and alternatives, which may be at most"):
        AnswerForm.of_grammar("start: " + "|".join(["a"] * 1000) + '\na: "b"').check()


def test_forms_are_tried_where_a_hook_imports_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As setuptools installs a checkout (pip install -e): its folder is not on the path."""
    root = Path(__file__).parents[2]
    monkeypatch.setattr(sys, "path", [p for p in sys.path if Path(p).resolve() != root])
    AnswerForm.of_regex("[0-9]+ by a hook").check()


def test_a_trial_that_waits_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = tmp_path / "python"
    waits.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 1000\n")
    waits.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(waits))
    monkeypatch.setattr(form_trial, "_MOST_SECONDS", 2.0)
    form = AnswerForm.of_regex("waits")
    with pytest.raises(TandemError, match=r"got no end of it in 2 s\. Ask again"):
        form.check()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    with pytest.raises(form_trial.SlowFormError):
        form.check(0.5)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    monkeypatch.undo()
    with pytest.raises(form_trial.SlowFormError):  # it is known to be slow
        form.check(60.0)
    form.check()
    form.check(60.0)


@pytest.mark.parametrize("ends", ["kill -9 $$", "kill -2 $$", "echo no such library >&2; exit 1"])
def test_a_trial_that_something_else_ends_says_nothing_of_the_form(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = AnswerForm.of_regex(re.escape(ends))
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{ends}\n")
    python.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        with pytest.raises(TandemError, match=r"in a process of its own, of .*got exit status"):
            form.check()
        patch.setattr(sys, "executable", str(tmp_path / "gone"))
        with pytest.raises(TandemError, match=r"got .*No such file"):
            form.check()
    form.check()
