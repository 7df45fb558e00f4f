"""Samples of data sets for a plan, beside all of their rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config.load import build_config
from tandem.data.embedded.generator import NUM_ROWS
from tandem.data.reading.sources import parse_spec, read_rows
from tandem.data.sampled import sampled, thin
from tandem.errors import DataError
from tandem.plan.lengths import rows_by_stage
from tandem.predict.rows import Rows
from tests.jsonl import write_jsonl


def written(path: Path, num: int) -> Path:
    """Rows whose lengths rise along the file, so that its beginning is no fair sample."""
    rows = (
        {"prompt": f"{n} " + "a " * (n // 100), "chosen": "b " * (1 + n // 50), "rejected": "c"}
        for n in range(num)
    )
    write_jsonl(path, rows)
    return path


@pytest.mark.parametrize("most", [1, 4, 7, 100])
def test_rows_are_thinned_evenly_to_at_most_so_many(most: int) -> None:
    for num in (0, 1, 5, 8, 33, 100, 101):
        kept, every = thin(range(num), most)
        assert kept == list(range(0, num, every))
        assert len(kept) <= most
        assert every == 1 or len(range(0, num, every // 2)) > most  # no fewer than needed


def test_every_row_of_all_data_sets_stands_for_equally_many(tmp_path: Path) -> None:
    small, large = written(tmp_path / "s.jsonl", 40), written(tmp_path / "l.jsonl", 400)
    read, every = sampled((f"{small}:2", str(large)), most=100)
    kept = [list(read(parse_spec(str(path)))) for path in (small, large)]
    assert (every, [len(rows) for rows in kept]) == (8, [5, 50])
    assert kept[1] == list(read_rows(parse_spec(str(large))))[::8]
    read, every = sampled((str(small),), most=100)
    assert every == 1
    assert list(read(parse_spec(str(small)))) == list(read_rows(parse_spec(str(small))))
    with pytest.raises(DataError, match="at least one row"):
        sampled((str(written(tmp_path / "none.jsonl", 0)),))


@pytest.mark.parametrize("most", [1, 2, 3, 10, 15, 16, 31, 32, 33, 40])
def test_a_sample_of_any_size_ends_and_has_rows_of_each_data_set(tmp_path: Path, most: int) -> None:
    plain = [written(tmp_path / f"{num}.jsonl", num) for num in (1, 50)]
    graded = tmp_path / "graded.jsonl"
    rows = ({"prompt": f"{n // 4}?", "completion": f"{n}", "score": n % 4} for n in range(100))
    write_jsonl(graded, rows)
    for paths in ([graded], [graded, *plain]):
        read, every = sampled([*map(str, paths)], most)
        kept = [list(read(parse_spec(str(path)))) for path in paths]
        assert sum(map(len, kept)) <= max(most, len(paths))
        assert all(kept)
        block = min(16, max(1, most // len(paths)))
        assert kept[0] == [
            row
            for number, row in enumerate(read_rows(parse_spec(str(graded))))
            if number // block % every == 0
        ]


def test_only_a_part_of_the_built_in_rows_is_made() -> None:
    read, every = sampled(("embedded",))
    assert every * len(list(read(parse_spec("embedded")))) == NUM_ROWS


def test_a_plans_rows_are_those_of_all_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = build_config(
        {"stages": ["sft", "reward", "ppo"], "dataset": {"max_tokens": 4096},
         "data": [str(written(tmp_path / "rows.jsonl", 4000))]}, where=""
    )  # fmt: skip
    found: dict[int, dict[str, Rows]] = {}
    for most in (1000, 100_000):
        monkeypatch.setattr("tandem.plan.lengths.sampled", lambda n, m=most: sampled(n, m))
        found[most] = rows_by_stage(config, "")
    for stage, rows in found[100_000].items():
        part = found[1000][stage]
        assert part.source.startswith("about ")
        assert not rows.source.startswith("about ")
        assert part.count == pytest.approx(rows.count, rel=0.1)
        assert part.tokens == pytest.approx(rows.tokens, rel=0.1)
        assert part.longest == pytest.approx(rows.longest, rel=0.05)


def test_graded_answers_are_thinned_in_blocks_so_that_those_to_a_prompt_stay_together(
    tmp_path: Path,
) -> None:
    for num in (0, 5, 33, 100, 101):
        kept, every = thin(range(num), 20, block=4)
        assert kept == [n for n in range(num) if n // 4 % every == 0]
        assert len(kept) <= 20
    path = tmp_path / "graded.jsonl"
    rows = (
        {"prompt": f"Question {n // 4}?", "completion": f"{n}", "score": n % 4} for n in range(8000)
    )
    write_jsonl(path, rows)
    config = build_config(
        {"stages": ["reward"], "dataset": {"heldout": 0.0}, "data": [str(path)]}, where=""
    )
    found = rows_by_stage(config, "")["reward"]  # more rows than are read for a plan
    assert found.count == 2000
    assert found.sequences == 4
