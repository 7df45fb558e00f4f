"""What a GPU's forward keeps for its backward, counted without one, beside the formula."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PreTrainedConfig

from tandem.memory.model import Layout
from tandem.memory.shape import shape_of
from tandem.memory.work import activation_bytes, backward_bytes
from tandem.models.gpu_blocks import join_projections
from tandem.models.lora import adaptable, attach_adapters
from tandem.models.recompute import enable_gradient_checkpointing
from tandem.models.twin import base_forward, twin_of
from tandem.ops.attention_context import Packed, attending
from tests.ops.counting import on_meta

META, TOKENS, LAYERS = torch.device("meta"), 1 << 16, 4
"""So many tokens that what does not grow with them (a weight's gradient) hardly counts."""
SHORT = {"num_hidden_layers": LAYERS, "vocab_size": 64, "max_position_embeddings": 128}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama-7b": LlamaConfig(hidden_size=4096, intermediate_size=11008, **SHORT),
    "llama-3-8b": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_key_value_heads=8, **SHORT
    ),
    "opt-13b": OPTConfig(
        hidden_size=5120, ffn_dim=20480, num_attention_heads=40, dropout=0.0, **SHORT
    ),
}


class _Alive(TorchDispatchMode):
    """Within: the bytes of all tensors that operations made and something still holds.

    Attributes:
        peak: the most so far, `apart` left out.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.peak = 0
        self._weights = list(model.parameters())
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                held = StorageWeakRef(storage)
                self._held[held.cdata] = (held, storage.nbytes())
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        """Bytes that are held, without weights and their gradients."""
        apart = {
            tensor.untyped_storage()._cdata
            for weight in self._weights
            for tensor in (weight, weight.grad)
            if tensor is not None
        }
        self._held = {k: held for k, held in self._held.items() if not held[0].expired()}
        return sum(size for key, (_, size) in self._held.items() if key not in apart)


def counted(config: PreTrainedConfig, *, again: bool, lora: int) -> tuple[float, float]:
    """Bytes per token that a forward keeps, and the most while its backward runs."""
    with META:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    if lora:
        attach_adapters(model, adaptable(model), lora, 16.0, 0.0)
        model.to(device=META, dtype=torch.bfloat16)
    if again:
        enable_gradient_checkpointing(model)
    join_projections(model)
    ends = torch.zeros(17, dtype=torch.int32, device=META)
    ids = torch.zeros((1, TOKENS), dtype=torch.long, device=META)
    twin = twin_of(model)
    with _Alive(model) as alive:
        with attending(Packed(ends, 512)):
            out = base_forward(twin, ids, ids)
        gc.collect()
        kept, alive.peak = alive.now(), 0
        out.backward(torch.empty_like(out))
    return kept / TOKENS, alive.peak / TOKENS


@pytest.mark.parametrize(
    ("name", "again", "lora"),
    [
        pytest.param(
            name, again, lora,
            # All four for one family; of the others each value once.
            marks=() if number == 0 or again == bool(lora) else pytest.mark.slow,
        )
        for number, name in enumerate(CONFIGS)
        for again in (False, True)
        for lora in (0, 8)
    ],
)  # fmt: skip
def test_a_gpu_keeps_what_the_formula_says(
    name: str, again: bool, lora: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_meta(monkeypatch)
    kept, peak = counted(CONFIGS[name], again=again, lora=lora)
    layout = Layout(half=True, checkpointing=again, lora_rank=lora)
    shape = shape_of(CONFIGS[name])
    formula = activation_bytes(shape, 1, layout)
    if not again:  # of a layer that is computed again, the forward keeps nothing yet
        assert formula == pytest.approx(kept, rel=0.1)
    assert formula + backward_bytes(shape, 1, layout) == pytest.approx(peak, rel=0.1)
