"""Progress in a notebook, with an IPython that only remembers."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from tandem.metrics.console import StageConsole


class Handle:
    def __init__(self, shown: list[Any]) -> None:
        self.shown = shown

    def update(self, data: Any, *, raw: bool) -> None:
        assert raw
        self.shown.append(data)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the notebook displays."""
    found: list[Any] = []
    ipython, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    shell = type("ZMQInteractiveShell", (), {})()
    ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]

    def displayed(data: Any, *, raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        found.append(data)
        return Handle(found)

    display.display = displayed  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as ipykernel does
    return found


def test_a_notebook_gets_one_bar_and_plain_lines(
    shown: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    console = StageConsole("sft", 3, 0)
    console.line(1, {"loss": 2.0})
    console.line(3, {"loss": 1.0})
    console.close()
    assert [data["text/plain"].split(",")[0] for data in shown] == ["sft 0/3", "sft 1/3", "sft 3/3"]
    assert '<progress value="1" max="3">' in shown[1]["text/html"]
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 2
    assert "\r" not in out
    assert "\x1b" not in out


def test_elsewhere_nothing_is_displayed(
    shown: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = type("TerminalInteractiveShell", (), {})()
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: shell)
    monkeypatch.delenv("FORCE_COLOR")
    StageConsole("sft", 3, 0).line(1, {"loss": 2.0})
    assert not shown
    assert "loss" in capsys.readouterr().out
