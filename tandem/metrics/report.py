"""The one-page report of a run: self-contained HTML, no script, no network."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from tandem.config.schema import RunConfig
from tandem.config.spellings import RENAMED
from tandem.files import replace as replace_file
from tandem.metrics import sections
from tandem.metrics.answer_sections import AnswerRecords
from tandem.metrics.folder import RunFolder, read_folder
from tandem.metrics.forecasts import prediction_tables
from tandem.metrics.other_data import other_data_tables
from tandem.text import visible_lines

REPORT_FILE = "report.html"

_HERE = Path(__file__).parent
_MAX_ANSWERS = 8
_MAX_SAMPLES = 8
_MAX_ALARMS = 40


def write_report(run_dir: Path | str, output: Path | str = "") -> Path:
    """Write <run_dir>/report.html, or `output`, from the folder's files; returns its path.

    All text from data, models and config is escaped, control characters included, and the page's
    Content-Security-Policy allows only its own style sheet.

    Raises:
        CheckpointError: if there is no such folder.
    """
    folder = read_folder(run_dir)
    path = Path(output) if output else folder.path / REPORT_FILE
    replace_file(path, render(folder).encode("utf-8"))
    return path


def render(folder: RunFolder) -> str:
    """The page as text."""
    css = (_HERE / "report.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    return (
        _page()
        .render(
            css=Markup(css),
            css_hash=f"sha256-{digest}",
            max_answers=_MAX_ANSWERS,
            max_alarms=_MAX_ALARMS,
            **_context(folder),
        )
        .lstrip()
    )


@cache
def _page() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters.update(breakable=_breakable, code=_code)
    return environment.get_template("report.html.j2")


def _context(folder: RunFolder) -> dict[str, Any]:
    records = AnswerRecords(folder)
    context: dict[str, Any] = {
        "name": folder.path.resolve().name,
        "model": str(folder.config.get("actor_model") or ""),
        "when": sections.when(folder),
        "stages": sections.stages_of_run(folder),
        "notices": (*folder.notices, *records.notices),
        "frontier": records.frontier(),
        "distributions": records.distributions(),
        "followed": records.followed(),
        "win_rates": records.win_rates(),
        "cards": sections.result_cards(folder),
        "table": sections.result_table(folder),
        "reward_tables": sections.reward_tables(folder),
        "other_data": other_data_tables(folder),
        "alarms": sections.alarm_rows(folder),
        "curves": sections.stage_curves(folder),
        "answers": sections.final_answers(folder),
        "samples": sections.training_answers(folder, _MAX_SAMPLES),
        "datasets": sections.dataset_rows(folder),
        "times": sections.time_per_phase(folder),
        "forecasts": prediction_tables(folder),
        "commands": folder.commands,
        "changed": changed_knobs(folder.config),
        "config_text": folder.config_text,
        "environment": list(folder.environment.items()),
    }
    parts_of = {
        ("result", "Result"): ("cards", "evaluated", "reward_tables", "win_rates", "other_data"),
        ("alarms", "Alarms"): ("alarms", "curves"),
        ("curves", "Curves"): ("curves",),
        ("frontier", "Reward against KL"): ("frontier",),
        ("distributions", "Distributions"): ("distributions",),
        ("answers", "Answers"): ("answers", "samples", "followed"),
        ("data", "Data"): ("datasets",),
        ("time", "Time and memory"): ("times",),
        ("forecast", "Predicted and measured"): ("forecasts",),
        ("repeat", "Repeat this run"): ("commands", "changed", "config_text", "environment"),
    }
    filled = {**context, "evaluated": context["table"]["rows"]}
    contents = [title for title, parts in parts_of.items() if any(filled[p] for p in parts)]
    return context | {"contents": contents}


def changed_knobs(config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(knob, value, default) of all knobs that differ from the default, unknown ones included, and
    renamed ones under their current names."""
    defaults = _flat(dataclasses.asdict(RunConfig()))
    return [
        (name, _knob_text(value), _knob_text(defaults.get(name, "")))
        for written, value in _flat(config).items()
        for name in [RENAMED.get(written, written)]
        if name not in defaults or value != defaults[name]
    ]


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested knobs as `ppo.actor.learning_rate: value`, tuples as lists as in YAML."""
    knobs: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            knobs.update(_flat(value, f"{prefix}{name}."))
        else:
            knobs[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return knobs


def _knob_text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_knob_text, value)) or "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "empty" if value == "" else str(value)


def _breakable(name: str) -> Markup:
    """A name that may only break after underscores, dots and slashes."""
    return Markup(re.sub(r"([_./])", r"\1<wbr>", str(escape(visible_lines(name)))))


def _code(text: str) -> Markup:
    """Text with its parts in backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(visible_lines(text)))))


def _shown(value: Any) -> Any:
    """Makes every value printable before it is escaped; our own markup is not changed."""
    return value if isinstance(value, Markup) or value is None else visible_lines(str(value))
