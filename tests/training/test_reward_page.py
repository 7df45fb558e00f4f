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


FUNCTIONS = {"rewards.py": "reward", "open_r1.py": "format_reward", "tokens.py": "brief"}
"""The page's files, and a function in each."""


def blocks(language: str) -> list[str]:
    """The page's blocks of a language."""
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    return [str(block) for block in found]


def command(output_dir: str) -> list[str]:
    """The words of the page's command that writes this folder, without `tandem`."""
    (found,) = (
        text
        for text in blocks("sh")
        if f"--output-dir {output_dir} " in f"{text} ".replace("\n", " ")
    )
    name, *rest = shlex.split(found.replace("\\\n", " "))
    assert name == "tandem"
    return rest


@pytest.fixture
def folder(tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the page's files and a model."""
    for name, function in FUNCTIONS.items():
        (text,) = (b for b in blocks("python") if f"def {function}(" in b)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "questions.jsonl").write_text(blocks("json")[0], encoding="utf-8")
    shutil.copytree(tiny_model, tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    load_reward_function.cache_clear()  # it knows another folder's files by the same names
    return tmp_path


def test_the_function_of_the_page_scores_and_leaves_unscored(folder: Path) -> None:
    function = load_reward_function(f"{folder}/rewards.py:reward")
    completions = ["It is Paris.", "Osaka", "anything"]
    scores = function([""] * 3, completions, answer=["Paris", "Tokyo", None], messages=[])
    assert scores == [pytest.approx(0.97), pytest.approx(-0.01), None]


def test_the_command_of_the_page_trains_by_the_function_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command("runs/capitals"), *SMALLER.split()]) == 0, capsys.readouterr().err
    steps = [record["values"] for record in records(folder / "runs/capitals") if record["step"]]
    assert len(steps) == 2
    for values in steps:
        assert values["reward_unscored"] == 1, "the prompt without an answer"
        assert values["reward_function_score"] == pytest.approx(values["reward_before_penalty"])
        assert "reward_model_score" not in values
    assert (folder / "runs/capitals/ppo/actor/config.json").is_file()


@pytest.mark.parametrize(
    ("output_dir", "section", "told"),
    [
        ("runs/several", "ppo", "gsm8k, of weight 0, does not tell answers apart on 3 rows"),
        ("runs/both", "grpo", "format_reward gives 0 to all that it was tried on"),
        ("runs/tokens", "ppo", "brief gives an answer the same score whatever row it is for"),
    ],
)
def test_the_commands_with_several_functions_run(
    folder: Path, output_dir: str, section: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    smaller = SMALLER.replace("ppo", section).replace("-steps 2", "-steps 1").split()
    code = main([*command(output_dir), *smaller])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert f"reward function {told}" in printed.out + printed.err
    values = records(folder / output_dir)[-1]["values"]
    names = ("reward_mean/length", "reward_per_token/brief")
    assert any(name in values for name in names)
