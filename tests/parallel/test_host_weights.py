"""Frozen weights that visit a device: which are there when, and that the numbers are the same."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tandem.errors import ModelError
from tandem.models.blocks import decoder_blocks
from tandem.models.lm_head import vocabulary_logits
from tandem.models.packed import hidden_states
from tandem.models.twin import shares_every_tensor, twin_of
from tandem.parallel.host_weights import HostWeights, Waiting
from tandem.types import TokenBatch

CPU = torch.device("cpu")
LAYERS = 5


class FakeDevice:
    """A device whose copies hold NaN until they are waited for, and that knows what it holds."""

    def __init__(self) -> None:
        self.batches: list[list[weakref.ref[Tensor]]] = []
        self.waited: list[int] = []

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Waiting]:
        copies = [torch.empty_like(t) for t in tensors]
        for copy in copies:
            if copy.is_floating_point():
                copy.fill_(float("nan"))
        number = len(self.batches)
        # The storage: parameters are made over the copies.
        self.batches.append([weakref.ref(copy.untyped_storage()) for copy in copies])

        def wait() -> None:
            self.waited.append(number)
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.data.copy_(tensor.data)

        return copies, wait


def frozen_llama(*, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def batch() -> TokenBatch:
    ids = torch.arange(24).view(2, 12) % 61
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 9:] = False
    return TokenBatch(ids, mask, mask & False)


def logits(model: PreTrainedModel) -> Tensor:
    return vocabulary_logits(model, hidden_states(model, batch()))


def resident(device: FakeDevice) -> list[int]:
    """Numbers of the fetches of which anything is alive."""
    return [
        number for number, copies in enumerate(device.batches) if any(copy() for copy in copies)
    ]


def is_at_rest(model: nn.Module, before: dict[str, Tensor]) -> bool:
    now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return now.keys() == before.keys() and all(now[name] is before[name] for name in before)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("tied", [True, False])
def test_a_twin_computes_the_same_and_nothing_stays(tied: bool) -> None:
    model = frozen_llama(tied=tied)
    before = tensors_of(model)
    with torch.no_grad():
        expected = logits(model)
    device = FakeDevice()
    weights = HostWeights(model, decoder_blocks(model), CPU, to_device=device)
    twin = twin_of(model)
    with torch.no_grad(), weights.onload(decoder_blocks(twin)):
        head = model.get_output_embeddings().weight
        assert (head is model.get_input_embeddings().weight) == tied
        assert isinstance(head, nn.Parameter)
        assert head is not before["model.embed_tokens.weight"]
        del head
        assert shares_every_tensor(model)
        for _ in range(2):  # as for two micro-batches
            assert torch.equal(logits(model), expected)
    assert is_at_rest(model, before)
    assert resident(device) == []
    # What is outside the blocks came once, a tied weight as one tensor.
    outside = {id(t) for name, t in before.items() if ".layers." not in name}
    assert len(device.batches[0]) == len(outside)
    with torch.no_grad():
        assert torch.equal(logits(model), expected)


def test_a_block_is_there_when_it_runs_and_the_next_is_on_its_way() -> None:
    model = frozen_llama()
    blocks = decoder_blocks(model)
    device = FakeDevice()
    weights = HostWeights(model, blocks, CPU, to_device=device)
    seen: list[tuple[list[int], bool]] = []

    def look(block: nn.Module, *_: object) -> None:
        values = [p.isfinite().all() for p in block.parameters()]
        seen.append((resident(device), bool(torch.stack(values).all())))

    ids = batch().token_ids
    expected = model(ids).logits
    with torch.no_grad(), weights.onload():
        handles = [block.register_forward_pre_hook(look) for block in blocks]
        assert torch.equal(model(ids).logits, expected)
        for handle in handles:
            handle.remove()
        assert resident(device) == [0], "what is outside the blocks"
    # Fetch 0 is the rest; block n is fetch n + 1.
    assert seen == [([0, n + 1, n + 2], True) for n in range(LAYERS - 1)] + [([0, LAYERS], True)]
    assert resident(device) == []
    # All were waited for before they went: a copy must not outlive its memory.
    assert set(device.waited) == set(range(LAYERS + 1))


def test_blocks_in_another_order_are_fetched_and_guesses_dropped() -> None:
    model = frozen_llama()
    blocks = decoder_blocks(model)
    before = tensors_of(model)
    device = FakeDevice()
    hidden, position = torch.randn(1, 4, 32), torch.arange(4)[None]

    most = 0

    def run(order: Sequence[int]) -> Tensor:
        nonlocal most
        x = hidden
        angles = model.model.rotary_emb(x, position)
        for number in order:
            x = blocks[number](x, position_embeddings=angles)
            most = max(most, len(resident(device)))
        return x

    order = (3, 0, 0, 4, 1)
    with torch.no_grad():
        expected = run(order)
        with HostWeights(model, blocks, CPU, to_device=device).onload():
            assert torch.equal(run(order), expected)
    assert most == 2, "the rest and one guess"
    assert is_at_rest(model, before)
    assert resident(device) == []
    # A copy that nobody used must have ended, too, before its memory is given away.
    assert set(device.waited) == set(range(len(device.batches)))


def test_several_lists_of_blocks_may_run() -> None:
    """A model whose twin cannot compute runs by its own modules."""
    model = frozen_llama()
    weights = HostWeights(model, decoder_blocks(model), CPU, to_device=FakeDevice())
    ids = batch().token_ids
    with torch.no_grad():
        expected = model(ids).logits, logits(model)
        with weights.onload(decoder_blocks(model), decoder_blocks(twin_of(model))):
            assert torch.equal(model(ids).logits, expected[0])
            assert torch.equal(logits(model), expected[1])


def test_integer_weights_travel_too() -> None:
    block = nn.Module()
    block.packed = nn.Parameter(torch.arange(9, dtype=torch.int8), requires_grad=False)
    block.register_buffer("steps", torch.tensor([3]))
    device = FakeDevice()
    on_host = block.steps
    with HostWeights(block, [], CPU, to_device=device).onload():
        assert block.steps.tolist() == [3]
        assert block.steps is not on_host
        assert block.packed.tolist() == list(range(9))
        assert block.packed.dtype == torch.int8
        assert len(resident(device)) == 1
    assert block.steps is on_host
    assert resident(device) == []


def test_an_error_on_the_way_leaves_everything_on_the_host() -> None:
    model = frozen_llama()
    blocks, before = decoder_blocks(model), tensors_of(model)
    device = FakeDevice()
    weights = HostWeights(model, blocks, CPU, to_device=device)
    handle = blocks[2].mlp.register_forward_pre_hook(_fail)
    with pytest.raises(RuntimeError, match="on purpose"), torch.no_grad(), weights.onload():
        model(batch().token_ids)
    handle.remove()
    assert is_at_rest(model, before)
    assert resident(device) == []
    assert not any(block._forward_pre_hooks or block._forward_hooks for block in blocks)


def _fail(*_: object) -> None:
    raise RuntimeError("on purpose")


def test_on_the_host_nothing_is_done() -> None:
    model = frozen_llama()
    before = tensors_of(model)
    weights = HostWeights(model, decoder_blocks(model), CPU)
    with weights.onload():
        assert is_at_rest(model, before)
        assert not any(block._forward_pre_hooks for block in decoder_blocks(model))


def test_what_is_trained_or_needs_a_gradient_is_refused() -> None:
    model = frozen_llama()
    weights = HostWeights(model, decoder_blocks(model), CPU, to_device=FakeDevice())
    with weights.onload(), pytest.raises(ModelError, match="must run without gradient"):
        model(batch().token_ids)
    model.lm_head.weight.requires_grad_(True)
    with pytest.raises(ModelError, match=r"must be frozen; got 1 trained ones, model.embed_tokens"):
        HostWeights(model, decoder_blocks(model), CPU)
