"""Families without a twin: Hugging Face's generate is compared with the forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from tandem.engine import checks
from tandem.engine.checks import check_policy
from tandem.errors import ModelError
from tandem.models.load import new_causal_lm
from tests.models.families import perturbed


def bloom() -> PreTrainedModel:
    config = AutoConfig.for_model("bloom", vocab_size=99, hidden_size=32, n_layer=2, n_head=4)
    return perturbed(new_causal_lm(config, seed=3)).eval()


def test_generate_that_draws_as_the_forward_says_is_used() -> None:
    state = torch.get_rng_state()
    assert check_policy(bloom()) is None
    assert torch.equal(torch.get_rng_state(), state)


def test_generate_that_draws_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bloom()
    forward = type(model.base_model).forward

    def shifted(self: Any, *args: Any, attention_mask: Any = None, **keywords: Any) -> Any:
        """A family that does not look at the mask, so that padding on the left enters."""
        return forward(self, *args, **keywords)

    monkeypatch.setattr(type(model.base_model), "forward", shifted)
    with pytest.raises(ModelError, match="must draw by the own forward of family 'bloom'; got"):
        check_policy(model)


def test_generate_that_fails_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **keywords: Any) -> Any:
        raise IndexError("list index out of range")

    monkeypatch.setattr(checks, "generate", fails)
    with pytest.raises(ModelError, match="must run family 'bloom'; got IndexError: list index"):
        check_policy(bloom())
