"""Fitted constants, by maker of the processor where there are some."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tandem.errors import ConfigError
from tandem.predict.constants import CONSTANTS, SHIPPED, constants, section_for


def test_a_processors_maker_decides_where_it_is_known() -> None:
    intel = constants("cpu", "this machine (Intel(R) Xeon(R) Processor)")
    other = constants("cpu", "this machine (AMD EPYC-Milan Processor)")
    assert "Intel" in intel.fitted_on
    assert "AMD" in other.fitted_on
    assert constants("cpu") == constants("cpu", "a Pi") == other
    assert constants("gpu", "Intel Arc") == constants("gpu")
    # Every section has every coefficient: what no run of a maker showed is another's.
    assert {name: set(of) for name, of in intel.phases.items()} == {
        name: set(of) for name, of in other.phases.items()
    }


def test_sections_are_told_by_the_makers_name() -> None:
    sections = ("cpu", "cpu Intel", "gpu")
    assert section_for(sections, "cpu", "an Intel Xeon") == "cpu Intel"
    assert section_for(sections, "cpu", "") == "cpu"
    assert section_for(sections, "gpu", "an Intel Xeon") == "gpu"


def test_a_file_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = yaml.safe_load(SHIPPED.read_text("utf-8"))
    values["cpu Intel"]["slack_mib"]["step"] = 1.0
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(values))
    monkeypatch.setenv(CONSTANTS, str(file))
    assert constants("cpu", "Intel").step == 2**20
    monkeypatch.setenv(CONSTANTS, str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="as `tandem plan --refit` writes it"):
        constants("cpu")
