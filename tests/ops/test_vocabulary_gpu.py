"""The vocabulary head in tiles, with plain torch for the kernels of a tile, against whole logits;
`test_kernels_gpu.py` runs the kernels themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.forward import response_logprobs
from tandem.models.lm_head import vocabulary_head
from tandem.models.packed import predictor_states
from tandem.objectives.logprobs import token_logprobs
from tandem.ops import gpu, logits, vocabulary_gpu
from tandem.ops.joined import joined_linear
from tandem.ops.logits import HeadProduct, tile_columns
from tandem.parallel.masters import MasterAdamW
from tests.models.families import CAUSAL_ONLY, FAMILIES, ragged_batch, tiny_model
from tests.ops.counting import Launches, kept, on_meta

AFTER = {"plain": None, "capped": lambda raw: 3.0 * torch.tanh(raw / 3.0)}


def fold(made: Tensor, targets: Tensor, numbers: Tensor, first: int, temperature: float) -> None:
    x = made.float() / temperature
    top = torch.maximum(numbers[0], x.amax(1))
    shrink, weights = (numbers[0] - top).exp(), (x - top[:, None]).exp()
    moved = (weights * (x - top[:, None])).nan_to_num(0.0).sum(1)
    lower = torch.where(shrink > 0, numbers[0] - top, 0.0)
    numbers[2] = shrink * (numbers[2] + numbers[1] * lower) + moved
    numbers[1] = numbers[1] * shrink + weights.sum(1)
    numbers[0] = top
    here = (targets >= first) & (targets < first + made.shape[1])
    own = x.gather(1, (targets - first).clamp(0, made.shape[1] - 1)[:, None])[:, 0]
    numbers[3] = torch.where(here, own, numbers[3])


def gradient(
    x: Tensor, targets: Tensor, sums: Tensor, entropy: Tensor, of_logprobs: Tensor,
    of_entropy: Tensor | None, made: Tensor, first: int, temperature: float,
) -> None:  # fmt: skip
    logprob = x.float() / temperature - sums[:, None]
    chance, g = logprob.exp(), of_logprobs[:, None]
    columns = torch.arange(first, first + x.shape[1])
    total = torch.where(columns == targets[:, None], g, 0.0) - g * chance
    if of_entropy is not None:
        bent = of_entropy[:, None] * chance * (logprob + entropy[:, None])
        total = total - bent.nan_to_num(0.0)
    made.copy_(total / temperature)


def whole_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> list[Tensor]:
    """Log-probs of targets and the entropy, by the formula."""
    rows = (logits.float() / temperature).log_softmax(-1)
    entropy = -(rows.exp() * rows.clamp(min=-200.0)).sum(-1)
    return [rows.gather(1, targets[:, None])[:, 0], entropy]


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Switches tiles of a few columns on and off."""
    monkeypatch.setattr(vocabulary_gpu, "fold_tile", fold)
    monkeypatch.setattr(vocabulary_gpu, "tile_gradient", gradient)
    monkeypatch.setattr(vocabulary_gpu, "tile_columns", lambda *_: 16)
    return lambda on: monkeypatch.setattr(gpu, "fuses", lambda x: on)


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tiles_are_whole_logits(
    after: str, dtype: torch.dtype, temperature: float, tiled: Any
) -> None:
    tiled(True)
    hidden, weight = (torch.randn(n, 12).to(dtype).requires_grad_() for n in (9, 51))
    bias = torch.randn(51).to(dtype).requires_grad_()
    targets, bent = torch.randint(51, (9,)), AFTER[after]
    head = HeadProduct(weight, bias, bent)
    ours = token_logprobs(
        lambda x: x, hidden, targets, vocabulary=51, weights=[], temperature=temperature,
        with_entropy=True, product=head,
    )  # fmt: skip
    whole = F.linear(hidden, weight, bias)
    plain = whole_logprobs(bent(whole) if bent else whole, targets, temperature)
    pulls = torch.randn(2, 9)
    inputs = [hidden, weight, bias]
    got = [*ours, *torch.autograd.grad(ours, inputs, pulls.unbind())]
    want = [*plain, *torch.autograd.grad(plain, inputs, pulls.unbind())]
    exact = dtype == torch.float32
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype
        tolerance = 1e-5 if exact or number < 2 else 2e-2
        assert torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance)


def test_without_entropy_or_gradient_of_the_head(tiled: Any) -> None:
    """As for a frozen head below adapters, and in scoring."""
    tiled(True)
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(40, 8)
    targets = torch.randint(40, (5,))
    banned = torch.zeros(40)
    banned[:20] = -math.inf  # a whole tile without probability
    targets += (targets < 20) * 20
    head = HeadProduct(weight, banned)
    logprobs, entropy = vocabulary_gpu.head_logprobs_gpu(head, hidden, targets, 1.0, False)
    assert not entropy.any()
    expected, _ = whole_logprobs(F.linear(hidden, weight, banned), targets)
    (got,) = torch.autograd.grad(logprobs.sum(), hidden)
    (want,) = torch.autograd.grad(expected.sum(), hidden)
    assert torch.allclose(logprobs, expected, atol=1e-5)
    assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("family", [*FAMILIES, *CAUSAL_ONLY])
def test_heads_of_all_families_in_tiles(family: str, tiled: Any) -> None:
    """Tied heads and their own, soft-caps and scales: values and every gradient."""
    found = []
    batch = ragged_batch()
    for on in (False, True):
        model = tiny_model(family).eval()
        head = vocabulary_head(model)
        assert head.product() is not None
        tiled(False)  # the layers stay plain
        states = predictor_states(model, batch)
        tiled(on)
        made = token_logprobs(
            head, states, batch.token_ids[batch.response_mask], vocabulary=99,
            weights=head.weights, with_entropy=True, product=head.product(),
        )  # fmt: skip
        (made[0].sum() - 0.3 * made[1].square().sum()).backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((torch.stack(made).detach(), gradients))
    (plain, wanted), (ours, got) = found
    assert torch.allclose(ours, plain, atol=1e-5)
    assert wanted.keys() == got.keys()
    for name, one in wanted.items():
        scale = max(1.0, float(one.abs().max()))
        assert float((got[name] - one).abs().max()) <= 2e-5 * scale, name


def test_the_heads_gradient_is_added_to_its_sum(tiled: Any) -> None:
    tiled(True)
    hidden, targets = torch.randn(9, 12).bfloat16().requires_grad_(), torch.randint(51, (9,))
    weight = torch.nn.Parameter(torch.randn(51, 12).bfloat16())
    group = {"params": [weight], "lr": 1e-3, "weight_decay": 0.0}
    optimizer = MasterAdamW([group], betas=(0.9, 0.95))
    expected = torch.zeros(51, 12)
    for _ in range(2):
        found, _ = vocabulary_gpu.head_logprobs_gpu(
            HeadProduct(weight), hidden, targets, 1.0, False
        )
        found.sum().backward()
        assert weight.grad is None
        exact = weight.detach().float().requires_grad_()
        plain, _ = whole_logprobs(F.linear(hidden.detach().float(), exact), targets)
        plain.sum().backward()
        expected += exact.grad
    (total,) = optimizer.collect()
    assert total.dtype == torch.float32
    assert float((total - expected).abs().max()) <= 2e-2 * float(expected.abs().max())
    before = weight.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(weight, before)
    assert optimizer.collect() == []


def test_joined_products_add_their_gradients_to_the_sums() -> None:
    """Two micro-batches give the float32 sum, and no gradient in the weights' type."""
    weights = [torch.nn.Parameter(torch.randn(n, 6).bfloat16()) for n in (4, 2)]
    optimizer = MasterAdamW(
        [{"params": weights, "lr": 1e-3, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    expected = torch.zeros(6, 6)
    for _ in range(2):
        x, pull = (torch.randn(5, 6).bfloat16() for _ in range(2))
        joined_linear(x, weights, [None, None]).backward(pull)
        expected += pull.float().t() @ x.float()
    assert all(weight.grad is None for weight in weights)
    assert torch.allclose(torch.cat(optimizer.collect()), expected, atol=1e-5)
    del optimizer  # the weights' gradients are their own again
    joined_linear(x, weights, [None, None]).backward(pull)
    assert all(weight.grad is not None for weight in weights)


def test_a_head_that_is_more_than_a_product_is_not_taken_apart() -> None:
    model = tiny_model("llama")
    kind = type(model.lm_head)

    class Shifted(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    model.lm_head.__class__ = Shifted
    assert vocabulary_head(model).product() is None
    batch = ragged_batch()
    logprobs, _ = response_logprobs(model, batch)
    assert logprobs.shape == batch.token_ids.shape


def test_no_tensor_of_the_size_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """8,192 tokens of an 8B with V = 128k: what is kept, made and launched, on the meta device."""
    on_meta(monkeypatch)
    rows, width, vocabulary = 8192, 4096, 128_256
    meta: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    hidden = torch.empty(rows, width, **meta, requires_grad=True)
    weight = torch.empty(vocabulary, width, **meta, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.int64, device="meta")
    with Launches() as launches, kept() as storages:
        made = token_logprobs(
            lambda x: x, hidden, targets, vocabulary=vocabulary, weights=[], with_entropy=True,
            product=HeadProduct(weight),
        )  # fmt: skip
    tiles = -(-vocabulary // tile_columns(rows, vocabulary, torch.bfloat16))
    assert tiles == 63
    assert launches.seen["tandem.fold_tile_gpu"] == tiles
    assert sum(storages.values()) <= hidden.nbytes + 16 * rows
    largest = 0

    class Largest(Launches):
        def __torch_dispatch__(self, *given: Any) -> Any:
            nonlocal largest
            result = super().__torch_dispatch__(*given)
            if isinstance(result, Tensor) and result.shape[-1:] != (width,):
                largest = max(largest, result.nbytes)
            return result

    with Largest() as launches:
        torch.autograd.backward(made, [torch.ones_like(part) for part in made])
    assert largest <= logits.TILE_BYTES
    # Per tile: logits, their gradient, the states' gradient, the weight's.
    assert launches.seen["tandem.tile_gradient_gpu"] == tiles
    assert launches.total <= 4 * tiles + 8
