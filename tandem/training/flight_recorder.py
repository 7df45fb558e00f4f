"""A step as the flight recorder keeps it in memory, and as it writes it to a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from tandem.types import Experience, TokenBatch

RECORDER_FILE = "recorder.jsonl"


@dataclass(slots=True)
class Recorded:
    """One step as the recorder keeps it."""

    step: int
    rows: Sequence[Any]
    made: Experience | None = None
    values: Mapping[str, float] | None = None

    def lines(self) -> list[Any]:
        """The rows for JSON; for PPO with the answers."""
        return [_plain(row) for row in self.rows] if self.made is None else rows_of(self.made.batch)


def rows_of(batch: TokenBatch) -> list[dict[str, Any]]:
    """A batch's rows for JSON: token ids, and the spans [begin, end) that the policy generated, one
    per turn."""
    return [
        {"token_ids": ids[mask].tolist(), "responses": _spans(response.tolist())}
        for ids, mask, response in zip(
            batch.token_ids, batch.attention_mask, batch.response_mask, strict=True
        )
    ]


def write_recorded(
    path: Path, stage: str, seed: int, steps: Iterable[Recorded], reason: str
) -> bool:
    """Write down a stage's last steps, and why it ended; whether the disk took them."""
    lines: list[dict[str, Any]] = [
        {
            "stage": stage,
            "step": recorded.step,
            "seed": seed,
            "values": recorded.values,
            "rows": recorded.lines(),
        }
        for recorded in steps
    ]
    lines.append({"ended_by": reason})
    text = "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError:
        return False  # the error that ends the stage says more
    return True


def _spans(mask: Sequence[bool]) -> list[list[int]]:
    padded = [False, *mask, False]
    edges = [i for i in range(len(mask) + 1) if padded[i] != padded[i + 1]]
    return [[begin, end] for begin, end in zip(edges[::2], edges[1::2], strict=True)]


def _plain(row: Any) -> Any:
    return asdict(row) if is_dataclass(row) and not isinstance(row, type) else row
