"""The supervised bench: all sides take the same steps, and it refuses where one does not."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench import supervised_sides
from bench.harness import Ready, once, ready
from bench.models import EOS, PAD, SHAPES, ragged_rows, tiny
from bench.plain_hf_supervised import IGNORED, Step, padded, pair_chunks, row_chunks
from bench.supervised import agreement, padded_tokens, require_same_work
from bench.supervised_sides import SIDES, PlainSide, TrainingWork, training_start
from tandem.types import PairRow, Source, TokenRow

TINY = tiny(SHAPES["llama-22m"])


@pytest.fixture(params=["sft", "reward"])
def work(request: pytest.FixtureRequest) -> TrainingWork:
    return TrainingWork(
        stage=request.param,
        shape=TINY,
        num_steps=3,
        batch_size=6,
        micro_batch_tokens=60,
        learning_rate=1e-3,
        prompt_tokens=(2, 6),
        max_answer_tokens=12,
    )


def trained(work: TrainingWork, *names: str) -> Ready:
    start = training_start(work)
    return ready({name: lambda name=name: SIDES[name](work, start) for name in names}, names)


def test_losses_gradients_and_weights_agree(work: TrainingWork) -> None:
    distances = agreement(work, trained(work, "tandem", "hf"))
    assert distances.keys() == {"tandem/loss", "tandem/grad_norm", "tandem/tensors"}
    assert max(distances.values()) < 1e-4


@pytest.mark.parametrize(
    ("knob", "value"),
    [("learning_rate", 1e-2), ("betas", (0.5, 0.95)), ("max_grad_norm", 1e-3)],
)
def test_a_plain_loop_with_another_knob_does_not_agree(
    work: TrainingWork, monkeypatch: pytest.MonkeyPatch, knob: str, value: Any
) -> None:
    """So none of these parts is idle in the check."""
    settings = supervised_sides.plain_settings
    monkeypatch.setattr(
        supervised_sides,
        "plain_settings",
        lambda work: replace(settings(work), **{knob: value}),
    )
    with pytest.raises(RuntimeError, match=r"must agree to 0\.0001 on both sides; got"):
        agreement(work, trained(work, "tandem", "hf"))


@pytest.mark.parametrize("name", ["tandem", "hf"])
def test_every_round_begins_at_the_start(work: TrainingWork, name: str) -> None:
    start = training_start(work)
    before = [p.clone() for p in start.model.parameters()]
    side = SIDES[name](work, start)
    (first, costs), (second, _) = once(side, 1), once(side, 2)
    require_same_work(work, "side", second, first)
    assert first[0].loss != first[2].loss
    assert costs["total"].wall > 0
    assert all(torch.equal(a, b) for a, b in zip(before, start.model.parameters(), strict=True))


def test_micro_batches_do_not_change_the_plain_loop(work: TrainingWork) -> None:
    start = training_start(work)
    whole, _ = once(PlainSide(replace(work, micro_batch_tokens=10_000), start), 1)
    cut, _ = once(PlainSide(replace(work, micro_batch_tokens=1), start), 1)
    for one, other in zip(whole, cut, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)


def test_rows_are_padded_on_the_right_and_prompts_are_no_labels() -> None:
    source = Source("bench", "bench", 1)
    rows = [
        TokenRow((7, 8, EOS), (False, True, True), source),
        TokenRow((9, EOS), (False, True), source),
    ]
    token_ids, attention_mask, labels = padded(rows, PAD, torch.device("cpu"))
    assert token_ids.tolist() == [[7, 8, EOS], [9, EOS, PAD]]
    assert attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert labels.tolist() == [[IGNORED, 8, EOS], [IGNORED, EOS, IGNORED]]


def test_chunks_hold_the_tokens_that_they_may() -> None:
    rows = ragged_rows(10, 48, prompt_tokens=(4, 8), max_answer_tokens=12)
    longest = max(map(len, rows))
    chunks = list(row_chunks(rows, 3 * longest + 1))
    assert [len(chunk) for chunk in chunks] == [3, 3, 3, 1]
    assert [row for chunk in chunks for row in chunk] == rows
    assert [len(chunk) for chunk in row_chunks(rows[:2], 1)] == [1, 1]
    pairs = [PairRow(a, b) for a, b in zip(rows[:5], rows[5:], strict=True)]
    assert [len(chunk) for chunk in pair_chunks(pairs, 4 * longest + 1)] == [2, 2, 1]


def test_padding_is_counted_as_the_plain_loop_pads(work: TrainingWork) -> None:
    start = training_start(work)
    one_row_at_a_time = replace(work, micro_batch_tokens=1)
    expected = sum(
        len(row) * (1 if work.stage == "sft" else 2) for batch in start.batches for row in batch
    )
    assert padded_tokens(one_row_at_a_time, start) == expected
    longest = sum(len(batch) * max(map(len, batch)) for batch in start.batches)
    assert padded_tokens(replace(work, micro_batch_tokens=10**6), start) == longest * (
        1 if work.stage == "sft" else 2
    )
    if work.stage == "sft":
        assert expected == start.num_tokens


def test_other_work_is_refused(work: TrainingWork) -> None:
    steps = [Step(3.0, 1.0), Step(2.0, 1.0), Step(1.0, 1.0)]
    require_same_work(work, "hf", steps, steps)
    with pytest.raises(RuntimeError, match="hf must take 3 optimizer steps; got 2"):
        require_same_work(work, "hf", steps[:2], steps)
    other = [*steps[:2], Step(1.1, 1.0)]
    with pytest.raises(
        RuntimeError, match=r"every round of hf must have the same losses; got 1\.1"
    ):
        require_same_work(work, "hf", other, steps)


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.filterwarnings("ignore")
def test_trl_takes_the_same_steps(work: TrainingWork) -> None:
    distances = agreement(work, trained(work, "trl", "hf"))
    assert distances.keys() == {"trl/loss", "trl/grad_norm", "trl/tensors"}
