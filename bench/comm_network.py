"""Two nodes on one machine: network namespaces joined by a link of a chosen rate.

Needs root, `ip` and `tc` (iproute2) and Linux. Inside a node ranks talk over its loopback; what
goes between the nodes passes a token bucket at each end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PREFIX = "tandem-comm"
_NETNS = Path("/run/netns")
_LINK = "node0"
"""What the link is called at both ends."""


@dataclass(frozen=True, slots=True)
class Node:
    """One namespace: its name, its address on the link, the link's name."""

    namespace: str
    address: str
    interface: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """`arguments`, to be run inside the node."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def environment(self) -> Mapping[str, str]:
        """What gloo needs to talk over the link alone."""
        return {"GLOO_SOCKET_IFNAME": self.interface}


def why_not() -> str:
    """Why this machine cannot have two nodes, in one line; empty if it can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"bench/comm.py must have {' and '.join(missing)} (iproute2); got none. Install it."
    if os.geteuid() != 0:
        return (
            f"bench/comm.py must run as root, to make network namespaces; got user {os.geteuid()}. "
            "Use sudo."
        )
    return ""


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Within: two namespaces joined by a link of full speed; none is left after, nor by a run of
    this bench that was killed before."""
    _remove_orphans()
    names = [f"{PREFIX}-{os.getpid()}-{side}" for side in "ab"]
    nodes = [Node(name, f"10.213.7.{i + 1}", _LINK) for i, name in enumerate(names)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        ends = ["name", _LINK, "netns", names[0], "type", "veth"]
        _run("ip", "link", "add", *ends, "peer", "name", _LINK, "netns", names[1])
        for node in nodes:
            inside = ("ip", "-n", node.namespace)
            _run(*inside, "addr", "add", f"{node.address}/24", "dev", _LINK)
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "link", "set", _LINK, "up")
        yield nodes[0], nodes[1]
    finally:
        for name in names:
            _remove(name)


def limit(nodes: Sequence[Node], megabits: float) -> None:
    """Let each node send at most `megabits` a second."""
    for node in nodes:
        # A bucket of two of the kernel's largest packets; a queue of 100 ms before it.
        bucket = ["tbf", "rate", f"{megabits:g}mbit", "burst", "128kb", "latency", "100ms"]
        _run("tc", "-n", node.namespace, "qdisc", "replace", "dev", _LINK, "root", *bucket)


def sent_bytes(interface: str) -> int:
    """Bytes that this node has sent over the link, headers included; from inside the node."""
    path = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    return int(path.read_text(encoding="ascii"))


def _remove_orphans() -> None:
    """Namespaces of runs whose process is no more."""
    for path in _NETNS.glob(f"{PREFIX}-*"):
        pid = path.name.split("-")[2]
        if not Path(f"/proc/{pid}").exists():
            _remove(path.name)


def _remove(namespace: str) -> None:
    if (_NETNS / namespace).exists():
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"bench/comm.py must be able to make network namespaces; got {done.stderr.strip()!r} "
            f"from {' '.join(command[:4])}. Run it where that is allowed."
        )
