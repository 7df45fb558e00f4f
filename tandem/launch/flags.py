"""The launcher's own flags, removed before the rest is read as a configuration. No torch."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_FLAGS = {
    "num-gpus": "Ranks on this machine, one per GPU; on a machine without, processes on the CPU",
    "num-nodes": "Machines; the same command is started on each",
    "rdzv": "HOST:PORT where the machines meet: one of them, and a free port there",
    "local-addr": "This machine's address for the others; by default the one on its way to HOST",
    "max-restarts": "How often all ranks start again from the last checkpoint when one fails",
}


_GPUS = ("gpus", "ngpus", "n-gpus", "num-ranks")
"""Common guesses of the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The launcher's flags.

    num_gpus: ranks on each node; 0 if not given.
    rdzv: (host, port) where nodes meet, None on one node.
    """

    num_gpus: int = 0
    num_nodes: int = 1
    rdzv: tuple[str, int] | None = None
    local_addr: str = ""
    max_restarts: int = 0

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to launch beyond this process."""
        return self.num_gpus > 1 or self.num_nodes > 1 or self.max_restarts > 0


def take_launch_flags(argv: Sequence[str]) -> tuple[LaunchOptions, list[str], list[str]]:
    """The launcher's flags, the rest of the command line, and problems of the flags: missing or
    impossible values, a flag given twice."""
    given: dict[str, str] = {}
    rest: list[str] = []
    problems: list[str] = []
    words = iter(argv)
    for word in words:
        flag, has_value, value = word.partition("=")
        name = flag[2:].replace("_", "-") if flag.startswith("--") else ""
        meant = name if name in _FLAGS else _near(name)
        if not meant:
            rest.append(word)
            continue
        if not has_value:
            value = next(words, "")
        if name != meant:
            problems.append(f"--{name} is not a flag. Did you mean --{meant}?")
            continue
        if not value or value.startswith("--"):
            problems.append(f"--{name} must have a value; got none")
            value = ""
        if name in given:
            problems.append(f"--{name} must be given once; got it twice. Remove one")
        given[name] = value
    return _read(given, problems), rest, problems


def _near(name: str) -> str:
    """The launcher's flag that a wrong name may mean; "" if none is close."""
    found = difflib.get_close_matches(name, _FLAGS, n=1, cutoff=0.85)
    return "num-gpus" if name in _GPUS else next(iter(found), "")


def launch_help() -> str:
    """The paragraph on several GPUs for the run commands' help."""
    lines = [
        "Several GPUs (or, without any, several processes on the CPU):",
        "  --num-gpus N                                   all on this machine",
        "  --num-nodes M --num-gpus N --rdzv HOST:PORT    the same on each of M machines",
    ]
    for name, about in _FLAGS.items():
        text = f"--{name}: {about}."
        lines += textwrap.wrap(text, 79, initial_indent=" " * 6, subsequent_indent=" " * 8)
    lines += textwrap.wrap(
        "Rank 0 prints; the others write RUN/logs/rank-N.log. torchrun works too: torchrun "
        "--nproc-per-node N -m tandem train ...",
        79,
        initial_indent=" " * 6,
        subsequent_indent=" " * 6,
    )
    return "\n".join(lines)


def _read(given: Mapping[str, str], problems: list[str]) -> LaunchOptions:
    numbers = {"num-gpus": 0, "num-nodes": 1, "max-restarts": 0}
    for name in numbers.keys() & given.keys():
        least, text = 0 if name == "max-restarts" else 1, given[name]
        if text.isdecimal() and int(text) >= least:
            numbers[name] = int(text)
        elif text:
            problems.append(f"--{name} must be a whole number >= {least}; got {text}")
    rdzv = _read_address(given["rdzv"], problems) if given.get("rdzv") else None
    if numbers["num-nodes"] > 1 and "rdzv" not in given:
        problems.append(
            f"--num-nodes {numbers['num-nodes']} must have a place to meet; got none. Add --rdzv "
            "HOST:PORT, the same on every node"
        )
    if numbers["num-nodes"] == 1 and "rdzv" in given:
        problems.append("--rdzv must go with --num-nodes; got it alone. Say how many nodes meet")
    if numbers["num-nodes"] == 1 and "local-addr" in given:
        problems.append("--local-addr must go with --num-nodes; got it alone. Remove it")
    return LaunchOptions(
        num_gpus=numbers["num-gpus"],
        num_nodes=numbers["num-nodes"],
        rdzv=rdzv,
        local_addr=given.get("local-addr", ""),
        max_restarts=numbers["max-restarts"],
    )


def _read_address(text: str, problems: list[str]) -> tuple[str, int] | None:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        problems.append(f"--rdzv must be HOST:PORT; got {text}")
        return None
    return host.strip("[]"), int(port)
