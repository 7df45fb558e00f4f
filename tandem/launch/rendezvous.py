"""Where ranks meet: one store per attempt, listening on the asked-for address and no other.

One node: the launcher keeps a store on 127.0.0.1 and nothing else listens. Several: whoever can
bind --rdzv keeps the meeting place of the launchers (torch's dynamic rendezvous), and the first
node's launcher a store for the ranks. Torch's own stores listen on every interface, and ranks that
start again would read the last attempt's addresses from a store that is shared with the launchers.
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
    """A meeting of one launcher: a fresh store for every attempt, on this machine alone."""

    def __init__(self) -> None:
        """Nothing listens before the first meeting."""
        self.ranks_store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Rank 0 of 1, and where the ranks meet."""
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
        """Never: nobody else could come."""
        return False

    def set_closed(self) -> None:
        """Nobody needs to know."""

    def num_nodes_waiting(self) -> int:
        """Nobody else could."""
        return 0

    def shutdown(self) -> bool:
        """The store ends with the process."""
        return True


class ManyNodes(RendezvousHandler):
    """A meeting of several launchers, by torch's dynamic rendezvous over a store that is ours."""

    def __init__(
        self, host: str, port: int, num_nodes: int, local_addr: str, join_seconds: float
    ) -> None:
        """Keeps the meeting place if (host, port) is this machine's and free, else comes to it.

        Raises:
            ConfigError: nobody keeps one there.
        """
        self.ranks_store: TCPStore | None = None
        self._local_addr = local_addr
        self._num_nodes = num_nodes
        self._meeting, self._is_keeper = _meeting_store(host, port, join_seconds)
        self._inner = DynamicRendezvousHandler.from_backend(
            run_id=_RUN_ID,
            store=self._meeting,
            backend=C10dRendezvousBackend(self._meeting, _RUN_ID),
            min_nodes=num_nodes,
            max_nodes=num_nodes,
            local_addr=local_addr,
            timeout=RendezvousTimeout(join=timedelta(seconds=join_seconds)),
        )

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all nodes; the first one's launcher then opens the ranks' store."""
        met = self._inner.next_rendezvous()
        if met.rank == 0:
            self.ranks_store = listening_store(self._local_addr)
            met.store.set(_RANKS_STORE, f"{self._local_addr} {self.ranks_store.port}")
        address, port = met.store.get(_RANKS_STORE).decode().split()
        if met.rank != 0:
            self.ranks_store = _client(address, int(port), 60.0)
        where = RendezvousStoreInfo(address, int(port))
        return RendezvousInfo(met.store, met.rank, met.world_size, where)

    def get_backend(self) -> str:
        """A name for events."""
        return self._inner.get_backend()

    def get_run_id(self) -> str:
        """A name for events."""
        return _RUN_ID

    def is_closed(self) -> bool:
        """Whether a node said that nobody should meet again."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """Say that nobody should meet again."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """Launchers that want to meet anew: their ranks failed."""
        return self._inner.num_nodes_waiting()

    def shutdown(self) -> bool:
        """Leave for good; who keeps the meeting place stays a moment, for the others to leave."""
        try:
            left = self._meeting.add(_LEFT, 1)
            deadline = time.monotonic() + _LEAVE_SECONDS
            while self._is_keeper and left < self._num_nodes and time.monotonic() < deadline:
                time.sleep(0.05)
                left = self._meeting.add(_LEFT, 0)
            return self._inner.shutdown()
        except RuntimeError:  # the keeper is gone, and the meeting with it
            return False


def listening_store(address: str, port: int = 0) -> TCPStore:
    """A store that listens on one address alone; port 0 takes a free one.

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
    """This machine's address on the way to `host`, which the others can reach it at.

    Raises:
        ConfigError: the host is not known or there is no way to it.
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
    """Refuse an address that is not this machine's: the others could not reach it there.

    Raises:
        ConfigError: nothing can listen on it here.
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
    """The network interface that has an IPv4 address; "" if none has it or nobody can say."""
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


def _meeting_store(host: str, port: int, seconds: float) -> tuple[Store, bool]:
    """The launchers' store, and whether it is kept here."""
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
    family, kind, protocol, name, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[
        0
    ]
    return family, kind, protocol, name, tuple(target)
