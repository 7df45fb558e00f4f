"""OpenAI's predicted output: the same answer in fewer steps."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.data.span_tokenizer import PieceTokenizer
from tandem.generation import speculative
from tandem.generation.session import Session
from tandem.generation.speculative import StepTimes
from tests.generation.rollouts import bitwise
from tests.serve.serving import CHAT, TestClient, ask, events

_COUNTED = ("accepted", "rejected")


def ids_of(client: TestClient, text: str) -> list[int]:
    found: list[int] = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return found


@pytest.fixture(autouse=True)
def _small_models_speculate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "LEAST_BYTES", 0)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows that were live in each step since it was cleared, where any number costs as much."""
    made: list[int] = []
    decode = Session._decode

    def counted(self: Session) -> Any:
        made.append(len(self.rows))
        return decode(self)

    monkeypatch.setattr(Session, "_decode", counted)
    monkeypatch.setattr(StepTimes, "of", lambda self, rows: 1.0)
    monkeypatch.setattr(StepTimes, "reach", 32)
    monkeypatch.setattr(StepTimes, "look", 0.0)
    return made


@bitwise
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}])
def test_what_was_predicted_is_the_same_answer_in_fewer_steps(
    client: TestClient, steps: list[int], more: dict[str, Any]
) -> None:
    body = ask(max_tokens=40, min_tokens=40, seed=3, **more)
    plain = client.post(CHAT, json=body).json()
    alone = len(steps)
    text = plain["choices"][0]["message"]["content"]
    parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
    for content in (text, parts):
        steps.clear()
        body["prediction"] = {"type": "content", "content": content}
        made = client.post(CHAT, json=body).json()
        counts = made["usage"].pop("completion_tokens_details")
        assert (made["choices"], made["usage"]) == (plain["choices"], plain["usage"])
        accepted, rejected = (counts[f"{name}_prediction_tokens"] for name in _COUNTED)
        assert 20 < accepted <= made["usage"]["completion_tokens"]
        if "n" not in more:  # the text may be of other tokens than were drawn
            assert accepted + rejected >= len(ids_of(client, text))
            assert len(steps) < 0.5 * alone
    streamed = events(client.post(CHAT, json=body | {"stream": True}).text)
    said = [e["choices"][0] for e in streamed if e["choices"] and e["choices"][0]["index"] == 0]
    assert "".join(choice["delta"].get("content", "") for choice in said) == text


@bitwise
def test_another_answer_than_predicted_is_the_same_too(
    client: TestClient, steps: list[int]
) -> None:
    body = ask(max_tokens=30, min_tokens=30, seed=4)
    plain = client.post(CHAT, json=body).json()
    for content in ("It is something else altogether.", "", " ", "\N{BLACK SQUARE}" * 30):
        body["prediction"] = {"type": "content", "content": content}
        made = client.post(CHAT, json=body).json()
        counts = made["usage"].pop("completion_tokens_details", None)
        assert (made["choices"], made["usage"]) == (plain["choices"], plain["usage"])
        if not content:
            assert counts is None
            continue
        accepted, rejected = (counts[f"{name}_prediction_tokens"] for name in _COUNTED)
        assert accepted <= 1
        assert accepted + rejected >= len(ids_of(client, content))


def test_a_stream_counts_what_was_predicted_too(client: TestClient) -> None:
    body = ask(max_tokens=12, min_tokens=12, seed=3)
    text = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    body["prediction"] = {"type": "content", "content": text}
    whole = client.post(CHAT, json=body).json()["usage"]
    assert whole["completion_tokens_details"]["accepted_prediction_tokens"] > 3
    options = {"stream": True, "stream_options": {"include_usage": True}}
    assert events(client.post(CHAT, json=body | options).text)[-1]["usage"] == whole


def test_nothing_is_made_of_the_vocabulary_for_short_texts(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What bounds a text's tokens takes half a second to make, when it is first asked for."""

    def never(self: PieceTokenizer, text: str) -> int:
        raise AssertionError(text)

    monkeypatch.setattr(PieceTokenizer, "fewest", never)
    for more in ({}, {"prediction": {"type": "content", "content": "It is four."}}):
        assert client.post(CHAT, json=ask(**more)).status_code == 200
