"""The one-page report of a run: self-contained HTML, no script, no network."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from tandem.files import replace as replace_file
from tandem.metrics.cost import time_per_phase
from tandem.metrics.curves import stage_curves
from tandem.metrics.folder import RunFolder, changed_knobs, read_folder
from tandem.metrics.ledger import alarm_rows, dataset_rows
from tandem.metrics.results import (
    final_answers,
    result_cards,
    result_table,
    steps_of_run,
    training_answers,
    when,
)
from tandem.metrics.text import visible

REPORT_FILE = "report.html"

_HERE = Path(__file__).parent
_MAX_ANSWERS = 8
_MAX_SAMPLES = 8
_MAX_ALARMS = 40


def write_report(run_dir: Path | str) -> Path:
    """Write <run_dir>/report.html from what the folder holds; what is missing is left out.

    Every text of data, models and config is escaped, control characters are spelled out, and the
    page's Content-Security-Policy allows its own style sheet alone.

    Returns:
        the path of the page.
    Raises:
        CheckpointError: if there is no such folder.
    """
    folder = read_folder(run_dir)
    path = folder.path / REPORT_FILE
    replace_file(path, render(folder).encode("utf-8"))
    return path


def render(folder: RunFolder) -> str:
    """The page as text."""
    css = (_HERE / "report.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters["breakable"] = _breakable
    page = environment.get_template("report.html.j2")
    return page.render(
        css=Markup(css),
        css_hash=f"sha256-{digest}",
        max_answers=_MAX_ANSWERS,
        max_alarms=_MAX_ALARMS,
        **_context(folder),
    ).lstrip()


def _context(folder: RunFolder) -> dict[str, Any]:
    context: dict[str, Any] = {
        "name": folder.path.resolve().name,
        "model": str(folder.config.get("actor_model") or ""),
        "when": when(folder),
        "steps": steps_of_run(folder),
        "notices": folder.notices,
        "cards": result_cards(folder),
        "table": result_table(folder),
        "alarms": alarm_rows(folder),
        "curves": stage_curves(folder),
        "answers": final_answers(folder),
        "samples": training_answers(folder, _MAX_SAMPLES),
        "datasets": dataset_rows(folder),
        "times": time_per_phase(folder),
        "commands": folder.commands,
        "changed": changed_knobs(folder.config),
        "config_text": folder.config_text,
        "environment": list(folder.environment.items()),
    }
    context["contents"] = _contents(context)
    return context


def _contents(context: dict[str, Any]) -> list[tuple[str, str]]:
    sections = {
        ("result", "Result"): context["cards"] or context["table"].rows,
        ("alarms", "Alarms"): context["alarms"] or context["curves"],
        ("curves", "Curves"): context["curves"],
        ("answers", "Answers"): context["answers"] or context["samples"],
        ("data", "Data"): context["datasets"],
        ("time", "Time and memory"): context["times"],
        ("repeat", "Repeat this run"): any(
            context[part] for part in ("commands", "changed", "config_text", "environment")
        ),
    }
    return [section for section, filled in sections.items() if filled]


def _breakable(name: str) -> Markup:
    """A name that a narrow column may break after its underscores, dots and slashes alone."""
    return Markup(re.sub(r"([_./])", r"\1<wbr>", str(escape(visible(name)))))


def _shown(value: Any) -> Any:
    """Every printed value passes here before it is escaped; markup of ours is left alone."""
    return value if isinstance(value, Markup) or value is None else visible(str(value))
