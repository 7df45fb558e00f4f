"""The batteries' own command: a failure ends it with a failure, and is in its table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_FAILS = """
def test_fails():
    assert 1 == 2, "one is two"

def test_holds():
    from tests.battery.figures import record
    record("holds", trials=3)
"""


@pytest.mark.parametrize(("code", "table"), [(1, 0), (0, 1), (0, 0)])
def test_make_battery_ends_as_its_tests_do(tmp_path: Path, code: int, table: int) -> None:
    """With a python that ends the tests and the table as told."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\n[ "$2" = pytest ] && exit {code}\nexit {table}\n')
    python.chmod(0o755)
    (tmp_path / ".installed").touch()
    os.utime(tmp_path / ".installed", (2**31, 2**31))
    ended = subprocess.run(
        ["make", "-f", ROOT / "Makefile", "battery", f"VENV={tmp_path}"],
        cwd=folder_to_make_in(tmp_path), capture_output=True, text=True,
    )  # fmt: skip
    assert (ended.returncode == 0) == (code == table == 0), ended.stderr


def folder_to_make_in(folder: Path) -> Path:
    """Where make finds what the virtual environment is made of, and nothing else."""
    copy = folder / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", "constraints.txt"):
        (copy / name).touch()
    return copy


def test_a_test_that_fails_is_in_the_table(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "battery"
    folder.mkdir(parents=True)
    (folder / "conftest.py").write_bytes((ROOT / "tests/battery/conftest.py").read_bytes())
    (folder / "test_some.py").write_text(_FAILS)
    environment = {**os.environ, "TANDEM_BATTERY": str(tmp_path / "b"), "PYTHONPATH": str(ROOT)}
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    command = [sys.executable, "-m", "pytest", *options, str(folder)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stdout
    command = [sys.executable, "-m", "tests.battery.table", str(tmp_path / "b")]
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert shown.returncode == 1
    assert "1 batteries held, 1 tests failed" in shown.stdout
    assert "one is two" in " ".join(shown.stdout.split())
