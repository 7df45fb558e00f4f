"""Answers that go on with the assistant's last turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.data.render import Renderer
from tandem.serve import judging
from tests.serve.serving import CHAT, TEXT, TestClient, ask, check_error, events, serving
from tests.serve.test_thinking import OPEN, save_thinking_model

ASKED = {"role": "user", "content": "What is two and two?"}


def going_on(begun: str, **more: Any) -> dict[str, Any]:
    """A request whose answer has begun."""
    turns = [ASKED, {"role": "assistant", "content": begun}]
    return ask() | {"messages": turns, "continue_final_message": True, **more}


def ids_of(client: TestClient, body: dict[str, Any]) -> list[int]:
    """The prompt's ids."""
    names = ("messages", "continue_final_message", "add_generation_prompt")
    asked = {name: body[name] for name in names if name in body}
    tokens: list[int] = client.post("/tokenize", json=asked).json()["tokens"]
    return tokens


@pytest.mark.parametrize("begun", ["It is", "It ", ""])
def test_the_answer_is_what_follows_the_prompt_and_its_beginning(
    client: TestClient, begun: str
) -> None:
    body = going_on(begun, add_generation_prompt=False)
    ids, plain = ids_of(client, body), ids_of(client, ask())
    assert ids[: len(plain)] == plain
    answer = client.post(CHAT, json=body).json()
    text = answer["choices"][0]["message"]["content"]
    shared = {"max_tokens": 8, "seed": 1}
    same = client.post(TEXT, json={"prompt": ids, **shared}).json()
    assert (text, answer["usage"]) == (same["choices"][0]["text"], same["usage"])
    streamed = events(client.post(CHAT, json=body | {"stream": True}).text)
    assert text == "".join(e["choices"][0]["delta"].get("content", "") for e in streamed)


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"add_generation_prompt": True}, "continue_final_message"),
        ({"messages": [ASKED]}, "continue_final_message"),
        ({"continue_final_message": 1}, "continue_final_message"),
        ({"tools": [{"name": "f"}]}, "continue_final_message"),
        ({"messages": [{"role": "assistant", "content": "It"}]}, "messages"),
        ({"continue_final_message": False, "add_generation_prompt": False},
         "add_generation_prompt"),
    ],
)  # fmt: skip
def test_what_cannot_go_on_is_refused(client: TestClient, more: dict[str, Any], name: str) -> None:
    for path in (CHAT, "/tokenize"):
        answer = client.post(path, json=going_on("It is", **more))
        assert answer.status_code == 400
        check_error(answer.json(), name)


def test_a_reward_model_with_other_tokens_reads_the_whole_answer(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def rendered(renderer: Renderer, messages: Any, said: Any, *more: Any, **flags: Any) -> Any:
        seen.append((messages, said))
        return as_judged(renderer, messages, said, *more, **flags)

    as_judged = judging.as_judged
    monkeypatch.setattr(Renderer, "renders_like", lambda self, other: False)
    monkeypatch.setattr(judging, "as_judged", rendered)
    answer = client.post(CHAT, json=going_on("It is", model="ppo", tandem={"reward": True}))
    (choice,) = answer.json()["choices"]
    assert isinstance(choice["tandem"]["reward"], float)
    ((messages, said),) = seen
    assert [turn.content for turn in messages] == [ASKED["content"]]
    assert said.content == "It is" + choice["message"]["content"]


def test_a_thought_that_has_begun_goes_on_as_a_thought(tmp_path: Path) -> None:
    with serving(save_thinking_model(tmp_path, OPEN)) as client:
        for begun, field in (("<think>Hm", "reasoning_content"), ("Well", "content")):
            token = str(ids_of(client, going_on("am"))[-1])
            answer = client.post(CHAT, json=going_on(begun, logit_bias={token: 100})).json()
            message = answer["choices"][0]["message"]
            assert message[field] == 8 * "m"
            assert not message.get("content" if field != "content" else "reasoning_content")


def test_what_the_template_writes_behind_an_answer_is_not_behind_its_beginning(
    tmp_path: Path,
) -> None:
    trailing = OPEN.replace("{{ eos_token }}", " {{ eos_token }}")
    with serving(save_thinking_model(tmp_path, trailing)) as client:
        plain, begun = (ids_of(client, body) for body in (ask(), going_on("It is")))
        text = client.post("/detokenize", json={"tokens": begun[len(plain) :]}).json()["content"]
        assert text == "It is"
        whole = {"messages": going_on("It is")["messages"]}
        scored = client.post("/v1/score", json=whole).json()["tokens"]
        assert "".join(scored[:-1]) == "It is "
