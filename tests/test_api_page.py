"""docs/api.md: every public name, its signature as in the code, and examples that run in order."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import tandem
from tandem.api_reference import markdown, signature
from tests.tiny import save_tiny_model, write_preferences

PAGE = (Path(__file__).parents[1] / "docs/api.md").read_text("utf-8")
_NO_TYPE = ("self", "cls")
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE))


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def test_the_page_is_what_the_code_says() -> None:
    assert markdown(PAGE) == PAGE, "run `make docs`"
    assert "`stop_token_ids` (`int | Sequence[int] | None`): further ids" in SECTIONS["Renderer"]
    # Whole descriptions, also where a further line of one begins like a name.
    assert "None: those that the stage's `reward_function` names.\n" in SECTIONS["PPOTrainer"]
    assert "Initialize self" not in PAGE  # object's docstring, where a class has none of its own


@pytest.mark.parametrize("name", tandem.__all__)
def test_types_and_docstrings_of_public_names_are_complete(name: str) -> None:
    thing = getattr(tandem, name)
    assert len((inspect.getdoc(thing) or "").split()) > 5, name
    callables = [thing]
    if inspect.isclass(thing):
        callables = [m for n, m in vars(thing).items() if not n.startswith("_")]
        callables += [thing.__init__] if "__init__" in vars(thing) else []
    for call in callables:
        call = getattr(call, "fget", getattr(call, "__func__", call))
        if not inspect.isfunction(call) or not call.__module__.startswith("tandem"):
            continue
        own = [p for p in inspect.signature(call).parameters.values() if p.name not in _NO_TYPE]
        assert all(p.annotation is not p.empty for p in own), call
        assert inspect.signature(call).return_annotation is not inspect.Signature.empty, call
        assert inspect.getdoc(call) or call.__name__ == "__init__", call


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
