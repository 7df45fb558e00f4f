"""What may take long runs beside the event loop and the engine, which everybody shares."""

from __future__ import annotations

import gc
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tandem.data.render import Renderer
from tandem.serve import server
from tandem.serve.service import ServeSettings
from tests.serve.serving import Running, TestClient, ask

_TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", ask()),
        ("/v1/chat/completions", ask(stream=True)),
        ("/v1/completions", {"prompt": "One two", "max_tokens": 2, "echo": True, "logprobs": 1}),
        ("/v1/score", {"messages": _TURNS}),
        ("/tokenize", {"messages": _TURNS}),
        ("/tokenize", {"prompt": "One two"}),
    ],
)
def test_templates_and_tokenizers_have_a_thread_of_their_own(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """A conversation of 200 KB takes half a second of CPU time."""
    threads: list[str] = []
    for name in ("prompt", "conversation", "document"):
        real = getattr(Renderer, name)

        def watched(self: Renderer, *args: Any, _real: Any = real, **more: Any) -> Any:
            threads.append(threading.current_thread().name)
            return _real(self, *args, **more)

        monkeypatch.setattr(Renderer, name, watched)
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert threads
    assert all(name.startswith("tandem-text") for name in threads), threads


def test_prompts_do_not_wait_for_texts_that_no_context_bounds(
    served_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, real = threading.Event(), threading.Event(), Renderer.document

    def held(self: Renderer, text: str, *args: Any, **more: Any) -> Any:
        if text == "long":
            begun.set()
            assert go.wait(60)
        return real(self, text, *args, **more)

    monkeypatch.setattr(Renderer, "document", held)
    running = Running(served_run, votes=str(tmp_path / "votes.jsonl"))
    with closing(running.send({"prompt": "long"}, "/tokenize")) as waiting:
        assert begun.wait(60)
        with closing(running.send({"prompt": "Hi", "max_tokens": 2}, "/v1/completions")) as short:
            assert b"completion_tokens" in b"".join(iter(lambda: short.recv(4000), b""))
        assert not go.is_set()
        go.set()
        assert b'"tokens"' in b"".join(iter(lambda: waiting.recv(4000), b""))
    running.close()


def test_what_is_there_at_the_start_is_not_searched_for_garbage(
    served_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full search takes a fifth of a second of CPU time once torch is loaded."""
    counts: list[tuple[int, int]] = []

    async def serve_nobody(self: Any, sockets: Any) -> None:
        counts.append((gc.get_freeze_count(), len(gc.get_objects())))

    monkeypatch.setattr(server.uvicorn.Server, "serve", serve_nobody)
    try:
        assert server.serve(ServeSettings(str(served_run)), 0, lambda line: None) == 0
    finally:
        gc.unfreeze()
    ((frozen, searched),) = counts
    assert frozen > 20 * searched
