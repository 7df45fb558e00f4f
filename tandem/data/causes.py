"""Why a stage has no rows, where the data sets show it: nothing in one was usable, or its answers
have columns that no shape reads."""

from __future__ import annotations

import re
from difflib import get_close_matches

from tandem.config.stages import Share
from tandem.data.assign import NO_REJECTED
from tandem.data.grades import ALONE
from tandem.data.ledger import DatasetLedger, Ledger
from tandem.data.shapes.answer_lists import LISTS
from tandem.data.shapes.mapped_row import FOUND_BESIDE
from tandem.data.shapes.two_answers import pair_of_names
from tandem.text import counted, visible

_SHOWN = 5
_GOOD, _BAD = ("chosen", "preferred", "accepted", "good"), ("reject", "bad")
_ANSWERS = ("response", "answer", "output", "completion", "generation", "solution", "target")
_SCORES = ("score", "rating", "grade")
_LABELS = ("label", "thumb", "vote", "feedback", "desirable", "liked", "is_good", *_SCORES)
_ABOUT = (
    frozenset(
        ("ability", "category", "dataset", "date", "difficulty", "domain", "id", "index", "kind")
    )
    | frozenset(
        (
            "lang",
            "language",
            "level",
            "model",
            "qid",
            "source",
            "split",
            "subject",
            "subset",
            "task",
        )
    )
    | frozenset(("timestamp", "title", "topic", "type", "url", "uuid"))
)
"""The last words of names of columns that describe a row: none of them is an answer."""
_STEPS = ("completions", "labels")
"""Columns of TRL's process supervision."""
_VERDICTS = ("annotat", "prefer", "better", "winner", "verdict", "choice", "label")


def why_none(ledger: Ledger, share: Share, *, labelled: bool = False) -> list[str]:
    """Sentences on the data sets that could not give a row to a stage of this share, and to one
    that learns from labelled answers if `labelled`.

    Example: "All 60 usable rows of a are prompts alone: no stage reads their columns reply, rating.
    Map the answer's column, as in a.jsonl::completion=reply"
    """
    found = []
    for account in ledger.datasets.values():
        if account.rows and account.num_dropped == account.rows:
            found.append(_all_bad(account))
        elif share != "prompts" and _are_prompts_alone(account) and account.unread:
            found.append(_prompts_alone(account, share, labelled))
        elif share == "pairs" and (rejected := _mistyped_rejected(account)):
            found.append(_half_a_pair(account, rejected))
        elif labelled and any(reason.startswith(ALONE) for reason in account.unused):
            found.append(_graded_alone(account))
        elif share == "pairs" and any(r.startswith(NO_REJECTED) for r in account.unused):
            found.append(_single_answers(account, labelled))
    return found


def _single_answers(account: DatasetLedger, labelled: bool) -> str:
    number = sum(n for reason, n in account.unused.items() if reason.startswith(NO_REJECTED))
    wanted = "chosen and rejected, two answers to one prompt"
    if labelled:
        wanted = f"a label, true or false, beside them, or {wanted}"
    return (
        f"{counted(number, 'row')} of {visible(account.name)} have one answer each, which "
        f"tandem sft learns. Give {wanted}"
    )


def _graded_alone(account: DatasetLedger) -> str:
    shape = account.shapes.most_common(1)[0][0].partition(" with ")[2] or "grade=grade"
    columns = visible(re.sub(r"\bgrade=", "label=", shape))
    return (
        f"Answers of {visible(account.name)} are graded, and have no other answer to their prompt "
        "to be better or worse than. Where 1 says good and 0 bad, map the grade to label, as in "
        f"{visible(account.path)}::{columns}"
    )


def _all_bad(account: DatasetLedger) -> str:
    reason, dropped = max(account.dropped.items(), key=lambda item: item[1].count)
    first = f"; the first, {visible(dropped.first[0])}: {visible(dropped.example)}"
    told = first if dropped.example else ""
    return (
        f"No row of {visible(account.name)} could be used ({dropped.count} of {account.rows}: "
        f"{visible(reason)}){told}"
    ).rstrip(".")


def _are_prompts_alone(account: DatasetLedger) -> bool:
    """Whether every usable row was read as a prompt, as `shaping.Shaped` names it."""
    return bool(account.shapes) and all(
        shape.partition(" with ")[0] == "prompt" for shape in account.shapes
    )


def _prompts_alone(account: DatasetLedger, share: Share, labelled: bool) -> str:
    names = [visible(name)[:30] for name, _ in account.unread.most_common()]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    rows = counted(account.shapes.total(), "usable row")
    if all(name in account.lists for name in _STEPS):
        return (
            f"All {rows} of {visible(account.name)} are prompts with {' and '.join(_STEPS)}, which "
            "judge an answer step by step (process supervision): no stage learns from them"
        )
    answers, what = _map_of_answers(account, share, labelled)
    prompt = next(iter(account.shapes)).partition(" with ")[2]  # a map is written whole
    if answers.partition("=")[0] in FOUND_BESIDE:
        prompt = ""
    columns = ",".join(part for part in (prompt, answers) if part)
    several = len(names) > 1
    return (
        f"All {rows} of {visible(account.name)} are prompts alone: no stage reads their "
        f"column{'s' * several} {', '.join(names[:_SHOWN])}{more}. Map {what}, as in "
        f"{visible(account.path)}::{columns}"
    )


def _mistyped_rejected(account: DatasetLedger) -> str:
    """The unread column of rows with a chosen answer alone that is named like `rejected`."""
    if any(shape.partition(" with ")[0] != "preference" for shape in account.shapes):
        return ""
    names = [name for name, count in account.unread.items() if count == account.shapes.total()]
    near = get_close_matches("rejected", names, n=1, cutoff=0.8)  # not created, not selected
    return "".join(near or [name for name in names if _is_like(name, _BAD)][:1])


def _half_a_pair(account: DatasetLedger, rejected: str) -> str:
    """What is missing where only chosen answers were read, beside a column for rejected ones."""
    read = next(iter(account.shapes)).partition(" with ")[2].split(",")
    columns = [part for part in read if part.startswith("prompt=")]  # a map is written whole
    columns.append(f"rejected={visible(rejected)}")
    return (
        f"All {counted(account.shapes.total(), 'usable row')} of {visible(account.name)} have a "
        f"chosen answer alone: no stage reads their column {visible(rejected)[:30]}. Map it, as in "
        f"{visible(account.path)}::{','.join(columns)}"
    )


def _map_of_answers(account: DatasetLedger, share: Share, labelled: bool) -> tuple[str, str]:
    """The column map that may read the answers, and what it maps.

    A column with lists is no answer: it may hold several, with a list of scores beside it. Nor is
    one that describes the row.
    """
    single = [n for n in account.unread if n not in account.lists and not _is_about(n)]
    lists = [name for name in account.unread if name in account.lists]
    several = [name for name in lists if _is_like(name, _ANSWERS)]
    several.sort(key=lambda name: name not in LISTS)
    if (pair := pair_of_names(single)) is not None:
        verdict = _like([name for name in single if name not in pair], _VERDICTS, len(single))
        return f"preferred={verdict}", "the column that says which answer is better"
    if several and (share == "pairs" or not any(_is_like(name, _ANSWERS) for name in single)):
        others = [name for name in lists if name != several[0]]
        numbers = [name for name in others if account.numbers[name] == account.unread[name]]
        likely = numbers if len(numbers) == 1 else others
        scores = _like(likely, _SCORES, 0 if likely is numbers else len(likely))
        inside = [
            name
            for name, count in account.numbers.items()
            if name.startswith(f"{several[0]}.") and count == account.unread[several[0]]
        ]
        if inside and likely is not numbers:
            scores = _like(inside, _SCORES, 0)
        answers = "" if several[0] in LISTS else f"answers={visible(several[0])},"
        return f"{answers}scores={scores}", "the list of the answers' scores"
    judged = [name for name in single if _is_like(name, _LABELS)]
    is_pair = any(_is_like(name, _BAD) for name in single)
    if share == "pairs" and not is_pair and (judged or labelled):
        role = "label" if labelled else "grade"
        texts = [name for name in single if name not in judged]
        columns = f"completion={_like(texts, _ANSWERS, 0)},{role}={_like(judged, _LABELS, 0)}"
        return columns, f"the columns of the answer and of its {role}"
    if share == "pairs":
        good, bad = _like(single, _GOOD, 0), _like(single, _BAD, 1)
        return f"chosen={good},rejected={bad}", "the answer's column"
    return f"completion={_like(single, _ANSWERS, 0)}", "the answer's column"


def _is_about(name: str) -> bool:
    return re.split(r"[^a-z]+", name.lower())[-1] in _ABOUT


def _is_like(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name.lower() for word in words)


def _like(names: list[str], words: tuple[str, ...], place: int) -> str:
    """The one of `names` that is named like one of `words`, else the one at `place`."""
    near = [name for name in names if _is_like(name, words)]
    return visible([*near, *names[place:], "COLUMN"][0])
