"""What a run may be planned for: accelerators of a table, a file of one's own, or this machine."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from tandem.errors import ConfigError
from tandem.predict.hardware_file import checked_entry, read_values
from tandem.yaml_text import shipped_table

GIGA, TERA = 1e9, 1e12
_NOT_NUMBERS = ("name", "kind", "flops", "products", "packs", "price", "priced")
_TABLE = Path(__file__).with_name("hardware.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The device of one rank, and what joins ranks. Rates are per second.

    name: as the user gives it, without the count. kind: what computes. count: devices, and so
    ranks. memory: bytes of a device; of a CPU, what all its ranks share. flops: of matrix products
    by compute type; on a CPU per core, for small, middle and large products (`products`).
    bandwidth: of memory. link: between devices of a node, network: between nodes, disk: writing,
    all bytes. per_node: devices of a node. call: seconds that one small operation takes, launch
    included. cores: of a CPU, for each rank. process: resident bytes of a rank's process before it
    loads a model. packs: generation decodes from packed weights. price: dollars per hour and
    device, priced: when and by whom.
    """

    name: str
    kind: Literal["cpu", "gpu"] = "gpu"
    count: int = 1
    memory: float = 0.0
    flops: Mapping[str, float]
    products: Mapping[str, float] | None = None
    bandwidth: float
    link: float
    network: float
    disk: float = 1.5 * GIGA
    per_node: int = 8
    call: float = 2.2e-6
    cores: int = 1
    process: float = 0.6 * 2**30
    packs: bool = False
    price: float | None = None
    priced: str = ""

    @property
    def on_cpu(self) -> bool:
        """Whether the host is the device."""
        return self.kind == "cpu"

    @property
    def label(self) -> str:
        """Count and name."""
        return f"{self.count} x {self.name}"

    def rate(self, dtype: str, width: int) -> float:
        """FLOP per second of products of matrices about `width` wide."""
        whole = self.flops.get(dtype) or self.flops["fp32"]
        if not self.products:
            return whole
        sizes = sorted((int(size), rate) for size, rate in self.products.items())
        share = _between(sizes, width) / sizes[-1][1]
        return whole * share


def _between(points: list[tuple[int, float]], size: int) -> float:
    """The rate at a size, straight in its logarithm between those measured."""
    if size <= points[0][0]:
        return points[0][1]
    for (low, first), (high, last) in pairwise(points):
        if size <= high:
            part = math.log(size / low) / math.log(high / low)
            return first + part * (last - first)
    return points[-1][1]


def find_hardware(text: str, price: float | None = None) -> Hardware:
    """What `--hardware` names: 8xA100-80G, H200, or a YAML file.

    Raises:
        ConfigError: the table has no such name (the message lists those it has), or a file is not
            as the table's entries are.
    """
    if text.endswith((".yaml", ".yml")):
        found = read_hardware(Path(text))
    else:
        match = re.fullmatch(r"(?:(\d+)\s*[xX*]\s*)?(.+)", text.strip())
        count = int(match[1]) if match and match[1] else 1
        found = _named(match[2] if match else text, count, text)
    return found if price is None else replace(found, price=price, priced="by --price")


def hardware_names() -> list[str]:
    """The names in the table."""
    return list(_table()["hardware"])


def _named(name: str, count: int, given: str) -> Hardware:
    known = {_plain(entry): entry for entry in hardware_names()}
    plain = _plain(name)
    entry = known.get(plain)
    if entry is None:  # the name without the size of its memory
        of_kind = [full for full in hardware_names() if _plain(full.partition("-")[0]) == plain]
        entry = of_kind[0] if len(of_kind) == 1 else None
    if entry is None or count < 1:
        near = [] if entry else difflib.get_close_matches(plain, known, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(known[n] for n in near)}?" if near else ""
        raise ConfigError(
            f"--hardware must be COUNTxNAME with a name of {', '.join(hardware_names())}, or a "
            f"YAML file; got {given!r}.{hint} Write for example 8xA100-80G."
        )
    return _of_entry(entry, _table()["hardware"][entry], count)


def _plain(name: str) -> str:
    """A name as it is compared: no case, no dashes, no GB."""
    return re.sub(r"(gb?|[\s_-])", "", name.lower().replace("nvidia", ""))


def _of_entry(name: str, entry: Mapping[str, Any], count: int) -> Hardware:
    prices = _table()["prices"]
    priced = f"{prices['date']}, {prices['source']}"
    if not entry.get("price_checked", True):
        priced += "; this one from memory, check it"
    return Hardware(
        name=name,
        count=count,
        memory=entry["memory"] * GIGA,
        flops={"bf16": entry["bf16"] * TERA, "fp16": entry["bf16"] * TERA}
        | {"fp32": entry["fp32"] * TERA},
        bandwidth=entry["bandwidth"] * GIGA,
        link=entry["link"] * GIGA,
        network=entry["network"] * GIGA,
        per_node=entry["per_node"],
        price=entry["price"],
        priced=priced,
    )


@cache
def _table() -> Any:
    return shipped_table(_TABLE)


def read_hardware(path: Path) -> Hardware:
    """A file with an entry as in hardware.yaml (and name, count), or one that was measured.

    Raises:
        ConfigError: it cannot be read; something is missing, unknown, or in another unit.
    """
    values = read_values(path)
    if "flops" in values:
        return hardware_of(values, str(path))
    entry = checked_entry(values, path)
    found = _of_entry(entry["name"], entry, entry["count"])
    disk = entry["disk"] * GIGA if "disk" in entry else found.disk
    return replace(found, priced=f"{path}", disk=disk)


def hardware_of(values: Mapping[str, Any], where: str) -> Hardware:
    """One that `as_values` wrote.

    Raises:
        ConfigError: something is missing, unknown, or no number.
    """
    names = {field.name for field in fields(Hardware)}
    if unknown := sorted(set(values) - names):
        raise ConfigError(f"{where} must hold {', '.join(sorted(names))}; got {unknown[0]!r}.")
    try:
        found = Hardware(**values)
    except TypeError as error:
        raise ConfigError(f"{where} must describe a machine; got: {error}.") from None
    numbers = {name: value for name, value in asdict(found).items() if name not in _NOT_NUMBERS}
    for of in ("flops", "products"):
        rates = values.get(of)
        if not isinstance(rates, dict) and (of == "flops" or rates is not None):
            raise ConfigError(f"{where} must hold numbers by name as {of}; got {rates!r}.")
        numbers |= {f"{of}: {name}": rate for name, rate in (rates or {}).items()}
    for name, value in numbers.items():
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(f"{where} must give a number of at least 0 as {name}; got {value!r}.")
    if not (found.flops.get("fp32") and found.bandwidth and found.link and found.network):
        raise ConfigError(
            f"{where} must give flops of fp32, bandwidth, link and network above 0; got 0 or none."
        )
    return found


def as_values(hardware: Hardware) -> dict[str, Any]:
    """Everything about a machine, as a file holds it."""
    return asdict(hardware)
