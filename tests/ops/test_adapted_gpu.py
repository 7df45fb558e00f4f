"""Adapted layers in one kernel against the plain path: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.config.lora import LoraConfig
from tandem.generation.runner import TwinRunner
from tandem.models.frozen import FrozenLinear
from tandem.models.lora import LoraLinear, adapters_off, add_lora, keep_start, lora_parameters
from tandem.models.quantized import PackedWeight
from tandem.models.twin import kv_shapes
from tandem.ops import gpu, native
from tandem.ops.attention_context import KVMemory
from tests.models.families import tiny_model
from tests.ops.test_paged_gpu import DEVICE, INTERPRETED, kernels

pytestmark = [
    kernels,
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
# bfloat16: the interpreter cuts off where a GPU rounds.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def _bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter multiplies the bits of bfloat16 as integers."""
    if not INTERPRETED:
        return
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def product(_: Any, a: Any, b: Any, total: Any, *__: Any) -> Any:
        a, b = (
            (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype == tl.bfloat16 else x.data
            for x in (a, b)
        )
        return TensorHandle(np.matmul(a, b, dtype=total.data.dtype) + total.data, tl.float32)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", product)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(native, "available", lambda: False)
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)


def layers_of(dtype: torch.dtype, inputs: int, biased: bool, ranks: tuple[int, ...]) -> list[Any]:
    """Layers of 40, 8 and 24 outputs; rank 0 is one without an adapter."""
    made: list[Any] = []
    for outputs, rank in zip((40, 8, 24), ranks, strict=False):
        base = nn.Linear(inputs, outputs, bias=biased).to(dtype)
        if rank == 0:
            made.append(base)
            continue
        layer = LoraLinear(base, rank, 2.0 * rank + 1.0, 0.0)
        for part in (layer.lora_A, layer.lora_B):
            nn.init.normal_(part.weight, std=0.3)
        made.append(layer)
    return made


def in_one(x: Tensor, layers: list[Any]) -> Tensor:
    from tandem.ops.adapted_gpu import Adapter, adapted_linear, takes

    adapters = [
        Adapter(layer.lora_A.weight, layer.lora_B.weight, layer.scale)
        if isinstance(layer, LoraLinear)
        else None
        for layer in layers
    ]
    weights = [
        own.layout.on_gpu(own.packed, own.scales) if isinstance(own, PackedWeight) else own
        for own in (layer.weight for layer in layers)
    ]
    biases = [layer.bias for layer in layers]
    assert takes(x, weights, biases, adapters)
    return adapted_linear(x, weights, biases, adapters)


@torch.no_grad()
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("ranks", [(3,), (1, 0), (4, 20, 0)])
@pytest.mark.parametrize("rows", [5, 70])
def test_adapted_layers(
    dtype: torch.dtype, biased: bool, ranks: tuple[int, ...], rows: int
) -> None:
    layers = layers_of(dtype, 150, biased, ranks)
    x = torch.randn(1, rows, 150).to(dtype)
    plain = torch.cat([layer(x) for layer in layers], -1)
    ours = in_one(x, layers)
    assert ours.shape == plain.shape
    assert ours.dtype == dtype
    scale = float(plain.abs().max())
    assert float((ours - plain).abs().max()) <= TOLERANCE[dtype] * scale


@torch.no_grad()
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kind", "inputs"), [("nf4", 192), ("int8", 512)])
@pytest.mark.parametrize(("ranks", "rows"), [((3,), 20), ((4, 20, 0), 5)])
def test_adapted_layers_in_few_bits(
    dtype: torch.dtype, kind: str, inputs: int, ranks: tuple[int, ...], rows: int
) -> None:
    """Against the dequantized weights."""
    layers = layers_of(dtype, inputs, True, ranks)
    plain = []
    x = torch.randn(rows, inputs).to(dtype)
    for i, layer in enumerate(layers):
        if not isinstance(layer, LoraLinear):
            layers[i] = layer = FrozenLinear(layer, kind)
        else:
            layer.quantize(kind)
        made = F.linear(x, layer.weight.dequantized(), layer.bias)
        plain.append(layer.adapted(x, made) if isinstance(layer, LoraLinear) else made)
    whole = torch.cat(plain, -1)
    scale = float(whole.abs().max())
    assert float((in_one(x, layers) - whole).abs().max()) <= TOLERANCE[dtype] * scale


@torch.no_grad()
def test_the_parts_of_an_adapter_in_bfloat16_add_up_to_it() -> None:
    """x and W without a share of the result: what is left is B A x to float32's rounding, which
    one bfloat16 of A would miss by 1 part in 256."""
    layer = layers_of(torch.bfloat16, 64, False, (4,))[0]
    layer.weight.zero_()
    layer.lora_B.weight.zero_()
    layer.lora_B.weight[:4] = torch.eye(4)
    one = layer.lora_A.weight
    one[:] = 1.0 + 2.0**-9 + 2.0**-18
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, 0], x[0, 1] = 1.0, -1.0
    one[:, 1] = 1.0
    left = in_one(x, [layer])[0, :4].float() / layer.scale
    assert torch.allclose(left, torch.full((4,), 2.0**-9 + 2.0**-18), rtol=2.0**-7)


@torch.no_grad()
def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    layers = layers_of(torch.float16, 150, False, (4, 4, 4))
    x = torch.randn(40, 150).half()
    assert torch.equal(in_one(x[20:], layers)[3], in_one(x, layers)[23])


def test_what_the_kernel_does_not_take() -> None:
    from tandem.ops.adapted_gpu import FEW_ROWS, MAX_RANK, Adapter, takes

    x, weight = torch.randn(5, 6), torch.randn(8, 6)
    small, wide = (
        Adapter(torch.randn(r, 6), torch.randn(8, r), 1.0) for r in (MAX_RANK, MAX_RANK + 1)
    )
    assert takes(x, [weight], [None], [small])
    assert not takes(x, [weight], [None], [wide])
    assert not takes(x, [weight], [None], [None])
    assert not takes(x, [weight] * 4, [None] * 4, [small] * 4)
    assert not takes(x, [weight] * 2, [None, torch.ones(8)], [small] * 2)
    assert not takes(x.half(), [weight], [None], [small])
    assert not takes(x, [torch.randn(6, 8).t()], [None], [small])
    assert not takes(x, [weight], [None], [Adapter(small.down.half(), small.up.half(), 1.0)])
    x = torch.randn(FEW_ROWS, 128)
    adapter = Adapter(torch.randn(4, 128), torch.randn(8, 4), 1.0)
    bits = PackedWeight(torch.randn(8, 128), "nf4")
    packed = bits.layout.on_gpu(bits.packed, bits.scales)
    assert takes(x, [packed], [None], [adapter])
    assert not takes(torch.randn(FEW_ROWS + 1, 128), [packed], [None], [adapter])
    assert not takes(x, [packed, torch.randn(8, 128)], [None] * 2, [adapter] * 2)
    odd = PackedWeight(torch.randn(8, 100), "nf4")
    ragged = odd.layout.on_gpu(odd.packed, odd.scales)
    adapter = Adapter(torch.randn(4, 100), torch.randn(8, 4), 1.0)
    assert not takes(x[:, :100], [ragged], [None], [adapter])


@pytest.mark.parametrize("family", ["llama", "qwen2", "opt"])
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj")])
def test_tokens_of_whole_models(
    family: str, targets: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill and a step of decoding, adapters on, off, and as they started, against the model's
    own forward."""
    monkeypatch.setattr(gpu, "fuses", lambda x: True)
    from tandem.ops import adapted_gpu

    calls: list[int] = []
    inner = adapted_gpu._adapted_linear

    def counted(x: Tensor, weights: list[Tensor], *given: Any) -> Tensor:
        calls.append(len(weights))
        made: Tensor = inner(x, weights, *given)
        return made

    monkeypatch.setattr(adapted_gpu, "_adapted_linear", counted)
    model = tiny_model(family).eval()
    add_lora(model, LoraConfig(rank=3, alpha=6.0, targets=targets), seed=1)
    with torch.no_grad():
        for parameter in lora_parameters(model):
            parameter += 0.1 * torch.randn_like(parameter)
    keep_start(model)
    with torch.no_grad():
        for parameter in lora_parameters(model):
            parameter += 0.1 * torch.randn_like(parameter)
    memory = KVMemory(kv_shapes(model), 6, dtype=torch.float32, device=torch.device("meta"))
    memory.layers = [tuple(torch.zeros_like(t, device=DEVICE) for t in x) for x in memory.layers]
    runner = TwinRunner(model, memory)
    lengths, tables = (3, 17), torch.tensor([[4, 1], [0, 3]], dtype=torch.int32)
    rows = [torch.randint(4, 50, (n + 1,)) for n in lengths]
    prompts = torch.cat([row[:n] for row, n in zip(rows, lengths, strict=True)])
    seen = []
    attention = [3, 3]  # layers that each kernel computes
    everywhere = [1, 3, 1, 1, 1, 3, 1, 1, 1, 1] if family == "opt" else [3, 1, 2, 1] * 2
    for on in (True, False):
        with torch.no_grad():
            states = adapters_off(model) if not on else torch.no_grad()
            with states:
                runner.prefill(prompts, lengths, tables)
                assert not calls, "prefill takes the plain path"
                found = runner.decode(
                    torch.stack([row[-1] for row in rows]), torch.tensor(lengths), tables
                )
                for i, row in enumerate(rows):
                    own = model(input_ids=row[None], use_cache=False).logits[0, -1]
                    assert torch.allclose(found[i], own, atol=3e-5)
        assert calls == (attention if targets[0] == "q_proj" else everywhere)
        calls.clear()
        seen.append(found)
    assert not torch.allclose(*seen, atol=1e-2)
