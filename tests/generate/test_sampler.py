"""The sampler against exact distributions, and the keys that make it repeatable."""

from __future__ import annotations

import pytest
import torch

from tandem.generate.sampler import draw_tokens, keyed_uniforms, sequence_key, truncated


def uniforms(n: int, token: int = 0) -> torch.Tensor:
    keys = torch.tensor([sequence_key(7, 1, i, 0) for i in range(n)])
    return keyed_uniforms(keys, token)


def test_uniforms_are_uniform_and_uncorrelated_between_tokens() -> None:
    a, b = uniforms(20_000, 0), uniforms(20_000, 1)
    for u in (a, b):
        assert bool(((u >= 0) & (u < 1)).all())
        counts = torch.histc(u, bins=20, min=0, max=1)
        chi2 = ((counts - 1000) ** 2 / 1000).sum().item()
        assert chi2 < 43.8  # 99.9 % of chi-square with 19 degrees of freedom
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 0.03


def test_a_key_gives_one_number_whatever_stands_beside_it() -> None:
    keys = torch.tensor([sequence_key(1, 2, 3, 0), sequence_key(1, 2, 3, 1)])
    both = keyed_uniforms(keys, 5)
    assert keyed_uniforms(keys[1:], 5).item() == both[1].item()
    assert both[0].item() != both[1].item()
    assert len({sequence_key(s, t, p, n) for s in (1, 2) for t in (1, 2) for p in (1, 2)
                for n in (0, 1)}) == 16  # fmt: skip


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"), [(0, 1.0, 1.0), (0, 1.0, 0.6), (3, 1.0, 1.0), (0, 0.7, 1.3)]
)
def test_draws_follow_the_distribution_and_report_it(
    top_k: int, top_p: float, temperature: float
) -> None:
    logits = torch.tensor([1.2, 0.3, -0.5, 2.0, 0.0, -4.0])
    n = 30_000
    draw = draw_tokens(
        logits.expand(n, -1), uniforms(n), temperature=temperature, top_k=top_k, top_p=top_p
    )
    plain = torch.log_softmax(logits / temperature, dim=0)
    kept = torch.exp(plain)
    if top_k:
        kept[kept < kept.topk(top_k).values[-1]] = 0
    if top_p < 1:
        order = kept.argsort(descending=True)
        mass = 0.0
        for index in order:  # the definition, token by token
            if mass >= top_p:
                kept[index] = 0
            else:
                mass += plain[index].exp().item()
    exact = kept / kept.sum()
    counts = torch.bincount(draw.tokens, minlength=6).double()
    assert not counts[exact == 0].any()
    chosen = exact > 0
    chi2 = ((counts[chosen] - n * exact[chosen]) ** 2 / (n * exact[chosen])).sum().item()
    assert chi2 < 20.5  # 99.9 % of chi-square with 5 degrees of freedom
    torch.testing.assert_close(draw.logprobs, plain[draw.tokens])
    torch.testing.assert_close(draw.sampled_logprobs, exact.log()[draw.tokens])


def test_without_truncation_both_logprobs_are_one() -> None:
    draw = draw_tokens(torch.randn(64, 40), uniforms(64))
    torch.testing.assert_close(draw.logprobs, draw.sampled_logprobs)


def test_tokens_that_may_not_be_drawn_never_are() -> None:
    logits = torch.zeros(1000, 4)
    logits[:, [0, 3]] = -torch.inf
    drawn = draw_tokens(logits, uniforms(1000)).tokens.unique().tolist()
    assert drawn == [1, 2]
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert draw_tokens(logits[:2], edges).tokens.tolist() == [1, 2]


def test_top_p_keeps_the_likeliest_token_however_small() -> None:
    logprobs = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    assert truncated(logprobs, top_k=0, top_p=0.01).isinf().tolist() == [[False, True, True]]
    assert truncated(logprobs, top_k=0, top_p=0.6).isinf().tolist() == [[False, False, True]]
