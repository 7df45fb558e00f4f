"""Hugging Face's road gives what ours gives, option by option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from tandem.config.schema import SamplingConfig
from tandem.generation.generator import generate
from tandem.generation.stops import Stops
from tandem.generation.streaming import stream
from tandem.models.load import new_causal_lm
from tests.generation.rollouts import STOPS, prompts, wide_llama
from tests.generation.test_streaming import bloom
from tests.models.families import perturbed
from tests.models.test_classifiers import config_of

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "top_k": 20},
    {"top_p": 0.8, "min_p": 0.01},
    {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"logit_bias": ("2:4", "7:1.5"), "min_new_tokens": 6},
    {"stop_strings": ("1 1", "9"), "min_new_tokens": 3},
]


@pytest.mark.parametrize("knobs", OPTIONS, ids=lambda knobs: next(iter(knobs), "plain"))
def test_both_roads_say_the_same(knobs: dict[str, Any]) -> None:
    model = wide_llama().eval()
    sampling = SamplingConfig(**{"max_new_tokens": 20, "samples_per_prompt": 2, **knobs})
    rows = prompts(4, 17, 9)
    ours = generate(model, rows, sampling, STOPS, seed=2, step=1)
    theirs = generate(
        model, rows, sampling, STOPS, seed=2, step=1, batch_size=4, by_hugging_face=True
    )
    assert theirs.responses == ours.responses
    assert torch.equal(theirs.finished, ours.finished)
    assert torch.equal(theirs.batch.token_ids, ours.batch.token_ids)
    for name in ("rollout_logprobs", "sampled_logprobs", "rollout_entropy"):
        torch.testing.assert_close(getattr(theirs, name), getattr(ours, name), atol=2e-5, rtol=1e-4)


def test_a_family_that_is_not_reached_is_answered_all_the_same() -> None:
    model = bloom()
    rows = prompts(3, 9, 5)
    sampling = SamplingConfig(max_new_tokens=15, temperature=0.9)
    rollout = generate(model, rows, sampling, STOPS, seed=4, step=1)
    for i in range(3):
        n = int(rollout.batch.attention_mask[i].sum())
        ids = rollout.batch.token_ids[i, :n]
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1].float() / 0.9
        expected = torch.log_softmax(logits, -1).gather(1, ids[1:, None]).squeeze(1)
        chosen = rollout.batch.response_mask[i, 1:n]
        got = rollout.rollout_logprobs[i, 1:n]
        torch.testing.assert_close(got[chosen], expected[chosen], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["recurrent_gemma", "mamba"])
def test_padding_stays_out_of_a_recurrent_state(family: str) -> None:
    model = perturbed(new_causal_lm(config_of(family), seed=3)).eval()
    rows = prompts(3, 9, 5, 9)
    sampling = SamplingConfig(max_new_tokens=8, temperature=0.9)
    alone = generate(model, rows, sampling, STOPS, seed=4, step=1, batch_size=1)
    together = generate(model, rows, sampling, STOPS, seed=4, step=1, batch_size=4)
    assert together.responses == alone.responses
    for name in ("rollout_logprobs", "sampled_logprobs", "rollout_entropy"):
        torch.testing.assert_close(
            getattr(together, name), getattr(alone, name), atol=2e-5, rtol=1e-4
        )


def longrope() -> PreTrainedModel:
    """Phi-3, whose rope turns every token otherwise in a sequence of more than 16."""
    config = AutoConfig.for_model(
        "phi3", vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        original_max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        initializer_range=0.2,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4, "original_max_position_embeddings": 16,
        },
    )  # fmt: skip
    return perturbed(new_causal_lm(config, seed=3)).eval()


def test_a_rope_that_follows_the_length_answers_as_each_prompt_does_alone() -> None:
    model = longrope()
    rows = prompts(5, 30, 12, 17)  # two of them pass the border while they are answered
    sampling = SamplingConfig(max_new_tokens=15, top_k=1, logit_bias=("2:-1e4",))
    rollout = generate(model, rows, sampling, STOPS, seed=4, step=1)
    for i, row in enumerate(rows):
        ids = list(row.token_ids)
        for _ in range(15):
            with torch.no_grad():
                logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            logits[2] = -torch.inf
            ids.append(int(logits.argmax()))
        n = int(rollout.batch.attention_mask[i].sum())
        assert rollout.batch.token_ids[i, :n].tolist() == ids
        assert list(stream(model, row.token_ids, sampling, STOPS, seed=0)) == ids[len(row) :]


def test_padding_need_not_be_a_token_of_the_model() -> None:
    model, rows = bloom(), prompts(3, 9)
    sampling = SamplingConfig(max_new_tokens=5)
    usual = generate(model, rows, sampling, STOPS, seed=4, step=1)
    other = Stops(STOPS.stop_token_ids, 120, STOPS.decode)
    made = generate(model, rows, sampling, other, seed=4, step=1)
    assert made.responses == usual.responses
