"""docs/api.md from the docstrings of the public names: `make docs`.

The page itself is read too: its introduction, the order of its sections and, in each section,
everything from the first example (or the line `<!-- more -->`) on are written by hand and stay.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import tandem

PAGE = Path(__file__).parents[1] / "docs/api.md"
_SECTION = re.compile(r"^## (\w+)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_KEPT = re.compile(r"^(```python|<!-- more -->)", re.MULTILINE)
_HEADINGS = ("Args", "Attributes", "Returns", "Raises", "Example", "Source")
_WIDTH = 100


def markdown(page: str) -> str:
    """The page with every section's signature and text as the code has them now."""

    def section(found: re.Match[str]) -> str:
        kept = _KEPT.search(found[2])
        by_hand = found[2][kept.start() :] if kept else "\n"
        return f"## {found[1]}\n\n{described(found[1])}\n\n{by_hand}"

    return _SECTION.sub(section, page)


def described(name: str) -> str:
    """A public name's signature, docstring, parameters and members, as Markdown."""
    thing = getattr(tandem, name)
    parts = [f"```text\n{_wrapped(signature(name))}\n```"]
    parts += list(_prose(inspect.getdoc(thing) or ""))
    if is_knobs(thing):
        parts.append("Every knob with its default: [config.md](config.md).")
        return "\n\n".join(parts)
    if inspect.isclass(thing):
        init = vars(thing).get("__init__")
        if not is_dataclass(thing) and init is not None and init.__doc__:
            parts += list(_prose(inspect.getdoc(init) or ""))
        if not issubclass(thing, Exception):
            parts += _parameters(thing) + _members(thing)
    else:
        parts += _parameters(thing)
    return "\n\n".join(parts)


def is_knobs(thing: Any) -> bool:
    """Whether it is a section of the configuration."""
    return inspect.isclass(thing) and thing.__module__.startswith("tandem.config")


def signature(name: str) -> str:
    """Names and defaults, in order, without types."""
    thing = getattr(tandem, name)
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return f"{name}(*args)"
    if is_knobs(thing):
        return f"{name}(**knobs)"
    return f"{name}({_arguments(thing)})"


def _arguments(thing: Any, *, method: bool = False) -> str:
    shown, had_star = [], False
    for p in list(inspect.signature(thing).parameters.values())[1 if method else 0 :]:
        if p.kind is p.KEYWORD_ONLY and not had_star:
            shown.append("*")
            had_star = True
        default = getattr(p.default, "__name__", repr(p.default))
        if "factory" in default.lower():
            default = "..."
        shown.append(p.name if p.default is p.empty else f"{p.name}={default}")
    return ", ".join(shown).replace("'", '"')


def _wrapped(text: str) -> str:
    """A signature on lines of at most `_WIDTH` characters, indented under its parenthesis."""
    indent = " " * (text.index("(") + 1)
    lines, line = [], ""
    for word in re.split(r"(?<=,) ", text):
        if line and len(line) + len(word) + 1 > _WIDTH:
            lines.append(line)
            line = indent + word
        else:
            line = f"{line} {word}" if line else word
    return "\n".join([*lines, line])


def _prose(docstring: str) -> Iterator[str]:
    """A docstring's paragraphs; its headed parts but the arguments' as paragraphs of their own."""
    for heading, text in _parts(docstring):
        if heading in ("Args", "Attributes"):
            continue
        if heading == "Example":
            yield "```text\n" + inspect.cleandoc(text) + "\n```"
        elif heading:
            yield f"{heading}: {' '.join(text.split())}"
        else:
            yield from _paragraphs(text)


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if paragraph.lstrip() != paragraph or "\n    " in paragraph:
            yield "```text\n" + inspect.cleandoc(paragraph) + "\n```"
        elif paragraph:
            yield " ".join(paragraph.split())


def _parts(docstring: str) -> list[tuple[str, str]]:
    """(heading, text); the text before the first heading has none."""
    found = re.split(rf"^({'|'.join(_HEADINGS)}):", docstring, flags=re.MULTILINE)
    return [("", found[0]), *zip(found[1::2], found[2::2], strict=True)]


def _parameters(thing: Any) -> list[str]:
    """One list: each parameter with its type and what the docstring says of it."""
    docstrings = [inspect.getdoc(thing) or ""]
    if inspect.isclass(thing) and "__init__" in vars(thing):
        docstrings.append(inspect.getdoc(thing.__init__) or "")
    told = {name: text for doc in docstrings for name, text in _told(doc).items()}
    lines = []
    for p in inspect.signature(thing).parameters.values():
        kind = "" if p.annotation is p.empty else f" (`{' '.join(str(p.annotation).split())}`)"
        about = f": {told[p.name]}" if p.name in told else ""
        lines.append(f"- `{p.name}`{kind}{about}")
    return ["\n".join(lines)] if lines else []


def _told(docstring: str) -> dict[str, str]:
    """What a docstring's arguments, or a dataclass's fields in its text, are said to be."""
    told: dict[str, str] = {}
    parts = [part for part in _parts(docstring) if part[0] in ("Args", "Attributes")]
    # What an argument is counts before what the attribute of its name is.
    for _, text in sorted(parts, key=lambda part: part[0] == "Args"):
        for names, about in re.findall(
            r"^    (\w[\w, ]*): (.*?)(?=^    \w[\w, ]*: |\Z)", text, re.DOTALL | re.MULTILINE
        ):
            for name in names.split(","):
                told[name.strip()] = " ".join(about.split())
    return told


def _members(thing: type) -> list[str]:
    """One list of the public methods and properties that its classes define."""
    own_fields = {f.name for f in fields(thing)} if is_dataclass(thing) else set()
    lines = []
    for name, member in vars(thing).items():
        if name.startswith("_") or name in own_fields:
            continue
        inner = getattr(member, "__func__", member)
        if isinstance(member, property):
            shown, doc = name, inspect.getdoc(member.fget) or ""
        elif inspect.isfunction(inner):
            shown, doc = (
                f"{name}({_arguments(inner, method=not isinstance(member, staticmethod))})",
                (inspect.getdoc(inner) or ""),
            )
        else:
            continue
        first = next(_paragraphs(_parts(doc)[0][1]), "")
        lines.append(f"- `{shown}`: {first}")
    return ["Members:\n\n" + "\n".join(lines)] if lines else []


def main() -> int:
    """Print the page."""
    sys.stdout.write(markdown(PAGE.read_text("utf-8")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
