"""Forms are made in a thread of their own: others go on, and errors are of one request alone."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tandem.config import form_trial
from tandem.serve import preparing, service
from tandem.serve.forms import Wish
from tests.serve.serving import Running, ask
from tests.serve.test_connections import until

pytest.importorskip("llguidance")

HELD = "[0-9]{2,4}"


@pytest.fixture(scope="module")
def server(served_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    votes = tmp_path_factory.mktemp("votes") / "votes.jsonl"
    running = Running(served_run, slots=4, votes=str(votes))
    assert body(running, regex="a") == "a"  # all is loaded
    yield running
    running.close()


def read(server: Running, **more: Any) -> tuple[int, dict[str, Any]]:
    """The status and the body of an answer."""
    with closing(server.send(ask(max_tokens=30, **more))) as connection:
        raw = b"".join(iter(lambda: connection.recv(4000), b"")).decode()
    head, _, content = raw.partition("\r\n\r\n")
    return int(head.split()[1]), json.loads(content)


def body(server: Running, **more: Any) -> str:
    status, found = read(server, **more)
    assert status == 200, found
    text: str = found["choices"][0]["message"]["content"]
    return text


class Held:
    """Holds whatever makes the form `HELD` until it is let go.

    Attributes:
        begun: forms that were begun, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.go = threading.Event()
        real = preparing.constraint_of

        def holding(renderer: Any, wish: Wish, *args: Any, **how: Any) -> Any:
            assert threading.current_thread().name.startswith("tandem-forms")
            assert wish.form is not None
            self.begun.append(wish.form.text)
            if wish.form.text == HELD:
                assert self.go.wait(60)
            if wish.form.text == "broken":
                raise MemoryError
            return real(renderer, wish, *args, **how)

        monkeypatch.setattr(preparing, "constraint_of", holding)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(monkeypatch)
    yield held
    held.go.set()


def test_others_go_on_while_a_form_is_made(server: Running, held: Held) -> None:
    with closing(server.send(ask(regex=HELD, max_tokens=30))) as waiting:
        until(lambda: bool(held.begun))
        with closing(server.send(ask(stream=True, max_tokens=20, ignore_eos=True))) as stream:
            told = b"".join(iter(lambda: stream.recv(4000), b""))
        assert b"data: [DONE]" in told
        assert b'"finish_reason":"length"' in told
        assert not held.go.is_set()
        held.go.set()
        answer = b"".join(iter(lambda: waiting.recv(4000), b"")).decode()
    found = json.loads(answer.partition("\r\n\r\n")[2])
    assert re.fullmatch(HELD, found["choices"][0]["message"]["content"])
    until(server.is_free)


def test_forms_do_not_wait_for_those_whose_trial_takes_long(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, real = list[str](), threading.Event(), form_trial._tried

    def trying(grammars: str, limits: str, seconds: float | None) -> str:
        if "slow" not in grammars:
            return real(grammars, limits, None)
        if seconds is not None:
            raise form_trial.SlowFormError
        begun.append(grammars)
        assert go.wait(60)
        return real(grammars, limits, seconds)

    monkeypatch.setattr(form_trial, "_tried", trying)
    sent = [server.send(ask(regex=f"slow{i}", max_tokens=30)) for i in range(3)]
    until(lambda: bool(begun))
    assert body(server, regex="quick") == "quick"
    assert len(begun) == 1
    go.set()
    for i, waiting in enumerate(sent):
        with closing(waiting):
            answer = b"".join(iter(lambda s=waiting: s.recv(4000), b"")).decode()
        found = json.loads(answer.partition("\r\n\r\n")[2])
        assert found["choices"][0]["message"]["content"] == f"slow{i}"
    assert len(begun) == 3
    until(server.is_free)


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_while_a_form_is_made_is_of_its_own_request(
    server: Running, held: Held, stream: bool
) -> None:
    held.go.set()
    status, found = read(server, regex="broken", stream=stream)
    assert status == 500
    assert "\n" not in found["error"]["message"]
    status, found = read(server, regex="(", stream=stream)
    assert status == 400
    assert "regular expression" in found["error"]["message"]
    assert body(server, regex="ab") == "ab"
    until(server.is_free)


def test_a_grammar_is_read_in_the_thread_of_forms(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llguidance import gbnf_to_lark

    real, threads = gbnf_to_lark.any_to_lark, []

    def reading(text: str) -> str:
        threads.append(threading.current_thread().name)
        return real(text)

    monkeypatch.setattr(gbnf_to_lark, "any_to_lark", reading)
    assert re.fullmatch("[0-9]{2}", body(server, grammar="root ::= [0-9] [0-9]"))
    assert threads
    assert all(name.startswith("tandem-forms") for name in threads)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_client_that_leaves_while_its_form_is_made_leaves_nothing(
    server: Running, held: Held, path: str
) -> None:
    """One that waits for its turn is not begun at all."""

    def sent(regex: str) -> Any:
        request = ask(regex=regex, n=2)
        return server.send({**request, "prompt": "One"} if "chat" not in path else request, path)

    first = sent(HELD)
    until(lambda: held.begun == [HELD])
    second = sent("queued")
    until(lambda: server.service.forming == 4)
    second.close()
    until(lambda: server.service.forming == 2)
    first.close()
    until(lambda: server.service.forming == server.service.outstanding == 0)
    assert server.service.engine.num_running == 0
    held.go.set()
    assert body(server, regex="ab") == "ab"
    assert held.begun == [HELD, "ab"]
    until(server.is_free)


def test_who_waits_too_long_for_others_forms_is_told_to_come_back(
    server: Running, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a form takes that has begun, it is made."""
    monkeypatch.setattr(service, "_MOST_FORM_SECONDS", 0.05)
    with closing(server.send(ask(regex=HELD, max_tokens=30))) as first:
        until(lambda: held.begun == [HELD])
        status, found = read(server, regex="queued")
        assert status == 429
        assert found["error"]["code"] == "rate_limit_exceeded"
        assert "other answers' forms have taken more than 0.05 s" in found["error"]["message"]
        assert read(server)[0] == 200  # without a form
        held.go.set()
        answer = b"".join(iter(lambda: first.recv(4000), b"")).decode()
    assert json.loads(answer.partition("\r\n\r\n")[2])["choices"]
    assert held.begun == [HELD]
    monkeypatch.undo()
    assert body(server, regex="ab") == "ab"
    until(server.is_free)


def test_who_waits_for_a_form_takes_no_room_from_others(
    served_run: Path, tmp_path: Path, held: Held
) -> None:
    """But there is an end to how many may wait."""
    few = Running(served_run, slots=1, max_queue=1, votes=str(tmp_path / "votes.jsonl"))
    with closing(few.send(ask(regex=HELD, max_tokens=30))) as first:
        until(lambda: held.begun == [HELD])
        with closing(few.send(ask(regex="queued", max_tokens=30))) as second:
            until(lambda: few.service.forming == 2)
            assert read(few, n=2)[0] == 200  # without a form
            status, found = read(few, regex="ab")
            assert status == 429
            assert "2 answers wait for their forms" in found["error"]["message"]
            held.go.set()
            for waiting in (first, second):
                answer = b"".join(iter(lambda s=waiting: s.recv(4000), b"")).decode()
                assert json.loads(answer.partition("\r\n\r\n")[2])["choices"]
    until(few.is_free)
    few.close()


def test_a_form_that_could_not_be_tried_is_asked_again(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -9 $$\n")
    python.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        status, found = read(server, regex="abc")
    assert status == 500
    assert "exit status -9" in found["error"]["message"]
    assert body(server, regex="abc") == "abc"
