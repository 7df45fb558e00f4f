"""Where ranks meet: one store per attempt, which listens on one address.

On one node the launcher's store listens on 127.0.0.1. With several nodes, the launcher that can
bind --rdzv keeps the launchers' store (torch's dynamic rendezvous), and the first node's launcher a
store for the ranks. Torch's own stores listen on every interface; and from a store shared with the
launchers, restarted ranks would read the last attempt's addresses.
"""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
import sys
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
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

LOOPBACK = "127.0.0.1"
_RUN_ID = "tandem"
_RANKS_STORE = "tandem/ranks-store"
_LEFT = "tandem/left"
_LEAVE_SECONDS = 5.0
_SIOCGIFADDR = 0x8915


class OneNode(RendezvousHandler):
    """One launcher: a new store for every attempt, on this machine only."""

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

    ranks_store: TCPStore | None = None
    _launchers_store: Store
    _is_keeper: bool
    _local_addr: str

    @classmethod
    def at(
        cls, host: str, port: int, num_nodes: int, local_addr: str, join_seconds: float
    ) -> ManyNodes:
        """Keeps the launchers' store if (host, port) is this machine's and free, else connects.

        Raises:
            ConfigError: there is no store at that address.
        """
        store, is_keeper = _launchers_store(host, port, join_seconds)
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
            self.ranks_store = listening_store(self._local_addr)
            met.store.set(_RANKS_STORE, f"{self._local_addr} {self.ranks_store.port}")
        address, port = met.store.get(_RANKS_STORE).decode().split()
        if met.rank != 0:
            self.ranks_store = _client(address, int(port), 60.0)
        where = RendezvousStoreInfo(address, int(port))
        return RendezvousInfo(met.store, met.rank, met.world_size, where)

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
    try:
        return _client(host, port, seconds), False
    except RuntimeError:
        raise ConfigError(
            f"--rdzv must be an address of one of the nodes, with a free port; got {host}:{port}, "
            f"where no launcher answered for {seconds:.0f} s. Start the same command there, or "
            "name another node."
        ) from None


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
