"""Thoughts of models that think, apart from the words, in answers and in requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from tandem.config.schema import SamplingConfig
from tandem.data.chat.call_reader import Called
from tandem.data.render import Renderer
from tandem.data.spoken import spoken
from tandem.data.thoughts import ThoughtForm
from tandem.generation.streaming import Turns
from tandem.models.load import load_tokenizer
from tandem.serve.answering import Choice
from tandem.serve.called import Words, message_of
from tandem.serve.chat import chat
from tandem.serve.preparing import Prepared
from tests.data.test_call_reader import reader
from tests.serve.serving import CHAT, TEXT, TestClient, ask, check_error, events, serving
from tests.tiny import tiny_llama, tiny_tokenizer

TURNS = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' and '</think>' in m.content "
    "%}{{ m.content.split('</think>')[-1] | trim }}{% else %}{{ m.content }}{% endif %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant: "
)
R1 = TURNS + "{% if messages[0].role == 'system' %}<think></think>{% else %}<think>\n{% endif %}"
R1 += "{% endif %}"
"""As DeepSeek's R1: prompts begin the thought, but for those with a system turn, which end it."""
OPEN = R1.split("{% if messages[0]", 1)[0] + "{% endif %}"
"""The model writes the tag itself."""
PIECES = ("<think>", "</think>", "\n\n", "Hm")
ASKED = {"role": "user", "content": "hello"}


def save_thinking_model(folder: Path, template: str) -> str:
    """One with tags of thoughts as tokens, which a bias makes it write."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in PIECES])
    model = tiny_llama(len(tokenizer))
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def r1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, Any]]:
    """A client of a model whose prompts begin the thought, and what biases it to end it."""
    folder = save_thinking_model(tmp_path_factory.mktemp("r1"), R1)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.convert_tokens_to_ids([*PIECES[1:], tokenizer.eos_token])
    with serving(folder) as client:
        yield client, {str(i): 12 for i in ids}


def sampled(biases: Any, **more: Any) -> dict[str, Any]:
    """The body of a request whose answers end thoughts at any place, or not."""
    return {"messages": [ASKED], "max_tokens": 8, "seed": 3, "n": 48, "logit_bias": biases, **more}


def test_thoughts_come_back_apart_from_words(r1: tuple[TestClient, Any]) -> None:
    client, biases = r1
    body = sampled(biases, logprobs=True, tandem=["seed"])
    answer = client.post(CHAT, json=body).json()
    kinds = set()
    for choice in answer["choices"]:
        message = choice["message"]
        tokens = "".join(token["token"] for token in choice["logprobs"]["content"])
        thoughts, ends, words = tokens.partition("</think>")
        assert message.get("reasoning_content", "") == thoughts.strip("\n")
        assert message["content"] == words.lstrip("\n")
        assert ("reasoning_content" in message) == bool(thoughts.strip("\n"))
        kinds.add((bool(thoughts), bool(ends), bool(words), choice["finish_reason"]))
    assert {(True, True, True, "stop"), (True, True, True, "length"), (True, False, False, "stop"),
            (True, False, False, "length"), (False, True, True, "stop")} <= kinds  # fmt: skip

    # The same, streamed.
    found: list[dict[str, Any]] = [{"thoughts": "", "words": "", "logprobs": []} for _ in range(48)]
    for chunk in events(client.post(CHAT, json={**body, "stream": True}).text):
        for choice in chunk["choices"]:
            one, delta = found[choice["index"]], choice["delta"]
            assert "</think>" not in delta.get("reasoning_content", "")
            assert not (one["words"] and delta.get("reasoning_content"))
            one["thoughts"] += delta.get("reasoning_content", "")
            one["words"] += delta.get("content", "")
            one["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
            one["finish"] = choice["finish_reason"]
    for one, choice in zip(found, answer["choices"], strict=True):
        assert one["thoughts"] == choice["message"].get("reasoning_content", "")
        assert one["words"] == choice["message"]["content"]
        assert one["finish"] == choice["finish_reason"]
        assert one["logprobs"] == choice["logprobs"]["content"]

    # A prompt that ends the thought itself asks for words.
    ended = sampled(biases, messages=[{"role": "system", "content": "Be brief."}, ASKED])
    for choice in client.post(CHAT, json=ended).json()["choices"]:
        assert "reasoning_content" not in choice["message"]
    # A completion is the text that was drawn.
    texts = client.post(TEXT, json={**sampled(biases), "messages": None, "prompt": "hello"}).json()
    assert any("</think>" in choice["text"] for choice in texts["choices"])


def test_a_tag_that_the_model_writes(tmp_path: Path) -> None:
    folder = save_thinking_model(tmp_path, OPEN)
    thinks = load_tokenizer(folder).convert_tokens_to_ids("<think>")
    with serving(folder) as client:
        whole = client.post(CHAT, json=ask(logit_bias={str(thinks): 100}, max_tokens=1)).json()
        plain = client.post(CHAT, json=ask(max_tokens=3)).json()
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "", "refusal": None}
    assert plain["choices"][0]["message"].keys() == {"role", "content", "refusal"}
    assert plain["choices"][0]["message"]["content"]


def test_turns_may_have_thoughts_of_their_own(tmp_path: Path) -> None:
    """They are rendered as those of data."""
    plain = TURNS.replace("m.role == 'assistant' and '</think>' in m.content", "false")
    folder = save_thinking_model(tmp_path, plain + "{% endif %}")
    renderer = Renderer(load_tokenizer(folder))
    said = {"role": "assistant", "content": "yes"}
    within = [ASKED, {**said, "content": "<think>\nHm\n</think>\n\nyes"}, ASKED]
    expected = renderer.prompt(within).token_ids

    with serving(folder) as client:

        def tokens(turn: dict[str, Any]) -> tuple[int, ...]:
            answer = client.post("/tokenize", json={"messages": [ASKED, turn, ASKED]})
            assert answer.status_code == 200, answer.text
            return tuple(answer.json()["tokens"])

        for key in ("reasoning_content", "reasoning", "thinking"):
            assert tokens({**said, key: "Hm"}) == expected
        assert tokens(within[1]) == tokens({**within[1], "reasoning_content": "Hm"}) == expected
        bare = renderer.prompt([ASKED, said, ASKED]).token_ids
        for nothing in (None, "", " "):
            assert tokens({**said, "reasoning_content": nothing}) == bare
        alone = {"role": "assistant", "content": None, "reasoning_content": "Hm"}
        assert tokens(alone)[: len(expected) - len(bare)] == expected[: len(expected) - len(bare)]
        score = {"messages": [ASKED, {**said, "reasoning_content": "Hm"}]}
        scored = client.post("/v1/score", json=score).json()
        inside = client.post("/v1/score", json={"messages": within[:2]}).json()
        assert scored["tokens"] == inside["tokens"]
        assert "".join(scored["tokens"]).startswith("<think>\nHm\n</think>")
        for turn, said_of_it in (
            (
                {**said, "reasoning_content": 3},
                "messages[1].reasoning_content must be a text; got 3.",
            ),
            ({**said, "reasoning": {"effort": "low"}}, "messages[1].reasoning must be a text; got"),
            (
                {**said, "reasoning": "a </think> b"},
                "messages[1].reasoning must have no </think> wit",
            ),
            (
                {**said, "reasoning": "\ud800"},
                "messages[1].reasoning must be valid Unicode; got half",
            ),
            (
                {**ASKED, "reasoning_content": "Hm"},
                "messages[1] must have no reasoning_content: only",
            ),
        ):
            body = {**ask(), "messages": [ASKED, turn, ASKED]}
            answer = client.post(CHAT, content=json.dumps(body))
            assert answer.status_code == 400
            check_error(answer.json(), "messages")
            assert answer.json()["error"]["message"].startswith(said_of_it)


def test_thoughts_words_and_calls_each_have_their_place() -> None:
    found, write = reader("hermes")
    add = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = write([Called("add", {"a": 2}, "call00000")])
    text = f"Hm {call} hm\n</think>\n\nLet me see.\n{call}"
    found.thoughts = form = ThoughtForm("joined", in_prompt=True)
    choice = Choice(0, Prepared((1,), tools=json.dumps([add]), thoughts=form))
    sent, parts = Words(found), []
    for letter in text:
        choice.text += letter
        parts.append(sent.new(choice))
    choice.finish, choice.turn = "stop", spoken(found, text, choice.prompt.tools).turn
    parts.append(sent.new(choice))
    message = message_of(choice)
    assert message["reasoning_content"] == "".join(p.thoughts for p in parts) == f"Hm {call} hm"
    assert message["content"] == "".join(p.words for p in parts) == "Let me see."
    assert [each["function"]["name"] for each in message["tool_calls"]] == ["add"]


@pytest.mark.parametrize(
    ("system", "pieces", "shown"),
    [
        ("", "Hm Hm </think> \n\n Hm", "thinking> HmHm\nassistant> Hm\n"),
        ("", "</think> Hm", "assistant> Hm\n"),
        ("", "Hm \n\n Hm", "thinking> Hm\n\nHm\nassistant> \n"),
        ("be brief", "Hm \n\n Hm", "assistant> Hm\n\nHm\n"),
        ("be brief", "<think> Hm </think> Hm", "thinking> Hm\nassistant> Hm\n"),
        ("be brief", "", "assistant> \n"),
    ],
)
def test_a_chat_shows_thoughts_and_words_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, pieces: str, shown: str
) -> None:
    folder = save_thinking_model(tmp_path, R1)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.convert_tokens_to_ids([*pieces.split(" ")] if pieces else [])
    drawn = [*ids, tokenizer.eos_token_id]
    monkeypatch.setattr(Turns, "stream", lambda *_, **__: iter(drawn))
    said: list[str] = []
    lines = iter(("hello", "/save " + str(tmp_path / "rows.jsonl"), "/quit"))
    chat(folder, SamplingConfig(), system=system, read=lambda _: next(lines), write=said.append)
    assert "".join(said).split("quits.\n")[1].startswith(shown)
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    assert row["messages"][-1]["content"] == "".join(pieces.split(" ")), "all of it is kept"
