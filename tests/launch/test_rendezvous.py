"""What listens, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.errors import ConfigError
from tandem.launch.rendezvous import address_towards, check_local, interface_of, listening_store


def test_a_store_listens_on_one_address_alone() -> None:
    store = listening_store("127.0.0.1")
    local = f"0100007F:{store.port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert [row[1] for row in rows if row[1].endswith(f":{store.port:04X}") and row[3] == "0A"] == [
        local
    ]
    with pytest.raises(OSError, match="in use"):
        listening_store("127.0.0.1", store.port)


def test_addresses_and_their_interface() -> None:
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""
    with pytest.raises(ConfigError, match="--rdzv must be a host that this machine can reach"):
        address_towards("no-such-host.invalid", 1)
    check_local("127.0.0.1")
    for address in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(ConfigError, match=f"--local-addr must be .* got {address} "):
            check_local(address)
