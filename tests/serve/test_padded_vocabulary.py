"""A served model with more outputs than its tokenizer has tokens, which it likes best by far."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.serving import CHAT, TEXT, ask, events, serving
from tests.tiny import save_padded_model


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = Path(save_padded_model(tmp_path_factory.mktemp("padded") / "model"))
    with serving(folder, slots=4) as client:
        yield client


@pytest.mark.parametrize(
    "rule",
    [{}, {"temperature": 0}, {"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.1},
     {"presence_penalty": 1.0}, {"logit_bias": {"4": 2}}],
)  # fmt: skip
def test_an_answer_is_of_the_tokenizers_tokens(client: Any, rule: dict[str, Any]) -> None:
    """Those beyond have no bytes."""
    body = ask(n=3, logprobs=True, top_logprobs=5, **rule)
    made = client.post(CHAT, json=body)
    assert made.status_code == 200, made.text
    for choice in made.json()["choices"]:
        entries = choice["logprobs"]["content"]
        assert entries
        for entry in entries:
            assert entry["bytes"]
            assert len(entry["top_logprobs"]) == 5
            assert all(top["bytes"] for top in entry["top_logprobs"])
            assert entry["logprob"] < -1, "of a softmax over all outputs"
        assert choice["message"]["content"]


def test_a_stream_and_a_completion_are_too(client: Any) -> None:
    streamed = client.post(CHAT, json=ask(stream=True, max_tokens=12)).text
    parts = [event["choices"][0]["delta"].get("content") for event in events(streamed)]
    assert "".join(filter(None, parts))
    body = {"prompt": "one two", "max_tokens": 8, "seed": 3, "logprobs": 4, "echo": True}
    choice = client.post(TEXT, json=body).json()["choices"][0]
    assert len(choice["text"]) > len("one two")
    assert all(choice["logprobs"]["tokens"])
    for top in choice["logprobs"]["top_logprobs"][1:]:
        assert len(top) in (4, 5), "the token itself is among them"
        assert all(top), "each has a name"
