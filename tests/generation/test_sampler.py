"""Drawing against slow loops, closed forms and statistics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.config.schema import SamplingConfig
from tandem.errors import ConfigError, GenerationError
from tandem.generation.sampler import Draw, Sampler, TokenCounts, sequence_key, truncated
from tandem.ops import dense

V = 12
STOP = 3


def draw(logits: Tensor, *, drawn: int = 0, prompt: Any = None, answer: Any = None,
         keys: Tensor | None = None, **settings: Any) -> Draw:  # fmt: skip
    n = len(logits)
    sampler = Sampler(SamplingConfig(**settings), (STOP,), torch.device("cpu"), logits.shape[1])
    keys = torch.arange(n) * 7919 if keys is None else keys
    counts = None
    if sampler.penalizes:
        held = TokenCounts(n, logits.shape[1], torch.device("cpu"))
        for row in range(n):
            held.begin(row, [token for token in range(V) if prompt[token]])
        for token in range(V):
            for _ in range(answer[token]):
                held.add(slice(None), torch.full((n,), token))
        counts = held.of(slice(None))
    return sampler.draw(logits, keys, torch.full((n,), drawn), counts)


def shares(logits: Tensor, n: int = 20_000, **settings: Any) -> Tensor:
    """How often each token is drawn, of n."""
    keys = torch.tensor([sequence_key(1, 0, i, 0) for i in range(n)])
    tokens = draw(logits.expand(n, -1), keys=keys, **settings).tokens
    return tokens.bincount(minlength=logits.shape[-1]) / n


def chi_square(found: Tensor, expected: Tensor, n: int) -> float:
    """Per degree of freedom; about 1, and below 3 for any fair draw of this size."""
    real = expected > 0
    assert not found[~real].any(), "what has no probability is never drawn"
    terms = n * (found[real] - expected[real]) ** 2 / expected[real]
    return float(terms.sum() / max(1, int(real.sum()) - 1))


@pytest.mark.parametrize("size", [V, 700])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_tokens_come_as_often_as_they_are_likely(size: int, spread: float) -> None:
    logits = spread * torch.randn(size, generator=torch.Generator().manual_seed(0))
    logits[5] = -torch.inf
    expected = torch.softmax(logits.double() / 0.8, -1).float()
    assert chi_square(shares(logits, temperature=0.8), expected, 20_000) < 3


@pytest.mark.parametrize(
    "settings", [{"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.7}]
)
def test_truncation_against_a_slow_loop(settings: dict[str, float]) -> None:
    logits = torch.randn(V, generator=torch.Generator().manual_seed(1))
    p = torch.softmax(logits.double(), -1)
    order = p.argsort(descending=True).tolist()
    kept = order[: settings.get("top_k", V)]
    total, nucleus, mass = float(p[kept].sum()), [], 0.0
    for token in kept:
        if mass / total < settings.get("top_p", 1.0):
            nucleus.append(token)
        mass += float(p[token])
    kept = [t for t in nucleus if p[t] >= settings.get("min_p", 0.0) * p.max()]
    expected = torch.zeros(V, dtype=torch.float64)
    expected[kept] = p[kept] / p[kept].sum()
    assert chi_square(shares(logits, **settings), expected.float(), 20_000) < 3
    made = draw(logits.expand(50, -1), **settings)
    assert torch.allclose(made.sampled_logprobs.double(), expected[made.tokens].log(), atol=1e-5)
    assert torch.allclose(made.logprobs.double(), p[made.tokens].log(), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nucleus_may_be_wider_than_the_first_look(dtype: torch.dtype) -> None:
    """Of rows side by side, some of which are certain; numpy is the reference, row by row."""
    noise = torch.randn(7, 5000, generator=torch.Generator().manual_seed(3))
    logits = (noise * torch.tensor([8.0, 0.3, 5.0, 0.0, 1.0, 0.01, 3.0])[:, None]).to(dtype)
    kept = truncated(logits, top_p=0.9).isfinite()
    widths = kept.sum(dim=1)
    assert int((widths < 1024).sum()) >= 2, "and some are not"
    assert int((widths > 1024).sum()) >= 2
    for row, is_kept in zip(logits, kept, strict=True):
        p = torch.softmax(row.float(), -1).numpy()
        descending = np.sort(p)[::-1]
        before = descending.astype(np.float64).cumsum() - descending
        border = descending[before < 0.9][-1]
        assert (is_kept.numpy() == (p >= border)).all()
        assert p[is_kept.numpy()].sum() >= 0.9 - 1e-4
        assert p[p > border].sum() < 0.9, "it is the smallest set"


def test_penalties_against_a_slow_loop() -> None:
    logits = torch.randn(V, generator=torch.Generator().manual_seed(2))
    prompt, answer = [0] * V, [0] * V
    prompt[1] = prompt[2] = 1
    answer[2], answer[4] = 3, 1
    changed = logits.double().clone()
    for token in range(V):
        if prompt[token] + answer[token]:
            changed[token] = changed[token] / 1.3 if changed[token] > 0 else changed[token] * 1.3
        changed[token] -= 0.4 * (answer[token] > 0) + 0.2 * answer[token]
    changed[7] += 1.5
    expected = torch.log_softmax(changed / 0.9, -1)
    made = draw(
        logits.expand(60, -1), prompt=prompt, answer=answer, temperature=0.9,
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, logit_bias=("7:1.5",),
    )  # fmt: skip
    assert torch.allclose(made.sampled_logprobs.double(), expected[made.tokens], atol=1e-5)
    plain = torch.log_softmax(logits.double() / 0.9, -1)
    assert torch.allclose(made.logprobs.double(), plain[made.tokens], atol=1e-5)
    entropy = -(plain.exp() * plain).sum()
    assert torch.allclose(made.entropy.double(), entropy.expand(60), atol=1e-5)


def test_stop_tokens_wait_for_the_least_length() -> None:
    logits = torch.zeros(200, V)
    logits[:, STOP] = 5.0
    early, late = draw(logits, min_new_tokens=4, drawn=3), draw(logits, min_new_tokens=4, drawn=4)
    assert STOP not in early.tokens.tolist()
    assert (late.tokens == STOP).float().mean() > 0.8
    assert torch.allclose(early.sampled_logprobs, torch.tensor(math.log(1 / (V - 1))), atol=1e-5)
    expected = torch.log_softmax(logits, -1).gather(1, early.tokens[:, None])[:, 0]
    assert torch.allclose(early.logprobs, expected, atol=1e-5)


def test_a_draw_is_a_function_of_key_and_number_alone() -> None:
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(3))
    together = draw(logits)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(4))
    shuffled = draw(logits[order], keys=(torch.arange(40) * 7919)[order])
    assert torch.equal(shuffled.tokens, together.tokens[order])
    assert torch.equal(shuffled.logprobs, together.logprobs[order])
    assert not torch.equal(draw(logits, drawn=1).tokens, together.tokens)


def test_the_numbers_are_those_of_the_training_forward() -> None:
    logits = torch.randn(40, 300)
    made = draw(logits, temperature=0.7)
    logprobs, entropy = dense.token_logprobs(logits, made.tokens, 0.7)
    assert torch.equal(made.logprobs, logprobs)
    assert torch.equal(made.entropy, entropy)


def test_keys_differ_by_everything_they_name() -> None:
    named = [(s, t, p, n) for s in (0, 1) for t in (0, 1) for p in (0, 1) for n in (0, 1)]
    assert len({sequence_key(*name) for name in named}) == len(named)


@pytest.mark.parametrize("pair", ["x:1", "4", "-1:2", "3:nan"])
def test_a_bias_that_is_none(pair: str) -> None:
    with pytest.raises(ConfigError, match="logit_bias must list ID:BIAS"):
        draw(torch.zeros(1, V), logit_bias=(pair,))


def test_a_bias_for_no_token() -> None:
    with pytest.raises(GenerationError, match="must name tokens below the model's 12; got 99"):
        draw(torch.zeros(1, V), logit_bias=("99:1",))


@pytest.mark.parametrize("bias", ["inf", "1e39"])
def test_a_bias_that_is_no_float32(bias: str) -> None:
    with pytest.raises(GenerationError, match="must be a float32 number or -inf; got"):
        draw(torch.zeros(1, V), logit_bias=(f"3:{bias}",))


def test_stop_tokens_that_the_model_does_not_have_are_never_drawn() -> None:
    config = SamplingConfig(min_new_tokens=2)
    sampler = Sampler(config, (STOP, V + 40), torch.device("cpu"), V)
    logits = torch.zeros(50, V)
    made = sampler.draw(logits, torch.arange(50), torch.zeros(50, dtype=torch.long))
    assert STOP not in made.tokens.tolist()


@pytest.mark.parametrize("knobs", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize("broken", [torch.nan, -torch.inf])
def test_nothing_to_draw_from_is_told_by_the_log_prob(
    knobs: dict[str, float], broken: float
) -> None:
    logits = torch.zeros(3, V)
    logits[1] = broken
    made = draw(logits, **knobs)
    assert made.sampled_logprobs.isnan().tolist() == [False, True, False]
