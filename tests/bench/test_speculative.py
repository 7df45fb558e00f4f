"""The bench of speculative decoding runs, and compares what it draws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import speculative
from tandem.generation import speculative as drafting
from tests.tiny import save_tiny_model


def test_both_ways_draw_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "LEAST_BYTES", 0)
    file = tmp_path / "made.json"
    speculative.main(
        [save_tiny_model(tmp_path), "--rounds", "1", "--max-tokens", "12", "--answers", "2",
         "--json", str(file)]
    )  # fmt: skip
    rows = json.loads(file.read_text("utf-8"))["rows"]
    assert set(rows) == {f"temperature {t}, 2 side by side" for t in ("0.01", "1")}
    for row in rows.values():
        assert 0 < row["tokens"] <= 12 * len(speculative.PROMPTS)
        assert row["steps"]["with"] <= row["steps"]["without"]
