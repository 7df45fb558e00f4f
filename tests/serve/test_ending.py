"""`tandem serve` and `tandem chat` as processes. Of a server any number of Ctrl-Cs is one line, and
so are too many clients; a request for another protocol is none. A chat says that it was ended."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from tests.tiny import save_tiny_model

SECONDS = 300.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_chat_that_is_ended_says_so(model: str, number: signal.Signals) -> None:
    command = [sys.executable, "-u", "-m", "tandem", "chat", model]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout is not None
        assert any(line.startswith("talking to") for line in process.stdout)
        process.send_signal(number)
        process.wait(SECONDS)  # its input stays open
        _, errors = process.communicate()
    finally:
        process.kill()
    told = f"tandem: stopped by {number.name} before it was done. The same command starts over; "
    assert errors.splitlines()[-1] == f"{told}/save keeps a conversation."
    assert process.returncode == 128 + number


@pytest.mark.parametrize(
    ("after", "pauses"),
    [
        ("votes:", (0.05, 0.05)),  # a model is being read
        ("page:", (0.0, 0.01, 0.01)),
        ("page:", (1.0, 0.1, 0.1)),  # it waits for requests
    ],
)
def test_any_number_of_ctrl_cs_is_one_line(model: str, after: str, pauses: Sequence[float]) -> None:
    command = [sys.executable, "-u", "-m", "tandem", "serve", model, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert any(line.startswith(after) for line in process.stdout)
        for pause in pauses:
            time.sleep(pause)
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert errors == "tandem: stopped.\n"
    assert process.returncode == 130


UPGRADES = {
    "websocket": "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    "h2c": "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n",
}
"""As a browser asks for a websocket, and curl for HTTP/2 in plain text."""


@pytest.mark.parametrize(("limit", "is_full"), [("-n 128", True), ("-S -n 128", False)])
def test_connections_are_as_many_as_may_be_one_more_is_a_line_and_an_upgrade_none(
    model: str, limit: str, is_full: bool
) -> None:
    """One more is one line; an upgrade is answered as plain HTTP, without a line."""
    serve = [sys.executable, "-u", "-m", "tandem", "serve", model, "--port", "0"]
    command = ["sh", "-c", f'ulimit {limit}; exec "$@"', "sh", *serve]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stdout is not None
        page = next(line for line in process.stdout if line.startswith("page:"))
        found = re.search(r"http://127.0.0.1:(\d+)/", page)
        assert found is not None
        address = ("127.0.0.1", int(found[1]))
        for protocol, more in UPGRADES.items():
            with socket.create_connection(address, timeout=SECONDS) as connection:
                head = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nUpgrade: {protocol}\r\n"
                connection.sendall(f"{head}Connection: Upgrade\r\n{more}\r\n".encode())
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
        for _ in range(160):
            one = stack.enter_context(socket.create_connection(address))
        if is_full:
            assert process.stdout.readline().startswith("warning: there are as many connections")
        else:
            one.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert one.recv(15) == b"HTTP/1.1 200 OK"
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=SECONDS)
    assert rest == ""
    assert errors == "tandem: stopped.\n"
