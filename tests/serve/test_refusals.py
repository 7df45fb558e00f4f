"""What is refused, by which name, and that the server lives on. Cases after the vLLM and llama.cpp
suites (entrypoints/openai/*, tools/server/tests/unit/*)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.data.span_tokenizer import PieceTokenizer
from tandem.serve.counters import Counters
from tests.serve.serving import CHAT, TEXT, TestClient, ask, check_error, serving

WRONG: list[tuple[str, dict[str, Any], str | None]] = [
    # (path, body, the field that is named)
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": [123]}, "messages"),
    (CHAT, {"messages": [{}]}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "x", "content": "a"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    (CHAT, ask(temperature=-1), "temperature"),
    (CHAT, ask(temperature="hot"), "temperature"),
    (CHAT, ask(temperature=True), "temperature"),
    (CHAT, ask(top_p=1.5), "top_p"),
    (CHAT, ask(n=0), "n"),
    (CHAT, ask(n=1.5), "n"),
    (CHAT, ask(max_tokens=0), "max_tokens"),
    (CHAT, ask(max_tokens=-1), "max_tokens"),
    (CHAT, ask(max_completion_tokens=5), "max_tokens"),
    (CHAT, ask(max_tokens=10**9), "messages"),
    (CHAT, ask(seed="one"), "seed"),
    (CHAT, ask(stop=[1]), "stop"),
    (CHAT, ask(stop=[""]), "stop"),
    (TEXT, {"prompt": "a", "stop": ["a", ""]}, "stop"),
    (CHAT, ask(stop=["a"] * 99), "stop"),
    (CHAT, ask(logit_bias={"a": 1}), "logit_bias"),
    (CHAT, ask(logit_bias={"1": 101}), "logit_bias"),
    (CHAT, ask(logit_bias={"99999999": 1}), "logit_bias"),
    (CHAT, ask(presence_penalty=3), "presence_penalty"),
    (CHAT, ask(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, ask(top_logprobs=2), "top_logprobs"),
    (CHAT, ask(stream="yes"), "stream"),
    (CHAT, ask(stream_options={"include_usage": True}), "stream_options"),
    (CHAT, ask(tools=[{"type": "function"}]), "tools"),
    (CHAT, ask(tool_choice="required"), "tool_choice"),
    (CHAT, ask(functions=[{"name": "f"}]), "functions"),
    (CHAT, ask(response_format={"type": "json_schema"}), "response_format"),
    (CHAT, ask(response_format={"type": "xml"}), "response_format"),
    (CHAT, ask(audio={"voice": "a"}), "audio"),
    (CHAT, ask(prediction="a text"), "prediction"),
    (CHAT, ask(prediction={"type": "content"}), "prediction"),
    (CHAT, ask(prediction={"type": "text", "content": "a"}), "prediction"),
    (CHAT, ask(prediction={"type": "content", "content": [{"type": "image_url"}]}), "prediction"),
    (CHAT, ask(prediction={"type": "content", "content": "a b " * 10**5}), "prediction"),
    (CHAT, ask(guided_json=5), "guided_json"),
    (CHAT, ask(tandem={"rewards": True}), "tandem"),
    (CHAT, ask(tandem="reward"), "tandem"),
    (CHAT, ask(model=7), "model"),
    (CHAT, ask(model="reward"), "model"),
    (CHAT, ask(min_tokens=9), "min_tokens"),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [[]]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": [10**7]}, "prompt"),
    (TEXT, {"prompt": [True]}, "prompt"),
    (TEXT, {"prompt": ["a", 1]}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": {"a": 1}}, "prompt"),
    (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
    (TEXT, {"prompt": "a", "best_of": 3}, "best_of"),
    (TEXT, {"prompt": "a", "n": 128}, "n"),
    ("/tokenize", {"prompt": 3}, "prompt"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/v1/score", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
]


def test_wrong_fields_are_refused_by_name(client: TestClient) -> None:
    for path, body, param in WRONG:
        answer = client.post(path, content=json.dumps(body))
        assert answer.status_code == 400, (path, body, answer.text)
        check_error(answer.json(), param)
    assert client.post(CHAT, json=ask()).status_code == 200


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b'{"a": NaN}', b"[" * 9000, b'"' + b"a" * 99],
)
def test_a_body_that_is_no_object(client: TestClient, content: bytes) -> None:
    answer = client.post(CHAT, content=content)
    assert answer.status_code == 400
    check_error(answer.json(), None)


@pytest.mark.parametrize(
    ("path", "name", "meant"),
    [
        (CHAT, "max_token", "max_tokens"), (CHAT, "temprature", "temperature"),
        (CHAT, "logits_bias", "logit_bias"), (CHAT, "topLogprobs", "top_logprobs"),
        (CHAT, "tool", "tools"), (TEXT, "top-p", "top_p"), (TEXT, "prompts", "prompt"),
        ("/tokenize", "add_special_token", "add_special_tokens"), ("/v1/score", "tool", "tools"),
    ],
)  # fmt: skip
def test_a_mistyped_field_is_answered_with_the_one_that_is_meant(
    client: TestClient, path: str, name: str, meant: str
) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    body = (
        ask() if path == CHAT else {"prompt": "a"} if path != "/v1/score" else {"messages": turns}
    )
    assert client.post(path, json=body).status_code == 200
    answer = client.post(path, json={**body, name: 1})
    assert answer.status_code == 400
    check_error(answer.json(), name)
    assert answer.json()["error"]["message"].endswith(f"Did you mean {meant}?")


def test_turns_are_not_counted_or_scored_otherwise_than_was_asked_for(client: TestClient) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    for path, name, value in (
        ("/tokenize", "add_generation_prompt", False), ("/tokenize", "with_pieces", True),
        ("/tokenize", "chat_template", "{{ x }}"), ("/v1/score", "chat_template_kwargs", {"a": 1}),
    ):  # fmt: skip
        answer = client.post(path, json={"messages": turns, name: value})
        assert answer.status_code == 400
        check_error(answer.json(), name)


def test_harmless_fields_are_ignored(client: TestClient) -> None:
    plain = client.post(CHAT, json=ask()).json()["choices"]
    more = {"user": "ann", "metadata": {}, "store": True, "service_tier": "auto", "tools": [],
            "tool_choice": "none", "parallel_tool_calls": True, "response_format": {"type": "text"},
            "top_k": -1, "whatever": {"a": 1}, "max_completion_tokens": 8}  # fmt: skip
    assert client.post(CHAT, json=ask(**more)).json()["choices"] == plain
    parts = [{"type": "text", "text": "What is two "}, {"type": "text", "text": "and two?"}]
    body = ask() | {"messages": [{"role": "user", "content": parts}]}
    assert client.post(CHAT, json=body).json()["choices"] == plain


def test_addresses_methods_and_models_that_are_not_there(client: TestClient) -> None:
    answers = [
        (client.get("/v1/nothing"), 404, None),
        (client.get(CHAT), 405, None),
        (client.post(CHAT, json=ask(model="gpt-9")), 404, "model"),
        (client.get("/v1/models/gpt-9"), 404, "model"),
    ]
    for answer, status, param in answers:
        assert answer.status_code == status
        check_error(answer.json(), param)


def test_a_prompt_that_is_too_long_names_both_counts_before_a_stream(client: TestClient) -> None:
    for stream in (False, True):
        answer = client.post(CHAT, json=ask("word " * 400, stream=stream))
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert "256 tokens" in answer.json()["error"]["message"]


def test_a_prompt_that_is_much_too_long_is_refused_before_it_is_tokenized(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, text = PieceTokenizer.encode, "word " * 100_000

    def short_only(self: PieceTokenizer, text: str, *args: Any) -> list[int]:
        assert len(text) < 100_000
        return encode(self, text, *args)

    monkeypatch.setattr(PieceTokenizer, "encode", short_only)
    answered = [*ask(text)["messages"], {"role": "assistant", "content": "yes"}]
    answers = [*ask()["messages"], {"role": "assistant", "content": text}]
    for path, body, name in (
        (CHAT, ask(text), "messages"),
        (CHAT, {"messages": answered, "continue_final_message": True}, "messages"),
        (CHAT, {"messages": answers, "continue_final_message": True}, "messages"),
        (CHAT, {"messages": answers}, "messages"),
        (TEXT, {"prompt": text}, "prompt"),
        (TEXT, {"prompt": [5] * 100_000}, "prompt"),
        ("/v1/score", {"messages": answered}, "messages"),
        ("/v1/score", {"messages": answers}, "messages"),
    ):
        error = client.post(path, json=body).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert (error["param"], "got at least " in error["message"]) == (name, True)


def test_a_long_text_may_be_tokenized_and_counted(client: TestClient) -> None:
    for body in ({"prompt": "word " * 1000}, ask("word " * 1000)):
        assert client.post("/tokenize", json=body).json()["count"] > 1000


def test_what_was_not_sent_is_not_reported_as_sent(client: TestClient) -> None:
    told = client.post(CHAT, json={}).json()["error"]["message"]
    assert told.startswith("messages must be a list of at least one turn; got none. Send e.g. ")
    body = ask("word " * 400)
    del body["max_tokens"]
    told = client.post(CHAT, json=body).json()["error"]["message"]
    assert "tokens of messages, which leave none for an answer. Shorten it." in told
    assert "max_tokens" not in told


def test_a_model_is_listed_with_the_tokens_that_it_can_answer(client: TestClient) -> None:
    for model in client.get("/v1/models").json()["data"]:
        if model["tandem"]["kind"] == "policy":
            assert model["tandem"]["defaults"]["max_tokens"] == 255  # of 256 positions


def test_bodies_over_the_limit_are_refused_before_they_are_read(client: TestClient) -> None:
    answer = client.post(CHAT, content=b" " * ((4 << 20) + 1))
    assert answer.status_code == 413

    def endless() -> Any:
        for _ in range(65):
            yield b" " * (1 << 16)

    answer = client.post(CHAT, content=endless())
    assert answer.status_code == 413
    check_error(answer.json(), None)


def test_hosts_and_origins(client: TestClient) -> None:
    def status(path: str = "/v1/models", **headers: str) -> int:
        return int(client.get(path, headers=headers).status_code)

    for host in ("localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:80", "192.168.0.7"):
        assert status(host=host) == 200
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "", "a b", "[::1"):
        assert status(host=host) == 403
        assert status("/", host=host) == 403
    assert status(host="localhost:8000", origin="http://localhost:8000") == 200
    for origin in ("http://evil.example", "null", "http://localhost:9999", "file://", "http://[x"):
        assert status(host="localhost:8000", origin=origin) == 403
    answer = client.post(CHAT, json=ask(), headers={"origin": "https://evil.example"})
    check_error(answer.json(), None)
    assert "access-control-allow-origin" not in answer.headers


def test_the_page_has_a_strict_policy(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    for rule in ("default-src 'none'", "script-src 'self'", "connect-src 'self'",
                 "img-src 'self' data:", "frame-ancestors 'none'"):  # fmt: skip
        assert rule in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert client.get("/../../etc/passwd").status_code == 404


def test_a_key_is_asked_for_and_other_sites_may_be_allowed(served_run: Any) -> None:
    allowed = "https://chat.example"
    with serving(served_run, api_key="secret", allow_origins=(allowed,)) as client:
        for given in ("", "Bearer wrong", "secret", "Basic secret", "Bearer s\xe9"):
            headers = {"authorization": given.encode("latin-1")} if given else {}
            answer = client.get("/v1/models", headers=headers)
            assert answer.status_code == 401
            check_error(answer.json(), None)
        assert client.get("/health").status_code == client.get("/").status_code == 200
        right = {"authorization": "Bearer secret"}
        assert client.get("/v1/models", headers=right).status_code == 200
        asked = "authorization, content-type, x-stainless-lang"  # as OpenAI's client for browsers
        asking = {"origin": allowed, "access-control-request-headers": asked}
        preflight = client.options(CHAT, headers=asking)
        assert preflight.status_code == 204
        assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"].split(", ")
        assert preflight.headers["access-control-allow-origin"] == allowed
        answer = client.get("/v1/models", headers={**right, "origin": allowed})
        assert answer.headers["access-control-allow-origin"] == allowed


def test_counts_have_all_their_digits() -> None:
    counters = Counters()
    counters.add("tokens_total", "Tokens.", 1_234_567)
    counters.add("tokens_total", "Tokens.", 1)
    counters.observe("wait_seconds", "Waits.", 1_234_567.25)
    page = counters.page({"resident_bytes": ("Memory.", {"": 422_965_231})})
    for line in ("tandem_tokens_total 1234568", "tandem_resident_bytes 422965231",
                 "tandem_wait_seconds_sum 1234567.25"):  # fmt: skip
        assert line in page.splitlines()


def test_metrics_are_prometheus_text(client: TestClient) -> None:
    client.post(CHAT, json=ask())
    page = client.get("/metrics").text
    names = set()
    for line in page.splitlines():
        if line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        float(value)
        names.add(name.partition("{")[0])
    assert {"tandem_requests_total", "tandem_completion_tokens_total", "tandem_slots",
            "tandem_answers_outstanding", "tandem_time_to_first_token_seconds_bucket",
            "tandem_kv_blocks_free"} <= names  # fmt: skip
