"""How reward functions are named: files, modules, options, weights, labels."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tandem.errors import ConfigError
from tandem.rewards.binding import columns_problem
from tandem.rewards.exact_number import reward
from tandem.rewards.loading import load_reward_function, source_files
from tandem.rewards.scoring import named, text_of
from tandem.rewards.shipped import SHIPPED
from tandem.rewards.spec import parse_spec, parse_specs

PAGE = Path(__file__).parents[2] / "docs/reward_function.md"


def test_a_name_its_options_and_its_weight() -> None:
    spec = parse_spec("tandem:length?limit=400&buffer=50:-0.5")
    assert (spec.name, spec.weight) == ("tandem:length", -0.5)
    assert spec.options == {"limit": "400", "buffer": "50"}
    assert parse_spec("C:/a b/rewards.py:score").where == "C:/a b/rewards.py"
    assert parse_spec("a.b:score:2").weight == 2.0
    assert parse_spec(text_of(spec)).options == spec.options
    found = parse_spec("tandem:format?pattern=%3A5%2B:0.1")
    assert (found.options["pattern"], found.weight) == (":5+", 0.1)


def test_an_option_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="Give each option once"):
        parse_spec("tandem:length?limit=400&limit=50")


def test_labels_are_different() -> None:
    specs = parse_specs(["a.py:score", "b.py:score", "tandem:exact_number", "m.n:other:0"])
    assert [s.label for s in specs] == ["a.score", "b.score", "exact_number", "other"]
    patterns = parse_specs(["tandem:format?pattern=a", "tandem:format?pattern=b"])
    assert [s.label for s in patterns] == ["tandem.format", "tandem.format_2"]


def test_strict_brings_lenient_to_be_logged_and_the_other_way_round() -> None:
    for given, other in (("gsm8k", "gsm8k_lenient"), ("gsm8k_lenient", "gsm8k")):
        specs = parse_specs([f"tandem:{given}:2"])
        assert [(s.label, s.weight) for s in specs] == [(given, 2.0), (other, 0.0)]
    both = parse_specs(["tandem:gsm8k", "tandem:gsm8k_lenient:0.5"])
    assert [s.weight for s in both] == [1.0, 0.5]


def test_found_in_a_file_or_a_module_or_here(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def good(prompts, completions, *, bonus=1.0, **columns):\n    return [bonus]\n"
    )
    assert load_reward_function(f"{file}:good")([], []) == [1.0]
    assert load_reward_function(f"{file}:good?bonus=2.5")([], [], bonus=[7]) == [2.5]
    assert load_reward_function("tandem:exact_number") is reward
    assert load_reward_function("tandem.training.exact_number:reward") is reward
    assert source_files(f"{file}:good?bonus=2") == [file]


def test_two_files_of_one_name_are_two_functions(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        text = f"def score(prompts, completions, **columns):\n    return ['{folder}']\n"
        (tmp_path / folder / "rewards.py").write_text(text)
    found = named([f"{tmp_path}/{folder}/rewards.py:score" for folder in ("a", "b")])
    assert [function([], []) for _, function in found] == [["a"], ["b"]]
    assert [spec.label for spec, _ in found] == ["rewards.score", "rewards.score_2"]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nothing", "Write e.g. rewards.py:my_reward"),
        ("/nowhere/mine.py:good", "no file /nowhere/mine.py"),
        ("no.such.module:good", "No module named"),
        ("FOLDER/my rewards.txt:f", "my rewards.txt is no Python file. Give one that ends in .py"),
        ("no/such/module:f", "no/such/module is no Python file"),
        ("my_imports:f", "No module named 'not_there'. Fix the file, or its name"),
        ("my_syntax:f", "named 'my_syntax'. Write my_syntax.py:f for the file of that name"),
        ("tandem.rewards.exact_number:rewrd", "has no function rewrd"),
        ("tandem:gsm9k", "that come with Tandem are gsm8k, gsm8k_lenient"),
        ("tandem:length?limit=long", "must be a whole number; got 'long'"),
        ("tandem:length?limits=3", "must have the option limits.*got limit, buffer, unit"),
        ("tandem:length?limit", "Write its options as"),
        ("FOLDER/syntax.py:f", "SyntaxError"),
        ("FOLDER/exits.py:f", "SystemExit: 3"),
    ],
)
def test_a_name_that_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/my_imports.py").write_text("import not_there")
    (tmp_path / "my_imports.py").touch()
    monkeypatch.setattr(sys, "path", [*filter(None, sys.path), str(tmp_path / "modules")])
    (tmp_path / "my_syntax.py").write_text("def f(:")
    (tmp_path / "my rewards.txt").touch()
    (tmp_path / "syntax.py").write_text("def f(:")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)")
    with pytest.raises(ConfigError, match=part) as raised:
        load_reward_function(name.replace("FOLDER", str(tmp_path)))
    assert str(raised.value).isprintable()


def test_a_function_is_named_once() -> None:
    with pytest.raises(ConfigError, match=r"must name each function once; got a\.py:f twice"):
        parse_specs(["a.py:f", "a.py:f:0.5"])


def test_options_are_no_columns() -> None:
    function = load_reward_function("tandem:length?limit=10")
    assert columns_problem(function, ["limit", "level"]) == ""
    assert function([""], ["a"], limit=[3], messages=[[]]) == [0.0]


def test_the_page_lists_the_shipped_functions() -> None:
    text = PAGE.read_text("utf-8")
    for name, shipped in SHIPPED.items():
        assert f"| `tandem:{name}` | {shipped.meaning}" in text, name
