"""Log-probs against a slow loop over positions and torch's own distributions."""

from __future__ import annotations

import pytest
import torch

from tandem.objectives.logprobs import scatter_to_tokens, token_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_rows", [None, 2])
def test_logprobs_and_entropy_equal_a_slow_loop(temperature: float, max_rows: int | None) -> None:
    vocabulary, width = 11, 6
    head = torch.randn(vocabulary, width, requires_grad=True)
    hidden = torch.randn(9, width, requires_grad=True)
    targets = torch.randint(0, vocabulary, (9,))
    logprobs, entropy = token_logprobs(
        lambda rows: rows @ head.T,
        hidden,
        targets,
        vocabulary=vocabulary,
        weights=[head],
        temperature=temperature,
        with_entropy=True,
        max_rows=max_rows,
    )
    for i in range(9):
        logits = (head @ hidden[i]) / temperature
        distribution = torch.distributions.Categorical(logits=logits)
        assert logprobs[i].item() == pytest.approx(
            distribution.log_prob(targets[i]).item(), abs=1e-5
        )
        assert entropy[i].item() == pytest.approx(distribution.entropy().item(), abs=1e-5)


def test_chunks_give_the_same_gradient_as_the_whole() -> None:
    torch.manual_seed(1)
    targets = torch.randint(0, 13, (10,))
    values, gradients = [], []
    weights = torch.randn(10)
    start = torch.randn(10, 4)
    head_start = torch.randn(13, 4)
    for max_rows in (None, 3):
        hidden = start.clone().requires_grad_()
        head = head_start.clone().requires_grad_()
        logprobs, entropy = token_logprobs(
            lambda rows, head=head: rows @ head.T,
            hidden,
            targets,
            vocabulary=13,
            weights=[head],
            with_entropy=True,
            max_rows=max_rows,
        )
        (logprobs * weights - 0.3 * entropy).sum().backward()
        values.append(logprobs.detach())
        gradients.append((hidden.grad, head.grad))
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_chunks_add_half_precision_gradients_up_in_float32() -> None:
    """64 chunks whose gradients bf16 additions would round 63 times; beside the float64 sum."""
    torch.manual_seed(2)
    hidden = torch.randn(64, 8).bfloat16().requires_grad_()
    head = torch.randn(31, 8).bfloat16().requires_grad_()
    targets = torch.randint(31, (64,))

    def gradient(rows: slice, max_rows: int) -> torch.Tensor:
        logprobs, _ = token_logprobs(
            lambda x: x @ head.T,
            hidden[rows],
            targets[rows],
            vocabulary=31,
            weights=[head],
            max_rows=max_rows,
        )
        (found,) = torch.autograd.grad(logprobs.sum(), head)
        return found

    expected = torch.zeros(31, 8)
    for i in range(64):
        expected += gradient(slice(i, i + 1), 1)
    assert torch.equal(gradient(slice(None), 1), expected.bfloat16())


def test_entropy_survives_tokens_that_cannot_occur() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    _, entropy = token_logprobs(
        lambda rows: rows, logits, torch.tensor([0]), vocabulary=3, weights=[], with_entropy=True
    )
    assert entropy.item() == pytest.approx(torch.tensor(2.0).log().item())


def test_scatter_puts_values_back_and_keeps_gradient() -> None:
    mask = torch.tensor([[False, True, True], [False, False, True]])
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    placed = scatter_to_tokens(values, mask)
    assert placed.tolist() == [[0.0, 1.0, 2.0], [0.0, 0.0, 3.0]]
    (placed * torch.tensor([[9.0, 2.0, 3.0], [9.0, 9.0, 5.0]])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [2.0, 3.0, 5.0]
