"""A run's folder as its stages leave it, with random weights, and a client of its server."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.testclient import TestClient

from tandem.checkpoint.folder import write_folder
from tandem.config.load import dump_config
from tandem.models.load import load_causal_lm, load_tokenizer
from tandem.models.save import save_model
from tandem.models.scalar import load_scalar_model, set_normalization
from tandem.serve.app import make_app
from tandem.serve.idle import LimitedProtocol
from tandem.serve.service import ServeSettings, Service, load_settings
from tests.tiny import save_tiny_model, tiny_config, write_preferences

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def make_run(folder: Path) -> Path:
    """A run with base, sft, reward, ppo and its average, each of other random weights."""
    model = save_tiny_model(folder / "start")
    data = write_preferences(folder / "prefs.jsonl", num=8)
    run = folder / "run"
    run.mkdir()
    config = tiny_config(run, model, data)
    (run / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    (run / "command.txt").write_text("tandem train\n", encoding="utf-8")
    tokenizer = load_tokenizer(model)

    def policy(place: Path, seed: int) -> None:
        saved = load_causal_lm(model)
        torch.manual_seed(seed)
        for parameter in saved.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
        save_model(saved, tokenizer, place)

    def scalar(place: Path, seed: int) -> None:
        scorer = load_scalar_model(model, seed=seed, from_causal_lm=True)
        set_normalization(scorer, 0.25, 0.5)
        save_model(scorer, tokenizer, place)

    def ppo(place: Path) -> None:
        policy(place / "actor", 2)
        policy(place / "ema", 3)
        scalar(place / "critic", 4)

    write_folder(run / "sft", lambda place: policy(place, 1), {})
    write_folder(run / "reward", lambda place: scalar(place, 5), {})
    write_folder(run / "ppo", ppo, {})
    return run


def with_template(run: Path, copy: Path, template: str) -> Path:
    """A copy of a run whose models have another chat template."""
    shutil.copytree(run, copy)
    for file in copy.rglob("chat_template.jinja"):
        file.write_text(template)
    for manifest in copy.rglob("MANIFEST.json"):
        manifest.unlink()
    return copy


@contextmanager
def serving(path: Path | str, **settings: Any) -> Iterator[TestClient]:
    """A client of a server over a path, in this process."""
    known = ServeSettings(str(path), **settings)
    service = Service(known, load_settings(known))
    try:
        with TestClient(make_app(service), base_url="http://localhost") as client:
            client.service = service  # type: ignore[attr-defined]
            yield client
    finally:
        service.close()


class Running:
    """A server on a free port of this machine, in a thread."""

    def __init__(self, path: Path, **settings: Any) -> None:
        known = ServeSettings(str(path), **settings)
        self.service = Service(known, load_settings(known))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        app = make_app(self.service)
        config = uvicorn.Config(
            app, http=LimitedProtocol, ws="none", log_level="critical", access_log=False
        )
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
        return socket.create_connection(("127.0.0.1", self.port), timeout=120.0)

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
        return (
            free
            and engine.num_running == 0
            and self.service.outstanding == self.service.forming == 0
        )


def events(text: str) -> list[dict[str, Any]]:
    """The objects of a stream, which must end with [DONE]."""
    lines = [line for line in text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]", lines[-1]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def ask(content: str = "What is two and two?", **more: Any) -> dict[str, Any]:
    """The body of a chat completion."""
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "seed": 1, **more}


def check_error(body: dict[str, Any], param: str | None) -> None:
    """OpenAI's form: all four keys."""
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"]
    assert error["code"]
    assert "\n" not in error["message"]
