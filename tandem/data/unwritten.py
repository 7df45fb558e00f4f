"""Rows whose text the tokenizer cannot write, counted per data set.

A tokenizer without tokens for bytes has a vocabulary of characters. Any other character becomes its
unknown token or, if it has none, nothing, and the model learns a text with holes. Such rows are
used as they are, and noted. Each character is tried once, so that nothing is tokenized a second
time; only vocabularies of words are asked for every text.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from string import printable

from tandem.data.ledger import Ledger
from tandem.data.render import Renderer
from tandem.data.spelled import texts_in
from tandem.text import visible
from tandem.types import Sample, Source

_NOTE = "text that the tokenizer cannot write"
_MANY = 0.03
"""Share of a data set's rows above which a warning is due."""
_SHOWN = 4
_EVERY_BYTE = "".join(
    (
        *map(chr, range(0x80)),
        *map(chr, range(0x80, 0xC0)),  # every byte within a character
        *map(chr, range(0xC0, 0x800, 0x40)),  # every first byte of two, three and four
        *map(chr, range(0x800, 0xD800, 0x1000)),
        *map(chr, range(0xE000, 0x10000, 0x1000)),
        *map(chr, range(0x10000, 0x110000, 0x40000)),
    )
)
"""Characters whose UTF-8 has every byte that a text may have: most tokenizers write them all."""


class Unwritten:
    """What a renderer's tokenizer cannot write."""

    def __init__(self, renderer: Renderer) -> None:
        self._pieces = renderer.pieces
        self._by_character = self._pieces.writes_by_character
        lost = self._pieces.lost(_EVERY_BYTE) if self._by_character else set()
        self._writes_all = self._by_character and not lost
        self._lost = lost
        self._lost_ascii = [character for character in printable[:-3] if character in lost]
        self._known = set(_EVERY_BYTE)

    def found_in(self, text: str) -> set[str] | None:
        """The characters of a text that are lost; empty if it is not known which, None if none."""
        if self._writes_all:
            return None
        if not self._by_character:
            return set() if self._pieces.has_unknown(text) else None
        if text.isascii():
            return {character for character in self._lost_ascii if character in text} or None
        characters = set(text)
        if new := characters - self._known:
            self._known |= new
            self._lost |= self._pieces.lost(new)
        return characters & self._lost or None


@dataclass
class _Found:
    """Rows of one data set with text that cannot be written, and how many have each character."""

    sources: list[Source] = field(default_factory=list)
    characters: Counter[str] = field(default_factory=Counter)


def note_unwritten(samples: Iterable[Sample], renderer: Renderer, ledger: Ledger) -> None:
    """Note in the ledger how many rows have text that the model will not see.

    Args:
        samples: of the ledger's data sets; one that comes again by its weight counts once.
    """
    unwritten = Unwritten(renderer)
    found: dict[str, _Found] = defaultdict(_Found)
    num_rows: Counter[str] = Counter()
    for sample in {id(sample): sample for sample in samples}.values():
        name = sample.source.dataset
        num_rows[name] += 1
        lost = [each for text in texts_in(sample) if (each := unwritten.found_in(text)) is not None]
        if lost:
            found[name].sources.append(sample.source)
            found[name].characters.update(set().union(*lost))
    for name, rows in found.items():
        share = f"{len(rows.sources) / num_rows[name]:.1%} of the rows"
        shown = ", ".join(_shown(rows.characters))
        note = f"{_NOTE}{f' ({shown})' * bool(shown)}, in {share}"
        for source in rows.sources:
            ledger.datasets[name].note(note, source)


def unwritten_lines(renderer: Renderer, ledger: Ledger) -> list[str]:
    """Warnings where the chat template's own text cannot be written, or that of many rows."""
    lines = []
    lost = Unwritten(renderer).found_in(_without_control(renderer))
    if lost is not None:
        shown = ", ".join(_shown(Counter(lost))) or "the words"
        lines.append(
            f"warning: the tokenizer cannot write {shown} of the chat template, so that nothing "
            "stands there, or its unknown token. Give --chat-template FILE, one that it can write "
            "(none frames nothing), or use another tokenizer"
        )
    for account in ledger.datasets.values():
        for note, count in account.notes.items():
            if note.startswith(_NOTE) and count > _MANY * account.rows:
                lines.append(
                    f"warning: {visible(account.name)} has {visible(note)}: a model learns these "
                    "without it. Use a model with a tokenizer for such text"
                )
    return lines


def _shown(characters: Counter[str]) -> list[str]:
    """The characters that most rows have, as they are printed."""
    ordered = sorted(characters, key=lambda char: (-characters[char], char))
    more = [f"{len(ordered) - _SHOWN} more characters"] if len(ordered) > _SHOWN else []
    return [*(visible(repr(char)) for char in ordered[:_SHOWN]), *more]


def _without_control(renderer: Renderer) -> str:
    text = renderer.framing
    for token in renderer.spelled(text):
        text = text.replace(token, "")
    return text
