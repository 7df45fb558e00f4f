"""Answers of tiny models, and what two rollouts must have in common."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tandem.config.schema import SamplingConfig
from tandem.generation.generator import generate
from tandem.generation.stops import Stops
from tandem.ops import native
from tandem.types import Message, PromptRow, Rollout, Source
from tests.models.families import tiny_model

bitwise = pytest.mark.skipif(not native.available(), reason=native.why_not() or "available")
CPU = torch.device("cpu")
STOPS = Stops(stop_token_ids=(2,), pad_token_id=2, decode=lambda ids: " ".join(map(str, ids)))
LENGTHS = (5, 33, 16, 1, 48, 20, 7)
SCHEDULES: dict[str, dict[str, Any]] = {
    "alone": {"batch_size": 1},
    "three rows": {"batch_size": 3, "refill": 1},
    "late refill": {"batch_size": 6, "refill": 6},
    "short of memory": {"kv_blocks": 9},
    "prompts one by one": {"prefill_tokens": 1},
    "no sharing": {"share_prompts": False, "batch_size": 5},
    "parts beside decoding": {"chunk_tokens": 16, "batch_size": 3, "refill": 1, "kv_blocks": 14},
}


def wide_llama() -> PreTrainedModel:
    """A tiny Llama with room for long answers."""
    return tiny_model("llama", max_position_embeddings=512)


def prompts(*lengths: int, vocabulary: int = 90) -> list[PromptRow]:
    generator = torch.Generator().manual_seed(4)
    return [
        PromptRow(
            tuple(torch.randint(3, vocabulary, (n,), generator=generator).tolist()),
            (Message("user", "q"),),
            {},
            Source("test", "memory", i + 1),
        )
        for i, n in enumerate(lengths)
    ]


def new_wide(family: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Room for long answers; some of the answers end, some reach their limit."""
    names = {"gpt2": "n_positions"}
    model = tiny_model(family, **{names.get(family, "max_position_embeddings"): 256})
    torch.nn.Module.to(model, dtype)
    return model.eval()


wide = cache(new_wide)
"""The same model again, which nobody may change."""


def rollout_of(model: PreTrainedModel, lengths: Sequence[int], **how: Any) -> Rollout:
    knobs = how.pop("sampling", {})
    sampling = SamplingConfig(**{"max_new_tokens": 40, "samples_per_prompt": 2, **knobs})
    return generate(model, prompts(*lengths), sampling, STOPS, seed=3, step=1, **how)


def assert_same(one: Rollout, other: Rollout) -> None:
    assert one.responses == other.responses
    for name in ("rollout_logprobs", "sampled_logprobs", "rollout_entropy", "finished"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert torch.equal(one.batch.token_ids, other.batch.token_ids)
    assert torch.equal(one.batch.response_mask, other.batch.response_mask)
