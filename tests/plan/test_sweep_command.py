"""`tandem sweep`: its flags, its mistakes, and what it shows without running."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tandem.errors import ConfigError
from tandem.plan import sweep_command as module
from tandem.plan.sweep_command import parse_sweep, sweep_command

_DATA = ["--data", "embedded"]


def test_flags_of_the_sweep_and_of_the_run() -> None:
    sweep, dry = parse_sweep(
        "--sweep-dir out --num-gpus 2 --sweep-stages 0 3 --sweep-lora 8 --no-sweep-offload "
        "--no-sweep-variants --ppo-steps 5 --retry-failed --sweep-only ppo/ sft/zero0 "
        "--data embedded".split()
    )
    assert (sweep.folder, sweep.ranks, dry) == (Path("out"), 2, False)
    assert (sweep.axes.stages, sweep.axes.lora) == ((0, 3), (8,))
    assert (sweep.axes.offload, sweep.axes.variants) == ((False,), False)
    assert (sweep.only, sweep.retry_failed) == (("ppo/", "sft/zero0"), True)
    assert sweep.config.ppo.steps == 5


def test_a_file_may_stand_first(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data: [embedded]\nseed: 5\nsteps: [sft]\n")
    sweep, dry = parse_sweep([str(file), "--sweep-dir", "out", "--dry-run"])
    assert (sweep.config.seed, sweep.config.stages, dry) == (5, ("sft",), True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "must get --sweep-dir DIR; got none"),
        (["--sweep-dir", "x", "--num-gpus", "0"], "--num-gpus must be at least 1; got 0"),
        (
            ["--sweep-dir", "x", "--num-gpus", "two"],
            "--num-gpus must be a whole number; got 'two'. See tandem sweep",
        ),
        (["--sweep-dir", "x", "--sweep-stages", "4"], "--sweep-stages must be within 0 to 3"),
        (["--sweep-dir", "x", "--sweep-lora", "-1"], "--sweep-lora must be at least 0; got -1"),
        (["--sweep-dir", "x", "--sweep-stage", "1"], "sweep-stage"),
    ],
)
def test_wrong_flags_of_sweep_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_sweep([*flags, *_DATA])


def test_a_dry_run_shows_cases_and_reasons(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "run_sweep", lambda sweep: pytest.fail("ran"))
    out = tmp_path / "out"
    flags = ["--sweep-dir", str(out), "--sweep-stages", "3", "--sweep-lora", "0", "--dry-run"]
    assert sweep_command([*flags, *_DATA, "--stages", "sft"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == (
        "sft/zero3: parallel.actor_zero_stage=3 parallel.critic_zero_stage=3 lora.rank=0, 1 rank"
    )
    assert any(line.startswith("skipped (1): sft/zero3-hpz: ") for line in others)
    assert not out.exists()


def test_help_comes_without_torch() -> None:
    code = (
        "import sys; from tandem.cli import main; code = main(['sweep', '--help']); "
        "assert code == 0 and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--sweep-dir DIR" in done.stdout
    assert "--retry-failed" in done.stdout
