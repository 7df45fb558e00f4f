"""docs/tutorial.md, followed literally: every command and every piece of Python, in order."""

from __future__ import annotations

import csv
import re
import shlex
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.data.embedded.generator import rows
from tests.tiny import save_tiny_model

PAGE = Path(__file__).parents[1] / "docs/tutorial.md"


def test_the_tutorial_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "my-model")
    with open("prefs.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "chosen", "rejected"])
        writer.writeheader()
        writer.writerows({k: row[k] for k in writer.fieldnames} for row in rows(200, 3))
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```", PAGE.read_text("utf-8"), re.S | re.M)
    assert [language for language, _ in blocks] == ["sh", "sh", "sh", "python", "python", "sh"]
    for language, text in blocks:
        if language == "python":
            exec(compile(text, str(PAGE), "exec"), {})
            continue
        for line in text.splitlines():
            command, *args = shlex.split(line)
            assert command == "tandem"
            assert main(args) == 0, line
    card = Path("runs/tutorial/dpo/README.md").read_text("utf-8")
    assert f"trained from `{Path('my-model').resolve()}` by Tandem" in card
    assert "| prefs | 200 | " in card
    assert "tandem train --actor-model my-model --data prefs.csv" in card
    assert "| dpo.learning_rate | 0.0001 |" in card
    assert "base_model" not in card  # a folder is no name of the hub
    assert "model.safetensors" in capsys.readouterr().out
    Path("runs/tutorial/dpo/README.md").write_text("My own words.", "utf-8")
    assert main(["push", "runs/tutorial", "you/assistant", "--dry-run"]) == 0
