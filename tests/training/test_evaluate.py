"""Held-out measures against plain loops over Hugging Face's own numbers."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.config.schema import RunConfig
from tandem.data.render import Renderer
from tandem.engine.scoring import RewardScorer
from tandem.errors import ModelError
from tandem.models.load import load_causal_lm, load_tokenizer
from tandem.models.scalar import load_scalar_model
from tandem.training import reward_model
from tandem.training.evaluate import (
    calibration_error,
    language_model_metrics,
    metrics_of_margins,
    pair_margins,
    row_logprobs,
)
from tandem.types import Message, PairRow, Source, TokenRow


def rows_of(renderer: Renderer) -> list[TokenRow]:
    pairs = [("one", "Yes."), ("two?", "It is a longer answer."), ("three", "No.")]
    return [
        renderer.conversation(
            [Message("user", question)], answer, Source(f"set{i % 2}", "memory", i + 1)
        )
        for i, (question, answer) in enumerate(pairs)
    ]


def test_perplexity_is_that_of_a_loop_over_rows(tiny_model: str) -> None:
    model, renderer = load_causal_lm(tiny_model), Renderer(load_tokenizer(tiny_model))
    rows = rows_of(renderer)
    losses, counts = [], []
    for row in rows:
        ids = torch.tensor([row.token_ids])
        labels = torch.tensor([[i if m else -100 for i, m in zip(row.token_ids, row.response_mask,
                                                                strict=True)]])  # fmt: skip
        n = sum(row.response_mask)
        with torch.no_grad():
            losses.append(model(ids, labels=labels).loss.item() * n)  # HF's own shifted mean
        counts.append(n)
    metrics = language_model_metrics(model, rows, renderer, RunConfig())
    mean = sum(losses) / sum(counts)
    assert metrics["heldout_loss"] == pytest.approx(mean, rel=1e-5)
    assert metrics["heldout_perplexity"] == pytest.approx(math.exp(mean), rel=1e-5)
    assert metrics["heldout_loss/set1"] == pytest.approx(losses[1] / counts[1], rel=1e-5)
    sums = row_logprobs(model, rows, renderer, RunConfig(micro_batch_tokens=1))
    torch.testing.assert_close(sums, -torch.tensor(losses), rtol=1e-5, atol=1e-4)


def test_no_rows_measure_nothing(tiny_model: str) -> None:
    model, renderer = load_causal_lm(tiny_model), Renderer(load_tokenizer(tiny_model))
    assert language_model_metrics(model, [], renderer, RunConfig()) == {}
    assert metrics_of_margins(pair_margins(RewardScorer(model, renderer), []), []) == {}


@pytest.mark.parametrize("score", [0.1, 100.3, 1000.7])
def test_a_constant_reward_model_has_no_spread_to_normalize_by(
    score: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the rounding error of the mean of equal floats, which made scores of +-1."""
    monkeypatch.setattr(reward_model, "answer", lambda *given: None)
    placement = SimpleNamespace(policy=lambda source, trained: None)
    run: Any = SimpleNamespace(
        config=RunConfig(actor_model="policy"),
        placement=placement,
        policy_source=lambda stage: "policy",
        settings=None,
    )
    scorer: Any = SimpleNamespace(raw=lambda rollout, renderer: torch.full((256,), score))
    rows: Any = SimpleNamespace(prompts=["one", "two"], renderer=None)
    with pytest.raises(ModelError, match="got 256 scores with sd 0"):
        reward_model.normalize(run, scorer, rows)


def test_preferences_equal_hugging_faces_own_scores(tiny_model: str, tmp_path: Path) -> None:
    renderer = Renderer(load_tokenizer(tiny_model))
    model = load_scalar_model(tiny_model, seed=3).eval()
    rows = rows_of(renderer)
    pairs = [PairRow(rows[0], rows[1]), PairRow(rows[1], rows[2]), PairRow(rows[2], rows[0])]
    with torch.no_grad():
        plain = [model(torch.tensor([row.token_ids])).logits.item() for row in rows]
    margins = [plain[0] - plain[1], plain[1] - plain[2], plain[2] - plain[0]]
    metrics = metrics_of_margins(pair_margins(RewardScorer(model, renderer), pairs), pairs)
    assert metrics["heldout_accuracy"] == pytest.approx(sum(m > 0 for m in margins) / 3)
    assert metrics["heldout_margin"] == pytest.approx(sum(margins) / 3, abs=1e-5)
    assert metrics["heldout_margin/set1"] == pytest.approx(margins[1], abs=1e-5)


def test_calibration_error_by_hand() -> None:
    # Four pairs at confidence 0.9, one of them wrong: |0.9 - 0.75|; two at 0.6, both right.
    logit = math.log(0.9 / 0.1)
    small = math.log(0.6 / 0.4)
    margins = torch.tensor([logit, logit, logit, -logit, small, small])
    expected = 4 / 6 * abs(0.9 - 0.75) + 2 / 6 * abs(0.6 - 1.0)
    assert calibration_error(margins) == pytest.approx(expected, abs=1e-6)


def test_a_calibrated_model_has_no_error() -> None:
    probability = torch.rand(40_000, generator=torch.Generator().manual_seed(0)) * 0.98 + 0.01
    wins = torch.rand(40_000, generator=torch.Generator().manual_seed(1)) < probability
    margins = torch.logit(probability) * torch.where(wins, 1.0, -1.0)
    assert calibration_error(margins) < 0.02
    assert calibration_error(3 * margins) > 0.05  # too sure of itself
