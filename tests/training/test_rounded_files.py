"""A stage says where its model's files round what it has trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import tiny_config
from tests.training.runs import ran


@pytest.fixture(scope="module")
def short_model(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model in bf16 files."""
    folder = str(tmp_path_factory.mktemp("short"))
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [({}, True), ({"save_dtype": "fp32"}, False), ({"lora__rank": 2}, False)],
)
def test_the_line_at_its_end_says_so(
    changes: dict[str, object], is_told: bool, tmp_path: Path, short_model: str, preferences: str
) -> None:
    config = tiny_config(
        tmp_path / "run", short_model, preferences, stages=["sft"], sft__max_steps=1,
        dataset__split=[], ppo__eval_prompts=0, dtype="fp32", **changes,
    )  # fmt: skip
    lines: list[str] = []
    ran(config, lines=lines)
    (line,) = [line for line in lines if "saved in" in line]
    assert ("bf16, as its checkpoint is (--save-dtype fp32 keeps" in line) == is_told
