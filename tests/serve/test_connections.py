"""Real sockets: clients that leave, half-close, read slowly or speak no HTTP; and OpenAI's."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tandem.serve.app import make_app
from tandem.serve.service import ServeSettings, Service, load_settings
from tests.serve.serving import ask

SECONDS = 120.0


class Running:
    """A server on a free port of this machine, in a thread."""

    def __init__(self, path: Path) -> None:
        settings = ServeSettings(str(path), slots=4, max_queue=4, max_context=256)
        self.service = Service(settings, load_settings(settings))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        config = uvicorn.Config(make_app(self.service), log_level="critical", access_log=False)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listener]))

    def close(self) -> None:
        """End it."""
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

    def connect(self) -> socket.socket:
        """A connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)

    def send(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> socket.socket:
        """A request whose answer nobody has read."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
        head += "Connection: close\r\n\r\n"
        connection = self.connect()
        connection.sendall(head.encode() + content)
        return connection

    def is_free(self) -> bool:
        """Whether nothing runs and no block is held."""
        engine = self.service.engine
        free = all(
            running.talk.num_free_blocks == running.talk._session._scheduler.pool.num_blocks
            for running in list(engine._running.values())
            if running.talk._session is not None
        )
        return free and engine.num_running == 0 and self.service.outstanding == 0


@pytest.fixture(scope="module")
def server(served_run: Path) -> Iterator[Running]:
    running = Running(served_run)
    yield running
    running.close()


def until(is_so: Callable[[], bool]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def endless(**more: Any) -> dict[str, Any]:
    """An answer of the most tokens that there is room for."""
    return ask(max_tokens=200, ignore_eos=True, **more)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["close", "half-close", "reset"])
def test_a_client_that_leaves_frees_its_slot(server: Running, stream: bool, way: str) -> None:
    with closing(server.send(endless(stream=stream, n=3))) as connection:
        if stream:
            assert connection.recv(10).startswith(b"HTTP/1.1 2")
        if way == "half-close":
            connection.shutdown(socket.SHUT_WR)
        elif way == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if way != "half-close":
            connection.close()
        until(server.is_free)


def test_a_full_queue_is_told_with_a_time_and_frees_again(server: Running) -> None:
    waiting = [server.send(endless(n=2, stream=True, seed=i)) for i in range(4)]
    until(lambda: server.service.outstanding == 8)
    with closing(server.send(ask())) as connection:
        answer = b"".join(iter(lambda: connection.recv(4000), b"")).decode()
    assert answer.startswith("HTTP/1.1 429")
    assert "retry-after: " in answer.lower()
    assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["code"] == "rate_limit_exceeded"
    for connection in waiting:
        connection.close()
    until(server.is_free)


def test_a_slow_reader_holds_nobody_up(server: Running) -> None:
    with closing(server.send(endless(stream=True, logprobs=True, top_logprobs=20))):
        with closing(server.send(ask())) as quick:
            assert quick.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: server.service.engine.num_running == 0)
    until(server.is_free)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(server: Running, sent: bytes) -> None:
    with closing(server.connect()) as connection:
        connection.sendall(sent)
        try:
            answer = connection.recv(1000)
        except ConnectionResetError:
            answer = b""
    assert answer == b"" or b" 40" in answer.splitlines()[0]
    with closing(server.send(ask())) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_openais_client(server: Running) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
    assert [model.id for model in client.models.list()][:2] == ["base", "sft"]
    turns = [{"role": "user", "content": "Hi"}]
    asked = {"model": "ppo", "messages": turns, "seed": 3, "max_tokens": 6}
    whole = client.chat.completions.create(**asked, extra_body={"tandem": {"reward": True}})
    text = whole.choices[0].message.content
    assert isinstance(whole.choices[0].tandem["reward"], float)
    stream = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    raw = client.completions.create(model="sft", prompt="One", max_tokens=3, logprobs=1, seed=1)
    assert len(raw.choices[0].logprobs.tokens) == raw.usage.completion_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**asked, "temperature": -1})
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**asked, "model": "gpt-9"})

    async def asynchronous() -> str:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none"
        ) as other:
            found = await other.chat.completions.create(**asked)
            return str(found.choices[0].message.content)

    assert asyncio.run(asynchronous()) == text
    client.close()
