"""`tandem doctor`: one screen, JSON, and a machine without a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tandem import processor
from tandem.cli import main
from tandem.errors import ConfigError
from tandem.ops import native
from tandem.ops.rates import ProductRate
from tandem.plan import doctor
from tandem.plan.doctor import bf16_advice, examine
from tandem.plan.doctor_command import doctor_command
from tandem.predict.machine import known_machine

RATE = ProductRate(768, 128, 352, "fp32", 90.0, 80.0, 70.0, 60.0, "6x64, 1024")


def test_the_screen_names_processor_packages_and_speed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "product_rate", lambda *shape: RATE)
    monkeypatch.setattr(doctor, "memory_rate", lambda: 2e10)
    assert main(["doctor"]) == 0
    shown, told = capsys.readouterr()
    loads, measures, *each = told.splitlines()
    assert loads == "tandem doctor: loading PyTorch and transformers ..."
    assert measures.startswith("tandem doctor: measuring products and memory, about 15 s")
    assert each == [
        f"tandem doctor: measuring {what} ..."
        for what in ("float32 products", "bfloat16 products", "memory")
    ]
    for part in (processor.kind(), "torch ", "20.0 GB/s", "768x128x352", "6x64, 1024"):
        assert part in shown
    assert len(shown.splitlines()) <= 40


@pytest.mark.parametrize(
    ("gains", "named"), [((2.5, 4.0), "2.5 to 4.0 times"), ((1.9, 4.0), ""), ((), "")]
)
def test_bf16_is_advised_where_every_product_is_twice_as_fast(
    gains: tuple[float, ...], named: str
) -> None:
    rates = [replace(RATE, rows=rows) for rows in range(1, 4)]
    rates += [
        replace(RATE, rows=rows, dtype="bf16", training=gain * RATE.training)
        for rows, gain in enumerate(gains, start=1)
    ]
    advice = bf16_advice(rates)
    assert named in advice
    assert bool(advice) == bool(named)
    assert ("--dtype bf16" in advice) == bool(named)


def test_json_has_what_the_screen_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor_command(["--json", "--no-speed"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["products"] == []
    assert facts["memory_bytes_per_second"] is None
    assert facts["native"]["available"] == native.available()
    assert facts["free_disk_bytes"] > 0
    assert facts["versions"]["torch"]


def test_without_a_compiler_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "_compiler", lambda: None)
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "not" / "there"))
    facts = examine(speed=False)
    assert "C++ compiler: apt install g++, or set CXX." in facts["missing"]
    assert facts["free_cache_disk_bytes"] > 0
    assert facts["native"]["cache_folder"] == str(tmp_path / "not" / "there")
    assert facts["native"]["why_no_cache_folder"] == ""


def test_a_user_without_a_home_folder_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("TANDEM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    facts = examine(speed=False)
    why = "this user has no home folder for a cache; set TANDEM_CACHE"
    assert facts["native"]["cache_folder"] is facts["free_cache_disk_bytes"] is None
    assert facts["native"]["why_no_cache_folder"] == why
    doctor_command(["--no-speed"])
    assert f"cache folder    none: {why}" in capsys.readouterr().out
    assert known_machine() is None, "a plan measures this machine and keeps nothing"


def test_a_needed_package_that_is_missing_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = doctor._version
    monkeypatch.setattr(
        doctor, "_version", lambda name: None if name == "tensorboard" else found(name)
    )
    assert doctor_command(["--no-speed"]) == 1
    assert "tensorboard: pip install tensorboard." in capsys.readouterr().out


def test_it_says_what_it_does_before_the_imports_that_take_seconds(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import sys\nsys.exit('torch is imported')")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), os.getcwd()]))
    command = [sys.executable, "-m", "tandem", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == ""
    assert done.stderr.startswith("tandem doctor: loading PyTorch and transformers ...\n")
    done = subprocess.run([*command, "--help"], env=environment, capture_output=True, text=True)
    assert "--no-speed" in done.stdout
    assert done.stderr == ""


def test_a_mistake_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="--sped"):
        doctor_command(["--sped"])


def test_it_runs_without_the_cpp_operations() -> None:
    environment = dict(os.environ, TANDEM_NATIVE="off")
    command = [sys.executable, "-m", "tandem", "doctor", "--no-speed"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "not built: TANDEM_NATIVE is off" in done.stdout
