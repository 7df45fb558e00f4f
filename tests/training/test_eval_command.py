"""The table of an evaluation, on a narrow terminal."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tandem.metrics.names import title_of
from tandem.training.eval_command import evaluate_run, figures_table
from tests.tiny import tiny_config, tiny_tokenizer
from tests.training.runs import ran


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


def test_an_evaluation_by_hand_is_the_run_s_own_whatever_its_template_is_called(
    tmp_path: Path, tiny_model: str, preferences: str, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text(str(tiny_tokenizer().chat_template))
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["sft"],
        dataset__chat_template=str(template),
    )  # fmt: skip
    ran(config)
    file = tmp_path / "run" / "evaluation.json"
    before = json.loads(file.read_text())["made_from"]
    file.unlink()
    evaluate_run(config.output_dir, 0)
    capsys.readouterr()
    assert json.loads(file.read_text())["made_from"] == before, "it need not be made again"
