"""Closed forms of models against the same models counted."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from transformers import GPT2Config, GPTNeoXConfig, LlamaConfig, OPTConfig, Qwen2Config, Qwen3Config

from tandem.errors import ConfigError
from tandem.memory.dimensions import scaled, shape_from
from tandem.memory.shape import shape_of
from tandem.models.hf_logging import quiet
from tandem.predict.models import config_of, config_of_shape, ladder, shape_for

SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300
}  # fmt: skip
GATED: dict[str, Any] = {**SMALL, "intermediate_size": 96, "num_key_value_heads": 2}
with quiet():
    CONFIGS = {
        "llama": LlamaConfig(**GATED),
        "llama-biased": LlamaConfig(
            **GATED, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
        ),
        "qwen2": Qwen2Config(**GATED, tie_word_embeddings=True),
        "qwen3": Qwen3Config(**GATED, head_dim=24),
        "opt": OPTConfig(**SMALL, ffn_dim=128, word_embed_proj_dim=64),
        "opt-350m": OPTConfig(
            **SMALL, ffn_dim=128, word_embed_proj_dim=32, do_layer_norm_before=False
        ),
        "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=300, n_positions=64),
        "gpt_neox": GPTNeoXConfig(**SMALL, intermediate_size=128),
    }


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_closed_form_is_what_counting_finds(name: str, scalar: bool) -> None:
    config = CONFIGS[name]
    counted = shape_of(config, scalar=scalar)
    closed = shape_from(config.to_dict(), scalar=scalar)
    assert closed is not None
    for field in fields(counted):
        found, expected = getattr(closed, field.name), getattr(counted, field.name)
        if field.name == "linears":
            found, expected = sorted(found), sorted(expected)
        assert found == expected, field.name


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("facebook/opt-350m", 0.331), ("facebook/opt-13b", 12.85), ("facebook/opt-66b", 65.7),
        ("meta-llama/Llama-2-7b-hf", 6.738), ("meta-llama/Llama-3.1-8B", 8.03),
        ("Qwen/Qwen2.5-7B", 7.616), ("Qwen/Qwen2.5-0.5B", 0.494),
    ],
)  # fmt: skip
def test_published_sizes_have_the_parameters_that_are_published(name: str, billions: float) -> None:
    assert shape_for(config_of(name)).parameters / 1e9 == pytest.approx(billions, rel=0.004)
    assert config_of(f"{name}-Base") == config_of(f"{name}-instruct") == config_of(name)


def test_a_shape_of_numbers_is_a_llama_or_an_opt() -> None:
    llama = shape_for(config_of_shape("layers=4,width=128,heads=4,vocabulary=512,inner=256"))
    assert llama.parameters == shape_for(
        scaled(layers=4, width=128, inner=256, heads=4, kv_heads=4, vocabulary=512, tied=False)
    ).parameters  # fmt: skip
    assert shape_for(config_of_shape("layers=2,width=64,family=opt")).inner == 256
    assert next(name for name, _ in ladder(config_of_shape("layers=2,width=64"))).startswith("Tiny")


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ("layers=2,width=64,layers=3", "must name layers once"),
        ("layers=1000000,width=64", "at most 10,000 layers"),
        ("layers=2,width=99999999999", "from 1 to 16,777,216"),
        ("layers=0,width=64", "from 1 to"),
    ],
)
def test_shapes_that_no_model_has_are_refused(shape: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of_shape(shape)
