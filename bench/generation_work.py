"""What the generation bench asks for: models, prompts, and answers of ragged lengths."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from tandem.data.render import Renderer
from tandem.generation.generator import Stops
from tandem.models.load import load_causal_lm, load_tokenizer
from tandem.types import Message, PromptRow, Source

PAD, BOS, EOS = 0, 1, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "stories260k": {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "llama-2.2m": {
        "model_type": "llama",
        "vocab_size": 2048,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "tie_word_embeddings": True,
    },
    "llama-22m": {
        "model_type": "llama",
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "opt-125m": {
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 768,
        "ffn_dim": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "word_embed_proj_dim": 768,
    },
    "opt-1.3b": {
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 2048,
        "ffn_dim": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "word_embed_proj_dim": 2048,
    },
    "llama-7b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
"""Settings of a Hugging Face config by name, its `model_type` among them."""


@dataclass(frozen=True, kw_only=True)
class GenerationWork:
    """Prompts to answer with one model.

    shape: settings of the model's config; its weights are random. Unused where `folder` is set.
    folder: a Hugging Face folder to read the model and its tokenizer from, or "".
    prompt_tokens: least and most tokens of a prompt; the lengths between are equally likely.
    ends: answers end after lengths from a geometric distribution, cut at `max_new_tokens`, with
        about half of that as their mean. Else all have `max_new_tokens`.
    """

    shape: Mapping[str, Any]
    folder: str = ""
    dtype: Literal["fp32", "bf16"] = "fp32"
    device: Literal["cpu", "cuda"] = "cpu"
    num_prompts: int = 64
    samples_per_prompt: int = 1
    prompt_tokens: tuple[int, int] = (32, 64)
    max_new_tokens: int = 128
    ends: bool = True
    seed: int = 1

    @property
    def num_answers(self) -> int:
        """Prompts times samples."""
        return self.num_prompts * self.samples_per_prompt


def _cpu_rows() -> dict[str, GenerationWork]:
    rows = {}
    for num_prompts in (64, 256):
        rows[f"stories260k-{num_prompts}"] = GenerationWork(
            shape=SHAPES["stories260k"], num_prompts=num_prompts
        )
    dtypes: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
    for name in ("llama-2.2m", "llama-22m", "opt-125m"):
        for dtype in dtypes:
            is_opt = name == "opt-125m"
            rows[f"{name}-{dtype}"] = GenerationWork(
                shape=SHAPES[name],
                dtype=dtype,
                num_prompts=32 if is_opt else 64,
                max_new_tokens=64 if is_opt else 128,
            )
    for name, num_prompts in (("llama-2.2m", 32), ("llama-22m", 16)):
        rows[f"{name}-8-samples"] = GenerationWork(
            shape=SHAPES[name],
            num_prompts=num_prompts,
            samples_per_prompt=8,
            prompt_tokens=(128, 192),
        )
    return rows


CPU_ROWS: Mapping[str, GenerationWork] = _cpu_rows()
GPU_ROWS: Mapping[str, GenerationWork] = {
    name: GenerationWork(
        shape=SHAPES[name],
        dtype="bf16",
        device="cuda",
        prompt_tokens=(256, 256),
        max_new_tokens=256,
        ends=False,
    )
    for name in ("opt-1.3b", "llama-7b")
}


@dataclass(frozen=True)
class GenerationStart:
    """Where every side starts: the model, on its device and in its type, and the prompts."""

    model: PreTrainedModel
    prompts: tuple[PromptRow, ...]
    stops: Stops


def generation_start(work: GenerationWork) -> GenerationStart:
    """Build or read the model, make the prompts, and see to the answers' lengths."""
    torch.manual_seed(work.seed)
    dtype = DTYPES[work.dtype]
    decode: Callable[[Sequence[int]], str]
    if work.folder:
        model = load_causal_lm(work.folder)
        nn.Module.to(model, work.device, dtype)
        decode = Renderer(load_tokenizer(work.folder)).decode
        prompts = _own_texts(model, work)
    else:
        with torch.device(work.device):
            model = AutoModelForCausalLM.from_config(_config(work), dtype=dtype).eval()
        decode = _numbers
        prompts = _random_ids(work)
    p = 1.594 / work.max_new_tokens if work.ends else 0.0
    set_end_probability(model.requires_grad_(False), prompts[:16], p)
    rows = tuple(
        PromptRow(tuple(ids), (Message("user", "?"),), {}, Source("bench", "bench", i + 1))
        for i, ids in enumerate(prompts)
    )
    return GenerationStart(model, rows, Stops((EOS,), PAD, decode))


def sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Another model object over the very same parameters.

    So one side's changes of settings (attention, compiled forward) do not reach another side.
    """
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


@torch.no_grad()
def set_end_probability(model: PreTrainedModel, prompts: Sequence[Sequence[int]], p: float) -> None:
    """Give EOS about the probability p after every token, by a bias of the head and nothing else.

    p is met on average over the prompts' tokens. Lengths are then geometric, and the mean of
    those cut at n tokens is (1 - (1 - p)^n) / p, n / 2 at p = 1.594 / n. With p = 0 none ends.
    """
    head = model.get_output_embeddings()
    # Else a text that is once likelier to end stays so, and lengths are no longer geometric. If
    # the head is tied, this is EOS's embedding too, which no prompt and no unfinished answer has.
    head.weight[EOS] = 0
    bias = -1e4
    if p > 0:
        logits = [
            model(torch.tensor([list(ids)], device=model.device)).logits[0] for ids in prompts
        ]
        bias = _bias_for(torch.cat(logits).float(), p)
    biased = nn.Linear(head.in_features, head.out_features, device="meta")
    biased.weight = head.weight  # the same tensor, so that a tied head stays tied
    biased.bias = nn.Parameter(torch.zeros_like(head.weight[:, 0]), requires_grad=False)
    biased.bias[EOS] = bias
    model.set_output_embeddings(biased)


def _bias_for(logits: Tensor, p: float) -> float:
    """The bias of EOS whose probability has mean p over the rows of (N, V) logits."""
    others = logits.clone()
    others[:, EOS] = -torch.inf
    log_odds = logits[:, EOS] - others.logsumexp(dim=1)
    low, high = -100.0, 100.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        if float(torch.sigmoid(log_odds + middle).mean()) < p:
            low = middle
        else:
            high = middle
    return low


def _config(work: GenerationWork) -> PreTrainedConfig:
    settings = dict(work.shape)
    return AutoConfig.for_model(
        settings.pop("model_type"),
        **settings,
        max_position_embeddings=work.prompt_tokens[1] + work.max_new_tokens,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )


def _lengths(work: GenerationWork) -> list[int]:
    least, most = work.prompt_tokens
    generator = torch.Generator().manual_seed(work.seed)
    return torch.randint(least, most + 1, (work.num_prompts,), generator=generator).tolist()


def _random_ids(work: GenerationWork) -> list[list[int]]:
    generator = torch.Generator().manual_seed(work.seed)
    size = work.shape["vocab_size"]
    return [
        torch.randint(EOS + 1, size, (length,), generator=generator).tolist()
        for length in _lengths(work)
    ]


def _own_texts(model: PreTrainedModel, work: GenerationWork) -> list[list[int]]:
    """Beginnings of the model's own texts: what a trained model expects to continue."""
    lengths = _lengths(work)
    texts = model.generate(  # type: ignore[operator]
        torch.full((work.num_prompts, 1), BOS, device=model.device),
        attention_mask=torch.ones((work.num_prompts, 1), device=model.device),
        do_sample=True,
        top_k=0,
        min_new_tokens=max(lengths),
        max_new_tokens=max(lengths),
        pad_token_id=PAD,
    )
    return [texts[i, :length].tolist() for i, length in enumerate(lengths)]


def _numbers(token_ids: Sequence[int]) -> str:
    """The text of an answer by a model without a tokenizer."""
    return " ".join(map(str, token_ids))
