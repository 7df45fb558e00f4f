"""docs/add_an_algorithm.md, followed literally: its record and its file are a whole stage."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tandem.training
from tandem.cli import main
from tandem.config import stages
from tandem.config.load import dump_config
from tandem.config.schema import RunConfig
from tandem.config.stages import Stage
from tandem.plan.run import plan_memory
from tests.tiny import tiny_config, tiny_llama
from tests.training.runs import StopError, assert_equal_runs, records, stop_at

PAGE = Path(__file__).parents[2] / "docs/add_an_algorithm.md"
NAME = "simpo"


@pytest.fixture
def simpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """The page's stage, in the table and beside the others' files for the time of a test."""
    record, file = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), flags=re.DOTALL)
    stage = eval(record, {"Stage": Stage})
    folder = tmp_path / "training"
    folder.mkdir()
    (folder / f"{NAME}.py").write_text(file, encoding="utf-8")
    monkeypatch.setattr(tandem.training, "__path__", [*tandem.training.__path__, str(folder)])
    monkeypatch.setattr(stages, "STAGES", (*stages.STAGES, stage))
    yield stage
    sys.modules.pop(f"tandem.training.{NAME}", None)


def config_file(config: RunConfig, folder: Path) -> list[str]:
    """What to give a command for this configuration in another folder."""
    path = folder.with_suffix(".yaml")
    path.write_text(dump_config(config), encoding="utf-8")
    return ["--config", str(path), "--output-dir", str(folder)]


def test_a_stage_of_the_page_is_trained_stopped_continued_and_shown(
    simpo: Stage,
    tmp_path: Path,
    tiny_model: str,
    preferences: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny_config(tmp_path, tiny_model, preferences, save_async=False, dtype="fp32")
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert main([NAME, *config_file(config, straight)]) == 0

    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, NAME, 3)
        with pytest.raises(StopError):
            main([NAME, *config_file(config, run)])
    capsys.readouterr()
    assert main([NAME, *config_file(config, run)]) == 0
    out = capsys.readouterr().out
    assert f"{NAME}: continuing after step 2 (checkpoint verified)" in out
    assert "(pairs " in out  # the ledger's account of its share
    assert_equal_runs(run, straight)
    assert [record["step"] for record in records(run)] == [0, 1, 2, 3]

    evaluation = json.loads((run / "evaluation.json").read_text("utf-8"))
    assert set(evaluation["models"]) == {"base", NAME}
    assert set(evaluation["answers"][0]["answers"]) == {"base", NAME}
    page = (run / "report.html").read_text("utf-8")
    assert simpo.title in page
    assert f"{simpo.short} model: " in page

    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main(["chat", str(run), "--model", NAME, "--max-new-tokens", "4"]) == 0
    assert f"talking to {run / NAME}" in capsys.readouterr().out
    assert main(["replay", str(run), "--step", "2"]) == 0
    assert f"{NAME} step 2, again" in capsys.readouterr().out
    assert main(["eval", str(run)]) == 0
    assert NAME in capsys.readouterr().out


def test_a_stage_of_the_page_follows_others_and_is_swept_and_planned(
    simpo: Stage,
    tmp_path: Path,
    tiny_model: str,
    preferences: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tiny_config(
        tmp_path, tiny_model, preferences, stages=["sft", NAME], dataset__split=[], dtype="fp32"
    )
    both = config_file(config, tmp_path / "both")
    assert main(["train", *both]) == 0
    made_from = json.loads((tmp_path / "both" / NAME / "MANIFEST.json").read_text("utf-8"))
    assert "the sft stage" in made_from["facts"]["made_from"]
    assert made_from["facts"]["made_from"]["dataset.split"] == [2, 4, 0]
    capsys.readouterr()
    changed = ["--dpo.beta", "0.2"]  # a knob of its section, read from its record
    assert main(["train", *both, *changed]) == 2
    assert f"both/{NAME} was made with other knobs" in (err := capsys.readouterr().err)
    assert "dpo.beta 0.1 -> 0.2" in err
    assert main(["train", *both, "--steps", NAME, "ppo"]) == 2
    assert "in two folders" in capsys.readouterr().err

    sweep = ["--sweep-dir", str(tmp_path / "sweep"), "--dry-run", "--sweep-stages", "0"]
    assert main(["sweep", *both, *sweep]) == 0
    assert f"{NAME}/zero0: " in capsys.readouterr().out
    plan = plan_memory(config, NAME, tiny_llama(64).config)
    assert plan.phases.keys() == {"train"}
    assert not any("reference" in name for name in plan.resting)  # its record has none
