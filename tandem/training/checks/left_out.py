"""What is told where much of the data for a stage is left out for one reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from tandem.config.schema import RunConfig
from tandem.config.stages import in_order
from tandem.data.ledger import Ledger
from tandem.text import counted, visible
from tandem.training.rendering import MEASURING

_SHARE = 0.25
"""Of the rows for a stage, above which it is told that they are left out."""
_KEPT = 95
"""Percent of the rows that the suggested limit keeps."""
_ROUND = 64
_CUT = ("answer cut", "oldest turns removed")
"""Beginnings of notes on rows that are measured, in part."""
_PROMPT_LIMIT, _LIMIT = "max_prompt_tokens", "max_tokens"


def left_out_lines(
    config: RunConfig, ledger: Ledger, lengths: Mapping[str, Sequence[int]], room: int | None
) -> list[str]:
    """A line for each reason for which much of a stage's or a data set's rows is left out.

    Args:
        lengths: tokens of the rows for each use, also of those that are left out.
        room: the most tokens of a sequence of the policy; None: no limit.
    """
    used: Counter[str] = Counter()
    left: dict[str, Counter[str]] = {}
    lines = []
    for account in ledger.datasets.values():
        used.update(account.used)
        for reason, dropped in account.dropped.items():
            what, mark, use = reason.rpartition(" (")
            if mark and use[:-1] in account.used:
                left.setdefault(use[:-1], Counter())[what] += dropped.count
            elif dropped.count > _SHARE * account.rows:
                share = _share(dropped.count, account.rows, f"rows of {visible(account.name)}")
                lines.append(
                    f"note: {share} left out: {visible(reason)}. `tandem data check` shows where "
                    "and why"
                )
    told_of = {reason for reasons in left.values() for reason in reasons}
    for what, count in _not_measured(config, ledger).items():
        if what not in told_of:  # what helps there helps here
            left.setdefault("heldout", Counter())[what] = count
            used["heldout"] -= count
    for use, reasons in left.items():
        total = used[use] + reasons.total()
        for reason, count in reasons.items():
            if count > _SHARE * total:
                share = _share(count, total, f"rows for {_readers(config, use)}")
                limit = next((n for n in (_PROMPT_LIMIT, _LIMIT) if n in reason), "")
                told = f"{reason} {getattr(config.dataset, limit)}" if limit else reason
                found = _advice(config, limit, lengths.get(use, ()), room)
                lines.append(f"note: {share} left out: {visible(told)}. {found}")
    return lines


def _not_measured(config: RunConfig, ledger: Ledger) -> Counter[str]:
    """How many held-out rows are too long for a metric of the run's stages, by reason."""
    limits = [_LIMIT]
    if any(stage.share == "prompts" for stage in in_order(config.stages)):
        limits.append(_PROMPT_LIMIT)
    found = Counter[str]()
    for account in ledger.datasets.values():
        for note, count in account.notes.items():
            what, mark, _ = note.rpartition(MEASURING)
            if mark and not what.startswith(_CUT) and any(limit in what for limit in limits):
                found[what] += count
    return found


def _share(count: int, total: int, what: str) -> str:
    return f"{count:,} of {total:,} {what} ({count / total:.0%}) are"


def _readers(config: RunConfig, use: str) -> str:
    """The stages that train on the rows of a use."""
    names = [stage.name for stage in in_order(config.stages) if stage.share == use]
    return " and ".join(names) or {"ptx": "mixture training", "heldout": "measuring"}.get(use, use)


def _advice(config: RunConfig, limit: str, lengths: Sequence[int], room: int | None) -> str:
    """What keeps more of them."""
    if not limit:
        return "`tandem data check` with --tokenizer shows which"
    ways, is_cut = [], config.dataset.on_long_row == "truncate"
    beside, most = "", "the most that the model takes"
    if limit == _PROMPT_LIMIT and room is not None:
        answer = config.sampling.max_new_tokens
        room -= answer
        beside = f" beside {counted(answer, 'token')} of the answer (--max-new-tokens)"
        most += beside
    if lengths:
        needed = float(np.percentile(lengths, _KEPT, method="higher"))
        wanted = -int(-needed // _ROUND) * _ROUND
        wanted = wanted if room is None else min(wanted, room)
        if wanted > getattr(config.dataset, limit):
            kept = sum(length <= wanted for length in lengths) / len(lengths)
            flag = f"--{limit.replace('_', '-')} {wanted}"
            most = f", {most}," if wanted == room else ""
            ways.append(f"{flag}{most} keeps {kept:.0%}{' whole' if is_cut else ''}")
        elif wanted == room:
            ways.append(f"the model takes no more than {counted(room, 'token')}{beside}")
    if not is_cut:
        cut = "the ends of answers whose prompts leave room"
        cut = "the oldest turns of prompts" if limit == _PROMPT_LIMIT else cut
        ways.append(f"--dataset.on-long-row truncate cuts {cut}")
    return "; ".join(ways) or "Use shorter rows"
