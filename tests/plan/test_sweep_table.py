"""The tables: columns, plain numbers, bars in proportion, nothing that a name could inject."""

from __future__ import annotations

import re
from dataclasses import replace

from tandem.plan.cases import Skipped
from tandem.plan.results import Result
from tandem.plan.sweep_table import bars, csv_table, page, summary_line, text_table

RESULT = Result(
    stage="ppo",
    name="zero3",
    ranks=2,
    knobs={"parallel.offload": ["optimizer", "params"]},
    digest="",
    exit_code=0,
    wall_seconds=75.0,
    steps=4,
    seconds={"step": 6.0, "generate": 2.0},
    tokens_per_second={"generate": 12345.6, "train": 99.5},
    peak_bytes={"0": 3 * 2**30, "1": 2**30},
    device_bytes={"train": 5 * 2**30},
    outcome=-0.25,
)
FAILED = replace(
    RESULT, name="bad", exit_code=2, error="no\x1b[31m", seconds={}, tokens_per_second={}
)


def test_a_line_of_a_finished_case() -> None:
    assert summary_line(RESULT) == (
        "1 m 15 s, generate 12,346 tokens/s, train 100 tokens/s, peak 3.00 GiB a rank, "
        "reward -0.2500"
    )
    assert summary_line(FAILED) == "failed with exit code 2: no\\x1b[31m"


def test_columns_are_even_and_empty_ones_skipped() -> None:
    table = text_table([RESULT, replace(RESULT, name="zero3-offload")], [Skipped("ppo", "x", "y")])
    head, first, second, skipped = table.splitlines()
    assert head.index("case") == first.index("zero3") == second.index("zero3-offload")
    assert len(head) == len(first) == len(second)
    assert skipped == "skipped (1): ppo/x: y"
    assert "error" not in head
    assert "GPU" not in head
    assert "error" in text_table([RESULT, FAILED], []).splitlines()[0]


def test_a_gpus_memory_is_its_own_column() -> None:
    table = text_table([replace(RESULT, device="cuda")], [])
    assert "GPU peak" in table.splitlines()[0]
    assert "5.00 GiB" in table


def test_the_csv_holds_plain_numbers() -> None:
    head, row = (line.split(",") for line in csv_table([RESULT]).splitlines())
    cells = dict(zip(head, row, strict=True))
    assert cells["parallel.offload"] == "optimizer params"
    assert cells["peak_bytes/rank0"] == str(3 * 2**30)
    assert cells["tokens_per_second/generate"] == "12345.6"
    assert "seconds/evaluate" not in cells


def test_bars_are_in_proportion() -> None:
    drawn = str(bars("Time", "seconds", [("a", 1.0), ("b", 4.0), ("c", 0.0)]))
    widths = [float(w) for w in re.findall(r'class="bar"[^>]* width="([\d.]+)"', drawn)]
    assert widths[1] == 4 * widths[0]
    assert widths[2] == 0
    assert "4.00 s" in drawn


def test_the_page_shows_everything_and_runs_nothing() -> None:
    html = page([RESULT, FAILED], [Skipped("ppo", "<i>", "why & how")], "<script>")
    assert not any(text in html for text in ("<script>", "<i>", "\x1b"))
    assert "default-src 'none'" in html
    assert "(1): ppo/&lt;i&gt;: why &amp; how" in html
    assert html.count("<svg") == 4  # memory, time, training, generation
    assert "loss or reward" in html
