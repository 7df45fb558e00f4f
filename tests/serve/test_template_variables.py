"""Variables of a chat template that requests set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tandem.data.chat.own_template import put_template, read_template
from tandem.data.render import Renderer
from tandem.models.load import load_tokenizer
from tandem.serve.loading import LoadSettings, load_policy
from tandem.serve.place import Place
from tandem.serve.sources import offer_of
from tests.serve.serving import CHAT, TestClient, ask, check_error, events, serving
from tests.serve.test_thinking import ASKED, OPEN, save_thinking_model

TEMPLATE = (
    "{% if level | default(1) > 3 %}({{ mood or 'calm' }}) {% endif %}"
    + OPEN.removesuffix("{% endif %}")
    + "{% if think is defined and think is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""As Qwen3's: told not to think, the prompt ends an empty thought."""
TOKENIZE = "/tokenize"


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, str]]:
    folder = save_thinking_model(tmp_path_factory.mktemp("thinks"), TEMPLATE)
    with serving(folder) as client:
        yield client, folder


def rendered(folder: str, variables: str) -> tuple[int, ...]:
    tokenizer = load_tokenizer(folder)
    own = put_template(tokenizer, read_template(f"tokenizer?{variables}" if variables else ""))
    return Renderer(tokenizer, own=own).prompt([ASKED]).token_ids


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"think": False}, "think=false"),
        ({"think": True}, "think=true"),
        ({"level": 7, "mood": 'glad "so"'}, 'level=7&mood=glad "so"'),
        ({"level": 5, "mood": "né 😀"}, "level=5&mood=né 😀"),
        ({"level": 4.5, "mood": None}, "level=4.5&mood=none"),
        ({}, ""),
        (None, ""),
    ],
)
def test_they_are_set_for_one_request(
    thinking: tuple[TestClient, str], given: dict[str, Any] | None, same: str
) -> None:
    client, folder = thinking
    expected = rendered(folder, same)
    body = {"messages": [ASKED], "chat_template_kwargs": given}
    assert tuple(client.post(TOKENIZE, json=body).json()["tokens"]) == expected
    answer = client.post(CHAT, json={**ask(max_tokens=6, seed=3), **body})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == len(expected)
    stream = events(
        client.post(CHAT, json={**ask(max_tokens=6, seed=3), **body, "stream": True}).text
    )
    said = "".join(c["delta"].get("content") or "" for e in stream for c in e["choices"])
    assert said == answer.json()["choices"][0]["message"]["content"]
    plain = {"messages": [ASKED]}
    assert tuple(client.post(TOKENIZE, json=plain).json()["tokens"]) == rendered(folder, "")


def test_a_form_stands_behind_a_thought_that_is_over(thinking: tuple[TestClient, str]) -> None:
    pytest.importorskip("llguidance")
    client, _ = thinking
    body = ask(max_tokens=9, regex="[0-9]{2}", chat_template_kwargs={"think": False}, n=4)
    for choice in client.post(CHAT, json=body).json()["choices"]:
        assert choice["message"]["content"].isdigit()
        assert "reasoning_content" not in choice["message"]


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ("think", 'chat_template_kwargs must be an object of variables; got "think"'),
        ({"thnk": False}, "it reads level, mood, think. Did you mean think?"),
        ({"messages": []}, "chat_template_kwargs must set variables that a template leaves"),
        ({"a b": 1}, "chat_template_kwargs must set variables that a template leaves"),
        ({"think": {"x": 1}}, "true, false, null, numbers or texts; got think: '{"),
    ],
)
def test_what_cannot_be_set(thinking: tuple[TestClient, str], given: Any, part: str) -> None:
    client, _ = thinking
    for path in (CHAT, TOKENIZE):
        answer = client.post(path, json={"messages": [ASKED], "chat_template_kwargs": given})
        assert answer.status_code == 400
        check_error(answer.json(), "chat_template_kwargs")
        assert part in answer.json()["error"]["message"]


def test_only_so_many_are_kept(thinking: tuple[TestClient, str]) -> None:
    _, folder = thinking
    (source,) = offer_of(folder).models.values()
    loaded = load_policy(source, LoadSettings(Place(torch.device("cpu"), torch.float32)))
    made = [loaded.rendering((("level", str(level)),)) for level in range(12)]
    assert len({id(renderer) for renderer in made}) == 12
    assert loaded.rendering((("level", "11"),)) is made[-1]
    assert loaded.rendering((("level", "0"),)) is not made[0]
    assert loaded.rendering(()) is loaded.renderer
