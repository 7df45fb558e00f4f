"""Resident memory does not grow from step to step, at vocabularies of real models."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.ops.logits import BUDGET_BYTES
from tests.jsonl import write_jsonl
from tests.tiny import tiny_config, tiny_tokenizer
from tests.training.runs import ran, records

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")

STEPS, ROWS, ANSWER_TOKENS = 30, 2, 20
CHUNK_ROWS = 15
"""Of logits, in place of the usual 64 MiB, so that few tokens make several chunks."""
WORDS = "the cat sat on a green mat and the sun came out again"


def save_model(folder: Path, vocabulary: int) -> str:
    """One narrow layer, so that nearly all work and memory is the vocabulary's."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_rows(folder: Path) -> tuple[str, str]:
    """Preferences with answers of one length, and texts."""
    pairs = [
        {"prompt": f"Say {i}.", "chosen": f"{WORDS} {i}", "rejected": f"{WORDS} not {i}"}
        for i in range(120)
    ]
    preferences, texts = folder / "pairs.jsonl", folder / "texts.jsonl"
    write_jsonl(preferences, pairs)
    lines = [json.dumps({"text": f"{WORDS}, {i} times"}) + "\n" for i in range(60)]
    texts.write_text("".join(lines), encoding="utf-8")
    return str(preferences), str(texts)


@pytest.mark.parametrize("vocabulary", [50_257, pytest.param(151_936, marks=pytest.mark.slow)])
def test_thirty_steps_hold_what_ten_did(
    vocabulary: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUDGET_BYTES, "cpu", CHUNK_ROWS * vocabulary * 4)
    model = save_model(tmp_path / "model", vocabulary)
    preferences, texts = save_rows(tmp_path)
    fit = {"max_steps": STEPS, "epochs": 1000, "batch_size": ROWS}
    config = tiny_config(
        tmp_path / "run",
        model,
        preferences,
        stages=["sft", "reward", "ppo"],
        save_every=1000,
        dataset={"heldout": 0.02},
        sft=fit,
        reward={**fit, "normalize_prompts": 4},
        dpo=fit,
        ppo={
            "steps": STEPS, "prompts_per_step": ROWS, "minibatch_size": ROWS, "epochs": 1,
            "eval_prompts": 2, "ptx_data": [texts], "ptx_coef": 0.5, "ptx_batch_size": ROWS,
        },
        sampling={"max_new_tokens": ANSWER_TOKENS},
    )  # fmt: skip
    ran(config)
    ran(replace(config, output_dir=str(tmp_path / "dpo"), stages=("dpo",)))
    for stage in (*config.stages, "dpo"):
        folder = tmp_path / ("dpo" if stage == "dpo" else "run")
        found = [r for r in records(folder, unlike=()) if r["stage"] == stage]
        peaks = {r["step"]: r["values"]["peak_memory_bytes/train"] for r in found if r["step"]}
        assert len(peaks) == STEPS
        before = max(peaks[step] for step in range(6, 11))
        after = max(peaks[step] for step in range(21, 31))
        assert after <= 1.01 * before, stage
