"""Random rows and weights of the benches: lengths as they say, differences as they are."""

from __future__ import annotations

import pytest
import torch

from bench.models import EOS, PAD, SHAPES, apart, model_config, ragged_rows, random_model, tiny


def test_rows_are_prompts_then_answers_of_geometric_lengths() -> None:
    rows = ragged_rows(2000, 48, prompt_tokens=(3, 5), max_answer_tokens=16)
    answers = torch.tensor([float(sum(row.response_mask)) for row in rows])
    prompts = {len(row) - sum(row.response_mask) for row in rows}
    assert prompts == {3, 4, 5}
    assert (answers.min(), answers.max()) == (1, 16)
    assert abs(answers.mean() - 8) < 4 * answers.std() / 2000**0.5 + 0.15  # 1.594 is rounded
    left = [(answers > n).float().mean().item() for n in (0, 5, 10)]
    assert left[1] / left[0] == pytest.approx(left[2] / left[1], abs=0.08)
    for row in rows:
        prompt = len(row) - sum(row.response_mask)
        assert list(row.response_mask) == [i >= prompt for i in range(len(row))]
        assert row.token_ids[-1] == EOS
        assert not {PAD, EOS} & set(row.token_ids[:-1])
    assert ragged_rows(3, 48) == ragged_rows(3, 48)
    assert ragged_rows(3, 48) != ragged_rows(3, 48, seed=2)


def test_apart_is_the_difference_over_the_size() -> None:
    ours, theirs = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])], [torch.tensor([3.0, 0.0])]
    assert apart(ours, [*theirs, torch.tensor([4.0])]) == 0
    assert apart([torch.tensor([3.0, 5.0])], [torch.tensor([3.0, 4.0])]) == pytest.approx(0.2)


# transformers has no scalar head for two of them.
@pytest.mark.parametrize(
    ("name", "scalar"),
    [
        (n, s)
        for n in SHAPES
        for s in (False, True)
        if not (s and n in ("lfm2-37m", "granite4-47m"))
    ],
)
def test_every_shape_has_a_tiny_one_of_its_kind(name: str, scalar: bool) -> None:
    model = random_model(model_config(tiny(SHAPES[name]), 16), scalar=scalar)
    assert model.num_parameters() < 50_000
    assert model.config.model_type == SHAPES[name]["model_type"]
    ids = torch.tensor([[5, 6, 7]])
    logits = model(ids, attention_mask=torch.ones_like(ids)).logits
    assert logits.shape == ((1, 1) if scalar else (1, 3, 320))
