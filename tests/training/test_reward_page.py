"""docs/reward_function.md, followed literally: its files and its command are a whole run."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.rewards.loading import load_reward_function
from tests.training.runs import records

PAGE = (Path(__file__).parents[2] / "docs/reward_function.md").read_text("utf-8")
SMALLER = (
    "--ppo-steps 2 --ppo.prompts-per-step 4 --ppo.minibatch-size 4 --ppo.eval-prompts 0 "
    "--max-new-tokens 8"
)


def block(language: str) -> str:
    """The page's first block of a language."""
    found, *_ = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    return str(found)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the page's two files."""
    (tmp_path / "rewards.py").write_text(block("python"), encoding="utf-8")
    (tmp_path / "questions.jsonl").write_text(block("json"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_function_of_the_page_scores_and_leaves_unscored(folder: Path) -> None:
    function = load_reward_function(f"{folder}/rewards.py:reward")
    completions = ["It is Paris.", "Osaka", "anything"]
    scores = function([""] * 3, completions, answer=["Paris", "Tokyo", None], messages=[])
    assert scores == [pytest.approx(0.97), pytest.approx(-0.01), None]


def test_the_command_of_the_page_trains_by_the_function_alone(
    folder: Path, tiny_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_model, folder / "my-model")
    command, *rest = shlex.split(block("sh").replace("\\\n", " "))
    assert command == "tandem"
    assert main([*rest, *SMALLER.split()]) == 0, capsys.readouterr().err
    steps = [record["values"] for record in records(folder / "runs/capitals") if record["step"]]
    assert len(steps) == 2
    for values in steps:
        assert values["reward_unscored"] == 1, "the prompt without an answer"
        assert values["reward_function_score"] == pytest.approx(values["reward_before_penalty"])
        assert "reward_model_score" not in values
    assert (folder / "runs/capitals/ppo/actor/config.json").is_file()
