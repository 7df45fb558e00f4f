"""A step as the flight recorder keeps it, and as it is written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from tandem.types import Experience, TokenBatch


@dataclass(slots=True)
class Recorded:
    """One step as the recorder keeps it."""

    step: int
    rows: Sequence[Any]
    made: Experience | None = None
    values: Mapping[str, float] | None = None

    def lines(self) -> list[Any]:
        """The rows as JSON can say them; of PPO, the answers rather than the prompts alone."""
        return [_plain(row) for row in self.rows] if self.made is None else rows_of(self.made.batch)


def rows_of(batch: TokenBatch) -> list[dict[str, Any]]:
    """A batch's rows as what is written down of them: ids, and where the response begins."""
    return [
        {"token_ids": ids[mask].tolist(), "response_begins": int(response.float().argmax())}
        for ids, mask, response in zip(
            batch.token_ids, batch.attention_mask, batch.response_mask, strict=True
        )
    ]


def _plain(row: Any) -> Any:
    return asdict(row) if is_dataclass(row) and not isinstance(row, type) else row
