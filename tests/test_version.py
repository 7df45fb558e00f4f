"""Tandem's version, installed or not."""

from __future__ import annotations

import importlib.metadata

import pytest

from tandem.cli import main
from tandem.version import own_version


def test_a_checkout_that_was_not_installed_has_a_version_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert own_version() == importlib.metadata.version("tandem-rlhf")

    def nothing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", nothing)
    assert own_version() == "0"
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "tandem 0\n"
