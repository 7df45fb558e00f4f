"""Random models of known shapes and the random rows that they read: one place for every bench."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tandem.data.embedded.tokenizer import build_tokenizer
from tandem.types import Message, PromptRow, Source, TokenRow

PAD, BOS, EOS = 0, 1, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WORDS = 512
"""Random ids end here, and so do the built-in tokenizer's."""
_FIRST_ID = 5
"""Random ids begin here: neither the ids above nor a tokenizer's five control tokens are drawn."""

Shape = Mapping[str, Any]
"""Settings of a Hugging Face config, its `model_type` among them."""


def llama(
    width: int,
    inner: int,
    layers: int,
    heads: int,
    vocabulary: int,
    *,
    kv_heads: int = 0,
    tied: bool = True,
) -> Shape:
    """A Llama's shape."""
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "tie_word_embeddings": tied,
    }


def _opt(width: int, layers: int, heads: int, *, embedding: int = 0) -> Shape:
    return {
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": width,
        "ffn_dim": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "word_embed_proj_dim": embedding or width,
        "do_layer_norm_before": not embedding,
        "dropout": 0.0,
    }


def _hybrid(family: str, state: str, **more: Any) -> Shape:
    """Three layers with a state to one that attends."""
    attends = "attention" if family == "granitemoehybrid" else "full_attention"
    kinds = ([state] * 3 + [attends]) * 2
    base = llama(512, 1536, 8, 8, 32000, kv_heads=2)
    return {**base, "model_type": family, "head_dim": 64, "layer_types": kinds, **more}


SHAPES: Mapping[str, Shape] = {
    "a": llama(128, 352, 4, 4, 512, tied=False),
    "b": llama(288, 768, 6, 6, 32000),
    "stories260k": llama(64, 172, 5, 8, 512, kv_heads=4),
    "llama-2.2m": llama(192, 512, 4, 6, 2048),
    "llama-22m": llama(512, 1408, 6, 8, 8192, kv_heads=4),
    "llama-7b": llama(4096, 11008, 32, 32, 32000, tied=False),
    "smollm2": llama(576, 1536, 30, 9, 49152, kv_heads=3),
    "qwen2.5-0.5b": {**llama(896, 4864, 24, 14, 151936, kv_heads=2), "model_type": "qwen2"},
    "qwen3.5-53m": _hybrid(
        "qwen3_5_text",
        "linear_attention",
        linear_num_key_heads=8,
        linear_num_value_heads=8,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    ),
    "lfm2-37m": _hybrid("lfm2", "conv", block_auto_adjust_ff_dim=False),
    "granite4-47m": _hybrid(
        "granitemoehybrid",
        "mamba",
        mamba_n_heads=16,
        mamba_d_head=64,
        mamba_d_state=128,
        num_local_experts=0,
        shared_intermediate_size=1536,
    ),
    "opt-125m": _opt(768, 12, 12),
    "opt-350m": _opt(1024, 24, 16, embedding=512),
    "opt-1.3b": _opt(2048, 24, 32),
}
"""a: Llama of 0.94M parameters. b: of 15.2M, the shape of stories15M. smollm2: SmolLM2-135M.
qwen2.5-0.5b: that model's. qwen3.5, lfm2, granite4: layers as in the smallest models of these
families, fewer and narrower."""


HYBRIDS = ("qwen3.5-53m", "lfm2-37m", "granite4-47m")


def tiny(shape: Shape) -> Shape:
    """A shape of the same kind to try a command with, some thousands of parameters small."""
    small: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    small |= {"intermediate_size": 48, "num_key_value_heads": 2, "ffn_dim": 48}
    projected = shape.get("word_embed_proj_dim") != shape["hidden_size"]
    small["word_embed_proj_dim"] = 16 if projected else 32
    if "layer_types" in shape:
        small |= {"layer_types": shape["layer_types"][2:4], "head_dim": 8, "mamba_d_head": 16}
        small |= {"mamba_n_heads": 4, "mamba_d_state": 8, "shared_intermediate_size": 48}
        small |= dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
        small |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
    return {**shape, **{name: value for name, value in small.items() if name in shape}}


def model_config(shape: Shape, positions: int, *, eos: int = EOS, **more: Any) -> PreTrainedConfig:
    """The shape's config for sequences of up to `positions` tokens; it knows of no BOS."""
    settings = {**shape, **more}
    return AutoConfig.for_model(
        settings.pop("model_type"),
        **settings,
        max_position_embeddings=positions,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=eos,
    )


def random_model(
    config: PreTrainedConfig,
    *,
    scalar: bool = False,
    seed: int = 1,
    dtype: str = "fp32",
    device: str | None = None,
) -> PreTrainedModel:
    """A causal model, or one with a single scalar output, with random weights; in eval mode."""
    torch.manual_seed(seed)
    kind: Any = AutoModelForCausalLM
    if scalar:
        kind, config.num_labels = AutoModelForSequenceClassification, 1
    with torch.device(device or torch.get_default_device()):
        return kind.from_config(config, dtype=DTYPES[dtype]).eval()


def sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Another model object over the very same parameters.

    So one side's changes of settings (attention, compiled forward) do not reach another side.
    """
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def copied(model: PreTrainedModel, device: str = "cpu") -> PreTrainedModel:
    """The model again, on that device."""
    other = copy.deepcopy(model)
    nn.Module.to(other, device)
    return other


@torch.no_grad()
def reset(model: nn.Module, to: nn.Module) -> None:
    """Give a model the other's weights."""
    for parameter, value in zip(model.parameters(), to.parameters(), strict=True):
        parameter.copy_(value)


def apart(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """The size of the difference of all these tensors over the size of the others."""
    left, right = (torch.cat([t.detach().float().flatten() for t in ts]) for ts in (ours, theirs))
    return float((left - right).norm() / right.norm().clamp(min=1e-12))


def end_probability(max_new_tokens: int) -> float:
    """The chance of EOS after every token that makes n / 2 the mean length of answers cut at n.

    Lengths are geometric, and the mean of those cut at n is (1 - (1 - p)^n) / p: n / 2 at this p.
    """
    return 1.594 / max_new_tokens


@torch.no_grad()
def set_end_probability(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], p: float, eos: int = EOS
) -> None:
    """Give EOS about the probability p after every token, by a frozen bias of the head.

    p is met on average over the prompts' tokens. With p = 0 no answer ends.
    """
    head = model.get_output_embeddings()
    # Else a text that is once likelier to end stays so, and lengths are no longer geometric. If
    # the head is tied, this is EOS's embedding too, which no prompt and no unfinished answer has.
    head.weight[eos] = 0
    bias = -1e4
    if p > 0:
        log_odds = []
        for ids in prompts:
            logits = model(torch.tensor([list(ids)], device=model.device)).logits[0].float()
            end = logits[:, eos].clone()
            logits[:, eos] = -torch.inf
            log_odds.append(end - logits.logsumexp(dim=1))
        bias = _bias_for(torch.cat(log_odds), p)
    biased = nn.Linear(head.in_features, head.out_features, device="meta")
    biased.weight = head.weight  # the same tensor, so that a tied head stays tied
    biased.bias = nn.Parameter(torch.zeros_like(head.weight[:, 0]), requires_grad=False)
    biased.bias[eos] = bias
    model.set_output_embeddings(biased)


def _bias_for(log_odds: Tensor, p: float) -> float:
    """What to add to (N,) log-odds so that their probabilities have mean p."""
    low, high = -100.0, 100.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        if float(torch.sigmoid(log_odds + middle).mean()) < p:
            low = middle
        else:
            high = middle
    return low


def uniform_lengths(num: int, least: int, most: int, seed: int) -> list[int]:
    """Lengths from `least` to `most`, all equally likely."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(least, most + 1, (num,), generator=generator).tolist()


def covering_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """The built-in tokenizer of `WORDS` tokens, and one that no text has for every further output
    of a model: what a tokenizer lacks is never drawn."""
    tokenizer = build_tokenizer(min(WORDS, vocabulary))
    if vocabulary > len(tokenizer):
        held = json.loads(tokenizer.backend_tokenizer.to_str())
        held["model"]["vocab"] |= {f"<{i}>": i for i in range(len(tokenizer), vocabulary)}
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(held))
    return tokenizer


def prompt_rows(prompts: Iterable[Sequence[int]]) -> tuple[PromptRow, ...]:
    """Prompts of these token ids."""
    return tuple(
        PromptRow(tuple(ids), (Message("user", "?"),), {}, Source("bench", "bench", i + 1))
        for i, ids in enumerate(prompts)
    )


def random_ids(
    lengths: Iterable[int], vocabulary: int, seed: int | torch.Generator
) -> list[list[int]]:
    """Rows of random token ids, none of which is a control token's."""
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    return [
        torch.randint(_FIRST_ID, vocabulary, (length,), generator=generator).tolist()
        for length in lengths
    ]


def token_row(prompt: int, answer: int, vocabulary: int, generator: torch.Generator) -> TokenRow:
    """A row of random ids for a prompt's and an answer's tokens; the answer ends with EOS."""
    (ids,) = random_ids([prompt + answer], vocabulary, generator)
    mask = (False,) * prompt + (True,) * answer
    return TokenRow((*ids[:-1], EOS), mask, Source("bench", "bench", 1))


def ragged_rows(
    num_rows: int,
    vocabulary: int,
    *,
    prompt_tokens: tuple[int, int] = (32, 64),
    max_answer_tokens: int = 128,
    seed: int = 1,
) -> list[TokenRow]:
    """Prompts of equally likely lengths, then answers of geometric lengths, as in generation."""
    generator = torch.Generator().manual_seed(seed)
    p = end_probability(max_answer_tokens)
    rows = []
    for _ in range(num_rows):
        least, most = prompt_tokens
        prompt = int(torch.randint(least, most + 1, (), generator=generator))
        uniform = float(torch.rand((), generator=generator))
        answer = min(max_answer_tokens, 1 + int(math.log1p(-uniform) / math.log1p(-p)))
        rows.append(token_row(prompt, answer, vocabulary, generator))
    return rows
