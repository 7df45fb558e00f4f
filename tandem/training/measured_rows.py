"""How long a run's rendered rows are, as its forecast asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tandem.config.schema import RLConfig
from tandem.config.stages import stage_of
from tandem.ops.sizes import BLOCK_TOKENS
from tandem.predict.rows import Heldout, Rows, common_beginning, rows_of
from tandem.training.run_folder import Run
from tandem.training.stage_data import StepRows
from tandem.types import GradedRow, LabelledRow, PromptRow, TokenRow

_MEASURED = 2000
"""Most rows of a kind that are measured."""

_Row = TokenRow | PromptRow


def measured_rows(run: Run, stage: str, rows: StepRows) -> Rows:
    """The lengths of the rows that a stage trains on."""
    found = rows.of(stage_of(stage))
    known = _measured([_sequences(row) for row in found[:_MEASURED]], len(found))
    section = getattr(run.config, stage_of(stage).section)
    if isinstance(section, RLConfig) and rows.ptx and found:
        known = replace(known, ptx=sum(map(len, rows.ptx)) / len(rows.ptx))
    return known


def measured_heldout(rows: StepRows) -> Heldout:
    """Those of the rows that the stages are evaluated on."""
    pairs = rows.heldout_dpo_pairs or rows.heldout_pairs
    return Heldout(
        texts=_one_by_one([_sequences(row) for row in rows.heldout_sft]),
        pairs=_one_by_one([_sequences(row) for row in pairs]),
        graded=_one_by_one([_sequences(row) for row in rows.heldout_graded]),
        labelled=_labelled(rows.heldout_labelled),
        prompts=_one_by_one([_sequences(row) for row in rows.heldout_prompts]),
        ptx=_one_by_one([_sequences(row) for row in rows.heldout_ptx]),
    )


def _sequences(row: object) -> list[_Row]:
    """What a row puts through the model."""
    if isinstance(row, TokenRow | PromptRow):
        return [row]
    if isinstance(row, LabelledRow | GradedRow):
        return [row.answer]
    return list(row.sequences)  # type: ignore[attr-defined]


def _measured(parts: Sequence[Sequence[_Row]], count: int) -> Rows:
    """Rows of these sequences, of which there are `count`."""
    if not parts:
        return Rows()
    lengths = [[(len(part), _answered(part)) for part in row] for row in parts]
    prompts = [_prompt(row[0]) for row in parts]
    alike = len(common_beginning(prompts) or ()) // BLOCK_TOKENS * BLOCK_TOKENS
    return replace(rows_of(lengths, count, f"{count:,} rows"), alike=alike)


def _one_by_one(rows: Sequence[Sequence[_Row]]) -> Rows:
    """Every sequence as a row."""
    parts = [[part] for row in rows for part in row]
    return _measured(parts[:_MEASURED], len(parts))


def _labelled(rows: Sequence[LabelledRow]) -> Rows:
    """Answers, whose tokens are counted with a prompt that several share once."""
    found = _one_by_one([[row.answer] for row in rows])
    if not rows:
        return found
    together: dict[tuple[int, ...], list[TokenRow]] = {}
    for row in rows[:_MEASURED]:
        together.setdefault(_prompt(row.answer), []).append(row.answer)
    known = _measured(list(together.values()), len(together))
    return replace(found, tokens=known.tokens / known.sequences)


def _answered(row: _Row) -> int:
    return 0 if isinstance(row, PromptRow) else sum(row.response_mask)


def _prompt(row: _Row) -> tuple[int, ...]:
    """The tokens before the first answer."""
    if isinstance(row, PromptRow):
        return tuple(row.token_ids)
    mask = tuple(row.response_mask)
    return tuple(row.token_ids[: mask.index(True) if True in mask else 0])
