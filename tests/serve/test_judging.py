"""Answers judged together get the numbers that each gets alone, and those of Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tandem.data.render import Renderer
from tandem.errors import DataError
from tandem.serve import judging, judging_queue
from tandem.serve.judging import Answered, Judges, Judging, judge, sequence_logprobs
from tandem.serve.judging_queue import WAIT_STEPS, JudgingQueue, Waiting
from tandem.serve.loading import Loaded, LoadSettings, load_policy, load_scorer
from tandem.serve.place import Place
from tandem.serve.sources import offer_of
from tandem.types import Message
from tests.serve.serving import TestClient, ask

ALL = frozenset({"reward", "kl", "token_kl", "values"})
_MEAN, _STD = 0.25, 0.5
"""Of the scores, as `make_run` sets them."""


@pytest.fixture(scope="module")
def models(served_run: Path) -> tuple[Loaded, Judges]:
    """PPO's actor, and all that judges it."""
    offer = offer_of(str(served_run))
    settings = LoadSettings(Place(torch.device("cpu"), torch.float32))
    assert offer.reward_model is not None
    assert offer.critic is not None
    judges = Judges(
        load_policy(offer.models["sft"], settings),
        load_scorer(offer.reward_model, settings),
        load_scorer(offer.critic, settings),
    )
    return load_policy(offer.models["ppo"], settings), judges


def answers(loaded: Loaded) -> list[Answered]:
    """Of several lengths, some to one prompt, one without a token."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for prompt, length in ((5, 9), (5, 1), (12, 30), (5, 0), (1, 4), (12, 17)):
        ids = torch.randint(5, loaded.vocabulary, (length,), generator=generator).tolist()
        start = tuple(range(20, 20 + prompt))
        messages = (Message("user", "Hi"),)
        found.append(Answered((*start, *ids), prompt, length % 2 == 0, messages, "text"))
    return found


def asked(models: tuple[Loaded, Judges], wanted: frozenset[str] = ALL) -> list[Judging]:
    """All of them to be judged; of every second one the sampler has kept the log-probs."""
    policy, judges = models
    made = []
    for number, answered in enumerate(answers(policy)):
        has_kept = number % 2 == 0 and len(answered.token_ids) > answered.prompt_length
        kept = sequence_logprobs(policy, [answered.row], 0)[0] if has_kept else ()
        made.append(Judging(policy, answered, wanted, judges, kept))
    return made


@pytest.mark.parametrize("at_once", [4096, 40, 1])
def test_together_is_as_alone_to_the_last_bit(
    models: tuple[Loaded, Judges], monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    every = asked(models)
    alone = [judge([one])[0] for one in every]
    assert [found["reward"] is None for found in alone] == [False] * 3 + [True] + [False] * 2
    monkeypatch.setattr(judging, "TOKENS_AT_ONCE", at_once)
    assert judge(every) == alone
    assert judge(every[::-1]) == alone[::-1]


def test_judges_run_once_for_all(
    models: tuple[Loaded, Judges], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[tuple[str, int]] = []

    def counted(name: str) -> None:
        real = getattr(judging, name)

        def run(model: Any, batch: Any) -> Any:
            rows.append((name, len(batch)))
            return real(model, batch)

        monkeypatch.setattr(judging, name, run)

    every = asked(models)
    for name in ("last_states", "predictor_states"):
        counted(name)
    judge(every)
    # Reward model; the policy, for answers whose log-probs nobody kept; reference; critic.
    assert rows == [
        ("last_states", 5), ("predictor_states", 2), ("predictor_states", 5),
        ("predictor_states", 5),
    ]  # fmt: skip


def test_numbers_are_those_of_hugging_face(models: tuple[Loaded, Judges], served_run: Path) -> None:
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(served_run / name) for name in ("ppo/actor", "sft")
    )
    reward, critic = (
        AutoModelForSequenceClassification.from_pretrained(served_run / name)
        for name in ("reward", "ppo/critic")
    )
    for one, found in zip(asked(models), judge(asked(models)), strict=True):
        prompt, ids = one.answered.prompt_length, torch.tensor([one.answered.token_ids])
        drawn = ids[0, prompt:, None]
        if not len(drawn):
            assert found == {
                **dict.fromkeys(ALL),
                "why": dict.fromkeys(ALL, "the answer has no token"),
            }
            continue
        with torch.no_grad():
            own, theirs = (
                model(ids).logits[0, prompt - 1 : -1].log_softmax(-1).gather(1, drawn)[:, 0]
                for model in (policy, reference)
            )
            scores, values = (
                model.score(model.base_model(ids).last_hidden_state)[0, :, 0]
                for model in (reward, critic)
            )
        torch.testing.assert_close(torch.tensor(found["token_kl"]), own - theirs, atol=1e-5, rtol=0)
        assert found["kl"] == pytest.approx(float((own - theirs).sum()), abs=1e-4)
        assert found["reward"] == pytest.approx((float(scores[-1]) - _MEAN) / _STD, abs=1e-5)
        expected = (values[prompt - 1 : -1] - _MEAN) / _STD
        torch.testing.assert_close(torch.tensor(found["values"]), expected, atol=1e-5, rtol=0)


def test_what_cannot_be_had_is_null_and_says_why(models: tuple[Loaded, Judges]) -> None:
    policy, judges = models
    first = answers(policy)[0]
    none = Judges(None, None, None)
    some, all_missing, reward_missing = judge(
        [
            Judging(policy, first, frozenset({"kl"}), judges),
            Judging(policy, first, ALL, none),
            Judging(
                policy, first, frozenset({"reward", "kl"}), Judges(judges.reference, None, None)
            ),
        ]
    )
    assert some.keys() == {"kl"}
    assert all_missing == {
        **dict.fromkeys(ALL),
        "why": {
            "reward": "there is no reward model",
            "kl": "this model has no reference",
            "values": "there is no critic",
        },
    }
    assert reward_missing == {
        "reward": None, "kl": some["kl"], "why": {"reward": "there is no reward model"},
    }  # fmt: skip


class Client:
    """Somebody who waits for an answer's numbers."""

    def __init__(self, models: tuple[Loaded, Judges], tokens: int = 6) -> None:
        policy, judges = models
        answered = Answered(tuple(range(20, 20 + tokens)), 2, False, (), "")
        self.found: dict[str, Any] | None = None
        self.error: Exception | None = None
        self.is_here = True
        self.waiting = Waiting(
            Judging(policy, answered, frozenset({"reward"}), judges),
            lambda: self.is_here,
            lambda found: setattr(self, "found", found),
            lambda error: setattr(self, "error", error),
        )


def test_an_answer_waits_for_others_but_not_long(models: tuple[Loaded, Judges]) -> None:
    queue, client = JudgingQueue(1000), Client(models)
    queue.add(client.waiting)
    for _ in range(WAIT_STEPS):
        queue.step(is_idle=False)
        assert client.found is None
    late = Client(models)
    queue.add(late.waiting)
    queue.step(is_idle=False)
    assert client.found == late.found == judge([client.waiting.judging])[0]
    assert len(queue) == 0
    queue.add(client.waiting)
    queue.step(is_idle=False)  # the wait begins anew
    assert len(queue) == 1


def test_nobody_waits_without_others_or_once_there_are_enough(
    models: tuple[Loaded, Judges],
) -> None:
    queue, client = JudgingQueue(12), Client(models)
    queue.add(client.waiting)
    queue.step(is_idle=True)
    assert client.found
    first, second = Client(models), Client(models)
    queue.add(first.waiting)
    queue.step(is_idle=False)
    assert first.found is None
    queue.add(second.waiting)
    queue.step(is_idle=False)
    queue.step(is_idle=False)
    assert first.found == second.found != None  # noqa: E711


def test_beside_running_answers_a_step_judges_a_quarter_of_what_is_enough(
    models: tuple[Loaded, Judges],
) -> None:
    clients = [Client(models) for _ in range(8)]
    each = len(clients[0].waiting.judging.answered.token_ids)
    queue = JudgingQueue(8 * each)
    for client in clients:
        queue.add(client.waiting)
    for judged in (2, 4):
        queue.step(is_idle=False)
        assert [client.found is not None for client in clients] == [True] * judged + [False] * (
            8 - judged
        )
    assert len(queue) == 4
    queue.step(is_idle=True)
    assert all(client.found for client in clients)
    assert len(queue) == 0


def test_one_that_cannot_be_judged_fails_alone(
    models: tuple[Loaded, Judges], monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = [Client(models) for _ in range(3)]
    poisoned = clients[1].waiting.judging

    def poison(every: list[Judging]) -> list[dict[str, Any]]:
        if any(one is poisoned for one in every):
            raise RuntimeError("no memory")
        return judge(every)

    monkeypatch.setattr(judging_queue, "judge", poison)
    queue = JudgingQueue(1000)
    for client in clients:
        queue.add(client.waiting)
    queue.step(is_idle=True)
    assert [str(client.error) for client in clients] == ["None", "no memory", "None"]
    assert clients[0].found == clients[2].found == judge([clients[0].waiting.judging])[0]


def test_turns_that_the_reward_model_refuses_have_no_reward(
    models: tuple[Loaded, Judges], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, judges = models
    bad, good = (
        Judging(policy, replace(answered, messages=(Message(role, "Hi"),)), ALL, judges)
        for role, answered in zip(("system", "user"), answers(policy), strict=False)
    )
    alone = judge([good])[0]
    rendered = judging.as_judged

    def refuses(renderer: Renderer, messages: Sequence[Message], *more: Any, **kind: Any) -> Any:
        if messages[0].role == "system":
            raise DataError("turns must suit the template")
        return rendered(renderer, messages, *more, **kind)

    monkeypatch.setattr(judging, "as_judged", refuses)
    monkeypatch.setattr(Renderer, "renders_like", lambda self, other: False)
    found = judge([bad, good])
    assert found[0]["reward"] is None
    assert "turns must suit" in found[0]["why"]["reward"]
    assert found[1]["reward"] is not None
    assert alone.keys() >= {"reward"}


def test_who_has_left_is_not_judged_and_a_failure_reaches_all(
    models: tuple[Loaded, Judges], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, gone, here = JudgingQueue(1), Client(models), Client(models)
    gone.is_here = False
    queue.add(gone.waiting)
    queue.add(here.waiting)
    counted: list[int] = []
    real = judge
    monkeypatch.setattr(
        judging_queue, "judge", lambda every: counted.append(len(every)) or real(every)
    )
    queue.step(is_idle=False)
    assert counted == [1]
    assert gone.found is None
    assert here.found

    def fails(every: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(judging_queue, "judge", fails)
    clients = [Client(models), Client(models)]
    for client in clients:
        queue.add(client.waiting)
    for _ in clients:  # each is enough by itself
        queue.step(is_idle=True)
    assert [str(client.error) for client in clients] == ["no memory"] * 2
    assert len(queue) == 0


def test_answers_of_one_request_are_judged_in_one_batch(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"reward": True, "kl": True, "values": True}
    body = ask(n=4, max_tokens=6, ignore_eos=True, tandem=wanted)
    first = client.post("/v1/chat/completions", json=body).json()
    counted: list[int] = []
    real = judge
    monkeypatch.setattr(
        judging_queue, "judge", lambda every: counted.append(len(every)) or real(every)
    )
    again = client.post("/v1/chat/completions", json=body).json()
    assert counted == [4]
    assert again["choices"] == first["choices"]
    assert all(choice["tandem"]["reward"] is not None for choice in again["choices"])


def test_a_judge_that_fails_fails_its_answers_and_the_server_lives_on(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(every: object) -> None:
        raise RuntimeError("no memory")

    body = ask(tandem={"reward": True})
    with monkeypatch.context() as patch:
        patch.setattr(judging_queue, "judge", fails)
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the server failed: RuntimeError."
    assert "no memory" in capfd.readouterr().err
    assert client.post("/v1/chat/completions", json=body).status_code == 200
