"""Templates that take too much."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from tandem.data.chat import template_limits
from tandem.data.chat.template_limits import deadline, require_bounded
from tandem.data.render import Renderer
from tandem.errors import DataError, ModelError
from tandem.types import Message
from tests.data.built_tokenizers import CHATML, LLAMA2, PLAIN, THINKING, byte_level

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"

NO_LIMIT_ON_MEMORY = """
import resource

take = resource.setrlimit

def setrlimit(kind, limits):
    if kind == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    take(kind, limits)

resource.setrlimit = setrlimit
"""


@pytest.mark.parametrize("template", [CHATML, LLAMA2, PLAIN, THINKING, "{{ 1 / 0 }}", "{% oops"])
def test_common_templates_are_bounded(template: str) -> None:
    require_bounded(template, "template")


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{% set x = 'a' * 1500000000 %}", "more memory"),
        ("{{ messages[0].content.ljust(2000000000) }}", "more memory"),
        ("{% generation %}{% set x = 'a' * 1500000000 %}{% endgeneration %}", "more memory"),
        (LOOP, "no end"),
        ("{{ 9 ** (9 ** 9) }}", "no end"),
        ("{% if messages | length > 4 %}" + LOOP + "{% endif %}", "no end"),
    ],
)
def test_a_template_without_bounds_is_refused(
    template: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "_CPU_SECONDS", 1)
    with pytest.raises(ModelError, match=f"must render a short conversation .* got {found}"):
        Renderer(byte_level(template + CHATML))


def test_without_a_limit_on_memory_templates_are_used_and_time_is_limited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on macOS: without this every template was refused there."""
    (tmp_path / "sitecustomize.py").write_text(NO_LIMIT_ON_MEMORY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(template_limits, "_CPU_SECONDS", 1)
    require_bounded(CHATML + "{# here #}", "template")
    with pytest.raises(ModelError, match="got no end"):
        require_bounded(LOOP + "{# here #}", "template")


def test_a_template_without_end_on_one_row_fails_for_that_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template_limits, "_RENDER_SECONDS", 0.5)
    renderer = Renderer(
        byte_level("{% if messages[0].content == 'go' %}" + LOOP + "{% endif %}" + CHATML)
    )
    renderer.prompt([Message("user", "hello")])
    with pytest.raises(DataError, match=r"turns must render in time; got no end after 0\.5 s"):
        renderer.prompt([Message("user", "go")])
    renderer.prompt([Message("user", "hello")])
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_deadline_that_is_met_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "_RENDER_SECONDS", 0.05)
    with deadline():
        pass
    time.sleep(0.1)

    def run_for_ever() -> None:
        with deadline():
            while True:
                pass

    with pytest.raises(TimeoutError, match=r"no end after 0\.05 s"):
        run_for_ever()


def test_another_threads_rendering_has_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "_RENDER_SECONDS", 0.01)
    ends: list[bool] = []

    def render() -> None:
        with deadline():
            time.sleep(0.05)
        ends.append(True)

    thread = threading.Thread(target=render)
    thread.start()
    thread.join()
    assert ends == [True]
