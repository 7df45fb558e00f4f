"""Fitted constants, by maker and kind of the processor where there are some."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tandem.errors import ConfigError
from tandem.predict.constants import CONSTANTS, SHIPPED, constants, own_section, section_for


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


def test_the_section_that_says_most_of_a_machine_serves() -> None:
    sections = ("cpu", "cpu AMD", "cpu Zen 4 with AVX2", "cpu Zen 4 with AVX-512", "gpu")
    machine = "this machine (AMD EPYC: Zen 4 with {})"
    assert section_for(sections, "cpu", machine.format("AVX2")) == "cpu Zen 4 with AVX2"
    assert section_for(sections, "cpu", machine.format("AVX-512")) == "cpu Zen 4 with AVX-512"
    assert section_for(sections, "cpu", "this machine (AMD EPYC: Zen 5 with AVX2)") == "cpu AMD"
    assert section_for(sections, "cpu", "this machine (AMD EPYC)") == "cpu AMD", "kept from before"
    unmeasured = "machine not measured: memory only ({})"
    assert section_for(sections, "cpu", unmeasured.format("AMD EPYC")) == "cpu AMD"
    kind = "AMD EPYC: Zen 4 with AVX2"
    assert section_for(sections, "cpu", unmeasured.format(kind)) == "cpu Zen 4 with AVX2"
    assert section_for(sections, "cpu", kind) == "cpu Zen 4 with AVX2"


def test_a_generation_is_told_whole() -> None:
    sections = ("cpu", "cpu Zen", "cpu Zen 3", "cpu family 25, model 1", "gpu")
    machine = "this machine (AMD EPYC: {})"
    assert section_for(sections, "cpu", machine.format("Zen with AVX2")) == "cpu Zen"
    assert section_for(sections, "cpu", machine.format("Zen 4 with AVX2")) == "cpu"
    assert section_for(sections, "cpu", machine.format("Zen 3 with AVX2")) == "cpu Zen 3"
    assert section_for(sections, "cpu", machine.format("Zen 3")) == "cpu Zen 3"
    told = machine.format("family 25, model {}")
    assert section_for(sections, "cpu", told.format(1)) == "cpu family 25, model 1"
    assert section_for(sections, "cpu", told.format(17)) == "cpu"


def test_fitted_constants_belong_to_a_generation() -> None:
    sections = ("cpu", "cpu Intel", "gpu")
    zen4 = "this machine (AMD EPYC: Zen 4 with AVX2)"
    assert own_section(sections, zen4) == "cpu Zen 4 with AVX2"
    assert section_for((*sections, own_section(sections, zen4)), "cpu", zen4) != "cpu"
    assert own_section(sections, "this machine (AMD EPYC)") == "cpu", "runs from before"
    assert own_section(sections, "this machine (Intel(R) Xeon(R))") == "cpu Intel"
    arm = "this machine (aarch64 (implementer 0x41, part 0xd0c))"
    assert own_section(sections, arm) == "cpu"


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
