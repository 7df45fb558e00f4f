"""People as a reward: votes decide between the answers to a prompt.

    FILE                the votes, one JSON row each; `tandem vote FILE` adds them, and rows that
                        `POST /v1/votes` keeps are read too
    FILE.asked.jsonl    the questions: prompt and answers, one JSON row each

A vote belongs to the question with its prompt and its answers, in whatever order, so a run that
was stopped finds the votes on the answers that it draws again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError, DataError
from tandem.files import append, sync

_ASKED = ".asked.jsonl"
_SECONDS = 0.5
"""Between two looks for new votes."""
Turns = Sequence[Mapping[str, str]]


def decided(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    messages: Sequence[Turns],
    file: str = "",
    **columns: Any,
) -> list[float | None]:
    """1 for the answer that a vote prefers, 0 for the others of its prompt and for all where the
    vote is a tie; None where a prompt has fewer than two different answers.

    Waits until every question has a vote, however long that takes.

    Args:
        file: where votes are; what is asked is appended to FILE.asked.jsonl.
    Raises:
        ConfigError: no file is given.
        DataError: a line of it is no vote.
    """
    check_file(file=file)
    answers: dict[str, tuple[Turns, dict[str, None]]] = {}
    for turns, completion in zip(messages, completions, strict=True):
        answers.setdefault(json.dumps(turns), (turns, {}))[1][completion] = None
    questions = {
        prompt: question(turns, list(texts))
        for prompt, (turns, texts) in answers.items()
        if len(texts) > 1
    }
    votes = _wait(Path(file), {asked["id"]: asked for asked in questions.values()})
    scores: list[float | None] = []
    for turns, completion in zip(messages, completions, strict=True):
        asked = questions.get(json.dumps(turns))
        scores.append(None if asked is None else float(votes[asked["id"]] == completion))
    return scores


def check_file(*, file: str) -> None:
    """Check the options of `decided`.

    Raises:
        ConfigError: no file is given.
    """
    if not file:
        raise ConfigError(
            "tandem:votes must have a file of votes; got none. Write tandem:votes?file=votes.jsonl."
        )


decided.check_options = check_file  # type: ignore[attr-defined]
decided.in_process = True  # type: ignore[attr-defined]  # it waits for people, without a deadline
decided.training_only = True  # type: ignore[attr-defined]  # half of all answers always win
decided.whole_rollout = True  # type: ignore[attr-defined]
decided.checks_answer = False  # type: ignore[attr-defined]


def question(turns: Turns, answers: Sequence[str]) -> dict[str, Any]:
    """A row that asks for a vote; its id follows from the prompt and the set of answers."""
    prompt = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
    key = json.dumps([prompt, sorted(answers)])
    return {
        "id": hashlib.sha256(key.encode()).hexdigest()[:16],
        "prompt": prompt,
        "answers": [{"text": text} for text in answers],
    }


def open_questions(file: Path) -> list[dict[str, Any]]:
    """What was asked and has no vote yet, in the order of asking.

    Raises:
        DataError: a line of either file cannot be read.
    """
    votes = _votes(file)
    asked = {row["id"]: row for _, row in _rows(asked_file(file))}
    return [row for name, row in asked.items() if name not in votes]


def asked_file(file: Path) -> Path:
    """Where the questions are."""
    return file.with_name(file.name + _ASKED)


def write_vote(file: Path, asked: Mapping[str, Any], winner: int | None, who: str) -> None:
    """Append a vote on a question and sync it; winner: the answer's number, None for a tie.

    A vote with a winner is a row that `tandem reward` and `tandem dpo` read, one of two answers.
    """
    row = {**asked, "verdict": "tie" if winner is None else "best", "who": who}
    if winner is not None:
        texts = [answer["text"] for answer in asked["answers"]]
        row |= {"winner": winner, "chosen": texts[winner]}
        row["rejected"] = next(text for n, text in enumerate(texts) if n != winner)
    _append(file, row)


def _wait(file: Path, questions: Mapping[str, Mapping[str, Any]]) -> dict[str, str | None]:
    """The text that won, by question."""
    votes = _votes(file)
    known = {row["id"] for _, row in _rows(asked_file(file))}
    missing = [name for name in questions if name not in votes]
    for name in missing:
        if name not in known:
            _append(asked_file(file), questions[name])
    if missing:
        print(
            f"{len(missing)} questions wait for a vote: tandem vote {file} in another terminal "
            "(Ctrl-C twice ends the run; votes are kept)",
            flush=True,
        )
    size = -1
    while any(name not in votes for name in questions):
        time.sleep(_SECONDS)
        now = file.stat().st_size if file.exists() else -1
        if now != size:
            size, votes = now, _votes(file)
    return votes


def _votes(file: Path) -> dict[str, str | None]:
    """By question, the text that the last vote prefers; None for a tie."""
    votes: dict[str, str | None] = {}
    for number, row in _rows(file):
        if "answers" not in row:  # a further pair of a vote on more than two answers
            continue
        try:
            texts = [answer["text"] for answer in row["answers"]]
            asked = question(row["prompt"], texts)
            winner = row.get("winner")
            votes[asked["id"]] = None if winner is None else texts[winner]
        except (KeyError, TypeError, IndexError):
            raise DataError(
                f"{file}:{number} must be a vote with prompt, answers and winner; got "
                f"{json.dumps(row)[:80]}. Remove the line, or vote by `tandem vote`."
            ) from None
    return votes


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a file with their numbers; a last line that is still being written is left."""
    if not file.exists():
        return
    lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise DataError(f"{file}:{number} must be a JSON object; got {line[:80]!r}. Remove it.")
        yield number, row


def _append(file: Path, row: Mapping[str, Any]) -> None:
    append(file, json.dumps(row, ensure_ascii=False).encode() + b"\n")
    sync(file)
