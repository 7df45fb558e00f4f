"""The table of an evaluation, on a narrow terminal."""

from __future__ import annotations

import errno
import json
import shutil
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tandem.cli import main
from tandem.errors import ModelError
from tandem.metrics.names import title_of
from tandem.training.comparing.eval_command import answers_table, evaluate_run, figures_table
from tandem.training.replay import replay
from tests.tiny import tiny_config, tiny_tokenizer
from tests.training.runs import StopError, ran, stop_at


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


def test_a_run_is_evaluated_from_any_folder_and_its_base_may_have_moved(
    tmp_path: Path,
    tiny_model: str,
    preferences: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home, path = tmp_path / "home", str(tmp_path / "run")
    base = Path(shutil.copytree(tiny_model, home / "my-model"))
    shutil.copy(preferences, home / "rows.jsonl")
    monkeypatch.chdir(home)
    config = tiny_config(tmp_path / "run", "my-model", "rows.jsonl", stages=["sft", "reward"])
    ran(config)
    models = evaluate_run(path, 0)["models"]
    monkeypatch.chdir(tmp_path)
    assert evaluate_run(path, 0)["models"] == models
    assert replay(path, 3, stage="sft") == 0
    base.rename(home / "renamed")
    with pytest.raises(ModelError, match=f"base model of {path} .* '{base}', .* --base MODEL"):
        evaluate_run(path, 0)
    capsys.readouterr()
    assert main(["eval", path, "--base", "home/renamed", "--prompts", "2"]) == 0
    assert "base" in capsys.readouterr().out
    (home / "renamed").rename(base)
    monkeypatch.chdir(home)
    lines: list[str] = []
    monkeypatch.setattr("tandem.training.run_stages.compare", None)
    ran(
        tiny_config(tmp_path / "run", "my-model", "rows.jsonl", stages=["sft", "reward"]),
        lines=lines,
    )
    assert "sft: finished before" in "".join(lines), "and nothing is compared anew"


def test_a_run_without_held_out_rows_says_so(
    tmp_path: Path, tiny_model: str, preferences: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(
        tmp_path / "run", tiny_model, preferences, stages=["sft"], dataset__heldout=0.0
    )
    ran(config)
    capsys.readouterr()
    assert main(["eval", config.output_dir]) == 0
    said = capsys.readouterr().out
    assert "nothing was measured: no row is held out. Give --data FILE." in said
    assert "metric" not in said


def test_what_the_reward_stage_starts_from_scores_nothing(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    config = tiny_config(tmp_path / "run", tiny_model, preferences, reward_model=tiny_model)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, "reward", 1)
        with pytest.raises(StopError):
            ran(config)
    evaluation = evaluate_run(config.output_dir, 2)
    assert list(evaluation["models"]) == ["base", "sft"]
    assert all(answer["score"] is None for answer in evaluation["answers"][0]["answers"].values())


def test_figures_that_cannot_be_written_are_shown_all_the_same(
    tmp_path: Path,
    tiny_model: str,
    preferences: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = ran(tiny_config(tmp_path / "run", tiny_model, preferences, stages=["sft"]))
    before = (folder / "evaluation.json").read_bytes()

    def refuse(path: Path, content: bytes) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr("tandem.training.run_folder.replace_file", refuse)
    monkeypatch.setattr("tandem.metrics.report.replace_file", refuse)
    capsys.readouterr()
    assert main(["eval", str(folder)]) == 2
    told = capsys.readouterr()
    assert "Held-out perplexity" in told.out
    assert told.err.splitlines()[-1] == (
        f"tandem: the figures above must be written to {folder}/evaluation.json and report.html; "
        "got: Read-only file system. Make the folder writable, or give --prompts N, which writes "
        "nothing."
    )
    assert (folder / "evaluation.json").read_bytes() == before
    assert main(["report", str(folder)]) == 2
    assert capsys.readouterr().err == (
        f"tandem: {folder}/report.html must be a file that can be written; got: Read-only file "
        "system. Write it elsewhere by --output FILE.\n"
    )
    monkeypatch.undo()
    assert main(["report", str(folder), "--output", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/page.html\n"
    assert (tmp_path / "page.html").read_bytes() == (folder / "report.html").read_bytes()


@pytest.mark.parametrize("score", [None, 0.5])
def test_answers_have_a_column_of_scores_where_one_has_a_score(
    score: float | None,
) -> None:
    answers = {
        "base": {"text": "one", "score": None},
        "sft": {"text": "two", "score": score},
    }
    table = answers_table({"prompt": "ask", "answers": answers})
    cells = {str(column.header): list(map(str, column.cells)) for column in table.columns}
    expected = {"model": ["base", "sft"], "answer": ["one", "two"]}
    assert cells == (expected if score is None else expected | {"score": ["", "+0.50"]})
