"""Votes on answers, kept as rows that the reward model and DPO train on.

    votes.jsonl          one line per pair of answers, appended and synced before the vote is
                         confirmed
    votes.undone.jsonl   the votes that were taken back

A vote with a winner has prompt, chosen and rejected; of more than two answers the winner makes a
pair with each of the others, one line each. A vote without one (a tie, all bad) has the prompt and
the answers, and training reads no pair from it. Each vote has an id that the client chose, so that
one sent twice is kept once. To take a vote back it is first noted as undone, then the file is
replaced; whatever is interrupted, the next start finishes.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from tandem.data.rows import RowProblem
from tandem.data.shapes.shaping import to_sample
from tandem.files import lock, replace, sync
from tandem.serve import fields
from tandem.serve.api_errors import ApiError
from tandem.serve.turns import read_messages, read_tools
from tandem.types import Source

VERDICTS = ("left", "right", "best", "tie", "both_bad", "rewrite")
_WINNERS = {"left": 0, "right": 1}
MOST_ANSWERS = 8
_KEPT_OF_ANSWER = ("text", "model", "seed", "reward", "kl", "tokens")
_MOST_ID = 100
_WHERE = Source("votes", "vote", 1)
_PART_OF = "vote_id"
"""The column by which the further lines of a vote name it."""


def read_vote(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a vote, without its time; the first has all that is known of it.

    Example body: {"id": "b7", "messages": [{"role": "user", "content": "Hi"}], "answers": [{"text":
    "Hello!", "model": "ppo"}, {"text": "Go away.", "model": "sft"}], "verdict": "left", "who":
    "ann"}. The answers are in the order in which they were shown.

    Raises:
        ApiError: a field is wrong, or training could not read a row.
    """
    row: dict[str, Any] = {"id": _read_id(body.get("id"))}
    if tools := read_tools(body):
        row["tools"] = json.loads(tools)
    messages = read_messages(body.get("messages"))
    prompt = [turn.as_dict() for turn in messages]
    verdict = body.get("verdict")
    answers = _read_answers(body.get("answers"), 1 if verdict == "rewrite" else 2)
    if verdict not in VERDICTS:
        raise fields.wrong("verdict", f"be one of {', '.join(VERDICTS)}", verdict)
    row |= {"verdict": verdict, "answers": answers}
    winner = fields.integer(body, "winner", _WINNERS.get(verdict), 0, len(answers) - 1)
    if verdict in ("left", "right", "best"):
        if winner is None or winner != _WINNERS.get(verdict, winner):
            raise fields.wrong("winner", f"be the number of the {verdict} answer, from 0", winner)
        row["winner"] = winner
    if verdict == "rewrite":
        row["rewrite"] = fields.text(body, "rewrite", most=1_000_000)
    row["who"] = fields.text(body, "who", most=200)
    if body.get("seed") is not None:
        row["seed"] = fields.integer(body, "seed", 0, -(2**63), 2**63 - 1)
    if body.get("blind") is not None:
        row["blind"] = fields.boolean(body, "blind")
    return _lines_of({"prompt": prompt, **row})


def _lines_of(vote: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A vote's rows, one per pair that training can read, or one without a pair."""
    first = dict(vote)
    asked = {name: vote[name] for name in ("prompt", "tools") if name in vote}
    problem = _unreadable(asked)
    if problem is not None:
        raise ApiError(f"messages must be a prompt to train on: {problem}.", "messages")
    pairs = [{"chosen": a, "rejected": b} for a, b in _pairs(vote)]
    problems = [_unreadable({**asked, **pair}) for pair in pairs]
    readable = [pair for pair, wrong in zip(pairs, problems, strict=True) if wrong is None]
    if pairs and not readable:
        raise ApiError(
            f"a vote must be a row to train on: {problems[0]}. Vote tie or both_bad, or rewrite.",
            "verdict",
        )
    if not readable:
        return [first]
    more = [{**asked, **pair, _PART_OF: vote["id"]} for pair in readable[1:]]
    return [{"prompt": first.pop("prompt"), **readable[0], **first}, *more]


def _pairs(vote: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(better, worse) texts."""
    texts = [answer["text"] for answer in vote["answers"]]
    if vote["verdict"] == "rewrite":
        return [(vote["rewrite"], text) for text in texts]
    if "winner" not in vote:
        return []
    best = vote["winner"]
    return [(texts[best], text) for i, text in enumerate(texts) if i != best]


def _unreadable(row: Mapping[str, Any]) -> RowProblem | None:
    """Why training could not read a row."""
    try:
        to_sample(row, _WHERE)
    except RowProblem as problem:
        return problem
    return None


class Votes:
    """The votes of one file; all methods may be called from any thread."""

    def __init__(self, path: Path) -> None:
        """Nothing is read or made yet."""
        self.path = path
        self._undone_path = path.with_name(f"{path.stem}.undone.jsonl")
        self._guard = threading.Lock()
        self._held: BinaryIO | None = None
        self._lines: list[tuple[str | None, bytes]] = []
        self._rows: dict[str, dict[str, Any]] = {}
        self._undone: set[str] = set()
        self._seen: tuple[int, ...] | None = None

    def add(self, rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], bool]:
        """Keep a vote, as `read_vote` made it; on the disk when this returns.

        Returns:
            its first row as it is kept, and whether it is new: the same vote sent again is not.
        Raises:
            ApiError: another vote has its id, it was taken back, or another server writes there.
            OSError: the disk refuses; nothing is kept.
        """
        with self._guard:
            self._open()
            first = rows[0]
            vote_id = first["id"]
            kept = self._rows.get(vote_id)
            if kept is not None and {k: v for k, v in kept.items() if k != "when"} == dict(first):
                return kept, False
            if kept is not None or vote_id in self._undone:
                known = "was taken back" if kept is None else "is another's"
                raise ApiError(
                    f"id must be new for a new vote; got {fields.shown(vote_id)}, which {known}.",
                    "id",
                    status=409,
                    code="id_taken",
                )
            kept = {**first, "when": _now()}
            lines = [json.dumps(row).encode() + b"\n" for row in (kept, *rows[1:])]
            _append(self.path, b"".join(lines))
            self._lines += [(vote_id, line) for line in lines]
            self._rows[vote_id] = kept
            self._seen = _signature(self.path)
            return kept, True

    def undo(self, vote_id: str) -> bool:
        """Take a vote back; False if it was already.

        Raises:
            ApiError: there is no such vote.
            OSError: the disk refuses.
        """
        with self._guard:
            self._open()
            if vote_id in self._undone:
                return False
            if vote_id not in self._rows:
                raise ApiError(
                    f"id must be that of a vote; got {fields.shown(vote_id)}.",
                    "id",
                    status=404,
                    code="vote_not_found",
                )
            line = json.dumps({"id": vote_id, "when": _now(), "row": self._rows[vote_id]})
            _append(self._undone_path, line.encode() + b"\n")
            self._undone.add(vote_id)
            self._drop_undone()
            return True

    def rows(self) -> list[dict[str, Any]]:
        """All votes that stand, oldest first.

        Raises:
            ApiError: another server writes there.
        """
        with self._guard:
            if not self.path.exists() and not self._undone_path.exists():
                return []
            self._open()
            return list(self._rows.values())

    def close(self) -> None:
        """Let other servers write the file."""
        with self._guard:
            if self._held is not None:
                self._held.close()
                self._held = None

    def _open(self) -> None:
        if self._held is None:
            self._held = lock(self.path.with_name(f".{self.path.name}.lock"))
            if self._held is None:
                raise ApiError(
                    f"{self.path.name} must be written by one server at a time; another holds it. "
                    "Use that one, or another --votes.",
                    status=409,
                    code="votes_locked",
                )
        if self._seen is None or self._seen != _signature(self.path):
            self._read()

    def _read(self) -> None:
        for path in (self.path, self._undone_path):
            _finish_last_line(path)
        self._undone = {str(row.get("id")) for _, row in _rows_of(self._undone_path) if row}
        self._lines, self._rows = [], {}
        num_lines: Counter[str] = Counter()
        for line, row in _rows_of(self.path):
            vote_id = (row or {}).get("id", (row or {}).get(_PART_OF))
            vote_id = vote_id if isinstance(vote_id, str) else None
            self._lines.append((vote_id, line))
            if row is not None and vote_id is not None:
                num_lines[vote_id] += 1
                if "id" in row:
                    self._rows[vote_id] = row
        self._complete(num_lines)
        if self._undone & self._rows.keys():
            self._drop_undone()
        self._seen = _signature(self.path)

    def _complete(self, num_lines: Mapping[str, int]) -> None:
        """Append the further lines of a last vote whose writing was interrupted."""
        if not self._rows:
            return
        vote_id, row = next(reversed(self._rows.items()))
        vote = {k: v for k, v in row.items() if k not in ("chosen", "rejected", "when")}
        try:
            more = _lines_of(vote)[num_lines[vote_id] :]
        except (ApiError, KeyError, TypeError, IndexError):  # a line that others have written
            return
        for each in more:
            line = json.dumps(each).encode() + b"\n"
            _append(self.path, line)
            self._lines.append((vote_id, line))

    def _drop_undone(self) -> None:
        """Replace the file by one without the votes that were taken back."""
        self._lines = [(i, line) for i, line in self._lines if i not in self._undone]
        self._rows = {i: row for i, row in self._rows.items() if i not in self._undone}
        replace(self.path, b"".join(line for _, line in self._lines))
        self._seen = _signature(self.path)


def agreement(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How often the reward model scores the better answer highest.

    Votes with a winner count whose answers came with rewards that are not all equal: `agree` of
    `compared`, their `rate`, and its 95 % interval `low`, `high` (Wilson 1927).
    """
    compared = agree = 0
    for row in rows:
        answers, winner = row.get("answers") or [], row.get("winner")
        rewards = [answer.get("reward") for answer in answers]
        if winner is None or any(r is None for r in rewards) or len(set(rewards)) < 2:
            continue
        compared += 1
        agree += rewards[winner] == max(rewards)
    found: dict[str, Any] = {"compared": compared, "agree": agree}
    if compared:
        z, rate = 1.96, agree / compared
        middle = (rate + z * z / (2 * compared)) / (1 + z * z / compared)
        spread = math.sqrt(rate * (1 - rate) / compared + (z / (2 * compared)) ** 2)
        half = z * spread / (1 + z * z / compared)
        found |= {"rate": rate, "low": max(0.0, middle - half), "high": min(1.0, middle + half)}
    return found


def _read_id(value: Any) -> str:
    is_plain = isinstance(value, str) and 0 < len(value) <= _MOST_ID
    if not is_plain or not all(
        char.isascii() and (char.isalnum() or char in "-_.:") for char in value
    ):
        rule = f"be a text of at most {_MOST_ID} letters, digits, - _ . and :, new for each vote"
        raise fields.wrong("id", rule, value)
    return str(value)


def _read_answers(value: Any, least: int) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not least <= len(value) <= MOST_ANSWERS:
        raise fields.wrong("answers", f"be a list of {least} to {MOST_ANSWERS} answers", value)
    return [_read_answer(answer, f"answers[{i}]") for i, answer in enumerate(value)]


def _read_answer(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise ApiError(
            f"{where} must be an object with text; got {fields.shown(value)}.", "answers"
        )
    kept = {name: value[name] for name in _KEPT_OF_ANSWER if value.get(name) is not None}
    for name, found in kept.items():
        is_text = isinstance(found, str)
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not (is_text if name in ("text", "model") else is_number):
            kind = "a text" if name in ("text", "model") else "a number"
            raise ApiError(f"{where}.{name} must be {kind}; got {fields.shown(found)}.", "answers")
    return kept


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _append(path: Path, line: bytes) -> None:
    """Append a line, synced; nothing of it stays if the disk refuses."""
    is_new = not path.exists()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
    if is_new:
        sync(path.parent)


def _finish_last_line(path: Path) -> None:
    """A last line without its end was never confirmed: whole, it is kept; torn, it is removed."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    if not content or content.endswith(b"\n"):
        return
    whole, _, last = content.rpartition(b"\n")
    start = len(whole) + 1 if whole else 0
    if _row_of(last) is not None:
        _append(path, b"\n")
        return
    with path.open("r+b") as file:
        file.truncate(start)
        os.fsync(file.fileno())


def _rows_of(path: Path) -> list[tuple[bytes, dict[str, Any] | None]]:
    """The lines of a file, each with its row; lines that are no row are kept as they are."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [(line, _row_of(line)) for line in lines]


def _row_of(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _signature(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except FileNotFoundError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns
