"""Rows of other data than a run's own, to evaluate its models on: all are read, none trained on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.data.ledger import Ledger
from tandem.data.reading.sources import parse_spec
from tandem.errors import ConfigError, DataError
from tandem.metrics.folder import EVALUATIONS_FOLDER
from tandem.text import counted, visible
from tandem.training.comparing.compare import judge_of, policies
from tandem.training.comparing.implicit import preference_stage
from tandem.training.comparing.trained_rows import trained_rows, without_data
from tandem.training.run_folder import Run
from tandem.training.run_stages import ledger_lines, tokenizer_sources
from tandem.training.stage_data import TRAINED_ON, StepRows, prepare_rows, source_of


@dataclass(frozen=True, slots=True)
class OtherData:
    """Rows to evaluate on. title: which, for a table. file: of the run's folder, for the record of
    the evaluation. facts: what that says of them."""

    rows: StepRows
    title: str
    file: str
    facts: Mapping[str, Any]


def read_other(run: Run, named: Sequence[str], on_bad_row: str = "") -> OtherData:
    """Read data sets as the run reads its own, and show what became of their rows.

    Rows that begin like one that the run trains on are noted, and evaluated all the same.

    Args:
        named: as FILE_OR_NAME[::role=column,...].
        on_bad_row: "error" or "drop"; empty: as the run.
    Raises:
        ConfigError, DataError: a data set cannot be read, or the run has no model that could be
            evaluated on it.
    """
    _refuse_weights(named)
    trained = trained_rows(run)
    config = replace(without_data(run.config), eval_data=tuple(named))
    bad: Any = on_bad_row or config.dataset.on_bad_row
    config = replace(config, dataset=replace(config.dataset, eval_rows=0, on_bad_row=bad))
    rows = prepare_rows(
        config,
        *tokenizer_sources(run),
        trains=False,
        trained_on=trained.keys,
        reward_is_finished=bool(run.judge),
    )
    for line in ledger_lines(rows):
        run.print_line(line)
    if trained.unknown:
        run.print_line(f"note: of the rows that the run trained on not all are known: "
                       f"{trained.unknown}")  # fmt: skip
    uses = _uses(run, rows)
    read = sum(account.rows for account in rows.ledger.datasets.values())
    names = ", ".join(visible(name) for name in rows.ledger.datasets)
    title = f"{counted(read, 'row')} of {names}"
    if not any(uses.values()):
        raise DataError(
            f"--data must have rows for a model of {visible(str(run.path))}, which has "
            f"{_readers(run)}; got none among {title}. Give rows that it reads."
        )
    evaluated = {source_of(row) for found in uses.values() for row in found}
    left = sum(account.num_used for account in rows.ledger.datasets.values()) - len(evaluated)
    if left:
        run.print_line(
            f"note: {counted(left, 'row')} without a number: too long, or for no model of the run, "
            f"which has {_readers(run)}"
        )
    facts = {
        "data": [_account(rows.ledger, name) for name in rows.ledger.datasets],
        "evaluated": {use: len(found) for use, found in uses.items()},
        "without_number": left,
        "trained_on_unknown": trained.unknown,
    }
    return OtherData(rows, title, _record_of(rows.ledger), facts)


def _refuse_weights(named: Sequence[str]) -> None:
    weighted = next((spec for spec in map(parse_spec, named) if spec.weight != 1), None)
    if weighted is not None:
        raise ConfigError(
            "--data must be without weights, as each row is evaluated once; got "
            f"{weighted.weight:g} for {visible(weighted.path)}. Remove the weight."
        )


def _uses(run: Run, rows: StepRows) -> dict[str, Sequence[Any]]:
    """The rows that the run's models are evaluated on, by kind."""
    found: dict[str, Sequence[Any]] = {}
    if any(policies(run)):
        found |= {"texts": rows.heldout_sft, "prompts": rows.heldout_prompts}
    if judge_of(run) is not None:
        found |= {"pairs": rows.heldout_pairs, "graded answers": rows.heldout_graded}
    elif (stage := preference_stage(run)) is not None:
        kind = "labelled answers" if stage.labelled else "pairs"
        found[kind] = rows.heldout_of(stage)
    return found


def _readers(run: Run) -> str:
    read = ["texts", "prompts"]
    if (stage := preference_stage(run)) is not None:
        read.append("labelled answers" if stage.labelled else "pairs")
    found = [f"policies ({', '.join(read)})"] if any(policies(run)) else []
    found += ["a reward model (pairs, graded answers)"] if judge_of(run) is not None else []
    return " and ".join(found) or "none"


def _account(ledger: Ledger, name: str) -> dict[str, Any]:
    """What the record says of a data set."""
    account = ledger.datasets[name]
    return {
        "name": name,
        "path": account.path,
        "rows": account.rows,
        "used": account.num_used,
        "dropped": {reason: dropped.count for reason, dropped in account.dropped.items()},
        "noted": dict(account.notes),
        "begin_like_trained": account.notes[TRAINED_ON],
        "fingerprint": account.fingerprint,
    }


def _record_of(ledger: Ledger) -> str:
    """The record's file: another one for other rows, also of a file of the same name."""
    names = "+".join(ledger.datasets)
    digests = "".join(account.fingerprint for account in ledger.datasets.values())
    digest = hashlib.sha256(digests.encode()).hexdigest()[:8]
    return f"{EVALUATIONS_FOLDER}/{re.sub(r'[^A-Za-z0-9_+-]+', '-', names)[:60]}-{digest}.json"
