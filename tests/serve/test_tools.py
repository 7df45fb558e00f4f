"""Tools and calls in requests, rendered as the training renders them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.data.render import Renderer
from tandem.models.load import load_tokenizer
from tests.data.test_tool_rendering import CALL, RESULT
from tests.serve.serving import TestClient, ask, serving
from tests.serve.test_refusals import CHAT, check_error

SHOWS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
    "{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ASKED = {"role": "user", "content": "How is the weather?"}
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
DIALOG = [ASKED, {**CALL, "content": None}, RESULT]


@pytest.fixture(scope="module")
def showing(served_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of a run whose chat template writes tools and calls."""
    run = tmp_path_factory.mktemp("tools") / "run"
    shutil.copytree(served_run, run)
    for file in run.rglob("chat_template.jinja"):
        file.write_text(SHOWS)
    for manifest in run.rglob("MANIFEST.json"):
        manifest.unlink()
    with serving(run, votes=str(run / "votes.jsonl")) as client:
        yield client


def test_tools_and_calls_are_rendered_as_in_training(showing: TestClient, served_run: Path) -> None:
    tokenizer = load_tokenizer(str(served_run / "sft"))
    tokenizer.chat_template = SHOWS
    expected = Renderer(tokenizer).prompt(DIALOG, tools=TOOLS).token_ids
    body: dict[str, Any] = {"messages": DIALOG, "tools": TOOLS}
    assert tuple(showing.post("/tokenize", json=body).json()["tokens"]) == expected
    answer = showing.post(CHAT, json={**ask(max_tokens=3), **body})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == len(expected)
    message = answer.json()["choices"][0]["message"]
    assert isinstance(message["content"], str)  # a call would come back as text
    assert not message.get("tool_calls")
    bare = showing.post(CHAT, json={**ask(max_tokens=3), **body, "tool_choice": "none"}).json()
    without = Renderer(tokenizer).prompt(DIALOG).token_ids
    assert bare["usage"]["prompt_tokens"] == len(without) < len(expected)


def test_a_call_is_scored_as_an_answer(showing: TestClient, served_run: Path) -> None:
    body: dict[str, Any] = {"messages": DIALOG[:2], "tools": TOOLS, "tandem": ["kl", "reward"]}
    found = showing.post("/v1/score", json=body)
    assert found.status_code == 200, found.text
    tokenizer = load_tokenizer(str(served_run / "sft"))
    tokenizer.chat_template = SHOWS
    renderer = Renderer(tokenizer)
    call = renderer.prompt([*DIALOG, ASKED]).messages[1]
    prompt = renderer.prompt(DIALOG[:1], tools=TOOLS)
    row = renderer.conversation(prompt.messages, call, prompt.source, tools=prompt.tools)
    usage = found.json()["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (len(prompt), len(row))


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"tools": ["add"]}, "tools", "tools must be a list of JSON schemas"),
        ({"tools": "add"}, "tools", "tools must be a list of JSON schemas"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": [1]}, RESULT]}, "messages",
         r"messages\[1\].tool_calls must be a list of calls"),
        ({"messages": [{**ASKED, "tool_calls": CALL["tool_calls"]}]}, "messages",
         "only the assistant's"),
        ({"messages": [ASKED, CALL, {**RESULT, "tool_call_id": 7}]}, "messages", "must be texts"),
        ({"messages": [ASKED, {"role": "assistant", "content": None}, ASKED]}, "messages",
         "content must be a text"),
    ],
)  # fmt: skip
def test_other_tools_and_calls_are_refused(
    showing: TestClient, body: dict[str, Any], param: str, said: str
) -> None:
    answer = showing.post(CHAT, json={**ask(), **body})
    assert answer.status_code == 400
    check_error(answer.json(), param)
    assert re.search(said, answer.json()["error"]["message"])


def test_a_template_that_shows_none_refuses_them(client: TestClient) -> None:
    answer = client.post(CHAT, json=ask(tools=TOOLS))
    assert answer.status_code == 400
    check_error(answer.json(), "tools")
    assert "this one leaves them out" in answer.json()["error"]["message"]
    answer = client.post(CHAT, json={**ask(), "messages": [ASKED, CALL, RESULT]})
    assert answer.status_code == 400
    check_error(answer.json(), "messages")
