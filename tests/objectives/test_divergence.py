"""Divergences over the whole vocabulary, against a plain sum in float64 and its gradient."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from tandem.objectives.divergence import Divergence, ExactKL, Predictions, exact_divergence

N, D, V = 7, 5, 11

REVERSE = Divergence("exact-in-loss")
DIVERGENCES = [
    REVERSE,
    Divergence("forward-exact-in-loss"),
    Divergence("jsd-in-loss", 0.5),
    Divergence("jsd-in-loss", 0.1),
    Divergence("jsd-in-loss", 0.9),
]
every_divergence = pytest.mark.parametrize(
    "divergence", DIVERGENCES, ids=lambda one: f"{one.placement}-{one.beta}"
)


@dataclass
class Case:
    """A policy's head and states, another's, and what each token counts."""

    head: nn.Linear
    hidden: Tensor
    other: nn.Linear
    others: Tensor
    counted: Tensor


@pytest.fixture
def case() -> Case:
    torch.manual_seed(0)
    return Case(
        nn.Linear(D, V), torch.randn(N, D, requires_grad=True), nn.Linear(D + 2, V),
        torch.randn(N, D + 2), torch.rand(N),
    )  # fmt: skip


def slow(case: Case, divergence: Divergence, temperature: float, vocabulary: int = V) -> Tensor:
    """(N,) float64: the sum over tokens, one by one."""
    made = []
    for state, other in zip(case.hidden, case.others, strict=True):
        logits = (case.head(state)[:vocabulary]).double() / temperature
        theirs = (case.other(other)[:vocabulary]).double() / temperature
        p, q, beta = logits.softmax(0), theirs.softmax(0), divergence.beta
        if divergence.placement == "exact-in-loss":
            made.append(plain_kl(p, q))
        elif divergence.placement == "forward-exact-in-loss":
            made.append(plain_kl(q, p))
        else:
            m = beta * q + (1 - beta) * p
            made.append(beta * plain_kl(q, m) + (1 - beta) * plain_kl(p, m))
    return torch.stack(made)


def plain_kl(one: Tensor, two: Tensor) -> Tensor:
    return torch.stack([a * (a.log() - b.log()) for a, b in zip(one, two, strict=True)]).sum()


def gradients(case: Case, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [case.hidden, case.head.weight, case.head.bias]))


@every_divergence
@pytest.mark.parametrize("rows", [None, 1, 3, N])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_value_and_gradients_are_those_of_the_plain_sum(
    case: Case, divergence: Divergence, rows: int | None, temperature: float
) -> None:
    total, each = exact_divergence(
        Predictions(case.head, case.hidden), Predictions(case.other, case.others), case.counted,
        divergence, vocabulary=V, weights=list(case.head.parameters()), temperature=temperature,
        max_rows=rows,
    )  # fmt: skip
    expected = slow(case, divergence, temperature)
    torch.testing.assert_close(each.double(), expected.detach(), atol=1e-6, rtol=1e-5)
    assert not each.requires_grad
    plain = (expected * case.counted).sum()
    torch.testing.assert_close(total.double(), plain, atol=1e-6, rtol=1e-5)
    for ours, theirs in zip(gradients(case, 3 * total), gradients(case, 3 * plain), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


@every_divergence
def test_one_model_has_no_divergence_and_no_gradient(case: Case, divergence: Divergence) -> None:
    total, each = exact_divergence(
        Predictions(case.head, case.hidden), Predictions(case.head, case.hidden.detach()),
        case.counted, divergence, vocabulary=V, weights=list(case.head.parameters()), max_rows=2,
    )  # fmt: skip
    assert each.abs().max() < 1e-6
    assert all(part.abs().max() < 1e-6 for part in gradients(case, total))


@every_divergence
def test_padding_behind_the_vocabulary_is_left_out(case: Case, divergence: Divergence) -> None:
    total, each = exact_divergence(
        Predictions(case.head, case.hidden), Predictions(case.other, case.others), case.counted,
        divergence, vocabulary=8, weights=list(case.head.parameters()), max_rows=4,
    )  # fmt: skip
    expected = slow(case, divergence, 1.0, vocabulary=8)
    torch.testing.assert_close(each.double(), expected.detach(), atol=1e-6, rtol=1e-5)
    _, of_weight, of_bias = gradients(case, total)
    assert not of_weight[8:].any()
    assert not of_bias[8:].any()
    assert of_weight[:8].any()


@every_divergence
def test_tokens_that_a_model_excludes_stay_finite(case: Case, divergence: Divergence) -> None:
    """Minus infinity excludes a token: of both models, of the other, of the policy."""

    def excluding(head: nn.Linear, tokens: list[int]) -> nn.Module:
        return nn.Sequential(head, _Excluding(tokens))

    total, each = exact_divergence(
        Predictions(excluding(case.head, [0, 2]), case.hidden),
        Predictions(excluding(case.other, [0, 1]), case.others),
        case.counted, divergence, vocabulary=V, weights=list(case.head.parameters()), max_rows=3,
    )  # fmt: skip
    assert torch.isfinite(each).all()
    bounded = divergence.placement == "jsd-in-loss"
    assert (each > (0.02 if bounded else 1)).all(), "one excludes what the other gives"
    assert all(torch.isfinite(part).all() for part in gradients(case, total))


class _Excluding(nn.Module):
    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, logits: Tensor) -> Tensor:
        return logits.index_fill(1, torch.tensor(self.tokens), -torch.inf)


def test_without_gradient_nothing_is_kept(case: Case) -> None:
    with torch.no_grad():
        total, each = exact_divergence(
            Predictions(case.head, case.hidden), Predictions(case.other, case.others),
            case.counted, REVERSE, vocabulary=V, weights=list(case.head.parameters()),
        )  # fmt: skip
    assert not total.requires_grad
    expected = slow(case, REVERSE, 1.0)
    torch.testing.assert_close(each.double(), expected.detach(), atol=1e-6, rtol=1e-5)


def test_a_frozen_head_leaves_the_states_their_gradient(case: Case) -> None:
    for parameter in case.head.parameters():
        parameter.requires_grad_(False)
    total, _ = exact_divergence(
        Predictions(case.head, case.hidden), Predictions(case.other, case.others), case.counted,
        REVERSE, vocabulary=V, weights=list(case.head.parameters()), max_rows=3,
    )  # fmt: skip
    (ours,) = torch.autograd.grad(total, [case.hidden])
    plain = (slow(case, REVERSE, 1.0) * case.counted).sum()
    (theirs,) = torch.autograd.grad(plain, [case.hidden])
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("beta", "one_way"), [(1e-4, "forward-exact-in-loss"), (1 - 1e-4, "exact-in-loss")]
)
def test_a_mixture_near_one_model_is_the_kl_in_one_direction(
    case: Case, beta: float, one_way: ExactKL
) -> None:
    """Divided by what beta leaves to 0 or 1, value and gradient."""
    found = []
    for divergence in (Divergence("jsd-in-loss", beta), Divergence(one_way)):
        total, _ = exact_divergence(
            Predictions(case.head.double(), case.hidden.double()),
            Predictions(case.other.double(), case.others.double()),
            case.counted, divergence, vocabulary=V, weights=list(case.head.parameters()),
        )  # fmt: skip
        found.append([total, *torch.autograd.grad(total, list(case.head.parameters()))])
    for mixed, plain in zip(*found, strict=True):
        torch.testing.assert_close(mixed / 1e-4, plain, atol=3e-3, rtol=1e-2)
