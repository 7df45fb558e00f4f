"""Answers with a form that requests ask for: JSON, grammars, calls of tools."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.models.load import load_tokenizer
from tests.serve.serving import (
    CHAT,
    TEXT,
    TestClient,
    ask,
    check_error,
    events,
    serving,
    with_template,
)
from tests.serve.test_thinking import PIECES, R1, save_thinking_model
from tests.serve.test_tools import SHOWS

pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"enum": [1, 22]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
DIGITS = "[0-9]{2,4}"
LARK = "start: /[0-9]{2,4}/"
GBNF = "root ::= [0-9] [0-9] [0-9]? [0-9]?"
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {
        "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
        "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip

ELSEWHERE = [{"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"a": {"$ref": "http://other/schema"}}}}}]  # fmt: skip


@pytest.fixture(scope="module")
def calling(served_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of a run whose chat template writes tools and calls."""
    run = with_template(served_run, tmp_path_factory.mktemp("forms") / "run", SHOWS)
    with serving(run, votes=str(run / "votes.jsonl"), max_context=400) as client:
        yield client


def said(client: TestClient, path: str = CHAT, **body: Any) -> list[dict[str, Any]]:
    """The choices of an answer, equal to those of its stream."""
    whole = client.post(path, json=body)
    assert whole.status_code == 200, whole.text
    choices: list[dict[str, Any]] = whole.json()["choices"]
    texts = dict.fromkeys(range(len(choices)), "")
    for chunk in events(client.post(path, json={**body, "stream": True}).text):
        for choice in chunk["choices"]:
            new = choice["delta"].get("content") if path == CHAT else choice["text"]
            texts[choice["index"]] += new or ""
    for choice in choices:
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert texts[choice["index"]] == (text or "")
    return choices


def content(client: TestClient, **body: Any) -> str:
    (choice,) = said(client, **ask(**{"max_tokens": 60, "seed": 5, **body}))
    text: str = choice["message"]["content"]
    return text


def test_json_of_a_schema(client: TestClient) -> None:
    body = ask(max_tokens=60, seed=1, n=6, response_format=NAMED, logprobs=True, temperature=0.7)
    choices = said(client, **body)
    assert any(choice["finish_reason"] == "stop" for choice in choices)
    for choice in choices:
        text = choice["message"]["content"]
        tokens = choice["logprobs"]["content"]
        raw = [byte for t in tokens if t["token"] != "<|end|>" for byte in t["bytes"]]
        assert bytes(raw).decode(errors="replace") == text
        assert all(token["logprob"] <= 0 for token in tokens)
        if choice["finish_reason"] == "stop":
            found = json.loads(text)
            assert found.keys() == {"name", "age"}
            assert found["age"] in (1, 22)
    assert len({choice["message"]["content"] for choice in choices}) > 3


@pytest.mark.parametrize(
    "fields",
    [
        [{"regex": DIGITS}, {"guided_regex": DIGITS}, {"structured_outputs": {"regex": DIGITS}},
         {"grammar": {"type": "regex", "value": DIGITS}}],
        [{"response_format": NAMED}, {"guided_json": PERSON}, {"json_schema": PERSON},
         {"json_schema": json.dumps(PERSON)}, {"structured_outputs": {"json": PERSON}},
         {"response_format": {"type": "json_object", "schema": PERSON}},
         {"response_format": {"type": "json_schema", "schema": PERSON}},
         {"grammar": {"type": "json", "value": PERSON}}],
        [{"guided_choice": ["red", "green"]}, {"structured_outputs": {"choice": ["red", "green"]}}],
        [{"guided_grammar": LARK}, {"ebnf": LARK}, {"grammar": LARK},
         {"structured_outputs": {"grammar": LARK}},
         {"response_format": {"type": "grammar", "grammar": LARK}}],
        [{"response_format": {"type": "json_object"}},
         {"structured_outputs": {"json_object": True}}],
        [{}, {"response_format": {"type": "text"}}, {"response_format": None}, {"regex": ""},
         {"guided_json": None}],
    ],
    ids=["regex", "schema", "choice", "grammar", "object", "none"],
)  # fmt: skip
def test_every_servers_field_means_the_same(client: TestClient, fields: list[Any]) -> None:
    texts = {content(client, **field) for field in fields}
    assert len(texts) == 1, texts


def test_what_each_form_is(client: TestClient) -> None:
    assert re.fullmatch(DIGITS, content(client, regex=DIGITS))
    assert re.fullmatch(DIGITS, content(client, grammar=GBNF))
    assert content(client, guided_choice=["red", "green"]) in ("red", "green")
    assert content(client, response_format={"type": "json_object"}).startswith("{")
    # A stop string, a minimum and a bias hold beside the form.
    assert content(client, guided_choice=["red", "green"], stop="re") in ("", "g")
    assert re.fullmatch(DIGITS, content(client, regex=DIGITS, min_tokens=50))
    assert re.fullmatch(DIGITS, content(client, regex=DIGITS, ignore_eos=True))


def test_a_completion_goes_on_in_the_form(client: TestClient) -> None:
    body = {"prompt": ["One", [5, 6, 7]], "max_tokens": 20, "seed": 2, "n": 3}
    for choice in said(client, TEXT, **body, guided_choice=[" red", "green"]):
        assert choice["text"] in (" red", "green")
        assert choice["finish_reason"] == "stop"
    found = client.post(TEXT, json={**body, "regex": DIGITS, "echo": True}).json()["choices"]
    assert all(re.search(f"{DIGITS}$", choice["text"]) for choice in found)


def test_an_answer_that_has_begun_goes_on_in_the_form(client: TestClient) -> None:
    def body(begun: str) -> dict[str, Any]:
        turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": begun}]
        return ask(messages=turns, continue_final_message=True, add_generation_prompt=False,
                   max_tokens=60, seed=1, response_format=NAMED)  # fmt: skip

    choice = client.post(CHAT, json=body('{"name": "')).json()["choices"][0]
    assert json.loads('{"name": "' + choice["message"]["content"])["age"] in (1, 22)
    refused = client.post(CHAT, json=body("The name"))
    assert refused.status_code == 400
    check_error(refused.json(), "response_format")
    assert "beginning of an answer must have the form" in refused.json()["error"]["message"]


def test_thoughts_come_before_the_form(tmp_path: Path) -> None:
    folder = save_thinking_model(tmp_path, R1)
    with serving(folder) as client:
        end = load_tokenizer(folder).convert_tokens_to_ids(PIECES[1])
        body = ask(max_tokens=90, seed=3, n=8, regex=DIGITS, logit_bias={str(end): 6})
        choices = said(client, **body)
    ended = [choice["message"] for choice in choices if choice["finish_reason"] == "stop"]
    assert ended
    assert any(message.get("reasoning_content") for message in ended)
    for message in ended:
        assert re.fullmatch(DIGITS, message["content"].strip())


def test_a_call_can_be_required(calling: TestClient) -> None:
    body = ask(max_tokens=50, seed=4, n=16, tools=TOOLS)
    add = {"type": "function", "function": {"name": "add"}}
    wishes: list[tuple[Any, set[str]]] = [
        ("required", {"add", "now"}), ("any", {"add", "now"}), (add, {"add"}),
    ]  # fmt: skip
    for choice, names in wishes:
        found = said(calling, **body, tool_choice=choice)
        ended = [each for each in found if each["finish_reason"] != "length"]
        assert ended
        for each in ended:
            assert each["finish_reason"] == "tool_calls"
            assert each["message"]["content"] is None
            for call in each["message"]["tool_calls"]:
                assert call["function"]["name"] in names
                given = json.loads(call["function"]["arguments"])
                assert given in (
                    [{}] if call["function"]["name"] == "now" else [{"a": 1}, {"a": 2}]
                )
    one = said(calling, **body, tool_choice="required", parallel_tool_calls=False)
    numbers = {len(each["message"].get("tool_calls", [])) for each in one}
    assert 1 in numbers
    assert numbers <= {0, 1}  # cut off


def test_beside_tools_an_answer_is_of_the_form_or_a_call(calling: TestClient) -> None:
    body = ask(max_tokens=50, seed=4, n=24, tools=TOOLS, regex="(yes|no)!")
    kinds = set()
    for choice in said(calling, **body):
        if choice["finish_reason"] == "stop":
            assert re.fullmatch("(yes|no)!", choice["message"]["content"])
        kinds.add(choice["finish_reason"])
    assert {"stop", "tool_calls"} <= kinds


@pytest.mark.parametrize(
    ("more", "param", "part"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "be of type text"),
        ({"response_format": "json"}, "response_format", "be of type text"),
        ({"guided_json": 5}, "guided_json", "be a JSON Schema; got 5"),
        ({"guided_json": "{"}, "guided_json", "be a JSON Schema; got"),
        ({"guided_json": {"type": "thing"}}, "guided_json", "Invalid type: thing"),
        ({"guided_json": {"$ref": "http://other/schema"}}, "guided_json", "not present"),
        ({"regex": "(?=a)b"}, "regex", "be a regular expression that can be followed"),
        ({"regex": 7}, "regex", "be a regular expression; got 7"),
        ({"guided_choice": []}, "guided_choice", "list 1 to 1000 texts"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "list 1 to 1000 texts"),
        ({"grammar": "root ::= [a"}, "grammar", "be a grammar; got what cannot be read"),
        ({"grammar": "start: a"}, "grammar", "unknown name"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "have one of json, regex"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "have one of"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs", "json_object: true"),
        ({"regex": "a", "guided_choice": ["a"]}, "regex", "one form; got guided_choice and regex"),
        ({"tool_choice": "required"}, "tool_choice", "come with tools"),
        ({"tool_choice": "maybe", "tools": TOOLS}, "tool_choice", "not supported"),
        ({"tool_choice": {"type": "function", "function": {}}, "tools": TOOLS},
         "tool_choice.function", 'be {"name": ...}'),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": TOOLS},
         "tool_choice", "name one of the tools, add, now"),
        ({"tool_choice": "required", "tools": ELSEWHERE}, "tools",
         "tools must have schemas that can be followed; got "),
        ({"guided_choice": ["a"], "tools": ELSEWHERE}, "tools", "tools must have schemas that can"),
        ({"guided_json": {"properties": dict.fromkeys(map(str, range(201)), True)}}, "guided_json",
         "201 optional properties, which may be at most 200: name more of them in `required`"),
        ({"parallel_tool_calls": False, "tools": TOOLS}, "parallel_tool_calls", "not supported"),
    ],
    ids=str,
)  # fmt: skip
def test_forms_that_cannot_be(
    calling: TestClient, more: dict[str, Any], param: str, part: str
) -> None:
    answer = calling.post(CHAT, json=ask(**more))
    assert answer.status_code == 400, answer.text
    check_error(answer.json(), param)
    assert part in answer.json()["error"]["message"]
    assert "\n" not in answer.json()["error"]["message"]


def test_without_the_library_it_says_how_to_get_it(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    answer = client.post(CHAT, json=ask(regex="a"))
    assert answer.status_code == 400
    check_error(answer.json(), "regex")
    assert "pip install 'tandem-rlhf[forms]'" in answer.json()["error"]["message"]
    assert client.post(CHAT, json=ask(max_tokens=2)).status_code == 200


def test_the_servers_description_names_the_fields(client: TestClient) -> None:
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    chat = schemas["ChatRequest"]["properties"]
    for name in ("response_format", "structured_outputs", "guided_json", "regex", "grammar"):
        assert name in chat
        assert name in schemas["CompletionRequest"]["properties"]
    assert {"required", "any"} <= set(chat["tool_choice"]["anyOf"][0]["enum"])
