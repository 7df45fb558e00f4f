"""What a run says while it reads and renders many rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.training import stage_data
from tandem.training.stage_data import prepare_rows
from tests.tiny import tiny_config


@pytest.mark.parametrize("says", [True, False])
def test_rows_are_counted_where_that_takes_long(
    tmp_path: Path,
    tiny_model: str,
    preferences: str,
    says: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(stage_data, "_SILENT_SECONDS", 0.0)
    monkeypatch.setattr("tandem.data.progress._LINE_SECONDS", 0.0)
    config = tiny_config(tmp_path, tiny_model, preferences)
    rows = prepare_rows(config, tiny_model, tiny_model, says=says)
    told = capsys.readouterr().err
    if not says:
        assert told == ""
        return
    assert f"reading {preferences}: 0 rows" in told
    for use, number in (("texts", len(rows.sft)), ("pairs", len(rows.pairs))):
        assert f"rendering {use}: 0 of {number:,} rows" in told
    assert told.index("reading") < told.index("rendering")
