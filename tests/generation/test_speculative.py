"""Drafts: what is guessed, what is worth running, and that no answer changes by it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tandem.config.schema import SamplingConfig
from tandem.generation import speculative
from tandem.generation.native_runner import NativeRunner
from tandem.generation.request import Request
from tandem.generation.sampler import Sampler
from tandem.generation.speculative import (
    History,
    Speculator,
    StepTimes,
    accepted,
    confirmed,
)
from tandem.generation.streaming import Conversations, Handle
from tandem.models.blocks import has_experts
from tandem.models.frozen import freeze_quantized
from tests.generation.rollouts import CPU, STOPS, bitwise, new_wide, prompts, wide

Drafts = Callable[[Speculator, Sequence[Request]], list[list[int]] | None]


@pytest.fixture(autouse=True)
def _small_models_speculate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "LEAST_BYTES", 0)


def history(prompt: Sequence[int], answer: Sequence[int] = (), limit: int = 100) -> History:
    made = History(prompt, limit)
    for token in answer:
        made.push(token)
    made.look()
    return made


def test_what_followed_last_time_is_guessed() -> None:
    assert history([5, 6, 7, 8, 9, 10, 5, 6]).guess[:4] == [7, 8, 9, 10]
    assert history([5, 6, 7], [4, 5]).guess[:3] == [6, 7, 4]
    assert history([5, 6, 7, 8]).guess == []
    assert history([5]).guess == []


def test_the_longest_match_is_taken_and_of_equals_the_newest() -> None:
    assert history([1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3]).guess[0] == 40
    assert history([2, 3, 40, 2, 3, 50, 2, 3]).guess[0] == 50
    # More than four are not compared.
    beyond = [1, 2, 3, 4, 5, 40, 9, 2, 3, 4, 5, 50, 1, 2, 3, 4, 5]
    assert history(beyond).guess[0] == 50


def test_a_text_in_circles_goes_on_in_circles() -> None:
    assert history([9, 7, 8, 7, 8]).guess == [7, 8, 7, 8, 7, 8, 7, 8]
    assert history([3, 3]).guess == [3] * 8


def test_no_more_is_guessed_than_may_be_drawn_before_the_last_token() -> None:
    # Of an answer of 4 tokens with one drawn, one comes from the last token, one of each draft's.
    assert len(history([1, 2], [1], limit=4).guess) == 2
    assert history([1, 2], [1], limit=2).guess == []


def test_chances_follow_what_became_of_guesses() -> None:
    good, bad = history([1, 2] * 3), history([1, 2] * 3)
    for i in range(40):
        good.draft(4)
        good.push(1 + i % 2)
        good.look()
        bad.push(1 if i % 2 else 9 + i)  # 1 has been followed by 2, and never is again
        bad.look()
    first, second = good.chances()[:2]
    assert 0.9 < first < 1
    assert 0.4 < second / first < 0.6  # nobody has seen yet what follows a right first token
    assert bad.chances()[0] < 0.1


def test_what_follows_a_right_token_is_learned_of_drafts_that_were_run() -> None:
    made = history([1, 2] * 3)
    for i in range(20):
        made.draft(3)
        made.push(1 + i % 2)
        made.push(2 - i % 2)
        made.push(1 + i % 2)
        made.look()
    chances = made.chances()
    assert chances[2] / chances[1] > 0.8


def slow_accepted(drawn: list[int], drafts: list[list[int]]) -> list[list[int]]:
    rows, places = [], list(range(len(drawn)))
    for draft in drafts:
        own, places = places[: len(draft) + 1], places[len(draft) + 1 :]
        right = [drawn[place] == token for place, token in zip(own, draft, strict=False)]
        rows.append(own[: ([*right, False]).index(False) + 1])
    return rows


def test_draws_are_kept_up_to_the_first_that_was_not_guessed() -> None:
    assert accepted([7, 8, 9, 4, 5, 6], [[7, 8], [], [6]]) == [[0, 1, 2], [3], [4]]
    chance = random.Random(2)
    for _ in range(200):
        drafts = [chance.choices([1, 2], k=chance.randrange(5)) for _ in range(6)]
        drawn = chance.choices([1, 2], k=sum(map(len, drafts)) + 6)
        assert accepted(drawn, drafts) == slow_accepted(drawn, drafts)


@pytest.mark.parametrize(
    ("predicted", "drawn", "said"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 4),
        ([1, 2, 3, 4], [9, 1, 2, 3, 4, 9], 4),  # something before it and behind it
        ([1, 2, 3, 4, 5, 6], [1, 2, 8, 5, 6], 3),  # 5 is where it goes on
        ([1, 2, 3, 4], [3, 4], 1),  # 3 was not expected
        ([1, 2], [1, 2, 1, 2], 2),  # no token is said twice
        ([1, 2, 5, 2, 3, 6], [8, 5, 2, 3, 6], 3),  # behind 5, not behind the first 2
        ([1, 2], [], 0),
        ([], [1, 2], 0),
        ([7, 8], [1, 2], 0),
    ],
)
def test_the_tokens_of_a_prediction_that_were_said_are_counted(
    predicted: list[int], drawn: list[int], said: int
) -> None:
    assert confirmed(predicted, [drawn]) == said
    assert confirmed(predicted, [drawn, [], drawn]) == 2 * said


class Counted(list[int]):
    """A list that counts what is read of it."""

    read = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        Counted.read += len(found) if isinstance(place, slice) else 1
        return found


def test_counting_what_was_said_of_a_long_prediction_takes_few_reads() -> None:
    """A server counts where it talks to everybody, so others wait: of texts whose tokens are many
    times in the prediction, without a match, at most a few reads for each token."""
    chance = random.Random(0)
    predicted = Counted(chance.choices(range(5), k=2000))
    drawn = Counted(chance.choices(range(5), k=2000))
    Counted.read = 0
    confirmed(predicted, [drawn])
    assert 0 < Counted.read < 2000 * 40


def test_times_between_those_seen_are_in_proportion() -> None:
    times = StepTimes()
    assert times.of(3) == 0.0
    for rows, seconds in ((2, 9.0), (2, 4.0), (2, 5.0), (6, 8.0)):
        times.ran(rows, seconds)
    assert [times.of(rows) for rows in (1, 2, 3, 4, 6, 9)] == [4.0, 4.0, 5.0, 6.0, 8.0, 8.0]


def test_more_rows_are_tried_little_by_little() -> None:
    times = StepTimes()
    assert times.reach == 1
    for rows, reach in ((1, 2), (2, 4), (4, 7), (3, 7), (20, 31)):
        times.ran(rows, 1.0)
        assert times.reach == reach


def test_times_are_forgotten_that_were_seen_long_ago() -> None:
    times = StepTimes()
    times.ran(4, 100.0)
    for _ in range(256):
        times.ran(1, 1.0)
    assert times.of(4) == 100.0
    times.ran(1, 1.0)
    assert times.of(4) == 1.0  # as of one row, so that it is tried again


def request(prompt: Sequence[int], limit: int = 50, **sampling: Any) -> Request:
    sampler = Sampler(SamplingConfig(**sampling), (2,), CPU, 99)
    return Request(0, tuple(prompt), 1, sampler, limit)


def speculator(seconds: Callable[[int], float], requests: Sequence[Request]) -> Speculator:
    made = Speculator(16)
    for rows in range(1, 17):
        made.times.ran(rows, seconds(rows))
    for each in requests:
        made.read([each], [each.prompt[0]])
    return made


def test_drafts_run_where_rows_cost_little() -> None:
    requests = [request([5, 6, 7, 8]), request([9])]
    free = speculator(lambda rows: 1.0, requests).drafts(requests)
    assert free is not None
    assert free[0] == [6, 7, 8, 5, 6, 7, 8, 5][: len(free[0])]
    assert free[1] == [9] * len(free[1])
    assert sum(map(len, free)) == 14
    dear = speculator(lambda rows: 1.0 * rows, requests).drafts(requests)
    assert dear is None
    some = speculator(lambda rows: 1.0 + 0.15 * rows, requests).drafts(requests)
    assert some is not None
    assert 0 < sum(map(len, some)) < sum(map(len, free))


def test_no_draft_makes_a_step_of_more_rows_than_may_run() -> None:
    requests = [request([5, 6, 7, 8]) for _ in range(12)]
    drafts = speculator(lambda rows: 1.0, requests).drafts(requests)
    assert drafts is not None
    assert sum(map(len, drafts)) == 4
    requests += [request([token]) for token in (5, 6, 7, 9)]
    assert speculator(lambda rows: 1.0, requests).drafts(requests) is None


def test_looks_that_lead_to_no_draft_take_a_hundredth_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StepTimes, "look", 0.04)
    look, looks = History.look, []

    def counted(self: History, *forced: Any) -> None:
        looks.append(step)
        look(self, *forced)

    monkeypatch.setattr(History, "look", counted)
    new = request([5, 6, 7, 8])
    made = speculator(lambda rows: 1.0, [new])
    for step in range(20):
        made.drafts([new])
        made.ran(1, 1.0)
        made.read([new], [10 + step if step < 10 else 5])  # it begins to repeat itself
    assert looks == [0, 1, 5, 9, *range(13, 20)]


def test_a_draft_that_saves_less_than_the_look_for_it_is_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = [request([5, 6, 7, 8])]
    for look, runs in ((0.0, True), (9.0, False)):
        monkeypatch.setattr(StepTimes, "look", look)
        drafts = speculator(lambda rows: 1.0, requests).drafts(requests)
        assert (drafts is not None) == runs


def test_draws_that_need_more_than_logits_are_not_guessed() -> None:
    requests = [request([5, 6, 7, 8]), request([5, 6], repetition_penalty=1.2)]
    assert speculator(lambda rows: 1.0, requests).drafts(requests) is None


@bitwise
def test_models_that_a_cache_holds_do_not_speculate(monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(weight.nbytes for weight in wide().state_dict().values())
    for least, runs in ((size, True), (2 * size, False)):
        monkeypatch.setattr(speculative, "LEAST_BYTES", least)
        assert speculative.runs_ahead(wide()) == runs


@bitwise
def test_mixtures_of_experts_do_not_speculate() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "vocab_size": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    for family in ("mixtral", "gpt_oss", "granitemoe", "deepseek_v3"):
        config = AutoConfig.for_model(family, **sizes)
        with torch.device("cpu" if family == "mixtral" else "meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert has_experts(model), family
        assert not speculative.runs_ahead(model), family
    assert not any(has_experts(wide(name)) for name in ("llama", "gpt2", "gemma2"))


# ---- answers ----


def answers(
    model: PreTrainedModel, samplings: Sequence[SamplingConfig], **how: Any
) -> tuple[list[Handle], int]:
    """Answers to prompts of which two begin alike, and how many steps they took."""
    rows = [tuple(row.token_ids) for row in prompts(20, 33, 5, 48, 17)]
    rows[3] = rows[1][:20] + rows[3]
    handles: list[Handle] = []
    with Conversations(model, STOPS, slots=4, max_tokens=200, chunk_tokens=32, **how) as talk:
        free = talk.num_free_blocks
        for i, row in enumerate(rows):
            sampling = samplings[i % len(samplings)]
            handles += talk.submit_samples(
                row, sampling, seed=i, samples=2 if i == 1 else 1, top_logprobs=2
            )
        steps = 0
        while talk.busy:
            talk.step()
            steps += 1
        assert talk.num_free_blocks == free
    return handles, steps


def assert_alike(one: Sequence[Handle], other: Sequence[Handle]) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.token_ids == b.token_ids
        assert (a.stop_token, a.finished, a.ended) == (b.stop_token, b.finished, b.ended)
        assert a.logprobs == b.logprobs


def told(answers: Sequence[Handle], chance: random.Random) -> Drafts:
    """In place of `Speculator.drafts`: by one who knows the answers, and lies after a while."""
    known = [
        (*each.token_ids, *(() if each.stop_token is None else (each.stop_token,)))
        for each in answers
    ]

    def drafts(self: Speculator, requests: Sequence[Request]) -> list[list[int]] | None:
        found: list[list[int]] = []
        for each in requests:
            drawn = tuple(each.drawn)
            whole = {tokens for tokens in known if tokens[: len(drawn)] == drawn}
            draft = list(min(whole)[len(drawn) :][: chance.randrange(7)])
            if draft and chance.random() < 0.7:
                draft[chance.randrange(len(draft))] = chance.randrange(3, 90)
            found.append(draft[: each.limit - len(drawn) - 1])
        return found if any(found) else None

    return drafts


KNOBS = {
    "plain": [SamplingConfig(max_new_tokens=60)],
    "greedy": [SamplingConfig(max_new_tokens=60, temperature=0.05)],
    "truncated": [SamplingConfig(max_new_tokens=60, top_p=0.9, top_k=30, temperature=0.7)],
    "mixed": [
        SamplingConfig(max_new_tokens=60, temperature=0.5),
        SamplingConfig(max_new_tokens=25, min_new_tokens=20, logit_bias=("2:3",)),
        SamplingConfig(max_new_tokens=40, stop_strings=("7", "33 4")),
    ],
}


@bitwise
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "qwen3"])
@pytest.mark.parametrize("knobs", KNOBS)
def test_drafts_right_and_wrong_change_no_bit(
    family: str, knobs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wide(family)
    plain, steps = answers(model, KNOBS[knobs], speculate=False)
    monkeypatch.setattr(Speculator, "drafts", told(plain, random.Random(5)))
    ahead, fewer = answers(model, KNOBS[knobs])
    assert_alike(plain, ahead)
    assert fewer < steps


@bitwise
@pytest.mark.parametrize("kind", ["bf16", "int8", "nf4"])
def test_drafts_change_no_bit_of_other_weights(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_wide("llama", torch.bfloat16 if kind == "bf16" else torch.float32)
    if kind != "bf16":
        freeze_quantized(model.requires_grad_(False), kind)
    plain, steps = answers(model, KNOBS["plain"], speculate=False)
    monkeypatch.setattr(Speculator, "drafts", told(plain, random.Random(6)))
    ahead, fewer = answers(model, KNOBS["plain"])
    assert_alike(plain, ahead)
    assert fewer < steps


@bitwise
@pytest.mark.parametrize("temperature", [0.01, 1.0])
def test_a_text_that_repeats_takes_fewer_steps(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepTimes, "of", lambda self, rows: 1.0)
    monkeypatch.setattr(StepTimes, "look", 0.0)
    model = wide()
    sampling = [SamplingConfig(max_new_tokens=120, temperature=temperature)]
    plain, steps = answers(model, sampling, speculate=False)
    ahead, fewer = answers(model, sampling)
    assert_alike(plain, ahead)
    assert fewer <= steps * (0.8 if temperature < 1 else 1)


@bitwise
def test_nobody_speculates_beside_a_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTimes, "of", lambda self, rows: 1.0)
    monkeypatch.setattr(StepTimes, "look", 0.0)
    for knobs in ({"repetition_penalty": 1.3}, {"presence_penalty": 0.5}):
        sampling = [SamplingConfig(max_new_tokens=60, temperature=0.05, **knobs)]
        plain, _ = answers(wide(), sampling, speculate=False)
        ahead, _ = answers(wide(), sampling)
        assert_alike(plain, ahead)


@bitwise
def test_an_answer_of_nan_ends_amid_its_draft_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = NativeRunner.decode

    def broken(self: NativeRunner, ids: Tensor, positions: Tensor, *tables: Any) -> Tensor:
        logits = decode(self, ids, positions, *tables)
        logits[positions == 30] = torch.nan  # one prompt ends before it, the other behind
        return logits

    sampling = [SamplingConfig(max_new_tokens=60)]
    short, long = prompts(20, 33)

    def both(**how: Any) -> list[Handle]:
        with Conversations(wide(), STOPS, slots=2, max_tokens=200, **how) as talk:
            handles = [
                talk.submit(row.token_ids, sampling[0], seed=i)
                for i, row in enumerate((short, long))
            ]
            while talk.busy:
                talk.step()
        return handles

    whole = both(speculate=False)
    monkeypatch.setattr(NativeRunner, "decode", broken)
    monkeypatch.setattr(Speculator, "drafts", told(whole, random.Random(7)))
    failed, good = both()
    assert failed.error is not None
    assert failed.token_ids == whole[0].token_ids[:11]
    assert_alike([good], whole[1:])
