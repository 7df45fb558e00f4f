"""What adapters cost in decoding on a GPU, by count."""

from __future__ import annotations

import pytest
import torch

from tandem.config.lora import LoraConfig
from tandem.models.frozen import freeze_quantized
from tandem.models.gpu_blocks import join_projections
from tandem.models.lora import add_lora
from tandem.models.twin import base_forward, twin_of
from tandem.ops.attention_context import Decode, KVMemory, LayerShape, attending
from tests.models.test_gpu_blocks import addressed, model_of
from tests.ops.counting import Launches, on_meta


@pytest.mark.parametrize("name", ["llama", "opt"])
@pytest.mark.parametrize("base", ["", "nf4", "int8"])
def test_adapters_cost_no_launch(name: str, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a layer's four products computes its adapters too; weights stay where they are."""
    on_meta(monkeypatch)
    meta = torch.device("meta")
    seen = []
    for layers in (1, 2):
        model = model_of(name, layers).eval()
        add_lora(model, LoraConfig(rank=16), seed=0)
        model.to("meta")
        if base:
            freeze_quantized(model, base)
        assert join_projections(model) == 0
        shapes = [LayerShape(32, 128, 128)] * layers
        memory = addressed(KVMemory(shapes, 8, dtype=torch.bfloat16, device=meta))
        ids = torch.zeros((1, 64), dtype=torch.long, device=meta)
        tables = torch.zeros((64, 16), dtype=torch.int32, device=meta)
        with torch.no_grad(), attending(Decode(ids[0], tables, memory)), Launches() as launches:
            base_forward(twin_of(model), ids, ids)
        seen.append(launches.seen)
    launched = seen[1] - seen[0]
    assert launched["tandem.adapted_linear"] == 4
    assert launched.total() <= 9, launched
