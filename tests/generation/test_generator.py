"""Generation against Hugging Face's own forward and greedy search, family by family."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from tandem.config.schema import SamplingConfig
from tandem.engine.forward import response_logprobs
from tandem.errors import ConfigError, GenerationError, NumericsError
from tandem.generation.generator import generate
from tandem.generation.streaming import stream
from tandem.types import PromptRow, Rollout, Source
from tests.generation.rollouts import STOPS, prompts, wide_llama
from tests.models.families import FAMILIES, tiny_model


def rollout_of(model: PreTrainedModel, rows: list[PromptRow], **knobs: float) -> Rollout:
    sampling = SamplingConfig(**{"max_new_tokens": 10, **knobs})  # type: ignore[arg-type]
    return generate(model, rows, sampling, STOPS, seed=5, step=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_the_plain_forward_over_each_row_alone(family: str) -> None:
    model = tiny_model(family)
    rollout = rollout_of(model, prompts(3, 9, 5, 7), temperature=0.8)
    for i in range(len(rollout)):
        n = int(rollout.batch.attention_mask[i].sum())
        ids = rollout.batch.token_ids[i, :n]
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1].float() / 0.8
        expected = torch.log_softmax(logits, -1).gather(1, ids[1:, None]).squeeze(1)
        chosen = rollout.batch.response_mask[i, 1:n]
        got = rollout.rollout_logprobs[i, 1:n]
        torch.testing.assert_close(got[chosen], expected[chosen], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(rollout.sampled_logprobs[i], rollout.rollout_logprobs[i])
        assert not got[~chosen].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_almost_no_temperature_is_greedy_search(family: str) -> None:
    model = tiny_model(family)
    rows = prompts(6, 4)
    rollout = rollout_of(model, rows, temperature=1e-4)
    for i, row in enumerate(rows):
        ids = torch.tensor([row.token_ids])
        with torch.no_grad():
            greedy = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=10,
                eos_token_id=2,
                pad_token_id=2,
            )
        n = int(rollout.batch.attention_mask[i].sum())
        assert rollout.batch.token_ids[i, :n].tolist() == greedy[0].tolist()


def test_eos_is_a_sampled_token_though_it_is_the_pad_too() -> None:
    model = wide_llama()
    rows = prompts(*[5] * 40)
    rollout = rollout_of(model, rows, max_new_tokens=120)
    ended = rollout.finished.nonzero().flatten().tolist()
    assert ended  # one token in ninety is EOS: some of forty rows draw it
    for i in ended:
        last = int(rollout.batch.attention_mask[i].sum()) - 1
        assert rollout.batch.token_ids[i, last] == 2
        assert rollout.batch.response_mask[i, last]
        assert rollout.rollout_logprobs[i, last] < 0
        assert "2" not in rollout.responses[i].split()
    cut = (~rollout.finished).nonzero().flatten().tolist()
    for i in cut:
        assert rollout.batch.response_mask[i].sum() == 120


def test_samples_are_side_by_side_and_differ_and_batches_do_not_matter() -> None:
    model = wide_llama()
    rows = prompts(4, 8, 6)
    sampling = SamplingConfig(max_new_tokens=12, samples_per_prompt=3)
    whole = generate(model, rows, sampling, STOPS, seed=1, step=1, batch_size=9)
    small = generate(model, rows, sampling, STOPS, seed=1, step=1, batch_size=2)
    assert whole.responses == small.responses
    assert [p.source.line for p in whole.prompts] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert len(set(whole.responses)) == 9
    other = generate(model, rows, sampling, STOPS, seed=1, step=2)
    assert other.responses != whole.responses


def test_min_new_tokens_forbids_the_stop() -> None:
    model = wide_llama()
    rollout = rollout_of(model, prompts(*[5] * 30), max_new_tokens=60, min_new_tokens=60)
    assert not rollout.finished.any()


def test_min_new_tokens_leaves_the_policys_own_logprobs_as_they_are() -> None:
    model = wide_llama()
    rollout = rollout_of(model, prompts(5, 9), max_new_tokens=20, min_new_tokens=20)
    for i in range(2):
        n = int(rollout.batch.attention_mask[i].sum())
        ids = rollout.batch.token_ids[i, :n]
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
        expected = logprobs.gather(1, ids[1:, None]).squeeze(1)
        chosen = rollout.batch.response_mask[i, 1:n]
        got = rollout.rollout_logprobs[i, 1:n][chosen]
        torch.testing.assert_close(got, expected[chosen], atol=2e-5, rtol=1e-4)
        assert bool((rollout.sampled_logprobs[i, 1:n][chosen] > got).all())


@pytest.mark.parametrize(
    "own",
    [{"repetition_penalty": 3.0}, {"num_beams": 3}, {"max_time": 0.0}, {"min_length": 40},
     {"stop_strings": ["a"]}, {"suppress_tokens": [5, 6, 7]}],
)  # fmt: skip
def test_a_checkpoints_own_generation_settings_change_nothing(own: dict[str, object]) -> None:
    plain, settled = wide_llama(), wide_llama()
    settled.load_state_dict(plain.state_dict())
    settled.generation_config = GenerationConfig(**own)
    rows = prompts(5, 9, 7)
    ours, theirs = rollout_of(plain, rows), rollout_of(settled, rows)
    assert ours.responses == theirs.responses
    torch.testing.assert_close(ours.rollout_logprobs, theirs.rollout_logprobs)
    assert settled.generation_config.to_dict()[next(iter(own))] == next(iter(own.values()))


def test_truncated_sampling_keeps_both_logprobs() -> None:
    rollout = rollout_of(wide_llama(), prompts(5, 6), top_k=3)
    mask = rollout.batch.response_mask
    assert bool((rollout.sampled_logprobs[mask] > rollout.rollout_logprobs[mask]).all())


def test_stream_draws_from_the_same_distribution_as_generate() -> None:
    model = wide_llama()
    row = prompts(6)[0]
    sampling = SamplingConfig(max_new_tokens=15, temperature=1e-4)
    streamed = list(stream(model, row.token_ids, sampling, STOPS, seed=0))
    answer = generate(model, [row], sampling, STOPS, seed=9, step=1)
    assert " ".join(map(str, streamed)) == answer.responses[0]


def test_answers_must_have_room_for_a_token() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.max_new_tokens must be >= 1; got 0"):
        generate(wide_llama(), prompts(4), SamplingConfig(max_new_tokens=0), STOPS)


@pytest.mark.parametrize(
    ("lengths", "part"),
    [
        ((), "at least one prompt; got none"),
        ((0,), "memory:1: a prompt must have tokens; got none"),
        ((5, 0), r"got none in prompt 2 of 2\. Leave it out"),
        ((900,), "must fit the model's"),
    ],
)
def test_prompts_that_cannot_be_answered(lengths: tuple[int, ...], part: str) -> None:
    with pytest.raises(GenerationError, match=part):
        rollout_of(wide_llama(), prompts(*lengths))


def test_a_conversation_that_leaves_no_room() -> None:
    with pytest.raises(GenerationError, match="must leave room for an answer"):
        list(stream(wide_llama(), [3] * 5000, SamplingConfig(), STOPS, seed=0))


@pytest.mark.parametrize("by_hugging_face", [False, True])
@pytest.mark.parametrize("token", [99, -1])
def test_a_prompt_of_tokens_that_the_model_does_not_have(token: int, by_hugging_face: bool) -> None:
    rows = [*prompts(4), replace(prompts(4)[0], token_ids=(5, token))]
    with pytest.raises(GenerationError, match=rf"must be from 0 to 98, the model's; got {token}"):
        generate(
            wide_llama(), rows, SamplingConfig(), STOPS, seed=0, step=0,
            by_hugging_face=by_hugging_face,
        )  # fmt: skip


@pytest.mark.parametrize("by_hugging_face", [False, True])
@pytest.mark.parametrize("knobs", [{}, {"top_p": 0.9}])
def test_nan_ends_in_one_line_that_says_where(
    knobs: dict[str, float], by_hugging_face: bool
) -> None:
    model = wide_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    rows = [*prompts(4), replace(prompts(4)[0], token_ids=(5, 6), source=Source("t", "file", 9))]
    sampling = SamplingConfig(
        max_new_tokens=4,
        # The second prompt's answer alone comes upon the broken token.
        logit_bias=("7:-1e4",),
        **knobs,  # type: ignore[arg-type]
    )
    fine = generate(model, rows, sampling, STOPS, seed=0, step=0, by_hugging_face=by_hugging_face)
    assert bool(fine.rollout_logprobs.isfinite().all())
    rows[1] = replace(rows[1], token_ids=(5, 7))
    with pytest.raises(NumericsError, match=r"file.*9.*got none at its token 1\. Look for NaN"):
        generate(model, rows, sampling, STOPS, seed=0, step=0, by_hugging_face=by_hugging_face)


def test_where_every_token_is_forbidden() -> None:
    forbidden = tuple(f"{token}:-inf" for token in range(99) if token != 2)
    with pytest.raises(NumericsError, match="must have finite logits for some token"):
        rollout_of(wide_llama(), prompts(4), min_new_tokens=2, logit_bias=forbidden)  # type: ignore[arg-type]


def test_a_rollout_of_inference_mode_can_be_trained_on() -> None:
    model = wide_llama()
    with torch.inference_mode():
        rollout = rollout_of(model, prompts(4))
    response_logprobs(model, rollout.batch)[0].sum().backward()
    assert model.lm_head.weight.grad is not None
