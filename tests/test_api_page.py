"""docs/api.md: every public name, its signature as in the code, and examples that run in order."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import tandem
from tests.tiny import save_tiny_model, write_preferences

PAGE = (Path(__file__).parents[1] / "docs/api.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE))


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def signature(name: str) -> str:
    """As the page writes it: names and defaults, in order, without types."""
    thing = getattr(tandem, name)
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return f"{name}(*args)"
    parameters = inspect.signature(thing).parameters.values()
    if all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in parameters):
        assert fields(thing), "a section of knobs"
        return f"{name}(**knobs)"
    shown, had_star = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not had_star:
            shown.append("*")
            had_star = True
        default = getattr(p.default, "__name__", repr(p.default))
        shown.append(p.name if p.default is p.empty else f"{p.name}={default}")
    return f"{name}({', '.join(shown)})".replace("'", '"')


def test_every_public_name_has_a_section_and_no_other_has() -> None:
    assert sorted(SECTIONS) == sorted(tandem.__all__)


@pytest.mark.parametrize("name", tandem.__all__)
def test_a_section_shows_the_signature_a_paragraph_and_an_example(name: str) -> None:
    shown, *_ = blocks("text", SECTIONS[name])
    assert " ".join(shown.split()) == signature(name)
    prose = re.sub(r"^```.*?^```", "", SECTIONS[name], flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) > 10
    example = "\n".join(blocks("python", SECTIONS[name]))
    assert re.search(rf"import .*\b{name}\b", example)


def test_the_examples_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "my-model")
    write_preferences(tmp_path / "prefs.jsonl")
    names: dict[str, object] = {}
    for example in blocks("python", PAGE):
        exec(compile(example, "docs/api.md", "exec"), names)
    assert (tmp_path / "runs/api/custom/model.safetensors").is_file()
