"""Gradients of weights are added where they are kept, and handed on where someone looks at them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tandem.ops import dense, native

pytestmark = pytest.mark.skipif(not native.available(), reason=native.why_not())

IDS = torch.tensor([[3, 0, 3, 7, 2, 3], [1, 1, 4, 6, 2, 0]])
PADDING = 2
Loss = Callable[[Tensor, Tensor], Tensor]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ours(table: Tensor, weight: Tensor) -> Tensor:
    """The table is the embedding and the vocabulary head, as in a model with tied weights."""
    hidden = dense.linear(dense.embedding(IDS, table, PADDING), weight)
    return dense.linear(hidden.tanh(), table).square().sum()


def theirs(table: Tensor, weight: Tensor) -> Tensor:
    hidden = F.linear(F.embedding(IDS, table, PADDING), weight)
    return F.linear(hidden.tanh(), table).square().sum()


def weights() -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(normal(9, 5)), nn.Parameter(normal(5, 5, seed=1))


def test_embedding_looks_rows_up() -> None:
    table = normal(9, 5)
    assert torch.equal(dense.embedding(IDS, table, PADDING), table[IDS])
    with pytest.raises(IndexError):
        dense.embedding(torch.tensor([9]), table)


def test_sums_over_micro_batches_are_autograds() -> None:
    found, wanted = weights(), weights()
    for micro_batch in range(3):
        kept = [parameter.grad for parameter in found]
        ours(*found).backward()
        theirs(*wanted).backward()
        for own, other, before in zip(found, wanted, kept, strict=True):
            assert own.grad is not None
            assert other.grad is not None
            assert not micro_batch or own.grad is before, "added in place"
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_more_rows_than_a_run_are_added_too() -> None:
    x, weight = normal(1100, 40), nn.Parameter(normal(70, 40, seed=1))
    start = normal(70, 40, seed=2)
    weight.grad = start.clone()
    pull = normal(1100, 70, seed=3)
    dense.linear(x, weight).backward(pull)
    wanted = start.double() + pull.double().t() @ x.double()
    torch.testing.assert_close(weight.grad.double(), wanted, rtol=1e-5, atol=1e-4)


def test_padding_gets_no_gradient_and_every_other_row_its_sum() -> None:
    table = nn.Parameter(normal(9, 5))
    dense.embedding(IDS, table, PADDING).sum().backward()
    counts = torch.bincount(IDS.flatten(), minlength=9)
    counts[PADDING] = 0
    assert table.grad is not None
    assert torch.equal(table.grad, counts[:, None].float().expand(9, 5))


def test_gradients_that_are_asked_for_are_returned_and_not_kept() -> None:
    found, wanted = weights(), weights()
    for got, want in zip(
        torch.autograd.grad(ours(*found), found),
        torch.autograd.grad(theirs(*wanted), wanted),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert [parameter.grad for parameter in found] == [None, None]
    ours(*found).backward(inputs=[found[1]])
    assert found[0].grad is None
    assert found[1].grad is not None


def test_hooks_see_every_gradient() -> None:
    seen: list[Tensor] = []

    def before_adding(parameter: nn.Parameter) -> tuple[object, object]:
        view = parameter.view_as(parameter)
        assert view.grad_fn is not None
        node = view.grad_fn.next_functions[0][0]
        assert node is not None
        return node, node.register_prehook(lambda given: seen.append(given[0]))

    for keep in (
        lambda p: p.register_hook(seen.append),
        lambda p: p.register_post_accumulate_grad_hook(lambda q: seen.append(q.grad.clone())),
        before_adding,
    ):
        found, wanted = weights(), weights()
        held = keep(found[0])
        seen.clear()
        ours(*found).backward()
        theirs(*wanted).backward()
        assert wanted[0].grad is not None
        torch.testing.assert_close(seen[0], wanted[0].grad, rtol=1e-5, atol=1e-5)
        del held


def test_recomputed_forwards_reach_the_weights() -> None:
    found, wanted = weights(), weights()
    for _ in range(2):
        checkpoint(ours, *found, use_reentrant=False).backward()
        theirs(*wanted).backward()
    for own, other in zip(found, wanted, strict=True):
        assert own.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-5)


def logprob_loss(keep_logits: bool, cap: bool, retain: bool) -> tuple[list[Tensor], Tensor]:
    hidden, weight = normal(6, 5).requires_grad_(), nn.Parameter(normal(40, 5, seed=1))
    logits = dense.linear(hidden[None], weight).squeeze(0)
    if cap:  # the cap's own backward reads its result
        logits = torch.tanh(logits)
    before = logits.detach().clone()
    logprobs, _ = dense.token_logprobs(
        logits, torch.arange(6), with_entropy=False, keep_logits=keep_logits
    )
    loss = (logprobs * normal(6, seed=2)).sum()
    loss.backward(retain_graph=retain)
    if retain:
        loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [hidden.grad, weight.grad], (logits.detach() - before).abs().max()


@pytest.mark.parametrize("cap", [False, True])
@pytest.mark.parametrize("retain", [False, True])
def test_logits_that_are_given_up_become_their_gradient(cap: bool, retain: bool) -> None:
    wanted, kept = logprob_loss(True, cap, retain)
    found, changed = logprob_loss(False, cap, retain)
    assert kept == 0
    assert bool(changed > 0) or cap, "the gradient took their place"
    assert changed == 0 or not cap, "another backward needed them"
    for own, other in zip(found, wanted, strict=True):
        assert torch.equal(own, other)
