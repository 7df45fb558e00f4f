"""Streams: each as if it were alone, cancelled at once, in both roads."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from tandem.config.schema import SamplingConfig
from tandem.errors import GenerationError, NumericsError
from tandem.generation.stops import Stops
from tandem.generation.streaming import Conversations, Handle, stream
from tandem.models.load import new_causal_lm
from tandem.models.twin import supports_packing
from tests.generation.rollouts import STOPS, prompts, wide_llama
from tests.models.families import perturbed


def bloom() -> PreTrainedModel:
    config = AutoConfig.for_model(
        "bloom", vocab_size=99, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    model = perturbed(new_causal_lm(config, seed=3)).eval()
    assert not supports_packing(model)
    return model


@pytest.fixture(params=["llama", "bloom"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return wide_llama().eval() if request.param == "llama" else bloom()


CONFIGS = [
    SamplingConfig(max_new_tokens=30),
    SamplingConfig(max_new_tokens=5, temperature=0.3),
    SamplingConfig(max_new_tokens=25, top_p=0.8, repetition_penalty=1.2, min_new_tokens=10),
    SamplingConfig(max_new_tokens=40, stop_strings=(" 4",)),
]


def test_conversations_do_not_disturb_each_other(model: PreTrainedModel) -> None:
    rows = prompts(6, 30, 11, 17)
    alone = [
        list(stream(model, row.token_ids, config, STOPS, seed=i))
        for i, (row, config) in enumerate(zip(rows, CONFIGS, strict=True))
    ]
    assert len(set(map(tuple, alone))) == 4
    with Conversations(model, STOPS, slots=3, max_tokens=80) as talks:
        handles: list[Handle] = []
        streamed: dict[Handle, list[int]] = {}
        for i in range(200):  # they come one by one, while others speak
            if i % 3 == 0 and len(handles) < 4:
                row = rows[len(handles)]
                handle = talks.submit(row.token_ids, CONFIGS[len(handles)], seed=len(handles))
                handles.append(handle)
            for handle, ids in talks.step():
                streamed.setdefault(handle, []).extend(ids)
            if len(handles) == 4 and not talks.busy:
                break
        assert [streamed[handle] for handle in handles] == alone
        assert [handle.token_ids for handle in handles] == alone
        assert all(handle.ended for handle in handles)


def test_the_end_says_how_it_came(model: PreTrainedModel) -> None:
    row = prompts(9)[0].token_ids
    with Conversations(model, STOPS, max_tokens=300) as talks:
        cut = talks.submit(row, SamplingConfig(max_new_tokens=3, logit_bias=("2:-100",)), seed=0)
        stopped = talks.submit(row, SamplingConfig(logit_bias=("2:100",)), seed=0)
        by_text = talks.submit(row, SamplingConfig(stop_strings=("1",)), seed=0)
        events = talks.step()
        assert (stopped, []) in events
        while talks.busy:
            talks.step()
    assert [cut.finished, stopped.finished, by_text.finished] == [False, True, True]
    assert [len(cut.token_ids), len(stopped.token_ids)] == [3, 0]
    assert "1" in str(by_text.token_ids[-1])
    assert not any("1" in str(token) for token in by_text.token_ids[:-1])


def test_cancel_frees_at_once_and_another_takes_the_place(model: PreTrainedModel) -> None:
    rows = prompts(10, 12)
    with Conversations(model, STOPS, slots=1, max_tokens=64, kv_blocks=4) as talks:
        first = talks.submit(rows[0].token_ids, SamplingConfig(max_new_tokens=50), seed=1)
        second = talks.submit(rows[1].token_ids, SamplingConfig(max_new_tokens=4), seed=2)
        talks.step()
        talks.cancel(first)
        talks.cancel(first)
        assert first.ended
        assert not first.finished
        while talks.busy:
            assert all(handle is second for handle, _ in talks.step())
    expected = list(stream(model, rows[1].token_ids, CONFIGS[1], STOPS, seed=2))
    assert len(expected) == 5
    assert len(second.token_ids) == 4


def test_closing_a_stream_ends_it(model: PreTrainedModel) -> None:
    tokens = stream(model, prompts(5)[0].token_ids, SamplingConfig(), STOPS, seed=0)
    next(tokens)
    tokens.close()  # type: ignore[attr-defined]
    gc.collect()
    with pytest.raises(StopIteration):
        next(tokens)


def test_a_prompt_that_leaves_no_room(model: PreTrainedModel) -> None:
    with (
        Conversations(model, STOPS, max_tokens=20) as talks,
        pytest.raises(GenerationError, match="room for an answer in 20 positions; it has 20"),
    ):
        talks.submit([5] * 20, SamplingConfig(), seed=0)
    with pytest.raises(GenerationError, match="must leave room for an answer"):
        list(stream(model, [], SamplingConfig(), STOPS, seed=0))


def test_an_answer_is_cut_where_the_room_ends() -> None:
    model = wide_llama()
    never = SamplingConfig(max_new_tokens=500, logit_bias=("2:-100",))
    tokens = list(stream(model, [5] * 500, never, Stops((2,), 2, str), seed=0))
    assert len(tokens) == 12  # of 512 positions


@pytest.mark.parametrize("bad", ["bias", "token", "negative"])
def test_a_bad_request_is_refused_and_the_others_go_on(model: PreTrainedModel, bad: str) -> None:
    row = prompts(9)[0].token_ids
    ids = {"bias": [5, 6], "token": [5, 99], "negative": [-1, 5]}[bad]
    config = SamplingConfig(logit_bias=("120:1",)) if bad == "bias" else SamplingConfig()
    with Conversations(model, STOPS, slots=4, max_tokens=100) as talks:
        good = talks.submit(row, CONFIGS[1], seed=3)
        talks.step()
        with pytest.raises(GenerationError, match="the model's"):
            talks.submit(ids, config, seed=1)
        while talks.busy:
            talks.step()
    assert good.token_ids == list(stream(model, row, CONFIGS[1], STOPS, seed=3))


def test_an_answer_with_nothing_to_draw_from_ends_alone(model: PreTrainedModel) -> None:
    row = prompts(9)[0].token_ids
    none = SamplingConfig(min_new_tokens=2, logit_bias=tuple(f"{i}:-inf" for i in range(99)))
    with Conversations(model, STOPS, slots=4, max_tokens=100) as talks:
        good = talks.submit(row, CONFIGS[1], seed=3)
        talks.step()
        broken = talks.submit(row, none, seed=1)
        while talks.busy:
            talks.step()
    assert good.token_ids == list(stream(model, row, CONFIGS[1], STOPS, seed=3))
    assert good.error is None
    assert broken.ended
    assert not broken.finished
    assert broken.token_ids == []
    assert "the conversation" in str(broken.error)
    with pytest.raises(NumericsError, match="got none at its token 1"):
        list(stream(model, row, none, STOPS, seed=1))


def test_observed_logprobs_are_those_of_a_forward(model: PreTrainedModel) -> None:
    row = prompts(9)[0].token_ids
    with Conversations(model, STOPS, slots=2, max_tokens=100) as talks:
        (handle,) = talks.submit_samples(row, CONFIGS[2], seed=3, top_logprobs=2)
        while talks.busy:
            talks.step()
    drawn = [each.token_id for each in handle.logprobs]
    assert drawn[: len(handle.token_ids)] == handle.token_ids
    with torch.no_grad():
        logits = model(torch.tensor([[*row, *drawn]])).logits[0].float()
    table = logits.log_softmax(-1)[len(row) - 1 : -1]
    for place, each in zip(table, handle.logprobs, strict=True):
        assert each.logprob == pytest.approx(float(place[each.token_id]), abs=1e-4)
        best = place.topk(2)
        assert [logprob for _, logprob in each.top] == pytest.approx(best.values.tolist(), abs=1e-4)
