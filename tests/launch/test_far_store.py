"""A store behind a link that may go down."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from torch.distributed import DistStoreError, PrefixStore  # type: ignore[attr-defined]

from tandem.errors import RankError
from tandem.launch import far_store
from tandem.launch.far_store import FarStore
from tandem.launch.rendezvous import _client, listening_store
from tandem.parallel import watchdog
from tandem.parallel.asking import Asking, NoAnswerError
from tandem.parallel.watchdog import watching
from tests.launch.links import Link
from tests.launch.programs import wait_for

# Of all that wait for an answer; `set` has none.
CALLS: dict[str, Callable[[Any], Any]] = {
    "get": lambda store: store.get("a"),
    "add": lambda store: store.add("n", 1),
    "compare_set": lambda store: store.compare_set("a", "1", "2"),
    "check": lambda store: store.check(["a"]),
    "wait": lambda store: store.wait(["a"], timedelta(seconds=1)),
}


@pytest.mark.parametrize("has_prefix", [False, True])
def test_it_answers_as_the_store_itself(has_prefix: bool) -> None:
    near: Any = listening_store("127.0.0.1")
    far: Any = FarStore(_client("127.0.0.1", near.port, 5.0))
    store: Any = PrefixStore("p", far) if has_prefix else far
    direct: Any = PrefixStore("p", near) if has_prefix else near
    store.set("a", "1")
    assert direct.get("a") == store.get("a") == b"1"
    assert store.add("n", 2) == 2
    assert (store.check(["a"]), store.check(["a", "b"])) == (True, False)
    assert store.compare_set("a", "1", "2") == b"2"
    with pytest.raises(DistStoreError, match=r"nothing was set for 0 s: .*b"):
        store.wait(["b"], timedelta(milliseconds=10))
    assert far.timeout == timedelta(seconds=5)
    assert far.silent_seconds == 0


@pytest.mark.parametrize("call", CALLS)
def test_no_call_outlasts_a_link_that_is_down(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_store, "_ANSWER_SECONDS", 0.3)
    near: Any = listening_store("127.0.0.1")
    link = Link(near.port)
    far: Any = FarStore(_client("127.0.0.1", link.port, 60.0))
    near.set("a", "1")
    wait_for(lambda: bool(CALLS["check"](far)))
    link.cut()
    with pytest.raises(NoAnswerError, match="no answer for 0 s"):
        CALLS[call](far)
    assert far.silent_seconds > 0
    with pytest.raises(NoAnswerError):  # at once: the first question is still open
        far.get("a")
    link.mend()
    wait_for(lambda: far.silent_seconds == 0)
    CALLS[call](far)


@pytest.mark.parametrize(
    ("error", "kind", "line"),
    [
        (RuntimeError("gloo: timed out"), RankError, r"or the link to it is down$"),
        (ValueError("boom"), ValueError, "boom"),
    ],
)
def test_a_rank_whose_link_is_down_ends(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], line: str
) -> None:
    monkeypatch.setattr(watchdog, "_STORE_SECONDS", 0.3)
    near: Any = listening_store("127.0.0.1")
    link = Link(near.port)
    store = _client("127.0.0.1", link.port, 60.0)
    monkeypatch.setattr(watchdog, "_store_of_the_ranks", lambda: store)

    def lose() -> None:
        with watching(0, 2):
            link.cut()
            raise error

    with pytest.raises(kind, match=line):
        lose()
    link.mend()  # or its threads would stay
    wait_for(lambda: near.check(["note-0"]))


def test_what_a_question_raises_is_raised() -> None:
    def wrong() -> None:
        raise KeyError("k")

    with pytest.raises(KeyError):
        Asking(5.0)(wrong)


def test_a_late_answer_ends_the_silence() -> None:
    asking, answer = Asking(0.05), Event()
    with pytest.raises(NoAnswerError):
        asking(answer.wait)
    with pytest.raises(NoAnswerError):
        asking(lambda: 1)
    answer.set()
    wait_for(lambda: asking.silent_seconds == 0)
    assert asking(lambda: 1) == 1
