"""Hugging Face's road gives what ours gives, option by option."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tandem.config.schema import SamplingConfig
from tandem.generate import generator
from tandem.generate.generator import generate
from tests.generate.test_conversations import bloom
from tests.generate.test_generator import STOPS, prompts, wide_llama

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "top_k": 20},
    {"top_p": 0.8, "min_p": 0.01},
    {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"logit_bias": ("2:4", "7:1.5"), "min_new_tokens": 6},
    {"stop_strings": ("1 1", "9"), "min_new_tokens": 3},
]


@pytest.mark.parametrize("knobs", OPTIONS, ids=lambda knobs: next(iter(knobs), "plain"))
def test_both_roads_say_the_same(knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_llama().eval()
    sampling = SamplingConfig(**{"max_new_tokens": 20, "samples_per_prompt": 2, **knobs})
    rows = prompts(4, 17, 9)
    ours = generate(model, rows, sampling, STOPS, seed=2, step=1)
    monkeypatch.setattr(generator, "supports_packing", lambda model: False)
    theirs = generate(model, rows, sampling, STOPS, seed=2, step=1, batch_size=4)
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
