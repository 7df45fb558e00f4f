"""An adapter of a text decoder, put by PEFT on the whole model that transformers opens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.config.lora import LoraConfig
from tandem.models.load import load_causal_lm
from tandem.models.lora import add_lora, lora_parameters
from tandem.models.save import save_model

from .families import tokenizer


def assert_peft_agrees(
    whole: Path, folder: Path, opener: Any, numbers: Callable[[Any], Tensor]
) -> None:
    """A decoder with adapters gives what PEFT makes of the folder that it is saved in.

    Args:
        whole: the whole model's folder. folder: to save in.
        opener: the Auto class that PEFT's base is opened by.
        numbers: of a model, to compare.
    """
    model: PreTrainedModel = load_causal_lm(whole)
    before = numbers(model)
    add_lora(model, LoraConfig(rank=2), seed=0, tokens=(5, 6))
    with torch.no_grad():
        for parameter in lora_parameters(model):
            parameter += 0.1
    save_model(model, tokenizer(), folder, base_path=whole)
    base = opener.from_pretrained(whole, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
    adapted = numbers(model)
    assert torch.equal(numbers(load_causal_lm(folder / "adapter")), adapted)
    assert not torch.allclose(adapted, before, atol=1e-3)
    # In float64: sums of float32 in another order, as on a matrix unit, differ by more here.
    expected, found = (numbers(made.double()).double() for made in (theirs, model))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
