"""Every bench with --tiny: the whole command runs, shows its table and writes its JSON."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

COMMANDS: dict[str, tuple[str, dict[str, set[str]]]] = {
    "step3": ("--rounds 2 --no-memory", {"": {"tandem", "plain"}}),
    "generation": (
        "--rounds 2 --rows llama-2.2m-fp32 --sides tandem hf hf-static",
        {"llama-2.2m-fp32": {"tandem", "hf", "hf-static"}},
    ),
    "packed": ("--rounds 2 --shapes llama-22m", {"llama-22m": {"tandem", "hf"}}),
    "supervised": (
        "--rounds 2 --steps 2 --dtype bf16",
        {"llama-2.2m-sft": {"tandem", "hf"}, "llama-2.2m-reward": {"tandem", "hf"}},
    ),
}


@pytest.mark.filterwarnings("ignore")  # of TRL, where it is installed
@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_prints_a_table_and_writes_json(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, expected = COMMANDS[name]
    file = tmp_path / "made.json"
    import_module(f"bench.{name}").main([*flags.split(), "--tiny", "--json", str(file)])
    shown = capsys.readouterr().out
    assert all(
        word in shown for word in ("tandem", "tokens/s", "ratio", "CPU s", torch.__version__)
    )
    written: dict[str, Any] = json.loads(file.read_text("utf-8"))
    facts = {"command", "commit", "machine", "threads", "versions", "keeps_freed_memory"}
    assert facts <= written.keys()
    assert written["options"]["tiny"] is True
    rows = written.get("rows") if name != "step3" else {"": written}
    assert rows is not None
    assert rows.keys() == expected.keys()
    for row, sides in expected.items():
        assert {"work", "apart", "rounds", "summary"} <= rows[row].keys()
        rounds = {side: of for side, of in rows[row]["rounds"].items() if side != "trl"}
        assert rounds.keys() == sides
        assert all(len(of) == 2 and of[0]["total"]["wall"] > 0 for of in rounds.values())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_count_must_be_positive(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        import_module(f"bench.{name}").main(["--rounds", "0"])
    assert "must be at least 1; got 0" in capsys.readouterr().err
