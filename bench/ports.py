"""Ports for servers that must be told theirs."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_KERNELS_OWN = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux; "32768 60999" there
_DYNAMIC = 49152  # the first of IANA's dynamic ports, which other systems hand out (RFC 6335)
_LOWEST = 10_000


def free_port() -> int:
    """A port of the loopback that is free and that the kernel hands to nobody.

    The kernel gives ports of one range to whoever binds port 0 or connects: one found free by
    binding port 0 may be another program's before the server that was told of it has started.

    Raises:
        OSError: none is free.
    """
    highest = int(_KERNELS_OWN.read_text().split()[0]) if _KERNELS_OWN.exists() else _DYNAMIC
    if highest <= _LOWEST:  # the kernel hands out nearly all
        highest = 2**16
    for port in random.Random().sample(range(_LOWEST, highest), 100):  # other than tests' seeds
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"100 of the ports from {_LOWEST} to {highest} are taken.")
