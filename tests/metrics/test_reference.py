from pathlib import Path

from tandem.metrics.alarms import ALARMS
from tandem.metrics.reference import markdown
from tandem.metrics.table import METRICS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def test_the_page_in_docs_is_the_generated_one():
    assert PAGE.read_text("utf-8") == markdown(), (
        "run `python -m tandem.metrics.reference > docs/metrics.md`"
    )


def test_every_metric_and_alarm_is_on_the_page_once():
    rows = [line.split(" | ")[0] for line in markdown().splitlines() if line.startswith("| `")]
    assert len(rows) == len(set(rows)) == len(METRICS) + len(ALARMS)


def test_tables_have_the_same_number_of_cells_in_every_row():
    width = None
    for line in markdown().splitlines():
        if not line.startswith("|"):
            width = None
            continue
        cells = line.replace("\\|", "").count("|")
        assert width in (None, cells)
        width = cells
