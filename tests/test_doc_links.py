"""Links between the pages of the documentation: every file and heading that one names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "bench", "examples", "recipes", "tandem")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.md"))]
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_ELSEWHERE = ("http://", "https://", "mailto:")


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = _HEADING.findall(page.read_text(encoding="utf-8"))
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings
    }


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(_ELSEWHERE):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_link_to_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# What it `does`, in short\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md#what-it-does-in-short) [b](#here) [c](https://example.org)\n"
        "[d](other.md#elsewhere) [e](missing.md) [f](#there)\n"
    )
    assert broken(page) == ["other.md#elsewhere", "missing.md", "#there"]
