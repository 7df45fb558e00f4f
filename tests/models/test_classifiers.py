"""Scalar heads on families for which transformers has none, against its backbones."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, PreTrainedConfig

from tandem.errors import ModelError
from tandem.models.classifiers import require_classifier
from tandem.models.lm_head import check_head
from tandem.models.load import new_causal_lm
from tandem.models.meta_init import empty_scalar_model
from tandem.models.scalar import (
    load_scalar_model,
    new_scalar_model,
    normalization,
    sequence_scores,
    set_normalization,
    token_values,
)

from . import families
from .families import LLAMA, TOKEN_IDS, perturbed, ragged_batch, saved, scaled
from .hybrid_families import HYBRIDS

_MIXTURE = LLAMA | {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_STATES = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
WITHOUT_A_CLASS: dict[str, dict[str, Any]] = {
    "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
    "cohere": LLAMA,
    "cohere2": LLAMA,
    "ctrl": {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48},  # has one with other parts
    "ernie4_5": LLAMA,
    "glm4_moe": _MIXTURE | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "granite": LLAMA,
    "granitemoe": _MIXTURE,
    "internlm3": LLAMA,  # another family's classes
    "lfm2": LLAMA | {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48},
    "llama4_text": LLAMA
    | {
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "mamba": _STATES,
    "mamba2": HYBRIDS["mamba2"],
    "olmoe": _MIXTURE,
    "recurrent_gemma": HYBRIDS["recurrent_gemma"],
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
}


def config_of(family: str) -> PreTrainedConfig:
    return families.config_of(family, **(TOKEN_IDS | WITHOUT_A_CLASS[family]))


@pytest.mark.parametrize("family", WITHOUT_A_CLASS)
def test_a_head_stands_on_the_familys_backbone(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    saved(perturbed(new_causal_lm(config_of(family), seed=3)), tmp_path / "policy")
    model = load_scalar_model(tmp_path / "policy", seed=1)
    batch = ragged_batch((9, 2, 14))
    with torch.no_grad():
        scores, values = sequence_scores(model, batch), token_values(model, batch)
    backbone = AutoModel.from_pretrained(tmp_path / "policy", dtype=torch.float32).eval()
    for row, n in enumerate(batch.lengths().tolist()):
        with torch.no_grad():
            states = backbone(batch.token_ids[row : row + 1, :n], use_cache=False).last_hidden_state
            expected = model.score(states[0])[:, 0]
        assert scaled(scores[row], expected[-1]), row
        assert scaled(values[row, 1:n], expected[:-1])

    set_normalization(model, 0.25, 2.5)
    saved(model, tmp_path / "reward")
    again = load_scalar_model(tmp_path / "reward", seed=9, from_causal_lm=False)
    assert normalization(again) == (0.25, 2.5)
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    with torch.no_grad():
        assert scaled(sequence_scores(again, batch), scores, 1e-6)
    streamed = empty_scalar_model(tmp_path / "reward")
    assert streamed is None or not streamed.missing


@pytest.mark.parametrize("family", ["granite", "mamba", "olmoe"])
def test_gradients_reach_backbone_and_head(family: str) -> None:
    model = new_scalar_model(config_of(family), seed=2)
    sequence_scores(model, ragged_batch((12, 7))).sum().backward()
    without = [
        n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()
    ]
    assert not without


def test_llama_4s_text_model_runs_as_its_own_forward_does() -> None:
    model = perturbed(new_causal_lm(config_of("llama4_text"), seed=3)).eval()
    assert model.base_model is model.model
    check_head(model)


def test_a_family_without_a_backbone_is_refused() -> None:
    class Lone(PreTrainedConfig):
        model_type = "lone"

    with pytest.raises(
        ModelError, match="'m' must have a backbone for its scalar head; got family"
    ):
        require_classifier(Lone(), "m")
