"""Plain text files: blocks of whole paragraphs as `text` rows.

A paragraph is a run of lines that are not blank. One longer than BLOCK characters is cut at its
line ends, a line that is still too long at the end of a sentence, at a space, or anywhere. The
pieces are packed in order into blocks of at most BLOCK characters, joined as they were in the file
(paragraphs by a blank line). So WikiText's headings stay with their sections and a play's one-line
speeches form scenes, while a block fits the usual token limits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tandem.data.reading.formats import Rows
from tandem.data.reading.lines import decode_line, read_lines
from tandem.data.rows import BadRow, RawRow
from tandem.types import Source

BLOCK = 1000
"""Longest block, in characters: 250 to 500 tokens of English."""

_SENTENCE_END = re.compile(r"[.!?][\"')\]]?\s")


def read_text(path: Path, dataset: str, on_blank: Callable[[], None]) -> Rows:
    """Blocks of at most BLOCK characters; a row's number is the line where its block begins.

    Blank lines only separate and are not counted. A line that is not UTF-8 becomes a BadRow.
    """
    block, start = "", 0
    for item in _pieces(path, dataset):
        if isinstance(item, BadRow):
            yield item
            continue
        joint, piece, number = item
        joined = f"{block}{joint}{piece}" if block else piece
        if block and len(joined) > BLOCK:
            yield RawRow({"text": block}, Source(dataset, str(path), start))
            block, start = piece, number
        else:
            block, start = joined, start if block else number
    if block:
        yield RawRow({"text": block}, Source(dataset, str(path), start))


def _pieces(path: Path, dataset: str) -> Iterator[tuple[str, str, int] | BadRow]:
    """(separator before it, text, line number) of each piece."""
    after_blank = True
    for number, offset, raw in read_lines(path):
        line = decode_line(raw, offset, Source(dataset, str(path), number))
        if isinstance(line, BadRow):
            yield line
            continue
        line = line.strip()
        if not line:
            after_blank = True
            continue
        joint = "\n\n" if after_blank else "\n"
        after_blank = False
        for piece in _cut(line):
            yield joint, piece, number
            joint = " "


def _cut(line: str) -> Iterator[str]:
    """The line in parts of at most BLOCK characters."""
    begin = 0
    while begin < len(line):
        # By position: copying the rest each time would take a day for a line of a gigabyte.
        window = line[begin : begin + BLOCK + 1]
        cut = len(window)
        if cut > BLOCK:
            ends = [match.end() for match in _SENTENCE_END.finditer(window)]
            cut = ends[-1] if ends else window.rfind(" ", 1)
            cut = cut if cut > 0 else BLOCK
        if piece := window[:cut].strip():
            yield piece
        begin += cut
        while begin < len(line) and line[begin].isspace():
            begin += 1
