"""Rewards from a server: what is asked, what is tried again, and what is said where it fails."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench.ports import free_port
from tandem.config.scoring import ScoringConfig
from tandem.errors import ConfigError, StoppedWaiting
from tandem.rewards import remote
from tandem.rewards.loading import load_reward_function
from tandem.rewards.scoring import FunctionScores, RewardFunctions
from tandem.rewards.selftest import ReferenceRow, self_test
from tandem.rewards.spec import parse_spec, parse_specs
from tandem.stopping import stop_asked
from tandem.training.signals import StopSignals
from tests.rewards.answers import answers_of

PAGE = (Path(__file__).parents[2] / "docs/reward_function.md").read_text("utf-8")
Reply = tuple[int, bytes, dict[str, str]]


def lengths(asked: dict[str, Any]) -> Reply:
    return 200, json.dumps({"rewards": [len(q) for q in asked["query"]]}).encode(), {}


class Quiet(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that has gone is what a deadline looks like from here."""


class Server:
    """A server on this machine; `replies` are given in turn, the last one for ever.

    Args:
        byte_seconds: between two bytes of a reply.
    """

    def __init__(
        self,
        *replies: Callable[[dict[str, Any]], Reply] | Reply,
        port: int = 0,
        byte_seconds: float = 0.0,
    ) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        left = list(replies)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(asked)
                outer.headers.append({n.lower(): v for n, v in self.headers.items()})
                reply = left.pop(0) if len(left) > 1 else left[0]
                status, body, headers = reply(asked) if callable(reply) else reply
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                for at in range(len(body)) if byte_seconds else ():
                    self.wfile.write(body[at : at + 1])
                    time.sleep(byte_seconds)
                if not byte_seconds:
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._http = Quiet(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/get_reward"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@contextmanager
def serving(*replies: Any, byte_seconds: float = 0.0) -> Iterator[Server]:
    server = Server(*replies, byte_seconds=byte_seconds)
    try:
        yield server
    finally:
        server.close()


class RawServer:
    """Sends bytes as they are, those of each connection in turn, the last for ever.

    Args:
        dribble: a byte that it then sends again and again, until the other side closes.
    """

    def __init__(self, *replies: bytes, dribble: bytes = b"") -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/get_reward"
        self.num_asked = 0
        self.left = threading.Event()
        """The other side has closed a connection that had been sent all."""
        self._replies, self._dribble = list(replies), dribble
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            self.num_asked += 1
            with connection:
                asked = connection.recv(65536)
                # What is left unread when a connection is closed resets it: the reply may be lost.
                while asked.startswith(b"POST") and not _is_whole(asked):
                    asked += connection.recv(65536)
                connection.sendall(self._replies[0])
                if len(self._replies) > 1:
                    self._replies.pop(0)
                try:
                    while self._dribble:
                        time.sleep(0.01)
                        connection.sendall(self._dribble)
                except OSError:
                    self.left.set()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _is_whole(asked: bytes) -> bool:
    head, end, body = asked.partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head, re.IGNORECASE)
    return bool(end) and length is not None and len(body) >= int(length[1])


@contextmanager
def sending(*replies: bytes, dribble: bytes = b"") -> Iterator[RawServer]:
    server = RawServer(*replies, dribble=dribble)
    try:
        yield server
    finally:
        server.close()


def http(body: bytes, *headers: str, length: int | None = None) -> bytes:
    told = [*headers, f"Content-Length: {len(body) if length is None else length}"]
    return "\r\n".join(["HTTP/1.1 200 OK", *told, "", ""]).encode() + body


GOOD = http(b'{"rewards": [3.0]}')


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.01)
    monkeypatch.setenv("no_proxy", "*")
    load_reward_function.cache_clear()


def scored(
    name: str, *completions: str, lines: list[str] | None = None, seconds: float = 5.0
) -> FunctionScores:
    config = ScoringConfig(deadline_seconds=seconds)
    rewards = RewardFunctions([name], config, (lines if lines is not None else []).append)
    answers = answers_of(list(completions), answer=["x"] * len(completions))
    texts = [f"<s>{prompt}:" for prompt in answers.prompts]
    return rewards.score(replace(answers, prompt_texts=texts))[0]


def named(url: str, **options: object) -> str:
    return f"tandem:remote?url={url}&" + "&".join(f"{k}={v}" for k, v in options.items())


def free_url() -> str:
    return f"http://127.0.0.1:{free_port()}/get_reward"


def test_answers_go_in_batches_as_openrlhf_sends_them_and_rewards_come_in_order() -> None:
    with serving(lengths) as server:
        found = scored(named(server.url, batch_size=2), "a", "bbb", "cc")
    assert found.scores == [len("<s>q0:a"), len("<s>q1:bbb"), len("<s>q2:cc")]
    assert [len(asked["query"]) for asked in server.asked] == [2, 1]
    assert server.asked[1] == {
        "query": ["<s>q2:cc"],
        "prompts": ["<s>q2:"],
        "labels": ["x"],
        "messages": [[{"role": "user", "content": "q2"}, {"role": "assistant", "content": "cc"}]],
    }
    assert server.headers[0]["content-type"] == "application/json"
    assert "authorization" not in server.headers[0]


def test_null_is_not_scored_and_other_fields_are_not_read() -> None:
    reply = {"rewards": [None, 2], "scores": [0, 1], "extra_logs": {"a": [1, 2]}}
    with serving((200, json.dumps(reply).encode(), {})) as server:
        found = scored(server.url, "a", "b")
    assert (found.scores, found.failures) == ([None, 2.0], {})


@pytest.mark.parametrize(
    ("reply", "reason", "part"),
    [
        ((404, b'{"detail":"Not Found"}', {}), "exception", "status 200; got 404 Not Found, '{\""),
        ((302, b"", {"Location": "/"}), "exception", "got 302 Found, an empty reply"),
        ((200, b"<html>\x1b[1m\nhello", {}), "result", r"JSON, .*; got '<html>\\\\x1b\[1m hello'"),
        ((200, b"", {}), "result", "got an empty reply"),
        ((200, b"[1.0]", {}), "result", r"got '\[1\.0\]'"),
        ((200, b'{"reward": [1.0]}', {}), "result", '"rewards"'),
        ((200, b'{"rewards": [1.0, 2.0]}', {}), "result", "with 1, one per query; got 2"),
        ((200, b'{"rewards": [NaN]}', {}), "result", "finite numbers within .*; got NaN"),
        ((200, b'{"rewards": ["1"]}', {}), "result", "finite numbers within .*; got '1'"),
        ((200, b'{"rewards": [true]}', {}), "result", "finite numbers within .*; got true"),
        ((200, b'{"rewards": [[1]]}', {}), "result", r"finite numbers within .*; got \[1\]"),
        ((200, b"[" * 10**5, {}), "result", r"must reply with JSON, .*; got '\[\["),
    ],
)
def test_a_reply_that_gives_no_reward_is_one_line(reply: Reply, reason: str, part: str) -> None:
    lines: list[str] = []
    with serving(reply) as server:
        found = scored(server.url, "a", lines=lines)
    assert len(server.asked) == 1, "nothing of this is tried again"
    assert found.failures == {reason: 1}
    assert re.search(part, found.first), found.first
    (line,) = lines
    assert line.isprintable()


def test_one_bad_batch_is_lost_alone() -> None:
    with serving(lengths, (400, b"", {}), lengths) as server:
        found = scored(named(server.url, batch_size=1), "a", "b", "c")
    assert found.failed == [False, True, False]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again_and_a_line_says_so(status: int) -> None:
    lines: list[str] = []
    busy = (status, b"busy", {"Retry-After": "0"})
    with serving(busy, busy, lengths) as server:
        found = scored(server.url, "a", lines=lines)
    assert (found.failures, len(server.asked)) == ({}, 3)
    assert len(lines) == 2
    assert all(re.search(rf"remote waits: .*got {status} .*again in 0 s", line) for line in lines)


def test_a_server_that_comes_later_is_waited_for() -> None:
    """The port is closed at first, so that the connection is refused."""
    url = free_url()
    lines: list[str] = []
    servers: list[Server] = []

    def start(line: str) -> None:
        lines.append(line)
        servers.append(Server(lengths, port=int(url.split(":")[2].partition("/")[0])))

    rewards = RewardFunctions([url], ScoringConfig(), start)
    (found,) = rewards.score(replace(answers_of(["a"]), prompt_texts=["q"]))
    servers[0].close()
    assert found.scores == [2.0]
    (line,) = lines
    assert line.startswith("reward function remote waits: http://127.0.0.1:")
    assert "must be reachable; got: Connection refused. It asks again" in line


def test_nothing_waits_longer_than_it_may_and_only_once() -> None:
    lines: list[str] = []
    name = named(free_url(), batch_size=1, retry_seconds=0.025)
    found = scored(name, "a", "b", "c", lines=lines)
    assert found.failures == {"exception": 3}
    assert "Connection refused (waited for 0 s)" in found.first
    assert len([line for line in lines if "waits" in line]) == 2, "0.01 s and the rest of 0.025"


def test_a_host_that_is_not_known_is_not_waited_for() -> None:
    lines: list[str] = []
    error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lambda *a, **k: (_ for _ in ()).throw(error))
        found = scored("http://no.such.host/x", "a", lines=lines)
    assert "http://no.such.host/x must be reachable; got: Name or service not known" in found.first
    assert len(lines) == 1


def test_a_server_that_dribbles_ends_with_the_deadline() -> None:
    """No byte is late, but the whole reply is."""
    start = time.monotonic()
    with serving((200, b" " * 500, {}), byte_seconds=0.02) as server:
        found = scored(server.url, "a", seconds=0.1)
        assert time.monotonic() - start < 5, "of 10"
    assert found.failures == {"timeout": 1}
    assert found.first == f"d.jsonl:1: {server.url} took more than 0.1 s"


def test_a_token_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_TOKEN", "sesame\n")
    lines: list[str] = []
    with serving((401, b"bad token: Bearer sesame", {})) as server:
        found = scored(named(server.url, token_env="RM_TOKEN"), "a", lines=lines)
        scored(named(server.url, token_env="RM_TOKEN", header="X-API-Key"), "a")
    assert server.headers[0]["authorization"] == "Bearer sesame"
    assert server.headers[1]["x-api-key"] == "sesame"
    assert "bad token: Bearer ***" in found.first
    assert "sesame" not in f"{lines} {found}"


def test_what_is_no_reward_fails_its_answer_alone() -> None:
    with serving((200, b'{"rewards": [1.0, Infinity, true, null, "x", 2]}', {})) as server:
        found = scored(server.url, *"abcdef")
    assert found.scores == [1.0, None, None, None, None, 2.0]
    assert found.failed == [False, True, True, False, True, False]


def test_numbers_that_json_has_not_are_sent_as_null() -> None:
    nan, inf = float("nan"), float("inf")
    with serving(lengths) as server:
        reward = load_reward_function(f"tandem:remote?url={server.url}")
        turns = [[{"role": "user", "content": "q"}]] * 3
        answer = [nan, {"low": -inf, "all": [1.5, (nan, "x")]}, 2]
        assert reward(["q"] * 3, ["a"] * 3, turns, answer=answer) == [2, 2, 2]
    assert server.asked[0]["labels"] == [None, {"low": None, "all": [1.5, [None, "x"]]}, 2]


@pytest.mark.parametrize(
    "broken",
    [
        http(b'{"rewards": [3.0]}', length=40),
        http(b"", length=40),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
    ],
    ids=["short", "no body", "chunk", "between chunks"],
)
def test_a_reply_that_breaks_off_is_asked_for_again(broken: bytes) -> None:
    lines: list[str] = []
    with sending(broken, GOOD) as server:
        found = scored(server.url, "a", lines=lines)
    assert (found.scores, server.num_asked) == ([3.0], 2)
    (line,) = lines
    assert re.search(r"must send all of its reply; got a reply that broke off after \d+ by", line)


@pytest.mark.parametrize(
    ("reply", "part"),
    [
        (b"SSH-2.0-Open\x1bSSH\r\n", r"got 'SSH-2.0-Open\\\\x1bSSH'$"),
        (http(b"", *(f"X-{i}: 1" for i in range(200))), "got 'got more than 100 headers'$"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 10**5 + b"\r\n",
            "got 'got more than 65536 bytes when reading chunk size'$",
        ),
    ],
    ids=["status line", "headers", "chunk"],
)
def test_what_is_not_http_is_said_so(reply: bytes, part: str) -> None:
    with sending(reply) as server:
        found = scored(server.url, "a")
    assert (found.failures, server.num_asked) == ({"exception": 1}, 1)
    assert re.search(f"{server.url} must answer as HTTP says; {part}", found.first), found.first


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_connection_is_closed_at_the_deadline(scheme: str) -> None:
    """Over TLS a long record of the handshake dribbles."""
    began = http(b"", length=10**6) if scheme == "http" else b"\x16\x03\x03\x3f\xff\x02\x00\x3f"
    with sending(began, dribble=b" ") as server:
        url = server.url.replace("http", scheme, 1)
        found = scored(url, "a", seconds=0.3)
        assert server.left.wait(20), "a dribble of 10,000 s"
    assert found.failures == {"timeout": 1}
    for thread in threading.enumerate():
        if thread.name == "remote reward":
            thread.join(20)
            assert not thread.is_alive()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("comes", ["before the pause", "within the pause"])
def test_a_signal_ends_the_wait_for_a_server(
    number: signal.Signals, comes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE", 1000.0)
    lines: list[str] = []

    def heard(line: str) -> None:
        lines.append(line)
        if "waits" in line and comes == "before the pause":
            signal.raise_signal(number)
        elif "waits" in line:
            threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), number)).start()

    rewards = RewardFunctions([named(free_url(), retry_seconds=2000)], ScoringConfig(), heard)
    with StopSignals(lines.append) as stops:
        stops.deferring = True
        with pytest.raises(StoppedWaiting, match=f"by {number.name} while .* remote waited for"):
            rewards.score(replace(answers_of(["a"]), prompt_texts=["q"]))
    assert len([line for line in lines if "waits" in line]) == 1
    assert not stop_asked(), "the next run does not hear of it"


SECRETS = ("s3cr3t/+\\=", "Basic dXNlcjpz/ZWNyZXQ=")


@pytest.mark.parametrize("token", SECRETS)
@pytest.mark.parametrize("place", ["reward", "nested", "body", "long", "status line", "404", "503"])
def test_no_message_shows_a_token_that_a_server_sends_back(
    token: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_TOKEN", token)
    said = f"Authorization: {token}"
    quoted = json.dumps(said).replace("/", "\\/").encode()
    reply = {
        "reward": http(b'{"rewards": [%s]}' % quoted),
        "nested": http(b'{"rewards": [{"headers": [%s]}]}' % quoted),
        "body": http(b'{"error": %s}' % quoted),
        "long": http(b" " * 470 + said.encode()),  # a part of it within what is read of it
        "status line": said.encode() + b"\r\n\r\n",
        "404": http(b" " * 470 + said.encode()).replace(b"200 OK", b"404 Not"),
        "503": http(quoted).replace(b"200 OK", b"503 Not"),
    }[place]
    lines: list[str] = []
    with sending(reply) as server:
        name = named(server.url, token_env="RM_TOKEN", retry_seconds=0.01)
        found = scored(name, "a", lines=lines)
    assert found.num_failed == 1
    assert "***" in found.first
    assert not re.search("s3c|dXN|ZWN", f"{lines} {found}")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("http://", "must be a server's; got 'http://'"),
        ("http://host:99999/x", "must be a server's"),
        ("http://host:x/y", "must be a server's"),
        ("http://[::1/x", "must be a server's"),
        ("tandem:remote", "must be a server's; got ''. Write http://HOST:PORT"),
        ("tandem:remote?url=ftp://host/x", "must be a server's"),
        ("http://me:hidden@host/x", "must hold no user name or password"),
        ("http://a/x,http://b/y", "Put spaces between them"),
        ("tandem:remote?url=http://a/x&token_env=hidden-token", "name an environment variable"),
        ("tandem:remote?url=http://a/x&token_env=NOT_SET_HERE", "NOT_SET_HERE must hold the tok"),
        ("tandem:remote?url=http://a/x&batch_size=0", "a batch_size above 0"),
        ("tandem:remote?url=http://a/x&retry_seconds=nan", "retry_seconds of 0 or more"),
        ("tandem:remote?url=http://a/x&tokn=A", "must have the option tokn.*got url, token_env"),
    ],
)
def test_a_name_that_cannot_be_used(name: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part) as raised:
        RewardFunctions([name])
    assert "hidden" not in str(raised.value)
    assert str(raised.value).isprintable()


def test_a_url_keeps_its_port_and_its_query_and_has_a_weight() -> None:
    for text, url, weight in (
        ("http://host:8000", "http://host:8000", 1.0),
        ("http://host:8000:0.5", "http://host:8000", 0.5),
        ("https://[::1]:8000/x?a=1&b=2:2", "https://[::1]:8000/x?a=1&b=2", 2.0),
        ("https://[::1]:8000", "https://[::1]:8000", 1.0),
        ("tandem:remote?url=http://host:8000", "http://host:8000", 1.0),
        ("tandem:remote?url=http://host:8000&batch_size=2:0", "http://host:8000", 0.0),
    ):
        spec = parse_spec(text)
        assert (spec.name, spec.options["url"], spec.weight) == ("tandem:remote", url, weight)
    two = parse_specs(["http://a:1/x", "http://b/x"])
    assert [spec.label for spec in two] == ["a_1.remote", "b.remote"]


def tried(name: str, *references: str) -> list[str]:
    rows = [ReferenceRow("q", [], {"answer": a}, "d:1", lambda: "q") for a in references]
    return self_test(RewardFunctions([name], None, lambda line: None), rows)


def test_it_is_tried_once_before_the_first_step() -> None:
    with serving(lengths) as server:
        assert tried(server.url, "a", "b") == []
        assert len(server.asked) == 1
        with pytest.raises(ConfigError, match="must score the reference answer"):
            tried(named(server.url, checks_answer="on"), "a", "b")
    with pytest.raises(
        ConfigError, match=r"d:1: http.*got: Connection refused. Start the server or corr"
    ):
        tried(named(server.url, retry_seconds=0), "a", "b")


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (b'{"rewards": ["x"]}', "got 'x'. Have the server reply with a number or null for each"),
        (b'{"rewards": []}', "got 0. Have the server reply with a number or null for each query;"),
        (b"<html>", "got '<html>'. Have the server .* for each query, or correct the URL;"),
    ],
)
def test_a_server_whose_reply_is_wrong_need_not_be_started(reply: bytes, told: str) -> None:
    with serving((200, reply, {})) as server, pytest.raises(ConfigError, match=told) as error:
        tried(server.url, "a", "b")
    assert "Start the server" not in str(error.value)


def test_the_pages_server_is_one() -> None:
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "do_POST" in b)
    made: dict[str, Any] = {}
    exec(block.rpartition("ThreadingHTTPServer((")[0], made)
    made["Rewards"].log_message = lambda *_: None
    http = ThreadingHTTPServer(("127.0.0.1", 0), made["Rewards"])
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    try:
        found = scored(f"http://127.0.0.1:{http.server_port}/get_reward", "a" * 100)
    finally:
        http.shutdown()
        http.server_close()
    assert found.scores == [-1.0]
