"""The exact KL over the vocabulary, against a plain sum in float64 and its gradient."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from tandem.objectives.divergence import EXACT, ExactKL, Predictions, exact_kl

N, D, V = 7, 5, 11


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


def slow(case: Case, placement: ExactKL, temperature: float, vocabulary: int = V) -> Tensor:
    """(N,) float64: the sum over tokens, one by one."""
    made = []
    for state, other in zip(case.hidden, case.others, strict=True):
        logits = (case.head(state)[:vocabulary]).double() / temperature
        theirs = (case.other(other)[:vocabulary]).double() / temperature
        p, q = logits.softmax(0), theirs.softmax(0)
        one, two = (p, q) if placement == "exact-in-loss" else (q, p)
        made.append(sum(a * (a.log() - b.log()) for a, b in zip(one, two, strict=True)))
    return torch.stack(made)  # type: ignore[arg-type]


def gradients(case: Case, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [case.hidden, case.head.weight, case.head.bias]))


@pytest.mark.parametrize("placement", EXACT)
@pytest.mark.parametrize("rows", [None, 1, 3, N])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_value_and_gradients_are_those_of_the_plain_sum(
    case: Case, placement: ExactKL, rows: int | None, temperature: float
) -> None:
    total, each = exact_kl(
        Predictions(case.head, case.hidden), Predictions(case.other, case.others), case.counted,
        placement, vocabulary=V, weights=list(case.head.parameters()), temperature=temperature,
        max_rows=rows,
    )  # fmt: skip
    expected = slow(case, placement, temperature)
    torch.testing.assert_close(each.double(), expected.detach(), atol=1e-6, rtol=1e-5)
    assert not each.requires_grad
    plain = (expected * case.counted).sum()
    torch.testing.assert_close(total.double(), plain, atol=1e-6, rtol=1e-5)
    for ours, theirs in zip(gradients(case, 3 * total), gradients(case, 3 * plain), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("placement", EXACT)
def test_one_model_has_no_divergence_and_no_gradient(case: Case, placement: ExactKL) -> None:
    total, each = exact_kl(
        Predictions(case.head, case.hidden), Predictions(case.head, case.hidden.detach()),
        case.counted, placement, vocabulary=V, weights=list(case.head.parameters()), max_rows=2,
    )  # fmt: skip
    assert each.abs().max() < 1e-6
    assert all(part.abs().max() < 1e-6 for part in gradients(case, total))


@pytest.mark.parametrize("placement", EXACT)
def test_padding_behind_the_vocabulary_is_left_out(case: Case, placement: ExactKL) -> None:
    total, each = exact_kl(
        Predictions(case.head, case.hidden), Predictions(case.other, case.others), case.counted,
        placement, vocabulary=8, weights=list(case.head.parameters()), max_rows=4,
    )  # fmt: skip
    expected = slow(case, placement, 1.0, vocabulary=8)
    torch.testing.assert_close(each.double(), expected.detach(), atol=1e-6, rtol=1e-5)
    _, of_weight, of_bias = gradients(case, total)
    assert not of_weight[8:].any()
    assert not of_bias[8:].any()
    assert of_weight[:8].any()


@pytest.mark.parametrize("placement", EXACT)
def test_tokens_that_a_model_excludes_stay_finite(case: Case, placement: ExactKL) -> None:
    """Minus infinity excludes a token: of both models, of the other, of the policy."""

    def excluding(head: nn.Linear, tokens: list[int]) -> nn.Module:
        return nn.Sequential(head, _Excluding(tokens))

    total, each = exact_kl(
        Predictions(excluding(case.head, [0, 2]), case.hidden),
        Predictions(excluding(case.other, [0, 1]), case.others),
        case.counted, placement, vocabulary=V, weights=list(case.head.parameters()), max_rows=3,
    )  # fmt: skip
    assert torch.isfinite(each).all()
    assert (each > 1).all(), "one gives probability to what the other excludes"
    assert all(torch.isfinite(part).all() for part in gradients(case, total))


class _Excluding(nn.Module):
    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, logits: Tensor) -> Tensor:
        return logits.index_fill(1, torch.tensor(self.tokens), -torch.inf)


def test_without_gradient_nothing_is_kept(case: Case) -> None:
    with torch.no_grad():
        total, each = exact_kl(
            Predictions(case.head, case.hidden), Predictions(case.other, case.others),
            case.counted, "exact-in-loss", vocabulary=V, weights=list(case.head.parameters()),
        )  # fmt: skip
    assert not total.requires_grad
    expected = slow(case, "exact-in-loss", 1.0)
    torch.testing.assert_close(each.double(), expected.detach(), atol=1e-6, rtol=1e-5)


def test_a_frozen_head_leaves_the_states_their_gradient(case: Case) -> None:
    for parameter in case.head.parameters():
        parameter.requires_grad_(False)
    total, _ = exact_kl(
        Predictions(case.head, case.hidden), Predictions(case.other, case.others), case.counted,
        "exact-in-loss", vocabulary=V, weights=list(case.head.parameters()), max_rows=3,
    )  # fmt: skip
    (ours,) = torch.autograd.grad(total, [case.hidden])
    plain = (slow(case, "exact-in-loss", 1.0) * case.counted).sum()
    (theirs,) = torch.autograd.grad(plain, [case.hidden])
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)
