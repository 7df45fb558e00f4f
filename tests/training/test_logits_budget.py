"""Whatever makes vocabulary logits, in any stage, makes no more at once than the budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.config.schema import SamplingConfig
from tandem.generation.generator import generate
from tandem.generation.streaming import stream
from tandem.ops import logits
from tests.generation.rollouts import STOPS, prompts
from tests.generation.test_streaming import bloom
from tests.tiny import tiny_config, tiny_tokenizer
from tests.training.runs import ran

ROWS = 40  # the checks at the start, which make 32, are within
VOCABULARY = len(tiny_tokenizer())
_OF_WEIGHTS = (torch.ops.aten.t.default, torch.ops.aten.transpose.int)


class Widest(TorchDispatchMode):
    """The most rows of a tensor (..., V) that any operation returned, forward or backward."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.dim() > 1]
        for tensor in tensors if func not in _OF_WEIGHTS else ():
            if tensor.shape[-1] == self.vocabulary:
                self.rows = max(self.rows, tensor.numel() // self.vocabulary)
        return outputs


@contextmanager
def budget_of(rows: int, vocabulary: int) -> Iterator[Widest]:
    with pytest.MonkeyPatch.context() as patch, Widest(vocabulary) as widest:
        patch.setitem(logits.BUDGET_BYTES, "cpu", rows * 4 * vocabulary)
        yield widest


@pytest.mark.parametrize("stages", [["sft", "dpo"], ["reward", "ppo"]])
def test_no_stage_exceeds_it(
    stages: list[str], tiny_model: str, preferences: str, tmp_path: Path
) -> None:
    texts = tmp_path / "texts.jsonl"
    walks = [json.dumps({"text": f"{number} long walks in the rain."}) for number in range(400)]
    texts.write_text("\n".join(walks), encoding="utf-8")
    config = tiny_config(
        tmp_path / "run",
        tiny_model,
        preferences,
        stages=stages,
        ppo={
            "steps": 1,
            "prompts_per_step": 64,
            "minibatch_size": 64,
            "ptx_coef": 0.5,
            "ptx_data": [str(texts)],
        },
        dpo__max_steps=1,
        sft__max_steps=1,
        reward__max_steps=1,
        sft__batch_size=32,
    )
    with budget_of(ROWS, VOCABULARY) as widest:
        ran(config)
    assert ROWS // 2 < widest.rows <= ROWS


@pytest.mark.parametrize("samples", [1, 3])
def test_hugging_faces_generate_makes_no_logits_of_whole_prompts(samples: int) -> None:
    model = bloom()
    vocabulary = model.config.vocab_size
    sampling = SamplingConfig(max_new_tokens=4, samples_per_prompt=samples)
    rows = prompts(30, 25, 28, 9)
    whole = generate(model, rows, sampling, STOPS, seed=3, step=1)
    with budget_of(5, vocabulary) as widest:
        parts = generate(model, rows, sampling, STOPS, seed=3, step=1)
        streamed = list(stream(model, rows[0].token_ids, sampling, STOPS, seed=3))
    assert 1 < widest.rows <= 5
    assert streamed
    assert torch.equal(parts.batch.token_ids, whole.batch.token_ids)
    torch.testing.assert_close(parts.rollout_logprobs, whole.rollout_logprobs)
