"""A port for a server that must be told its own: free, and nobody else's by chance."""

import socket

from bench import ports


def test_a_port_is_free_and_outside_those_that_the_kernel_hands_out() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        handed_out = int(probe.getsockname()[1])
    found = {ports.free_port() for _ in range(20)}
    if ports._KERNELS_OWN.exists():
        low, high = map(int, ports._KERNELS_OWN.read_text().split())
        assert low <= handed_out <= high
        assert not found & set(range(low, high + 1)) or low <= ports._LOWEST
    for port in found:
        with socket.create_server(("127.0.0.1", port)):
            assert ports.free_port() != port
