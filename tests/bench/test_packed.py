"""The packing bench: both sides differentiate the same loss, and it refuses where they do not."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bench.harness import once, ready
from bench.models import SHAPES, apart, tiny
from bench.packed import SIDES, PlainGradient, TandemGradient, gradients
from bench.supervised import agreement, measure_row
from bench.supervised_sides import TrainingWork, training_start
from tandem.types import TokenBatch


def work_of(micro_batch_tokens: int = 40, lora_rank: int = 0) -> TrainingWork:
    return TrainingWork(
        shape=tiny(SHAPES["llama-22m"]),
        num_steps=1,
        batch_size=9,
        micro_batch_tokens=micro_batch_tokens,
        prompt_tokens=(2, 6),
        max_answer_tokens=12,
        lora_rank=lora_rank,
    )


@pytest.mark.parametrize(
    ("micro_batch_tokens", "lora_rank"), [(1, 0), (40, 0), (10_000, 0), (40, 4)]
)
def test_both_sides_have_one_gradient_whatever_the_micro_batch(
    micro_batch_tokens: int, lora_rank: int
) -> None:
    work = work_of(micro_batch_tokens, lora_rank)
    start = training_start(work)
    found = ready(
        {name: lambda kind=kind: kind(work, start) for name, kind in SIDES.items()}, SIDES
    )
    assert max(agreement(work, found, gradients, 1e-5).values()) < 1e-5
    trained = len(gradients(found.sides["tandem"].model))
    assert trained == (2 * 7 * 2 if lora_rank else 9 * 2 + 2)  # A and B; all but the tied head


def test_the_gradient_is_of_the_answers_mean_cross_entropy() -> None:
    """Against a loop over rows and tokens, one row at a time and without padding."""
    work = work_of()
    side = PlainGradient(work, training_start(work))
    once(side, 1)
    ours = [gradient.clone() for gradient in gradients(side.model)]
    side.prepare()
    total: Tensor = torch.zeros(())
    count = 0
    for row in side.start.rows:
        logits = side.model(torch.tensor([row.token_ids])).logits[0]
        for t in range(1, len(row)):
            if row.response_mask[t]:
                total = total - logits[t - 1].log_softmax(dim=0)[row.token_ids[t]]
                count += 1
    (total / count).backward()  # type: ignore[no-untyped-call]
    assert apart(ours, gradients(side.model)) < 1e-5


class Other(TandemGradient):
    """A gradient a little too small."""

    def losses(self, batch: TokenBatch) -> Iterator[Tensor]:
        return (loss * 0.99 for loss in super().losses(batch))


def test_another_gradient_is_refused() -> None:
    options = Namespace(rounds=1, micro_batch_tokens=40)
    kinds = {**SIDES, "tandem": Other}
    with pytest.raises(
        RuntimeError, match=r"tandem/loss must agree to 1e-05 on both sides; got 0\.01"
    ):
        measure_row(work_of(), options, kinds, gradients, 1e-5)


def test_what_is_measured_is_what_is_reported() -> None:
    work = work_of(30)
    row = measure_row(work, Namespace(rounds=2, micro_batch_tokens=30), SIDES, gradients)
    lengths = list(map(len, training_start(work).batches[0]))
    assert row["tokens"] == sum(lengths)
    assert {side: len(rounds) for side, rounds in row["rounds"].items()} == {"tandem": 2, "hf": 2}
    size = 30 // max(lengths)
    padded = sum(len(lengths[i : i + size]) * max(lengths[i : i + size]) for i in range(0, 9, size))
    assert row["padding"] == pytest.approx(padded / sum(lengths))
