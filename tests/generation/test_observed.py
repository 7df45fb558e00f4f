"""The likeliest tokens beside drawn ones."""

from __future__ import annotations

import pytest
import torch

from tandem.generation.observed import observe


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 20, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ids", [20, 600])
def test_of_equal_logits_the_lowest_ids_come_first(
    count: int, dtype: torch.dtype, num_ids: int
) -> None:
    """However many are asked for: by an answer, and by those beside it. Of the tokenizer's."""
    generator = torch.Generator().manual_seed(count)
    logits = torch.randint(-3, 4, (5, 600), generator=generator).to(dtype)
    logits[1] = 0.0
    logits[1, ::2] = -0.0
    logits[2, 3:] = -torch.inf
    _, ids, likeliest = observe(logits, torch.zeros(5, dtype=torch.long), count, num_ids)
    ranked = [
        sorted(range(num_ids), key=lambda i, row=row: (-row[i], i))[:count]
        for row in logits.float().tolist()
    ]
    assert ids.tolist() == ranked
    all_logprobs = logits.float().log_softmax(-1)
    torch.testing.assert_close(likeliest, all_logprobs.gather(1, ids), msg="the softmax is of all")


def test_a_distribution_that_is_none_names_tokens_that_there_are() -> None:
    logits = torch.full((2, 50), torch.nan)
    logits[1, 7] = 1.0
    chosen, ids, _ = observe(logits, torch.zeros(2, dtype=torch.long), 5, 50)
    assert chosen.isnan().all()
    assert ((ids >= 0) & (ids < 50)).all()
