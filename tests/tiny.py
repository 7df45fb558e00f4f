"""Tiny models on disk for tests: a Llama, a tokenizer with a chat template, some preferences."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from tandem.config.schema import RunConfig
from tandem.data.embedded.generator import rows
from tandem.data.embedded.tokenizer import build_tokenizer


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """The embedded data set's tokenizer: a few hundred tokens, its own control tokens."""
    return build_tokenizer()


def tiny_llama(
    vocabulary: int, *, seed: int = 0, width: int = 32, layers: int = 2
) -> LlamaForCausalLM:
    """Four heads, two key and value heads; float32, eval mode."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def save_tiny_model(folder: Path, *, seed: int = 0) -> str:
    """A model folder that from_pretrained opens; returns its path."""
    tokenizer = tiny_tokenizer()
    model = tiny_llama(len(tokenizer), seed=seed)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


PADDING = 24
"""Embeddings of `save_padded_model` that its tokenizer has no tokens for."""


def save_padded_model(folder: Path, *, seed: int = 0) -> str:
    """As `save_tiny_model`, with `PADDING` more embeddings. They come in pairs of opposite sign, so
    that the likeliest tokens are always among them, with nearly all the probability."""
    tokenizer = tiny_tokenizer()
    known = len(tokenizer)
    model = tiny_llama(known + PADDING, seed=seed)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[known::2] *= 30.0
        weight[known + 1 :: 2] = -weight[known::2]
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
WRONG_CALL = '<tool_call>{"name": "add", "arguments": {"c": 2}}</tool_call>'


def save_calling_model(folder: Path) -> str:
    """One with the default template, and with `CALL` and `WRONG_CALL` as tokens, so that a bias
    makes it call."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (CALL, WRONG_CALL)])
    model = tiny_llama(len(tokenizer))
    model.config.max_position_embeddings = 1024
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_preferences(path: Path, num: int = 120, seed: int = 3) -> str:
    """A JSONL file of prompt, chosen, rejected rows; returns its path."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows(num, seed):
            file.write(json.dumps(row) + "\n")
    return str(path)


def tiny_config(folder: Path, model: str, data: str, **changes: object) -> RunConfig:
    """A run of a few seconds over all three steps."""
    from tandem.config.load import build_config

    values: dict[str, object] = {
        "actor_model": model,
        "data": [data],
        "output_dir": str(folder),
        "save_every": 2,
        "dataset": {
            "split": [2, 4, 4],
            "heldout": 0.1,
            "max_tokens": 128,
            "max_prompt_tokens": 96,
        },
        "sft": {"max_steps": 3, "epochs": 10, "batch_size": 8, "learning_rate": 1e-3},
        "reward": {"max_steps": 3, "epochs": 10, "batch_size": 8, "normalize_prompts": 16},
        "dpo": {"max_steps": 3, "epochs": 10, "batch_size": 8},
        "ppo": {
            "steps": 3,
            "prompts_per_step": 8,
            "minibatch_size": 4,
            "epochs": 2,
            "eval_prompts": 8,
            "actor": {"learning_rate": 1e-3},
        },
        "sampling": {"max_new_tokens": 12},
        "log": {"tensorboard": False},
    }
    for name, value in changes.items():
        section, _, knob = name.partition("__")
        if knob:
            inner = values.setdefault(section, {})
            assert isinstance(inner, dict)
            inner[knob] = value
        else:
            values[section] = value
    return build_config(values, where="test: ")
