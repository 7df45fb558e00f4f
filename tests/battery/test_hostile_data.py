"""Damaged data files: each gives one clear line, or rows of which every one is accounted for."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

import pytest

from tandem.config.schema import DataConfig
from tandem.data.dataset import load_data
from tandem.data.ledger import Ledger
from tandem.data.reading.lines import read_lines
from tandem.data.render import Renderer
from tandem.data.tokenview import render
from tandem.errors import DataError, TandemError
from tests.battery.damage import damaged_file
from tests.battery.figures import record
from tests.data.built_tokenizers import byte_level

_SHORT, _FULL = 120, 1000


def _outcome(path: Path, renderer: Renderer) -> str:
    """Read a file as a run does, both ways: "refused" or "read"; asserts what must hold."""
    try:
        data = load_data(DataConfig(on_bad_row="drop"), [str(path)], seed=1)
    except TandemError as error:
        _assert_clear(str(error), path)
        with pytest.raises(TandemError):
            load_data(DataConfig(on_bad_row="error"), [str(path)], seed=1)
        return "refused"
    (account,) = data.ledger.datasets.values()
    assert account.balances()
    assert account.rows > 0
    if (lines := _lines_with_rows(path)) is not None:
        assert account.rows == lines, f"{account.rows} rows of {lines} lines"
    assert Ledger.from_json(data.ledger.to_json()).datasets[account.name].rows == account.rows
    for sample in (*data.texts, *data.pairs, *data.prompts, *data.heldout):
        try:
            render(renderer, sample)
        except DataError as error:
            _assert_clear(str(error), path)
    if account.num_dropped == 0:
        load_data(DataConfig(on_bad_row="error"), [str(path)], seed=1)
        return "read"
    with pytest.raises(DataError) as caught:
        load_data(DataConfig(on_bad_row="error"), [str(path)], seed=1)
    _assert_clear(str(caught.value), path)
    assert re.match(rf"{re.escape(str(path))}[^:]*:\d+: ", str(caught.value)), str(caught.value)
    return "read"


def _assert_clear(message: str, path: Path) -> None:
    assert message.isprintable(), f"not one printable line: {message!r}"
    assert path.name in message
    assert " must " in message
    assert re.search(r"; (got|found) ", message), message
    assert len(message) < 1500, message


def _lines_with_rows(path: Path) -> int | None:
    """How many rows a JSONL file has, counted on its own; None for the other formats."""
    if path.suffix.lower() != ".jsonl" or not path.is_file():
        return None
    return sum(1 for _, _, raw in read_lines(path) if raw.strip())


def _battery(seeds: range, folder: Path) -> Counter[str]:
    renderer = Renderer(byte_level())
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        path = damaged_file(seed, folder)
        start = time.process_time()
        try:
            outcomes[_outcome(path, renderer)] += 1
        except BaseException as error:
            error.add_note(f"damaged file of seed {seed}: {path}")
            raise
        assert time.process_time() - start < 20, f"seed {seed} takes too long"
    return outcomes


@pytest.mark.filterwarnings("ignore")
def test_damaged_files_in_short(tmp_path: Path) -> None:
    outcomes = _battery(range(_SHORT), tmp_path)
    assert outcomes.total() == _SHORT
    assert min(outcomes["read"], outcomes["refused"]) > _SHORT / 10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_damaged_files(tmp_path: Path) -> None:
    outcomes = _battery(range(_FULL), tmp_path)
    record("damaged data files", files=_FULL, seeds=f"0-{_FULL - 1}", **outcomes, tracebacks=0)
    assert outcomes.total() == _FULL
