"""The embedded default's tokenizer, trained on its text, and the small model that goes with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tandem.data.embedded.generator import rows

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, SYSTEM, USER, ASSISTANT, END = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
_CONTEXT = 256  # tokens

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles must be system, user or assistant; got ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Each turn is its role's token, its text and <|end|>."""


def build_tokenizer(vocab_size: int = 640) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template, always the same for a size.

    It encodes any text without loss. EOS is <|end|>, which ends every turn; padding has its own
    token; there is no BOS.

    Args:
        vocab_size: 5 control tokens, 256 bytes, the rest merges.
    """
    from transformers import PreTrainedTokenizerFast  # seconds, which the rows do not need

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, SYSTEM, USER, ASSISTANT, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=_CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def model_config(
    tokenizer: PreTrainedTokenizerBase,
    *,
    hidden_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    context: int = _CONTEXT,
) -> LlamaConfig:
    """A Llama of about 0.4 million parameters for `tokenizer`: tied embeddings, grouped queries
    (two heads per key and value head) and a context of `context` tokens."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=5 * hidden_size // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        # With Llama's 0.02 such a narrow model needs far more steps to learn right answers.
        initializer_range=0.06,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )


def _texts() -> Iterable[str]:
    """What the merges are learned from."""
    for row in rows(2000, 0):
        yield from (row["prompt"], row["chosen"])
