"""Tiny random models of every family that the room is tested with, and a ragged batch for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tandem.models.frozen import LinearLayer
from tandem.models.load import new_causal_lm
from tandem.models.lora import LoraLayer
from tandem.models.save import save_model
from tandem.models.scalar import new_scalar_model
from tandem.models.token_layers import TokenEmbedding, TokenHead
from tandem.types import Source, TokenBatch, TokenRow

VOCABULARY = 99
PAD, BOS, EOS = 0, 1, 2
TOKEN_IDS = {
    "vocab_size": VOCABULARY,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
OPT = {
    "hidden_size": 32,
    "word_embed_proj_dim": 16,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "init_std": 0.2,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "opt": OPT | {"dropout": 0.1},
    "llama": LLAMA,
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "initializer_range": 0.2,
    },
    "gpt_neox": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "hidden_dropout": 0.1,
    },
    "qwen2": LLAMA | {"tie_word_embeddings": True},
    "qwen3": LLAMA,
    "mistral": LLAMA | {"sliding_window": 3},
    "gemma": LLAMA | {"tie_word_embeddings": True},
    "gemma2": LLAMA
    | {
        "tie_word_embeddings": True,
        "sliding_window": 4,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 2.0,
    },
}
FAMILIES = sorted(_CONFIGS)
CAUSAL_ONLY = {"cohere": LLAMA | {"logit_scale": 0.3}, "granite": LLAMA | {"logits_scaling": 3.0}}


def config_of(family: str, **settings: Any) -> PreTrainedConfig:
    """A new config; skips the test where this transformers is older than the family."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no family {family!r}")
    return AutoConfig.for_model(family, **settings)


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """A new config: two layers, width 32, dropout on in some families."""
    options = _CONFIGS.get(family) or CAUSAL_ONLY[family]
    return AutoConfig.for_model(family, **{**TOKEN_IDS, **options, **changes})


def perturbed(model: PreTrainedModel) -> PreTrainedModel:
    """Move every weight off its start, so that biases and norms are not the identity."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


_MADE: dict[str, PreTrainedModel] = {}


def _copy_of(made: Callable[..., PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A copy of the model, which is made once for each config: half the time of making it."""
    key = f"{made.__name__} {type(config).__name__} {config.to_dict()}"
    if key not in _MADE:
        _MADE[key] = perturbed(made(config, seed=3))
    return copy.deepcopy(_MADE[key])


def tiny_model(family: str, **changes: Any) -> PreTrainedModel:
    """A language model with random weights."""
    return _copy_of(new_causal_lm, tiny_config(family, **changes))


def tiny_scalar(family: str, **changes: Any) -> PreTrainedModel:
    """A scalar model with random weights."""
    return _copy_of(new_scalar_model, tiny_config(family, **changes))


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer with a chat template."""
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(VOCABULARY - 4))]
    core = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    fast.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    return fast


def saved(model: PreTrainedModel, folder: Path) -> Path:
    """The model's folder."""
    save_model(model, tokenizer(), folder)
    return folder


def ragged_batch(lengths: Sequence[int] = (9, 5, 12, 1), seed: int = 0) -> TokenBatch:
    """Random right-padded rows that never hold the pad id; all but the first token answered."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i, n in enumerate(lengths):
        ids = torch.randint(4, VOCABULARY, (n,), generator=generator).tolist()
        mask = (False, *(True for _ in range(n - 1)))
        rows.append(TokenRow(tuple(ids), mask, Source("random", "random", i + 1)))
    return TokenBatch.from_rows(rows, PAD)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    """Of the model's own forward over a padded batch."""
    batch = ragged_batch()
    return model(input_ids=batch.token_ids, attention_mask=batch.attention_mask.long()).logits


def scaled(left: torch.Tensor, right: torch.Tensor, tolerance: float = 1e-5) -> bool:
    """Equal to `tolerance` of the largest absolute number."""
    return bool((left - right).abs().max() <= tolerance * right.abs().max().clamp_min(1.0))


@torch.no_grad()
def merged_state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state of the model with its adapters merged, under the unadapted model's names.

    Adapted weights are new tensors, and so are quantized ones, which are dequantized: the folder
    that they make has full weights. All others are the model's own; the model is not changed.
    """
    state = model.state_dict()
    for name, layer in model.named_modules():
        if not isinstance(layer, LinearLayer | TokenEmbedding):
            continue
        for ending in (
            ".lora_A.weight",
            ".lora_B.weight",
            ".start_a.weight",
            ".start_b.weight",
            ".lora_tokens.weight",
            ".weight.packed",
            ".weight.scales",
        ):
            state.pop(name + ending, None)
        state[f"{name}.weight"] = (
            layer.merged_weight()
            if isinstance(layer, LoraLayer | TokenEmbedding | TokenHead)
            else layer.plain_weight()
        )
    return dict(state)
