"""The server as a process of its own: fuzzed requests, crowds, slow readers, huge bodies, kills."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bench.ports import free_port
from tests.battery.figures import record
from tests.jsonl import read_jsonl

pytestmark = pytest.mark.skipif(
    find_spec("starlette") is None, reason="needs the extra serve (starlette, uvicorn)"
)
SEED = 17
_HANGS = 600.0
_GROWTH = 1.05
"""Resident bytes at the end over those after a warm-up."""


class Server:
    """`tandem serve RUN` on a free port of this machine."""

    def __init__(self, run: Path, votes: Path, *flags: str) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "tandem", "serve", str(run), "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, "--votes", str(votes), "--slots", "8", *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        deadline = time.monotonic() + _HANGS
        while True:
            with suppress(OSError):
                if self.ask("GET", "/health")[0] == 200:
                    return
            assert self.process.poll() is None, "the server ended"
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and content of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_HANGS)
        try:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def post(self, path: str, body: object) -> tuple[int, bytes]:
        """The same with JSON."""
        return self.ask("POST", path, json.dumps(body).encode())

    def gauge(self, name: str) -> float:
        """The sum of a gauge over models."""
        page = self.ask("GET", "/metrics")[1].decode()
        values = re.findall(rf"^tandem_{name}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
        assert values, page
        return sum(map(float, values))

    def wait_until_free(self) -> None:
        """Wait until nothing runs or waits.

        Raises:
            AssertionError: a slot leaked.
        """
        deadline = time.monotonic() + _HANGS
        while self.gauge("answers_outstanding") or self.gauge("answers_in_engine"):
            assert time.monotonic() < deadline, "slots are held for ever"
            time.sleep(0.05)


@contextmanager
def serving(run: Path, votes: Path, *flags: str) -> Iterator[Server]:
    server = Server(run, votes, *flags)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.serve.serving import make_run

    return make_run(tmp_path_factory.mktemp("served"))


_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/score", "/tokenize", "/detokenize")
_VALUES: tuple[Any, ...] = (
    None, True, 0, 1, -1, 2, 16, 0.5, 1e308, -1e-9, "", "a", "user", "\x00\x1b[2J", "é" * 200,
    [], [1, 2], ["a"], {}, {"role": "user", "content": "Hi"}, [[1]], "<|user|>", 10**30,
)  # fmt: skip
_FIELDS = (
    "model", "messages", "prompt", "n", "max_tokens", "stream", "stop", "seed", "temperature",
    "top_p", "top_k", "min_p", "logprobs", "top_logprobs", "echo", "logit_bias", "tandem",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "user", "tools", "text",
    "tokens", "stream_options", "response_format", "min_tokens", "ignore_eos",
)  # fmt: skip


def fuzzed(random: Random) -> tuple[str, bytes]:
    """A path and a body: a right one with some fields changed, or no JSON at all."""
    path = random.choice(_PATHS)
    body: dict[str, Any] = {"model": random.choice(["ppo", "sft", "base"]), "max_tokens": 2}
    if "chat" in path or "score" in path:
        body["messages"] = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "!"},
        ]
    else:
        body |= {"prompt": "One", "text": "One", "tokens": [5, 6]}
    for _ in range(random.randint(0, 3)):
        body[random.choice(_FIELDS)] = random.choice(_VALUES)
    raw = json.dumps(body).encode()
    if random.random() < 0.1:
        cut = random.randrange(len(raw) + 1)
        raw = raw[:cut] + random.randbytes(random.randint(0, 8)) + raw[cut + 1 :]
    return path, raw


@pytest.mark.slow
@pytest.mark.parametrize("count", [10_000])
def test_fuzzed_requests_break_and_leak_nothing(served: Path, tmp_path: Path, count: int) -> None:
    count = int(os.environ.get("TANDEM_FUZZED", count))
    random, codes = Random(SEED), Counter[int]()
    with serving(served, tmp_path / "votes.jsonl") as server:
        for number in range(count):
            if number == count // 5:  # models are loaded, samplers and templates are kept
                begin = server.gauge("resident_bytes")
            status, content = server.ask("POST", *fuzzed(random))
            codes[status] += 1
            assert status < 500, content
        server.wait_until_free()
        grown = server.gauge("resident_bytes") / begin
    assert codes[200] > 0
    assert codes[400] > 0
    assert grown < _GROWTH
    record("fuzzed requests", requests=count, seed=SEED, codes=dict(codes), grown=round(grown, 4))


@pytest.mark.slow
def test_a_crowd_half_of_which_leaves(served: Path, tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    lock = threading.Lock()

    def client(number: int, server: Server) -> None:
        body = {"model": "ppo", "max_tokens": 24, "stream": number % 4 < 2, "seed": number,
                "messages": [{"role": "user", "content": f"Say {number}."}]}  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=_HANGS)
        outcome = "left"
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body))
            if number % 2:
                answer = connection.getresponse()
                outcome = str(answer.status)
                if answer.status == 429:
                    assert answer.headers["Retry-After"]
                answer.read()
        finally:
            connection.close()
            with lock:
                outcomes[outcome] += 1

    with serving(served, tmp_path / "votes.jsonl", "--max-queue", "64") as server:
        blocks = None
        for _ in range(2):  # the second time every model is loaded
            threads = [threading.Thread(target=client, args=(n, server)) for n in range(200)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            server.wait_until_free()
            before, blocks = blocks, server.gauge("kv_blocks_free")
        assert blocks == before, "blocks of KV memory leaked"
    assert outcomes["left"] == 200
    assert outcomes["200"] > 0
    assert set(outcomes) <= {"left", "200", "429"}
    record("200 clients twice, half leave", **outcomes)


@pytest.mark.slow
def test_slow_readers_keep_nobody_waiting(served: Path, tmp_path: Path) -> None:
    with serving(served, tmp_path / "votes.jsonl") as server:
        body = json.dumps({"model": "ppo", "max_tokens": 200, "min_tokens": 200, "stream": True,
                           "messages": [{"role": "user", "content": "Hi"}]}).encode()  # fmt: skip
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
        )
        slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(12)]
        for connection in slow:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
        status, _ = server.post("/v1/completions", {"model": "sft", "prompt": "A", "max_tokens": 2})
        assert status == 200
        for connection in slow:
            connection.close()
        server.wait_until_free()
    record("slow readers", readers=len(slow), others_answered=1)


@pytest.mark.slow
def test_a_body_of_a_gibibyte_is_refused_before_it_is_read(served: Path, tmp_path: Path) -> None:
    with serving(served, tmp_path / "votes.jsonl") as server:
        before = server.gauge("resident_bytes")
        connection = socket.create_connection(("127.0.0.1", server.port))
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        connection.sendall(f"{head}Content-Length: {2**30}\r\n\r\n".encode())
        sent = 0
        with suppress(OSError):  # it closes
            while sent < 2**30:
                sent += connection.send(bytes(2**20))
        told = b""
        with suppress(OSError):
            told = connection.recv(2**16)
        connection.close()
        assert b" 413 " in told or sent < 2**30
        grown = server.gauge("resident_bytes") - before
        assert grown < 2**26
    record("a body of 1 GiB", sent_bytes=sent, grown_bytes=int(grown))


@pytest.mark.slow
@pytest.mark.parametrize("kills", [25])
def test_no_vote_is_lost_or_doubled_by_kills(served: Path, tmp_path: Path, kills: int) -> None:
    kills = int(os.environ.get("TANDEM_KILLS", kills))
    random, votes = Random(SEED), tmp_path / "votes.jsonl"
    confirmed: set[str] = set()
    lock = threading.Lock()

    def vote(server: Server, name: str) -> None:
        answers = [{"text": f"a {name}", "model": "ppo"}, {"text": "b\r\n", "model": "sft"}]
        body = {"id": name, "who": "ann", "verdict": "left", "answers": answers,
                "messages": [{"role": "user", "content": "x" * 2000}]}  # fmt: skip
        with suppress(OSError, http.client.HTTPException):
            if server.post("/v1/votes", body)[0] < 300:
                with lock:
                    confirmed.add(name)

    names = [f"vote-{number}" for number in range(20)]
    for kill in range(kills):
        with serving(served, votes) as server:
            own = [f"{name}-{kill}" for name in names]
            threads = [threading.Thread(target=vote, args=(server, name)) for name in own]
            for thread in threads:
                thread.start()
            time.sleep(random.uniform(0, 0.1))
            os.kill(server.process.pid, signal.SIGKILL)
            for thread in threads:
                thread.join()
    with serving(served, votes) as server:  # the clients ask again for all of the last
        for name in own:
            vote(server, name)
            vote(server, name)
    rows = read_jsonl(votes)
    found = Counter(row["id"] for row in rows)
    assert not confirmed - found.keys(), "a vote that was confirmed is lost"
    assert set(found.values()) <= {1}, "a vote is there twice"
    record("SIGKILL while voting", kills=kills, seed=SEED, confirmed=len(confirmed), rows=len(rows),
           lost=0, doubled=0)  # fmt: skip
