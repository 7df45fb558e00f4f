"""`tandem vote`: a person decides between answers that a run has asked about."""

from __future__ import annotations

import getpass
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.config.pages import Parser, home_path
from tandem.errors import ConfigError
from tandem.rewards.votes import asked_file, open_questions, write_vote
from tandem.text import visible_lines

_SECONDS = 1.0
"""Between two looks for new questions."""


def vote_command(args: Sequence[str]) -> int:
    """Parse the flags and ask; returns the exit code.

    Raises:
        ConfigError: no question can be there, nor come.
    """
    about = "Decide between answers that a run with --reward-function tandem:votes asks about."
    parser = Parser("vote", "FILE [flags]", about, "tandem vote votes.jsonl --who ann")
    parser.section("votes")
    about = "The file of tandem:votes?file=FILE; votes are appended and synced one by one."
    parser.flag("FILE", about, type=home_path)
    parser.flag("--who NAME", "Who votes, kept with each vote.", shown="the user's name")
    about = "End when no question is open, rather than wait for the next."
    parser.flag("--once", about, False, shown="off", action="store_true")
    options = parser.parse_args(args)
    file = Path(options.file)
    _refuse_missing(file, once=options.once)
    ask_all(file, options.who or getpass.getuser(), waits=not options.once)
    return 0


def _refuse_missing(file: Path, *, once: bool) -> None:
    """A run may ask its first question later, unless --once; but it does not create folders."""
    if file.is_dir():
        raise ConfigError(
            f"FILE must be that of a run with --reward-function tandem:votes?file=FILE; got the "
            f"folder {file}. Give the file that the run names."
        )
    if once and not asked_file(file).exists() and not file.exists():
        raise ConfigError(
            f"FILE must be that of a run with --reward-function tandem:votes?file=FILE; got {file}:"
            f" neither it nor {asked_file(file)} is there. Check the spelling, or remove --once to "
            "wait for the run."
        )
    if not file.parent.is_dir():
        raise ConfigError(
            f"FILE must be in a folder that is there; got {file}. Check the spelling."
        )


def ask_all(
    file: Path,
    who: str,
    *,
    waits: bool,
    read: Callable[[str], str] = input,
    show: Callable[[str], None] = print,
) -> int:
    """Ask about every open question; how many votes were given.

    Args:
        waits: whether to wait for further questions.
        read: shows a prompt and reads a line; show: shows a text.
    """
    skipped: set[str] = set()
    given = 0
    said = False
    while True:
        questions = [row for row in open_questions(file) if row["id"] not in skipped]
        if not questions and not waits:
            show(f"no open question in {asked_file(file)}; {given} votes given")
            return given
        if not questions:
            if not said:
                missing = "" if asked_file(file).exists() else ", which is not there yet"
                show(f"waiting for questions in {asked_file(file)}{missing} (Ctrl-C ends)")
            said = True
            time.sleep(_SECONDS)
            continue
        said = False
        for place, row in enumerate(questions, 1):
            answer = _ask(row, f"question {place} of {len(questions)}", read, show)
            if answer == "q":
                return given
            if answer == "s":
                skipped.add(row["id"])
                continue
            write_vote(file, row, None if answer == "=" else int(answer), who)
            given += 1


def _ask(
    row: Mapping[str, Any], title: str, read: Callable[[str], str], show: Callable[[str], None]
) -> str:
    """The number of the better answer in the question's order, "=", "s" (skip) or "q" (quit)."""
    texts = [answer["text"] for answer in row["answers"]]
    shown = list(range(len(texts)))
    random.Random(row["id"]).shuffle(shown)  # no place may be the better one's
    show(f"\n{title}")
    for turn in row["prompt"]:
        show(f"{turn['role']}: {visible_lines(turn['content'])}")
    for place, number in enumerate(shown, 1):
        show(f"[{place}] {visible_lines(texts[number])}")
    while True:
        try:
            line = read(f"better: 1-{len(texts)}, = tie, s skip, q quit > ").strip().lower()
        except EOFError:
            return "q"
        if line in ("=", "s", "q"):
            return line
        if line.isdigit() and 1 <= int(line) <= len(texts):
            return str(shown[int(line) - 1])
