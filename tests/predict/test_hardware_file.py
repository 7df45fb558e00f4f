"""`--hardware FILE`: the documented example, and one line for each mistake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.errors import ConfigError
from tandem.predict.hardware import as_values, find_hardware, read_hardware

DOCS = Path(__file__).parents[2] / "docs" / "planner.md"


def example() -> str:
    """The file in docs/planner.md."""
    (found,) = re.findall(r"```yaml\n(# mine\.yaml.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    return str(found)


def plain() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(example())
    return found


def test_the_documented_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(example(), "utf-8")
    found, said = find_hardware(str(file)), plain()
    assert found.label == f"{said['count']} x {said['name']}"
    assert found.flops["bf16"] == said["bf16"] * 1e12
    assert (found.memory, found.disk) == (said["memory"] * 1e9, said["disk"] * 1e9)
    assert (found.price, found.priced) == (said["price"], str(file))
    assert find_hardware(str(file), price=9.0).price == 9.0
    # What may be left out, and numbers that YAML takes for text.
    for name in ("name", "count", "per_node", "disk", "price"):
        del said[name]
    file.write_text(yaml.safe_dump({**said, "fp32": "51e0"}))
    found = find_hardware(str(file))
    assert (found.label, found.per_node, found.price) == ("1 x mine", 8, None)
    assert found.flops["fp32"] == 51e12


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory": None}, "must give bf16 in TFLOP/s, .* got no memory"),
        ({"memory": 80e9}, r"memory must be a number of GB, 1 to 2,000; got 80000000000\.0"),
        ({"memory": 81920}, "memory must be a number of GB, 1 to 2,000; got 81920"),
        ({"memory": "80GB"}, "memory must be a number of GB, .* got '80GB'"),
        ({"bandwidth": 3.35}, "bandwidth must be a number of GB/s, 10 to"),
        ({"bf16": 7.56e14}, "bf16 must be a number of TFLOP/s"),
        ({"bf16": "fast"}, "bf16 must be .* got 'fast'"),
        ({"fp32": True}, "fp32 must be .* got True"),
        ({"fp32": [1]}, r"fp32 must be .* got \[1\]"),
        ({"fp32": float("nan")}, "fp32 must be .* got nan"),
        ({"links": 64}, "got 'links'. Did you mean link?"),
        ({"colour": "red"}, "got 'colour'. Remove it"),
        ({"count": "two"}, "count must be a whole number of devices"),
        ({"count": 1.5}, "count must be a whole number of devices"),
        ({"per_node": 0}, "per_node must be a whole number of devices"),
        ({"price": -3}, "price must be a number of dollars per hour and device, 0 to"),
    ],
)
def test_each_mistake_gets_one_line(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(plain() | changes))
    with pytest.raises(ConfigError, match=said) as caught:
        find_hardware(str(file))
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1\n- 2\n", r"must hold names and numbers; got \[1, 2\]"),
        ("name: x\n  bf16: 1\n", "must be a YAML file; got: .*, line 2"),
        (None, "must be a YAML file; got: No such file"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "mine.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        find_hardware(str(file))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bandwidth": "fast"}, "a number of at least 0 as bandwidth; got 'fast'"),
        ({"flops": {"fp32": None}}, "as flops: fp32; got None"),
        ({"flops": 3}, "numbers by name as flops; got 3"),
        ({"link": 0}, "link and network above 0"),
        ({"speed": 3}, "got 'speed'"),
    ],
)
def test_a_measured_machine_must_hold_numbers(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(yaml.safe_dump(as_values(find_hardware("H100")) | changes))
    with pytest.raises(ConfigError, match=said):
        read_hardware(file)
