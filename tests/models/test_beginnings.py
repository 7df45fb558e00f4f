"""Different prompts that begin alike run that once, and compute what each row computes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tandem.engine.forward import response_logprobs
from tandem.models.beginnings import PromptGroup, common_tokens, prompt_groups
from tandem.models.packed import hidden_states, packed_rows, predictor_states, shares_prompts
from tandem.ops import native
from tandem.types import TokenBatch

from .alike_rows import PROMPTS, beginning_batch
from .families import tiny_model
from .test_shared_prompts import require_same


def each_alone(forward: Callable[[TokenBatch], Tensor], batch: TokenBatch) -> list[Tensor]:
    """A function of a batch, of every row by itself, padded as in the batch."""
    found = []
    for row in range(len(batch)):
        one = TokenBatch(
            batch.token_ids[row : row + 1],
            batch.attention_mask[row : row + 1],
            batch.response_mask[row : row + 1],
        )
        found.append(forward(one))
    return found


def groups_of(rows: Sequence[Sequence[int]], answers: Sequence[int]) -> list[PromptGroup]:
    """Of rows whose last `answers` tokens are the answer."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    places = torch.arange(width)[None]
    ends = torch.tensor([len(row) for row in rows])[:, None]
    begins = ends - torch.tensor(answers)[:, None]
    return prompt_groups(TokenBatch(ids, places < ends, (places >= begins) & (places < ends)))


def test_what_prompts_have_in_common_is_told_by_blocks() -> None:
    s, r = [*range(100, 116)], [*range(200, 216)]
    rows = [
        [*s, *r, 1, 2, 9],  # s r
        [7, *s, 9],
        [*s, *r, 1, 3, 9],  # s r, and 1 of the next block
        [*s, 5, 9],  # s
        [*s, *r, 1, 2, 8],  # the prompt of the first row
        [*s, *r],  # a prompt of s and 15 more, the answer is the last of r
        s,  # a prompt of 15
    ]
    groups = groups_of(rows, [1] * len(rows))
    found = [
        (group.rows, group.prompt_tokens, [part.end for part in group.beginnings])
        for group in groups
    ]
    assert found == [
        ([0, 4], 34, [16, 32]),
        ([1], 17, []),
        ([2], 34, [16, 32]),
        ([3], 17, [16]),
        ([5], 31, [16]),
        ([6], 15, []),
    ]
    assert len({group.beginnings[0].number for group in groups if group.beginnings}) == 1
    assert groups[0].beginnings == groups[2].beginnings
    assert common_tokens(groups) == [32, 16, 16]
    assert common_tokens([groups[3], groups[0], groups[1], groups[2]]) == [16, 32]


def test_many_prompts_within_each_other() -> None:
    """As the turns of one long conversation."""
    many = 60
    tokens = [*range(1, many * 16 + 3)]
    groups = groups_of([tokens[: 16 * n + 2] for n in range(1, many + 1)], [1] * many)
    assert len(groups[-1].beginnings) == many - 1
    assert common_tokens(groups) == [16 * n for n in range(1, many)]


def test_tokens_stand_once() -> None:
    s = [*range(100, 116)]
    ids = torch.tensor([[*s, 1, 5, 6], [*s, 2, 7, 0], [*s, 1, 8, 0], [*range(19)]])
    real = torch.tensor([[True] * 19, [True] * 18 + [False], [True] * 18 + [False], [True] * 19])
    answered = torch.zeros_like(real)
    answered[:, 17:] = True
    batch = TokenBatch(ids, real, answered & real)
    rows = packed_rows(batch, real, shares=True)
    assert rows.token_ids.tolist() == [*s, 1, 5, 6, 8, 2, 7, *range(19)]
    assert rows.positions.tolist() == [*range(16), 16, 17, 18, 17, 16, 17, *range(19)]
    assert rows.step.cu_seqlens.tolist() == [0, 16, 17, 19, 20, 22, 41]
    assert rows.step.prefixes is not None
    assert rows.step.prefixes.tolist() == [-1, 0, 1, 1, 0, -1]
    assert rows.step.max_length == 19
    assert rows.asked is not None
    assert torch.equal(rows.token_ids[rows.asked], ids[real])
    whole = rows.step.whole()
    assert whole.packed.cu_seqlens.tolist() == [0, 19, 37, 55, 74]
    assert torch.equal(rows.token_ids[whole.tokens], ids[[0, 2, 1, 3]][real[[0, 2, 1, 3]]])
    assert torch.equal(whole.tokens[whole.back], torch.arange(41))


@pytest.mark.parametrize("prompts", PROMPTS)
def test_logprobs_and_gradients(family: str, prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny_model(family), beginning_batch(PROMPTS[prompts])
    assert shares_prompts(model)
    rows = packed_rows(batch, batch.attention_mask, shares=True)
    assert len(rows.token_ids) < int(batch.attention_mask.sum()) - 31
    require_same(model, lambda: response_logprobs(model, batch)[0], monkeypatch)


@pytest.mark.skipif(not native.available(), reason=native.why_not() or "available")
def test_a_row_has_the_bits_that_it_has_alone() -> None:
    model, batch = tiny_model("llama"), beginning_batch(PROMPTS["in each other"])
    with torch.no_grad():
        together = response_logprobs(model, batch)[0]
        alone = each_alone(lambda row: response_logprobs(model, row)[0], batch)
    assert torch.equal(together, torch.cat(alone))


def test_answers_in_earlier_turns_keep_their_own_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """SFT learns every answer of a conversation: rows have losses from their first answer on."""
    model, batch = tiny_model("llama"), beginning_batch(PROMPTS["one answer"])
    learned = batch.response_mask.clone()
    learned[0, 18:20] = True  # within what the rows begin with alike
    learned[2, 10:12] = True
    batch = TokenBatch(batch.token_ids, batch.attention_mask, learned)
    ends = [[part.end for part in group.beginnings] for group in prompt_groups(batch)]
    assert ends == [[16], [16], []]
    require_same(model, lambda: response_logprobs(model, batch)[0], monkeypatch)


def test_states_of_all_tokens_share_nothing() -> None:
    model, batch = tiny_model("llama"), beginning_batch(PROMPTS["one answer"])
    with torch.no_grad():
        states = hidden_states(model, batch)
        asked = states[batch.response_mask.roll(-1, 1)[batch.attention_mask]]
        assert torch.allclose(asked, predictor_states(model, batch), atol=1e-6)
