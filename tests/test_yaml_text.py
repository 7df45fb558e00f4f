"""YAML by libyaml: it says what YAML in Python says, and no text ends the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import tandem
from tandem.yaml_text import as_yaml, from_yaml, shipped_table

PACKAGE = Path(tandem.__file__).parent
TEXTS = {
    "a list": "- 1\n- 2.5\n- -3e-4\n- .inf\n- yes\n- ~\n",
    "quotes": "a: \"x\\ty\\u2028\"\nb: 'it''s'\nc: |\n  two\n  lines\nd: >\n  folded\n  text\n",
    "anchors": "a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n",
    "repeated": "a: 1\na: 2\n",
    "dates and bases": "a: 2026-01-02\nb: 0x1f\nc: 017\nd: 1_000\ne: 1:30\n",
    "empty": "",
    "long": "a: " + "x" * 5000 + "\n",
}


@pytest.mark.parametrize("name", TEXTS)
def test_it_reads_as_yaml_does_in_python(name: str) -> None:
    assert from_yaml(TEXTS[name]) == yaml.safe_load(TEXTS[name])


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.yaml")), ids=lambda path: path.name)
def test_shipped_tables_read_alike(path: Path) -> None:
    assert shipped_table(path) == yaml.safe_load(path.read_text("utf-8"))


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, "[\n" * 200_000, "- " * 200_000, "{a: " * 200_000, "? " * 200_000],
    ids=["brackets", "lines of brackets", "lists", "mappings", "keys"],
)
def test_text_that_is_nested_too_deep_is_an_error(text: str) -> None:
    with pytest.raises((RecursionError, yaml.YAMLError)):
        from_yaml(text)


@pytest.mark.parametrize("text", ["a: [1", "a: b: c", "\tx", "a: 'b", "*nothing", "%"])
def test_what_is_not_yaml_is_an_error(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        from_yaml(text)


@pytest.mark.parametrize(
    "value",
    [
        "",
        " x ",
        "a: b",
        "é\u2028\u0085x",
        "x\x00y",
        "yes",
        "1e3",
        "a\udcffb",
        "- a",
        "# b",
        "x " * 200,
        None,
        1.5,
    ],
)
def test_what_is_written_reads_back_in_python_too(value: Any) -> None:
    values = {"b": value, "a": [value, {"c": value}]}
    text = as_yaml(values)
    assert text.isascii()
    assert list(yaml.safe_load(text)) == ["b", "a"]
    assert yaml.safe_load(text) == from_yaml(text) == values
