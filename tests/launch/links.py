"""A link between two nodes that can be cut: what is sent is lost, and no connection ends."""

from __future__ import annotations

import socket
from threading import Event, Thread


class Link:
    """A port of the loopback that leads to another one, while the link is up."""

    def __init__(self, target: int) -> None:
        """`target`: where it leads to."""
        self._up = Event()
        self._up.set()
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Nothing gets through until `mend`."""
        self._up.clear()

    def mend(self) -> None:
        """What was held back gets through, as with TCP, which sends again."""
        self._up.set()

    def _accept(self) -> None:
        while True:
            here, _ = self._server.accept()
            there = socket.create_connection(("127.0.0.1", self._target))
            Thread(target=self._pass, args=(here, there), daemon=True).start()
            Thread(target=self._pass, args=(there, here), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while content := source.recv(65536):
                self._up.wait()
                sink.sendall(content)
        except OSError:
            return
        finally:
            source.close()
            sink.close()
