"""Tools and calls in requests, rendered as the training renders them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.data.chat.call_reader import Called
from tandem.data.render import Renderer
from tandem.data.spoken import spoken
from tandem.models.load import load_tokenizer
from tandem.serve.answering import Choice
from tandem.serve.called import Words, finish_of, message_of
from tandem.serve.preparing import Prepared
from tests.data.test_call_reader import reader
from tests.data.test_tool_rendering import CALL, RESULT
from tests.serve.serving import CHAT, TestClient, ask, check_error, events, serving, with_template
from tests.tiny import CALL as CALL_TOKEN
from tests.tiny import save_calling_model

SHOWS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
    "{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ASKED = {"role": "user", "content": "How is the weather?"}
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}
DIALOG = [ASKED, {**CALL, "content": None}, RESULT]


@pytest.fixture(scope="module")
def showing(served_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of a run whose chat template writes tools and calls."""
    run = with_template(served_run, tmp_path_factory.mktemp("tools") / "run", SHOWS)
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
    assert isinstance(message["content"], str)  # a call would come back as one
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


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, Any]]:
    """A client of a model that may be biased to call, and what biases it."""
    folder = save_calling_model(tmp_path_factory.mktemp("calling"))
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.convert_tokens_to_ids([CALL_TOKEN, tokenizer.eos_token])
    with serving(folder) as client:
        yield client, {str(i): bias for i, bias in zip(ids, (12, 13), strict=True)}


def sampled(calling: tuple[TestClient, Any], **more: Any) -> dict[str, Any]:
    """The body of a request whose answers are calls and ends, in any order."""
    return {"messages": [ASKED], "tools": [ADD], "max_tokens": 4, "seed": 3, "n": 64,
            "logit_bias": calling[1], **more}  # fmt: skip


def test_calls_come_back_as_tool_calls(calling: tuple[TestClient, Any]) -> None:
    client = calling[0]
    answer = client.post(CHAT, json=sampled(calling)).json()
    kinds = set()
    for choice in answer["choices"]:
        message, calls = choice["message"], choice["message"].get("tool_calls", [])
        kinds.add((len(calls), choice["finish_reason"]))
        assert ("tool_calls" in message) == bool(calls)
        assert message["content"] is None if calls else message["content"] == ""
        for number, call in enumerate(calls):
            assert call["id"] == f"call{number:05d}"
            assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}
            assert call["function"]["name"] == "add"
    assert {(0, "stop"), (1, "tool_calls"), (2, "tool_calls")} <= kinds
    assert all((finish == "tool_calls") == (n > 0) for n, finish in kinds if finish != "length")
    # Back again, as its clients send them.
    called = next(c["message"] for c in answer["choices"] if c["finish_reason"] == "tool_calls")
    result = {"role": "tool", "content": "5", "tool_call_id": called["tool_calls"][0]["id"]}
    again = client.post(CHAT, json=sampled(calling, messages=[ASKED, called, result], n=1))
    assert again.status_code == 200, again.text
    # Without tools, or where none may be called, the same tokens are text.
    for more in ({"tools": None}, {"tool_choice": "none"}):
        plain = client.post(CHAT, json=sampled(calling, **more)).json()
        assert all("tool_calls" not in choice["message"] for choice in plain["choices"])
        assert any(CALL_TOKEN in choice["message"]["content"] for choice in plain["choices"])


def test_a_stream_sends_calls_once_they_are_whole(calling: tuple[TestClient, Any]) -> None:
    client = calling[0]
    body = sampled(calling, logprobs=True)
    whole = client.post(CHAT, json=body).json()["choices"]
    found: list[dict[str, Any]] = [{"content": "", "calls": [], "logprobs": []} for _ in whole]
    for chunk in events(client.post(CHAT, json={**body, "stream": True}).text):
        for choice in chunk["choices"]:
            one, delta = found[choice["index"]], choice["delta"]
            one["content"] += delta.get("content") or ""
            one["calls"] += delta.get("tool_calls", [])
            one["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
            one["finish"] = choice["finish_reason"]
    for one, choice in zip(found, whole, strict=True):
        assert one["finish"] == choice["finish_reason"]
        assert one["content"] == (choice["message"]["content"] or "")
        assert [call.pop("index") for call in one["calls"]] == list(range(len(one["calls"])))
        assert one["calls"] == choice["message"].get("tool_calls", [])
        assert one["logprobs"] == choice["logprobs"]["content"]


@pytest.mark.parametrize("name", ["hermes", "llama", "list", "tags", "name and json"])
@pytest.mark.parametrize(
    "words",
    ["", "Let me see.\n", "a < b, {c} [d] ", "<tool <t", "<think>{a} <tool_call> [b</think>"],
)
@pytest.mark.parametrize("ends", ["call", "more", "broken", "words"])
def test_words_are_sent_as_they_come_and_calls_never_as_words(
    name: str, words: str, ends: str
) -> None:
    found, write = reader(name)
    call = write([Called("add", {"a": 2, "b": [{"c": "}"}]}, "call00000")])
    text = words + {"call": call, "more": f"{call}\nDone.", "broken": call[:-9], "words": ""}[ends]
    tools = json.dumps([ADD])
    prompt, sent, parts = Prepared((1,), tools=tools), Words(found), []
    choice = Choice(0, prompt)
    for letter in text:
        choice.text += letter
        parts.append(sent.new(choice))
    choice.finish, choice.turn = "stop", spoken(found, text, tools).turn
    parts.append(sent.new(choice))
    message = message_of(choice)
    told = "".join(part.words for part in parts)
    thoughts = "".join(part.thoughts for part in parts)
    assert thoughts == message.get("reasoning_content", "")
    assert thoughts == ("{a} <tool_call> [b" if words.startswith("<think>") else "")
    words = words.rpartition("</think>")[2]
    if "tool_calls" not in message:
        rest = text.rpartition("</think>")[2].lstrip("\n") if thoughts else text
        assert told == message["content"] == rest
        assert finish_of(choice) == "stop"
        return
    assert told == (message["content"] or "")
    assert finish_of(choice) == "tool_calls"
    assert "add" not in told
    # All but the letters that may have begun a call are sent before it.
    early = "".join(part.words for part in parts[: len(words)])
    assert words.startswith(early)
    assert len(early) >= len(words.rstrip()) - 3 or name == "llama"
