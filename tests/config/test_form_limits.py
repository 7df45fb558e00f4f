"""What a form may cost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.config.answer_form import AnswerForm, FormError
from tandem.config.form_limits import MOST_GRAMMAR_LETTERS, MOST_LETTERS, MOST_RULE_LETTERS

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
    with pytest.raises(FormError, match="in time; got multipleOf with the common multiple"):
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
    with pytest.raises(FormError, match=r"in time; got 16,3\d\d letters beside its texts, which"):
        AnswerForm.of_grammar("start: " + "x? " * (MOST_RULE_LETTERS // 3) + '\nx: "a"')
    with pytest.raises(FormError, match="be a grammar"):  # a quote that does not end
        AnswerForm.of_grammar('start: "' + '\\"' * 60_000 + "\\").check()
    with pytest.raises(FormError, match="in time; got 131,08"):
        AnswerForm.of_grammar(f'start: "{"a" * MOST_GRAMMAR_LETTERS}"')
    with pytest.raises(FormError, match="in time; got 1,048,577 letters"):
        AnswerForm.of_regex("a" * (MOST_LETTERS + 1)).check()
    AnswerForm.of_choice([f"{i}" + '"' * 100 for i in range(1000)]).check()


def test_a_schema_may_be_a_boolean() -> None:
    AnswerForm.of_json(True).check()
    with pytest.raises(FormError, match="a JSON Schema that can be followed; got: "):
        AnswerForm.of_json(False).check()
