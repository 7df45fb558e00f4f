"""What listens, and where."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from bench.ports import free_port
from tandem.errors import ConfigError
from tandem.launch import rendezvous
from tandem.launch.rendezvous import (
    ManyNodes,
    address_towards,
    check_local,
    interface_of,
    listening_store,
)


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


def meet(port: int, nodes: int, say: Callable[[str], None] = print) -> ManyNodes:
    return ManyNodes.at("127.0.0.1", port, nodes, "127.0.0.1", 5.0, say)


def test_launchers_that_wait_for_other_numbers_of_nodes_do_not_meet() -> None:
    port = free_port()
    keeper = meet(port, 3)
    with pytest.raises(ConfigError, match=f"got 2 here and 3 where the nodes meet.*:{port}"):
        meet(port, 2)
    assert keeper.settings.max_nodes == 3


def test_two_jobs_on_one_port_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    keeper = meet(port, 2)
    meet(port, 2)
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    with pytest.raises(ConfigError, match="SLURM job 17 meets, and this is job 18"):
        meet(port, 2)
    assert keeper.settings.max_nodes == 2


def test_a_launcher_too_many_is_told() -> None:
    port, said = free_port(), list[str]()
    launchers = [meet(port, 2, said.append) for _ in range(3)]
    (line,) = said
    assert line.startswith(
        "3 launchers have come to a meeting of 2 nodes; unless one of them is gone"
    )
    assert len(launchers) == 3


@pytest.mark.parametrize("closes", [False, True])
def test_another_program_on_the_port_is_told_from_a_missing_node(
    closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To one that never answers, and to one that always hangs up."""
    monkeypatch.setattr(rendezvous, "_ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return

        if closes:
            Thread(target=hang_up, daemon=True).start()
        with pytest.raises(ConfigError, match="listens that is no launcher: it did not answer"):
            rendezvous._found_store("127.0.0.1", server.getsockname()[1], 2.0)
    for thread in threading.enumerate():
        if thread.name == rendezvous._CONNECTING:  # or its complaints come in another test
            thread.join()
