"""What docs/serving.md says to type is typed here."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tandem.errors import TandemError
from tandem.serve.server import describe, serve
from tandem.serve.service import ServeSettings
from tests.serve.serving import TestClient, serving

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


def curl_lines() -> list[list[str]]:
    """The words of each curl command of the page."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    commands = re.findall(r"^curl .*?(?=^curl |\Z)", "\n".join(blocks), re.MULTILINE | re.DOTALL)
    return [shlex.split(command) for command in commands]


def test_every_curl_line_is_answered(client: TestClient) -> None:
    lines = curl_lines()
    assert len(lines) >= 5
    for _, address, *more in lines:
        path = address.removeprefix("localhost:8000")
        assert path != address
        if more:
            flag, body = more
            assert flag == "-d"
            answer = client.post(path, content=body, headers={"content-type": ""})
            json.loads(body)
        else:
            answer = client.get(path)
        assert answer.status_code in (200, 201), (path, answer.text)
        assert "error" not in answer.json()


def test_the_first_lines_name_models_memory_and_votes(client: TestClient) -> None:
    lines = describe(client.service)  # type: ignore[attr-defined]
    assert lines[0] == "models: base, sft, ppo, ema (without a name: ppo)"
    assert lines[1] == "scores: reward, critic"
    assert re.match(
        r"memory: weights of all 6 models take [\d.]+ (MiB|KiB) as float32 on ", lines[2]
    )
    assert lines[3].startswith("votes:  /")


def test_a_model_alone_is_one_model(served_run: Path) -> None:
    with serving(served_run / "sft") as client:
        lines = describe(client.service)  # type: ignore[attr-defined]
    assert re.match(r"memory: weights of the model take [\d.]+ (MiB|KiB) as float32 on ", lines[1])


@pytest.mark.parametrize(
    ("path", "host", "part"),
    [
        ("no/model", "127.0.0.1", "model 'no/model' must be a folder or a reachable hub name"),
        ("sft", "192.0.2.1", "--host must be an address of this machine; got 192.0.2.1"),
    ],
)
def test_what_cannot_be_served_is_told_before_the_first_lines(
    served_run: Path, monkeypatch: pytest.MonkeyPatch, path: str, host: str, part: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(served_run)
    shown: list[str] = []
    with pytest.raises(TandemError, match=re.escape(part)):
        serve(ServeSettings(path, host=host), 0, shown.append)
    assert shown == []


def test_the_python_example_is_right(client: TestClient) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    openai = pytest.importorskip("openai")
    httpx = pytest.importorskip("httpx2")

    def passed_on(request: object) -> object:
        sent = client.post(request.url.path, content=request.read())  # type: ignore[attr-defined]
        return httpx.Response(sent.status_code, json=sent.json())

    def made(**settings: object) -> object:
        transport = httpx.MockTransport(passed_on)
        return openai.OpenAI(**settings, http_client=httpx.Client(transport=transport))

    shown: list[object] = []
    code = example.replace("from openai import OpenAI\n", "")
    exec(code, {"OpenAI": made, "print": lambda *words: shown.extend(words)})
    assert isinstance(shown[0], str)
    assert {"reward", "kl"} <= shown[1].keys()  # type: ignore[attr-defined]
