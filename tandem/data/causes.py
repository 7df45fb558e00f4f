"""Why a stage has no rows, where the data sets show it: nothing in one was usable, or its answers
have columns that no shape reads."""

from __future__ import annotations

from tandem.config.stages import Share
from tandem.data.ledger import DatasetLedger, Ledger
from tandem.text import counted, visible

_SHOWN = 5
_GOOD, _BAD = ("chosen", "preferred", "accepted", "good"), ("reject", "bad")
_ANSWERS = ("response", "answer", "output", "completion", "generation", "solution", "target")


def why_none(ledger: Ledger, share: Share) -> list[str]:
    """Sentences on the data sets that could not give a row to a stage of this share.

    Example: "All 60 usable rows of a are prompts alone: no stage reads their columns reply, rating.
    Map the answer's column, as in a.jsonl::completion=reply"
    """
    found = []
    for account in ledger.datasets.values():
        if account.rows and account.num_dropped == account.rows:
            found.append(_all_bad(account))
        elif share != "prompts" and _are_prompts_alone(account) and account.unread:
            found.append(_prompts_alone(account, share))
    return found


def _all_bad(account: DatasetLedger) -> str:
    reason, dropped = max(account.dropped.items(), key=lambda item: item[1].count)
    first = f"; the first, {visible(dropped.first[0])}: {visible(dropped.example)}"
    told = first if dropped.example else ""
    return (
        f"No row of {visible(account.name)} could be used ({dropped.count} of {account.rows}: "
        f"{visible(reason)}){told}"
    ).rstrip(".")


def _are_prompts_alone(account: DatasetLedger) -> bool:
    """Whether every usable row was read as a prompt, as `shapes.Shaped` names it."""
    return bool(account.shapes) and all(
        shape.partition(" with ")[0] == "prompt" for shape in account.shapes
    )


def _prompts_alone(account: DatasetLedger, share: Share) -> str:
    names = [visible(name)[:30] for name, _ in account.unread.most_common()]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    prompt = next(iter(account.shapes)).partition(" with ")[2]  # a map is written whole
    if share == "pairs":
        good, bad = (_like(account, words, rest) for words, rest in ((_GOOD, 0), (_BAD, 1)))
        answers = f"chosen={good},rejected={bad}"
    else:
        answers = f"completion={_like(account, _ANSWERS, 0)}"
    columns = ",".join(part for part in (prompt, answers) if part)
    several = len(names) > 1
    rows = counted(account.shapes.total(), "usable row")
    return (
        f"All {rows} of {visible(account.name)} are prompts alone: no stage reads their "
        f"column{'s' * several} {', '.join(names[:_SHOWN])}{more}. Map the answer's column, as in "
        f"{visible(account.path)}::{columns}"
    )


def _like(account: DatasetLedger, words: tuple[str, ...], place: int) -> str:
    """The unread column that is named like one of `words`, else the one at `place`."""
    names = list(account.unread)
    near = [name for name in names if any(word in name.lower() for word in words)]
    return visible([*near, *names[place:], "COLUMN"][0])
