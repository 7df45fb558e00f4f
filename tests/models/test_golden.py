"""Two small real models against numbers recorded apart from this code (golden.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.models.lm_head import check_head, vocabulary_logits
from tandem.models.load import check_vocabulary, load_causal_lm, load_tokenizer
from tandem.models.packed import hidden_states
from tandem.types import TokenBatch

NAMES = ["stories260K", "babyllama105"]


def _cases(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "golden.json").read_text(encoding="utf-8"))["cases"]


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_logprobs_and_likeliest_tokens(shared: Path, name: str) -> None:
    folder = shared / "models" / name
    model, tokenizer = load_causal_lm(folder / "hf"), load_tokenizer(folder / "hf")
    check_head(model)
    check_vocabulary(model, tokenizer)
    for case in _cases(folder):
        ids = torch.tensor([case["prompt_ids"]])
        everything = torch.ones_like(ids, dtype=torch.bool)
        hidden = hidden_states(model, TokenBatch(ids, everything, ~everything))
        logprobs = vocabulary_logits(model, hidden).log_softmax(-1)
        chosen = logprobs[:-1].gather(1, ids[0, 1:, None]).squeeze(1)
        assert torch.allclose(chosen, torch.tensor(case["prompt_token_logprobs"]), atol=2e-4)
        values, likeliest = logprobs[-1].topk(5)
        assert likeliest.tolist() == [token for token, _ in case["next_top5"]]
        assert torch.allclose(values, torch.tensor([v for _, v in case["next_top5"]]), atol=2e-4)
        assert tokenizer(case["prompt"]).input_ids == case["prompt_ids"]


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens(shared: Path, name: str) -> None:
    folder = shared / "models" / name
    model, tokenizer = load_causal_lm(folder / "hf"), load_tokenizer(folder / "hf")
    for case in _cases(folder):
        ids = torch.tensor([case["greedy_ids"]])
        everything = torch.ones_like(ids, dtype=torch.bool)
        hidden = hidden_states(model, TokenBatch(ids, everything, ~everything))
        start = len(case["prompt_ids"])
        greedy = vocabulary_logits(model, hidden[start - 1 : -1]).argmax(-1)
        assert greedy.tolist() == case["greedy_ids"][start:]
        text = tokenizer.decode(case["greedy_ids"], skip_special_tokens=True)
        assert text.strip() == case["greedy_text"].strip()
