"""The table of an evaluation, on a narrow terminal."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from tandem.metrics.names import title_of
from tandem.training.eval_command import figures_table


def test_data_sets_are_told_apart_at_eighty_columns() -> None:
    names = [f"heldout_perplexity/{name}" for name in ("politeness_rasbt", "politeness_other")]
    models = {
        label: dict.fromkeys(names, 113.2)
        for label in ("base", "sft", "dpo", "ppo", "ema", "reward model")
    }
    out = StringIO()
    Console(file=out, width=80).print(figures_table(models))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    first_column = "".join(line.split("│")[1] for line in lines if line.startswith("│"))
    titles = "".join(title_of(name) for name in names)
    assert first_column.replace(" ", "") == titles.replace(" ", "")
    assert out.getvalue().count("113.2") == len(models) * len(names)
