"""The small Llama that the embedded default trains from new weights."""

from __future__ import annotations

from transformers import LlamaConfig, PreTrainedTokenizerBase


def model_config(
    tokenizer: PreTrainedTokenizerBase,
    *,
    hidden_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    context: int = 256,
) -> LlamaConfig:
    """A Llama of about 0.4 million parameters for `tokenizer`: tied embeddings, grouped queries
    (two heads per key and value head) and a context of `context` tokens."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=5 * hidden_size // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        # At Llama's 0.02 so narrow a model learns to answer right only after far more steps.
        initializer_range=0.06,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
