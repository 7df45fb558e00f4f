"""Where ranks meet: one store per attempt, which listens on one address.

On one node the launcher's store listens on 127.0.0.1. With several nodes, the launcher that can
bind --rdzv keeps the launchers' store (torch's dynamic rendezvous), and the first node's launcher a
store for the ranks. Torch's own stores listen on every interface; and from a store shared with the
launchers, restarted ranks would read the last attempt's addresses.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from threading import Thread

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from tandem.errors import ConfigError
from tandem.launch.far_store import FarStore

LOOPBACK = "127.0.0.1"
_RUN_ID = "tandem"
_RANKS_STORE = "tandem/ranks-store"
_LEFT = "tandem/left"
_COME = "tandem/come"
_JOB = "tandem/job"
_ANSWER_SECONDS = 20.0
_CONNECTING = "connecting to the launchers' store"
_LEAVE_SECONDS = 5.0
_SIOCGIFADDR = 0x8915


class OneNode(RendezvousHandler):
    """One launcher: a new store for every attempt, on this machine only."""

    silent_seconds = 0.0

    def __init__(self) -> None:
        """Nothing listens yet."""
        self.ranks_store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Rank 0 of 1, and the address of the ranks' store."""
        self.ranks_store = listening_store(LOOPBACK)
        where = RendezvousStoreInfo(LOOPBACK, self.ranks_store.port)
        return RendezvousInfo(PrefixStore("launcher", self.ranks_store), 0, 1, where)

    def get_backend(self) -> str:
        """A name for events."""
        return "one-node"

    def get_run_id(self) -> str:
        """A name for events."""
        return _RUN_ID

    def is_closed(self) -> bool:
        """Never: there are no other launchers."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def num_nodes_waiting(self) -> int:
        """None: there are no other launchers."""
        return 0

    def shutdown(self) -> bool:
        """The store ends with the process."""
        return True


class ManyNodes(DynamicRendezvousHandler):
    """Several launchers, by torch's dynamic rendezvous over our own store; made by `at`."""

    ranks_store: Store | None = None
    _launchers_store: Store
    _is_keeper: bool
    _local_addr: str

    @classmethod
    def at(
        cls,
        host: str,
        port: int,
        num_nodes: int,
        local_addr: str,
        join_seconds: float,
        print_line: Callable[[str], None],
    ) -> ManyNodes:
        """Keeps the launchers' store if (host, port) is this machine's and free, else connects.

        Raises:
            ConfigError: there is no store at that address, or it is another run's.
        """
        store, is_keeper = _launchers_store(host, port, join_seconds)
        _require_same_run(store, f"{host}:{port}", num_nodes)
        come = store.add(_COME, 1)
        if come > num_nodes:
            print_line(
                f"{come} launchers have come to a meeting of {num_nodes} nodes; unless one of them "
                "is gone, this one waits until one is"
            )
        meeting: ManyNodes = cls.from_backend(
            run_id=_RUN_ID,
            store=store,
            backend=C10dRendezvousBackend(store, _RUN_ID),
            min_nodes=num_nodes,
            max_nodes=num_nodes,
            local_addr=local_addr,
            timeout=RendezvousTimeout(join=timedelta(seconds=join_seconds)),
        )
        meeting._launchers_store, meeting._is_keeper = store, is_keeper
        meeting._local_addr = local_addr
        return meeting

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all nodes; the first one's launcher then opens the ranks' store."""
        met = super().next_rendezvous()
        if met.rank == 0:
            self.ranks_store = kept = listening_store(self._local_addr)
            met.store.set(_RANKS_STORE, f"{self._local_addr} {kept.port}")
        address, port = met.store.get(_RANKS_STORE).decode().split()
        if met.rank != 0:
            self.ranks_store = FarStore(_client(address, int(port), 60.0))
        where = RendezvousStoreInfo(address, int(port))
        return RendezvousInfo(met.store, met.rank, met.world_size, where)

    @property
    def silent_seconds(self) -> float:
        """For how long the launchers' store has not answered; 0 if it answers."""
        store = self._launchers_store
        return store.silent_seconds if isinstance(store, FarStore) else 0.0

    def num_nodes_waiting(self) -> int:
        """How many launchers want to join; 0 while the store does not answer, because whoever asks
        must go on watching its ranks."""
        try:
            return int(super().num_nodes_waiting())
        except RendezvousConnectionError:
            if self.silent_seconds:
                return 0
            raise

    def shutdown(self) -> bool:
        """Leave; the keeper of the launchers' store waits a moment for the others to leave."""
        try:
            left = self._launchers_store.add(_LEFT, 1)
            deadline = time.monotonic() + _LEAVE_SECONDS
            nodes = self.settings.max_nodes
            while self._is_keeper and left < nodes and time.monotonic() < deadline:
                time.sleep(0.05)
                left = self._launchers_store.add(_LEFT, 0)
            return super().shutdown()
        except RuntimeError:  # the keeper is gone
            return False


def listening_store(address: str, port: int = 0) -> TCPStore:
    """A store that listens on one address; port 0 takes a free one.

    Raises:
        OSError: the address is not this machine's, or the port is taken.
    """
    family, kind, protocol, _, target = _resolve(address, port)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),  # the store closes it
    )


def address_towards(host: str, port: int) -> str:
    """This machine's address towards `host`, at which the others can reach it.

    Raises:
        ConfigError: the host is unknown or unreachable.
    """
    try:
        family, _, _, _, target = _resolve(host, port)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"--rdzv must be a host that this machine can reach; got {host} "
            f"({error.strerror or error}). Use an address of one of the nodes."
        ) from None


def check_local(address: str) -> None:
    """Check that an address is this machine's.

    Raises:
        ConfigError: it is not.
    """
    try:
        family, kind, protocol, _, target = _resolve(address, 0)
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(target)
    except OSError as error:
        raise ConfigError(
            f"--local-addr must be an address of this machine; got {address} "
            f"({error.strerror or error}). Remove it, or give an address that the others can reach."
        ) from None


def interface_of(address: str) -> str:
    """The network interface that has an IPv4 address; "" if there is none or it is unknown."""
    if sys.platform != "linux":
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return ""


def _launchers_store(host: str, port: int, seconds: float) -> tuple[Store, bool]:
    """The launchers' store, and whether this launcher keeps it."""
    try:
        return listening_store(host, port), True
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE, errno.EACCES):
            raise ConfigError(
                f"--rdzv must be HOST:PORT of one of the nodes; got {host}:{port} "
                f"({error.strerror or error}). Use an address that all nodes know."
            ) from None
    return FarStore(_found_store(host, port, seconds)), False


def _found_store(host: str, port: int, seconds: float) -> TCPStore:
    """The store that another launcher keeps, which may begin to listen later.

    Raises:
        ConfigError: nothing listens there for that long, or another program does.
    """
    problem = f"--rdzv must be an address of one of the nodes, with a free port; got {host}:{port}"
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not _listens(host, port):
            time.sleep(0.2)
            continue
        found: list[TCPStore] = []
        # The connection to a program that never answers has no timeout of its own.
        arguments = (host, port, seconds, found)
        connecting = Thread(target=_connect, args=arguments, name=_CONNECTING, daemon=True)
        connecting.start()
        connecting.join(_ANSWER_SECONDS)
        if found:
            return found[0]
        if connecting.is_alive():
            raise ConfigError(
                f"{problem}, where a program listens that is no launcher: it did not answer for "
                f"{_ANSWER_SECONDS:.0f} s. Choose another port, the same on every node."
            )
    raise ConfigError(
        f"{problem}, where no launcher answered for {seconds:.0f} s. Start the same command "
        "there, or name another node."
    )


def _connect(host: str, port: int, seconds: float, found: list[TCPStore]) -> None:
    with suppress(RuntimeError):  # it went away, or is none: whoever waits looks again
        found.append(_client(host, port, seconds))


def _listens(host: str, port: int) -> bool:
    family, kind, protocol, _, target = _resolve(host, port)
    with socket.socket(family, kind, protocol) as probe:
        probe.settimeout(2.0)
        return probe.connect_ex(target) == 0


def _require_same_run(store: Store, where: str, num_nodes: int) -> None:
    """Refuse to meet launchers of another command.

    Raises:
        ConfigError: they wait for another number of nodes, or are of another SLURM job.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    theirs = store.compare_set(_JOB, "", f"{num_nodes} {job}").decode()
    nodes, _, other = theirs.partition(" ")
    if job and other and job != other:
        raise ConfigError(
            f"--rdzv must be a meeting of this job's nodes; got {where}, where SLURM job {other} "
            f"meets, and this is job {job}. Choose another port."
        )
    if nodes != str(num_nodes):
        raise ConfigError(
            f"--num-nodes must be the same on every node; got {num_nodes} here and {nodes} where "
            f"the nodes meet, {where}. Start the same command on each, or, for two runs at a time, "
            "choose another port for one."
        )


def _client(address: str, port: int, seconds: float) -> TCPStore:
    return TCPStore(
        address,
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
    )


def _resolve(
    host: str, port: int
) -> tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[object, ...]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, name, target = found[0]
    return family, kind, protocol, name, tuple(target)
