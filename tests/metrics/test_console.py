import io
import math
import re

import pytest
from rich.console import Console

from tandem.config.stages import FAMILIES, STAGES
from tandem.metrics.console import _SPEED, StageConsole, _speed
from tandem.metrics.names import find_metric
from tandem.metrics.table import METRICS
from tandem.metrics.text import short_number


def stage_console(stage="ppo", num_steps=200, start_step=0, terminal=False, width=200):
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=terminal, width=width, highlight=False, soft_wrap=True
    )
    return StageConsole(stage, num_steps, start_step, console), file


def columns(stage):
    """(name, label) of everything that a stage may show, held-out numbers last."""
    shown = [m for m in METRICS if stage.family in m.families and m.column]
    main = [(m.name, m.column) for m in shown if not m.is_heldout]
    return [*main, _speed(stage.name), *((m.name, m.column) for m in shown if m.is_heldout)]


def test_every_family_shows_a_few_declared_metrics():
    assert set(_SPEED) == set(FAMILIES) == {stage.family for stage in STAGES}
    for stage in STAGES:
        names = [name for name, _ in columns(stage)]
        assert all(stage.family in find_metric(name).families for name in names)
        assert 5 <= len([name for name in names if "heldout" not in name]) <= 9


def test_plain_lines_are_aligned_and_end_with_the_eta():
    console, file = stage_console()
    console.line(1, {"reward": 0.5, "kl": 1e-9, "entropy": 2.0, "clip_fraction": 0.1})
    console.line(100, {"reward": -12.25, "kl": 3.0, "entropy": math.nan})
    first, second = file.getvalue().splitlines()
    assert first.startswith(
        "ppo      1/200  reward 0.500    kl 1e-09    entropy 2.00     clip 0.100"
    )
    assert second.startswith("ppo    100/200  reward -12.2    kl 3.00     entropy nan      clip -")
    assert "| eta " in second
    assert "\x1b" not in file.getvalue()


def test_a_short_eta_is_in_whole_seconds() -> None:
    console, file = stage_console()
    console.line(199, {"reward": 0.5})
    assert file.getvalue().endswith("| eta 1 s\n")


def test_no_eta_at_the_last_step_or_without_a_total():
    console, file = stage_console(num_steps=1)
    console.line(1, {"reward": 0.5})
    unknown, other = stage_console(num_steps=0)
    unknown.line(7, {"reward": 0.5})
    assert "eta" not in file.getvalue() + other.getvalue()
    assert other.getvalue().startswith("ppo       7  reward")


def test_held_out_numbers_follow_or_stand_alone():
    console, file = stage_console("sft")
    console.line(0, {"heldout_loss": 2.0})
    console.line(1, {"loss": 1.0, "heldout_loss": 2.0})
    console.line(2, {"heldout_margin": 2.0})
    alone, both = file.getvalue().splitlines()
    assert alone.startswith("sft      0/200  held-out loss 2.00")
    assert both.index("loss 1.00") < both.index("held-out loss 2.00")


def test_a_step_has_no_decimals() -> None:
    console, file = stage_console("sft")
    console.line(150, {"heldout_loss": 2.5, "heldout_best_step": 20.0})
    assert "held-out loss 2.50 best at 20 |" in file.getvalue()


def test_a_terminal_gets_a_bar():
    console, file = stage_console(terminal=True, start_step=3)
    console.line(4, {"reward": 0.5})
    console.close()
    text = file.getvalue()
    assert "4/200" in text
    assert "━" in text
    assert "| eta" not in text


def test_the_bar_has_an_eta_however_long_a_step_takes(monkeypatch):
    now = 1000.0
    monkeypatch.setattr("tandem.metrics.console.time.monotonic", lambda: now)
    console, file = stage_console(terminal=True, start_step=3, num_steps=23)
    for step in (4, 5):
        now += 600.0
        console.line(step, {"reward": 0.5})
    console.close()
    assert "eta 3 h 00 m" in file.getvalue()  # 18 steps of 10 minutes
    assert "-:--:--" not in file.getvalue()


def test_what_comes_before_the_first_step_is_not_in_the_eta(monkeypatch):
    now = 1000.0
    monkeypatch.setattr("tandem.metrics.console.time.monotonic", lambda: now)
    console, file = stage_console(num_steps=11)
    now += 500.0  # a rehearsal, an evaluation
    console.line(0, {"heldout_loss": 2.0})
    console.begin()
    now += 60.0
    console.line(1, {"reward": 0.5})
    assert file.getvalue().endswith("| eta 10 m 00 s\n")


@pytest.mark.parametrize("width", [60, 80, 100, 120])
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_terminals_lines_end_between_numbers(stage, width):
    console, file = stage_console(stage.name, terminal=True, width=width)
    shown = columns(stage)
    values = {name: -0.012345 * 10**-n for n, (name, _) in enumerate(shown)}
    console.line(123, values)
    console.close()
    lines = [
        re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]", file.getvalue())
    ]
    lines = [line for line in lines if "━" not in line and line.strip()]
    assert all(len(line) <= width and line == line.rstrip() for line in lines)
    text = "\n".join(lines)
    for name, label in shown:
        assert f"{label} {short_number(values[name], 3)}" in text


def test_a_column_appears_with_its_metric_and_stays():
    """A family's columns are not all of each of its stages'."""
    console, file = stage_console("dpo")
    console.line(1, {"loss": 0.5, "implicit_reward_margin": 0.25})
    console.line(2, {"loss": 0.5})
    first, second = file.getvalue().splitlines()
    assert first.startswith("dpo      1/200  loss 0.500    margin 0.250   ")
    assert second.startswith("dpo      2/200  loss 0.500    margin -       ")
    assert "acc" not in first + second


@pytest.mark.parametrize("terminal", [False, True])
def test_text_cannot_drive_the_terminal(terminal):
    console, file = stage_console(terminal=terminal)
    plain, _ = stage_console(terminal=terminal)
    console.sample(
        3,
        "p \x1b]0;title\x07 [bold]not markup[/bold]",
        {"evil \x1b[2J": {"text": "a\u202eb\x9b1m\nsecond", "score": 1.25}},
    )
    console.close()
    plain.close()
    text = file.getvalue()
    assert "p \\x1b]0;title\\x07 [bold]not markup[/bold]" in text
    assert "evil \\x1b[2J (score 1.250): a\\u202eb\\x9b1m\n      second" in text
    assert "\x1b]0" not in text
    assert "\x07" not in text


def test_an_alarm_is_one_line():
    console, file = stage_console()
    console.alarm(9, "kl-high", "Far. Do this.")
    assert file.getvalue() == "ppo      9/200  ALARM kl-high: Far. Do this.\n"
