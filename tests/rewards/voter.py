"""A thread in a person's place, that votes on what runs in tests ask."""

from __future__ import annotations

import threading
from pathlib import Path

from tandem.rewards.votes import open_questions, write_vote


def voting(file: Path, stop: threading.Event) -> None:
    """Prefer the answer that is first in the alphabet, as long as there are questions."""
    while not stop.wait(0.02):
        for row in open_questions(file):
            texts = [answer["text"] for answer in row["answers"]]
            write_vote(file, row, texts.index(min(texts)), "ann")
