"""Gradients of bfloat16 weights that go into float32 sums on a CPU, against float64."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tandem.objectives.logprobs import token_logprobs
from tandem.ops import dense, gpu, native

pytestmark = pytest.mark.skipif(not native.available(), reason=native.why_not())

BF16 = torch.bfloat16
IDS = torch.tensor([[3, 0, 3, 7, 2, 3], [1, 1, 4, 6, 2, 0]])
PADDING = 2


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Sums:
    """What an optimizer does: a sum per weight, made with the first gradient."""

    def __init__(self, *weights: nn.Parameter) -> None:
        self.kept: dict[nn.Parameter, Tensor] = {}
        held = weakref.ref(self)
        for weight in weights:
            gpu.keep_sum(weight, lambda weight: (found := held()) and found.of(weight))

    def of(self, weight: Tensor) -> tuple[Tensor, bool]:
        assert isinstance(weight, nn.Parameter)
        is_new = weight not in self.kept
        if is_new:
            self.kept[weight] = torch.full(weight.shape, float("nan"))
        return self.kept[weight], is_new


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 5, 3), (70, 130, 65), (1500, 40, 96)])
def test_a_turned_product_is_written_or_added(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    wide = normal(rows, outputs + 4, dtype=dtype)
    left, right = wide[:, :outputs], normal(rows, inputs, seed=1, dtype=dtype)
    exact = left.double().t() @ right.double()
    total = torch.full((outputs, inputs), float("nan"))
    torch.ops.tandem.add_turned(total, left, right, True)
    limit = 1e-6 * float(exact.abs().max())
    assert (total.double() - exact).abs().max() <= limit
    torch.ops.tandem.add_turned(total, left, right, False)
    assert (total.double() - 2 * exact).abs().max() <= 3 * limit


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("inputs", [112, 100])
def test_every_way_to_cut_a_turned_product_gives_the_same_bits(
    inputs: int, dtype: torch.dtype
) -> None:
    # More calls than are needed to try each way; factors are parts of wider rows.
    left, right = (
        normal(700, 150, dtype=dtype)[:, 7:],
        normal(700, inputs + 16, seed=1, dtype=dtype),
    )
    right = right[:, 16:]
    found = torch.empty(143, inputs)
    torch.ops.tandem.add_turned(found, left, right, True)
    for _ in range(45):
        again = torch.full_like(found, float("nan"))
        torch.ops.tandem.add_turned(again, left, right, True)
        assert torch.equal(again, found)


def test_no_rows_are_a_sum_of_zeros() -> None:
    total = torch.full((3, 4), float("nan"))
    torch.ops.tandem.add_turned(total, normal(0, 3), normal(0, 4), True)
    assert torch.equal(total, torch.zeros(3, 4))


def loss_of(table: Tensor, weight: Tensor, bias: Tensor, ids: Tensor = IDS) -> Tensor:
    """The table is embedding and vocabulary head, as in a model with tied weights."""
    hidden = dense.linear(dense.embedding(ids, table, PADDING), weight, bias)
    logits = dense.linear(hidden, table).flatten(0, 1)
    logprobs, _ = dense.token_logprobs(logits, ids.flatten(), keep_logits=False)
    return logprobs.sum()


def test_sums_over_micro_batches_are_those_of_gradients_that_are_handed_on() -> None:
    table, weight, bias = (
        nn.Parameter(normal(*shape, seed=seed))
        for seed, shape in enumerate([(9, 34), (34, 34), (34,)])
    )
    wanted = {p: torch.zeros(p.shape, dtype=torch.float64) for p in (table, weight, bias)}
    parts = (IDS, IDS.flip(0), IDS[:1])
    for ids in parts:
        loss_of(table, weight, bias, ids).backward()
        for parameter, total in wanted.items():
            assert parameter.grad is not None
            total += parameter.grad.double()
            parameter.grad = None
    sums = Sums(table, weight)
    for ids in parts:
        loss_of(table, weight, bias, ids).backward()
    assert table.grad is None
    assert weight.grad is None
    for parameter in (table, weight):  # each gradient above was rounded, and the table's twice
        largest = float(wanted[parameter].abs().max())
        apart = (sums.kept[parameter].double() - wanted[parameter]).abs().max()
        assert apart <= 2**-7 * largest
    assert bias.grad is not None, "it has no sum"
    torch.testing.assert_close(bias.grad.double(), wanted[bias], rtol=2**-6, atol=2**-6)


def test_a_sum_is_closer_to_float64_than_a_rounded_gradient() -> None:
    weight = nn.Parameter(normal(40, 64))
    x, given = normal(300, 64, seed=1), normal(300, 40, seed=2)
    exact = given.double().t() @ x.double()
    dense.linear(x, weight).backward(given)
    assert weight.grad is not None
    rounded = (weight.grad.double() - exact).abs().max()
    sums = Sums(weight)
    dense.linear(x, weight).backward(given)
    assert (sums.kept[weight].double() - exact).abs().max() < rounded / 50


def test_outputs_and_gradients_of_inputs_do_not_depend_on_sums() -> None:
    weight, bias = nn.Parameter(normal(40, 64)), nn.Parameter(normal(40, seed=3))
    given = normal(30, 40, seed=2)
    found = []
    for keeps in (False, True):
        sums = Sums(weight) if keeps else None
        x = normal(30, 64, seed=1).requires_grad_()
        bias.grad = None
        y = dense.linear(x, weight, bias)
        y.backward(given)
        assert x.grad is not None
        assert bias.grad is not None
        found.append((y.detach(), x.grad, bias.grad))
        assert sums is None or weight in sums.kept
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_weight_whose_optimizer_is_gone_has_its_own_gradient_again() -> None:
    table = nn.Parameter(normal(9, 34))
    sums = Sums(table)
    del sums
    gc.collect()
    dense.linear(dense.embedding(IDS, table, PADDING), table).sum().backward()
    assert table.grad is not None
    assert bool(table.grad.any())


def test_padding_and_ids_out_of_range() -> None:
    total = torch.zeros(9, 5)
    torch.ops.tandem.add_rows(total, IDS, torch.ones(2, 6, 5, dtype=BF16), PADDING)
    counts = torch.bincount(IDS.flatten(), minlength=9)
    counts[PADDING] = 0
    assert torch.equal(total, counts[:, None].float().expand(9, 5))
    with pytest.raises(IndexError, match=r"in \[0, 9\); got 9"):
        torch.ops.tandem.add_rows(total, torch.tensor([9]), torch.ones(1, 5), -1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_add_to_sums_too(reentrant: bool) -> None:
    found = []
    for recomputes in (False, True):
        table, weight = nn.Parameter(normal(9, 34)), nn.Parameter(normal(34, 34, seed=1))
        sums = Sums(table, weight)
        hidden = dense.embedding(IDS, table, PADDING)

        def layer(x: Tensor, weight: nn.Parameter = weight) -> Tensor:
            return dense.linear(x, weight).tanh()

        made = checkpoint(layer, hidden, use_reentrant=reentrant) if recomputes else layer(hidden)
        dense.linear(made, table).float().square().sum().backward()
        assert weight.grad is None
        assert table.grad is None
        found.append((sums.kept[table], sums.kept[weight]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_who_asks_for_gradients_gets_them_and_sums_stay() -> None:
    table, weight = nn.Parameter(normal(9, 34)), nn.Parameter(normal(34, 34, seed=1))
    x = normal(30, 34, seed=2).requires_grad_()
    wanted = torch.autograd.grad(dense.linear(x, weight).sum(), (x, weight))
    rows = torch.autograd.grad(dense.embedding(IDS, table, PADDING).sum(), table)
    sums = Sums(table, weight)
    found = torch.autograd.grad(dense.linear(x, weight).sum(), (x, weight))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)
    (of_x,) = torch.autograd.grad(dense.linear(x, weight).sum(), x)
    assert torch.equal(of_x, found[0])
    dense.linear(x, weight).sum().backward(inputs=[x])
    assert torch.equal(torch.autograd.grad(dense.embedding(IDS, table, PADDING).sum(), table)[0],
                       rows[0])  # fmt: skip
    assert not sums.kept


def test_a_hook_sees_the_gradient() -> None:
    weight = nn.Parameter(normal(40, 64))
    sums = Sums(weight)
    seen: list[Tensor] = []
    weight.register_hook(seen.append)
    dense.linear(normal(30, 64, seed=1), weight).sum().backward()
    assert len(seen) == 1
    assert weight.grad is not None
    assert torch.equal(weight.grad, seen[0])
    assert not sums.kept


def test_a_product_that_fails_leaves_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(normal(40, 64))
    sums = Sums(weight)

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    y = dense.linear(normal(30, 64, seed=1), weight)
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "add_product_", fail)
        with pytest.raises(MemoryError):
            y.sum().backward()
    assert torch.equal(sums.kept[weight], torch.zeros(40, 64))


def test_a_head_in_chunks_adds_to_its_sum() -> None:
    found = []
    hidden, targets = normal(50, 34, seed=1), torch.arange(50) % 9
    for rows in (50, 7):
        table = nn.Parameter(normal(9, 34))
        sums = Sums(table)
        logprobs, _ = token_logprobs(
            lambda part, table=table: dense.linear(part, table),
            hidden.clone().requires_grad_(),
            targets,
            vocabulary=9,
            weights=[table],
            max_rows=rows,
        )
        logprobs.sum().backward()
        assert table.grad is None
        found.append(sums.kept[table])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_short_ids_and_products_of_no_inputs() -> None:
    total = torch.zeros(9, 5)
    torch.ops.tandem.add_rows(total, IDS.int(), torch.ones(2, 6, 5, dtype=BF16), -1)
    assert torch.equal(total[:, 0], torch.bincount(IDS.flatten(), minlength=9).float())
    for dtype in (torch.float32, BF16):
        bias = normal(4, dtype=dtype)
        packed = dense.pack_weight(torch.empty(4, 0, dtype=dtype))
        made = dense.linear_packed(torch.empty(3, 0, dtype=dtype), packed, 4, 0, bias)
        assert torch.equal(made, bias.expand(3, 4))
