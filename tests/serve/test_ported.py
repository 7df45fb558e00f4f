"""Cases that vLLM's and llama.cpp's suites hold against their own servers, in our words.

After vLLM tests/entrypoints/openai (completion/test_completion, test_completion_text_offset,
chat_completion/test_chat, test_tool_choice_null, test_stream_frame_template) and llama.cpp
tools/server/tests/unit (test_completion, test_chat_completion, test_tokenize, test_security,
test_log_injection).
"""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tandem.generation.observed import TokenLogprobs
from tandem.generation.streaming import Conversations
from tandem.serve.answering import Choice, Step
from tandem.serve.preparing import Prepared
from tandem.serve.server import _printable
from tandem.serve.shapes import CompletionShape
from tandem.serve.token_bytes import Offsets, TokenBytes
from tests.serve.serving import TestClient, ask, events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def said(client: TestClient, **more: Any) -> dict[str, Any]:
    """The one choice of a chat."""
    answer = client.post(CHAT, json=ask(**more))
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def continued(client: TestClient, **more: Any) -> dict[str, Any]:
    """The one choice of a completion."""
    body = {"prompt": "One two", "max_tokens": 6, "seed": 1, **more}
    answer = client.post(TEXT, json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_frames_of_a_stream(client: TestClient) -> None:
    text = client.post(CHAT, json=ask(stream=True)).text
    assert text.endswith("data: [DONE]\n\n")
    frames = text.split("\n\n")[:-1]
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    first, *middle, last = [json.loads(frame[6:]) for frame in frames[:-1]]
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert first["choices"][0]["delta"]["content"] == ""
    assert last["choices"][0]["finish_reason"] == "length"
    for chunk in middle:
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["choices"][0]["finish_reason"] is None
        assert "role" not in chunk["choices"][0]["delta"]
    assert all("usage" not in chunk for chunk in (first, *middle, last))


def test_an_error_in_mid_stream_is_an_event_and_the_server_lives_on(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    step = Conversations.step

    def breaks(self: Conversations) -> Any:
        steps.append(1)
        if len(steps) == 3:
            raise RuntimeError("out of memory\x1b[31m")
        return step(self)

    monkeypatch.setattr(Conversations, "step", breaks)
    found = events(client.post(CHAT, json=ask(stream=True)).text)
    error = found[-1]["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "server_error"
    assert "memory" not in error["message"]
    assert found[0]["choices"]
    monkeypatch.undo()
    assert said(client)["finish_reason"] == "length"
    answer = client.post(CHAT, json=ask(n=2))
    assert len(answer.json()["choices"]) == 2


def test_text_offsets_are_where_the_tokens_begin(client: TestClient) -> None:
    for echo in (False, True):
        choice = continued(client, echo=echo, logprobs=1, temperature=0, prompt="a bird, a bird")
        logprobs = choice["logprobs"]
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        assert logprobs["text_offset"][0] == 0  # of the choice's own text
        if echo:
            for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
                if offset < len("a bird, a bird"):
                    assert choice["text"][offset:].startswith(token)


def test_a_streamed_echo_and_its_logprobs_are_those_of_the_whole(client: TestClient) -> None:
    whole = continued(client, echo=True, logprobs=2)
    body = {"prompt": "One two", "max_tokens": 6, "seed": 1, "echo": True, "logprobs": 2}
    chunks = events(client.post(TEXT, json={**body, "stream": True}).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    joined: dict[str, list[Any]] = {name: [] for name in whole["logprobs"]}
    for chunk in chunks:
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            joined[name] += values
    assert joined == whole["logprobs"]


def test_a_streamed_echo_of_a_prompt_without_text_has_its_tokens() -> None:
    """Of an empty text a tokenizer may make a token that begins texts."""
    backend = Tokenizer(models.BPE({"<s>": 0, "a": 1}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    answering = Mock(wanted=Mock(top_logprobs=1, include_usage=False))
    choice = Choice(0, Prepared((0,), text=""), echoed=[None])
    shapes = [CompletionShape("m", TokenBytes(tokenizer), answering) for _ in range(2)]
    assert shapes[0].chunk(Step(choice, "", 0)) is None
    choice.text, choice.token_ids = "a", [1]
    choice.logprobs = [TokenLogprobs(1, -0.5, ((1, -0.5),))]
    chunk = shapes[0].chunk(Step(choice, "a", 0))
    assert chunk is not None
    whole = {"tokens": ["<s>", "a"], "token_logprobs": [None, -0.5],
             "top_logprobs": [None, {"a": -0.5}], "text_offset": [0, 0]}  # fmt: skip
    assert chunk["choices"][0]["logprobs"] == whole
    answering.choices = [choice]
    assert shapes[1].whole(answering)["choices"][0]["logprobs"] == whole


def test_streamed_logprobs_of_a_chat_are_those_of_the_whole(client: TestClient) -> None:
    wanted: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    whole = said(client, **wanted)["logprobs"]["content"]
    chunks = events(client.post(CHAT, json=ask(stream=True, **wanted)).text)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for part in parts if part for entry in part["content"]] == whole


def test_several_prompts_and_answers_come_in_order(client: TestClient) -> None:
    body = {"prompt": ["One", "Two"], "n": 2, "max_tokens": 3, "seed": 5}
    choices = client.post(TEXT, json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    alone = client.post(TEXT, json={**body, "prompt": "Two"}).json()["choices"]
    assert [c["text"] for c in choices[2:]] == [c["text"] for c in alone]
    chunks = events(client.post(TEXT, json={**body, "stream": True}).text)
    for choice in choices:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert sum(c["finish_reason"] is not None for c in own) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_stop_token_ids_end_answers(client: TestClient, stream: bool) -> None:
    """The text ends before the token; what was drawn has it. Within `min_tokens` it ends nothing,
    and `ignore_eos` is of the model's own."""
    ids = client.post("/tokenize", json={"prompt": "so", "add_special_tokens": False}).json()
    other, stop = ids["tokens"][0], ids["tokens"][-1]
    assert client.post("/detokenize", json={"tokens": [stop]}).json()["prompt"]

    def ended(**more: Any) -> tuple[str, str, int, int]:
        body = {"prompt": "One", "max_tokens": 5, "seed": 1, "logprobs": 0, "stream": stream,
                "logit_bias": {str(stop): 100}, **more}  # fmt: skip
        if not stream:
            answer = client.post(TEXT, json=body).json()
            (choice,) = answer["choices"]
            parts, count = [choice], answer["usage"]["completion_tokens"]
        else:
            options = {"stream_options": {"include_usage": True}}
            chunks = events(client.post(TEXT, json=body | options).text)
            parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
            count = chunks[-1]["usage"]["completion_tokens"]
        kept = sum(len(part["logprobs"]["tokens"]) for part in parts if part["logprobs"])
        return "".join(part["text"] for part in parts), parts[-1]["finish_reason"], count, kept

    text = client.post("/detokenize", json={"tokens": [stop] * 5}).json()["prompt"]
    whole = (text, "length", 5, 5)
    assert ended() == ended(stop_token_ids=[]) == ended(stop_token_ids=[other + 1]) == whole
    assert ended(stop_token_ids=[other + 1, stop]) == ("", "stop", 1, 1)
    assert ended(stop_token_ids=[stop], ignore_eos=True) == ("", "stop", 1, 1)
    assert ended(stop=text[: len(text) // 5]) == ("", "stop", 1, 1)
    shorter = client.post("/detokenize", json={"tokens": [stop] * 3}).json()["prompt"]
    assert ended(stop_token_ids=[stop], min_tokens=3) == (shorter, "stop", 4, 4)
    chat = said(client, logit_bias={str(stop): 100}, stop_token_ids=[stop])
    assert (chat["message"]["content"], chat["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize(
    ("ids", "part"),
    [
        (3, "must list at most 1000 token ids; got 3"),
        ([-1], "must list at most 1000 token ids"),
        (["3"], "must list at most 1000 token ids"),
        ([True], "must list at most 1000 token ids"),
        ([10**6], "stop_token_ids must name tokens below the model's"),
    ],
)
def test_stop_token_ids_that_are_none_are_refused(client: TestClient, ids: Any, part: str) -> None:
    answer = client.post(CHAT, json=ask(stop_token_ids=ids))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stop_token_ids"
    assert part in answer.json()["error"]["message"]


def test_what_means_nothing_changes_nothing(client: TestClient) -> None:
    plain = said(client)
    for nothing in (
        {"tool_choice": None}, {"tools": None}, {"stop": None}, {"stop": ""}, {"stop": []},
        {"stop_token_ids": None}, {"stop_token_ids": []},
        {"logit_bias": None}, {"logit_bias": {}}, {"n": None}, {"stream": None}, {"top_k": -1},
        {"top_k": 0}, {"min_p": 0}, {"repetition_penalty": 1}, {"presence_penalty": 0},
        {"response_format": None}, {"functions": None}, {"audio": None}, {"user": "\x1b[31m"},
        {"add_special_tokens": True}, {"repeat_penalty": 1.0}, {"cache_prompt": True},
        {"stream_options": None}, {"metadata": {"a": "b"}}, {"reasoning_effort": "none"},
        {"extra_headers": {}}, {"ignore_eos": False}, {"skip_special_tokens": False},
        {"max_token": None}, {"do_sample": True}, {"prompt_cache_key": "a"}, {"maximum": 9},
        {"num_beams": 1}, {"best_of": 1},
    ):  # fmt: skip
        assert said(client, **nothing) == plain, nothing


@pytest.mark.parametrize(
    "field",
    [
        {"repeat_penalty": 1.3}, {"typical_p": 0.5}, {"n_predict": 5}, {"length_penalty": 2},
        {"add_special_tokens": False}, {"truncate_prompt_tokens": 3}, {"samplers": ["top_k"]},
        {"include_stop_str_in_output": True}, {"skip_special_tokens": True}, {"mirostat": 2},
        {"add_generation_prompt": False}, {"reasoning_effort": "high"},
        {"function_call": "f"}, {"modalities": ["audio"]}, {"prompt_logprobs": 1},
        {"do_sample": False}, {"max_new_tokens": 3}, {"enable_thinking": False}, {"best_of": 2},
        {"extra_body": {"top_k": 1}}, {"guided_whitespace_pattern": " *"},
            {"stop_sequences": ["a"]},
    ],
)  # fmt: skip
def test_what_is_not_done_is_refused_by_its_name(client: TestClient, field: dict[str, Any]) -> None:
    (name,) = field
    answer = client.post(CHAT, json=ask(**field))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    assert answer.json()["error"]["code"] == "unsupported_parameter"


def test_roles_and_turns(client: TestClient) -> None:
    turns = [{"role": "user", "content": "Hi"}]
    with_system = [{"role": "system", "content": "Be brief."}, *turns]
    developer = [{"role": "developer", "content": "Be brief."}, *turns]
    counts = []
    for messages in (turns, with_system, developer):
        answer = client.post(CHAT, json=ask() | {"messages": messages}).json()
        counts.append((answer["usage"]["prompt_tokens"], answer["choices"]))
    assert counts[1] == counts[2]
    assert counts[1][0] > counts[0][0]
    longer = [*turns, {"role": "assistant", "content": "Hello"}, *turns]
    assert client.post(CHAT, json=ask() | {"messages": longer}).status_code == 200


def test_seeds_repeat_and_their_absence_does_not(client: TestClient) -> None:
    def text(**more: Any) -> str:
        body = {k: v for k, v in (ask(max_tokens=12) | more).items() if v is not None}
        answer = client.post(CHAT, json=body).json()
        return str(answer["choices"][0]["message"]["content"])

    assert text(seed=4) == text(seed=4)
    assert len({text(seed=seed) for seed in range(4)}) == 4
    assert len({text(seed=None) for _ in range(3)}) == 3


def test_the_most_tokens_are_kept_to_and_ends_are_said(client: TestClient) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        body = {**ask(), "ignore_eos": True}
        del body["max_tokens"]
        answer = client.post(CHAT, json={**body, name: 3}).json()
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["choices"][0]["finish_reason"] == "length"
    default = {"prompt": "One", "ignore_eos": True}
    assert client.post(TEXT, json=default).json()["usage"]["completion_tokens"] == 16


def test_tokens_of_a_text_and_back(client: TestClient) -> None:
    for text in (
        "What a world",
        "ünïcödé 世界 🦆",
        " leading",
        "",
        "<|user|> </s>",
        "a\x00b\x1b[2J",
    ):
        tokens = client.post("/tokenize", json={"content": text}).json()
        bare = client.post("/tokenize", json={"content": text, "add_special_tokens": False}).json()
        assert tokens["tokens"][len(tokens["tokens"]) - bare["count"] :] == bare["tokens"]
        back = client.post("/detokenize", json={"tokens": bare["tokens"]}).json()
        assert back["content"] == text
    turns = [{"role": "user", "content": "Hi"}]
    count = client.post("/tokenize", json={"messages": turns}).json()["count"]
    body = ask() | {"messages": turns}
    assert client.post(CHAT, json=body).json()["usage"]["prompt_tokens"] == count


def test_bytes_of_characters_that_span_tokens(client: TestClient) -> None:
    """Every text that a stream shows is whole characters; the bytes beside it are exact."""
    body = ask(logprobs=True, max_tokens=40, temperature=3.0, stream=True)
    for seed in range(3):
        text, raw = "", b""
        for chunk in events(client.post(CHAT, json={**body, "seed": seed}).text):
            choice = chunk["choices"][0]
            text += choice["delta"].get("content") or ""
            for entry in (choice["logprobs"] or {}).get("content", []):
                raw += bytes(entry["bytes"])
        assert raw.decode("utf-8", "replace").strip() == text.strip()


def test_the_server_lives_through_wrong_and_right_at_once(client: TestClient) -> None:
    bodies = [ask(logprobs=True, top_logprobs=21), ask(), ask(messages=[{}]), ask(n=2),
              ask(max_tokens=10**6), ask(stream=True)] * 2  # fmt: skip
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda body: client.post(CHAT, json=body), bodies))
    assert [answer.status_code for answer in answers] == [400, 200, 400, 200, 400, 200] * 2


def test_log_lines_are_one_printable_line_each() -> None:
    raw = "GET /\r\n2026 INFO all is well\x1b[2J \u202e %s"
    record = logging.LogRecord("uvicorn.error", 30, "", 1, raw, (), None)
    record.args = None
    assert _printable(record)
    line = record.getMessage()
    assert "\n" not in line
    assert "\r" not in line
    assert "\x1b" not in line
    assert "\u202e" not in line


def test_offsets_are_in_the_text_that_is_shown() -> None:
    """A control token and SentencePiece's first space are among the tokens and not in the text."""
    words = {"<s>": 0, "\u2581Once": 1, "\u2581upon": 2, "\u2581a": 3, "<0xC3>": 4, "<0xA9>": 5}
    backend = Tokenizer(models.BPE(words, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    token_bytes, ids = TokenBytes(tokenizer), [0, 1, 2, 3, 4, 5, 3]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text == "Once upon a\u00e9 a"
    assert Offsets(token_bytes).of(ids, text) == [0, 0, 4, 9, 11, 11, 12]
    assert Offsets(token_bytes).of(ids[2:], " upon a\u00e9 a") == [0, 5, 7, 7, 8]
    assert Offsets(token_bytes).of([0, 1], "<s> Once") == [0, 3]
    assert tokenizer.decode([2, 4, 3, 4, 0]) == " upon\ufffd a\ufffd<s>".removeprefix(" ")
    assert Offsets(token_bytes).of([2, 4, 3, 4, 0], " upon\ufffd a\ufffd<s>") == [0, 5, 6, 8, 9]
    # The text of some tokens is held back until it can be no stop string.
    by_and_by = Offsets(token_bytes)
    heard = [(ids[:2], ""), (ids[2:3], "On"), (ids[3:5], "Once up"), (ids[5:], text)]
    assert [by_and_by.of(some, known) for some, known in heard] == [[0, 0], [4], [9, 11], [11, 12]]
    shown = Offsets(token_bytes)
    assert [shown.of([i], known) for i, known in ((0, ""), (1, "<s> Once"))] == [[0], [3]]


def test_offsets_in_a_stream_read_each_token_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    token_bytes, read = TokenBytes(PreTrainedTokenizerFast(tokenizer_object=backend)), []
    of = token_bytes.of
    monkeypatch.setattr(token_bytes, "of", lambda token: read.append(token) or of(token))
    offsets, ids = Offsets(token_bytes), [0, 1] * 200
    places = [offsets.of([token], "ab" * (i // 2)) for i, token in enumerate(ids)]
    assert places == [[i] for i in range(400)]
    assert len(read) <= 3 * len(ids)


def test_routes_are_there_without_the_version(client: TestClient) -> None:
    assert client.get("/models").json()["data"] == client.get("/v1/models/").json()["data"]
    body = {"prompt": "One", "max_tokens": 2, "seed": 1}
    answers = [client.post(path, json=body).json() for path in ("/v1/completions", "/completions")]
    assert answers[0]["choices"] == answers[1]["choices"]
