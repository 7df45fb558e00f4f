"""Calls that a request requires, in the styles of published templates, read by OpenAI's client, and
the conversation that goes on with the tools' results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.built_tokenizers import byte_level
from tests.serve.call_templates import STYLES
from tests.serve.serving import Running, ask, serving
from tests.tiny import tiny_llama

pytest.importorskip("llguidance")

CITIES = ["Paris", "São Paulo", 'a "b"']
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}, "days": {"type": "integer", "enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


def save(folder: Path, template: str) -> Path:
    tokenizer = byte_level(template)
    model = tiny_llama(len(tokenizer))
    model.config.max_position_embeddings = 4096
    ends = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.config.eos_token_id = model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def answered(client: Any, *, stream: bool, **asked: Any) -> tuple[str, str, list[dict[str, Any]]]:
    """The reason that an answer ended, its words and its calls, as a next request sends them."""
    if not stream:
        (choice,) = client.chat.completions.create(**asked).choices
        calls = [call.model_dump() for call in choice.message.tool_calls or []]
        return choice.finish_reason, choice.message.content or "", calls
    reason, words, parts = "", "", dict[int, dict[str, Any]]()
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            reason, words = choice.finish_reason or reason, words + (choice.delta.content or "")
            for new in choice.delta.tool_calls or []:
                empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                call = parts.setdefault(new.index, empty)
                call["id"] = new.id or call["id"]
                call["function"]["name"] += new.function.name or ""
                call["function"]["arguments"] += new.function.arguments or ""
    return reason, words, list(parts.values())


@pytest.mark.parametrize("style", STYLES)
def test_required_calls_are_read_and_answered(style: str, tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    server = Running(save(tmp_path / "model", STYLES[style]), slots=4, max_context=3000)
    address = f"http://127.0.0.1:{server.port}/v1"
    seen = set()
    try:
        with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
            name = client.models.list().data[0].id
            for choice, stream in ((c, s) for c in ("required", NAMED) for s in (False, True)):
                turns: list[Any] = [{"role": "user", "content": "The weather?"}]
                for number in range(2):
                    reason, words, calls = answered(
                        client, stream=stream, model=name, messages=turns, tools=TOOLS,
                        tool_choice=choice, parallel_tool_calls=False, seed=number, max_tokens=400,
                    )  # fmt: skip
                    assert (reason, words, len(calls)) == ("tool_calls", "", 1)
                    called = calls[0]["function"]
                    given = json.loads(called["arguments"])
                    seen.add((called["name"], *given.values()))
                    if called["name"] == "now":
                        assert choice == "required"
                        assert given == {}
                    else:
                        assert given.keys() == {"city", "days"}
                        assert given["city"] in CITIES
                        assert given["days"] in (1, 2)
                    turns.append({"role": "assistant", "content": None, "tool_calls": calls})
                    turns += [
                        {"role": "tool", "tool_call_id": call["id"], "content": '{"celsius": 21}'}
                        for call in calls
                    ]
                free = client.chat.completions.create(
                    model=name, messages=turns, tools=TOOLS, max_tokens=3
                )
                assert free.usage.completion_tokens
    finally:
        server.close()
    assert len(seen) > 1


def test_calls_before_one_that_the_limit_cuts_are_read(tmp_path: Path) -> None:
    seen = set()
    with serving(save(tmp_path / "model", STYLES["hermes"]), max_context=3000) as client:
        asked = ask(tools=TOOLS, tool_choice="required", n=24, seed=1, max_tokens=75)
        answer = client.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 200, answer.text
        for choice in answer.json()["choices"]:
            message = choice["message"]
            calls = message.get("tool_calls", [])
            text = message["content"] or ""
            assert "</tool_call>" not in text
            seen.add((choice["finish_reason"], bool(calls), "<tool" in text))
            for call in calls:
                json.loads(call["function"]["arguments"])
    # Where no call is whole, what there is of the first stays text.
    assert seen == {("tool_calls", True, False), ("length", True, False), ("length", False, True)}
