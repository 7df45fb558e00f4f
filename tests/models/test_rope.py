"""Ropes of packed sequences: once for every position, or by the length of each sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.errors import ShapeError
from tandem.models.packed import computed_tokens, hidden_states
from tandem.models.rope import STEADY_KINDS
from tandem.models.selfcheck import check_twin
from tandem.models.twin import decodes, rope_border, supports_packing, twin_of, why_unpacked
from tandem.ops.attention_context import Packed, attending

from .families import ragged_batch, scaled, tiny_model

BORDER = 16
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": BORDER,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


STEADY: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", STEADY_KINDS)
def test_positions_that_tokens_share_are_computed_once_with_the_same_bits(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = {"rope_type": kind, "rope_theta": 1e4, **STEADY[kind]}
    model = tiny_model("llama", rope_parameters=parameters).to(dtype).eval()
    rope, own = model.base_model.rotary_emb, twin_of(model).base_model.rotary_emb
    x, lengths = torch.zeros(1, 1, 8, dtype=dtype), (9, 40, 3, 21)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    computed: list[int] = []
    forward = type(rope).forward

    def counted(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        computed.append(position_ids.shape[1])
        return forward(self, x, position_ids)

    monkeypatch.setattr(type(rope), "forward", counted)
    with attending(Packed.of_lengths(lengths, positions.device)):
        found = own(x, positions)
        alone = own(x, positions[:, :9])
    expected = rope(x, positions)
    assert all(map(torch.equal, found, expected))
    assert all(torch.equal(one, other[:, :9]) for one, other in zip(alone, expected, strict=True))
    assert computed == [40, 9, 73]


def longrope(**changes: Any) -> PreTrainedModel:
    return tiny_model("llama", rope_parameters=LONG, **changes).eval()


@torch.no_grad()
def test_a_row_does_not_turn_by_a_longer_neighbours_frequencies() -> None:
    model = longrope()
    lengths = (BORDER, BORDER + 1, 30, 3)
    batch = ragged_batch(lengths)
    assert supports_packing(model)
    packed = hidden_states(model, batch).split(lengths)
    for row, n, ours in zip(batch.token_ids, lengths, packed, strict=True):
        own = model.base_model(row[None, :n], use_cache=False).last_hidden_state[0]
        assert scaled(ours, own)
    short = model.base_model(batch.token_ids[2:3, :BORDER], use_cache=False).last_hidden_state[0]
    assert not scaled(packed[2][:BORDER], short, 1e-2), "the long row's tokens turn otherwise"


def test_it_does_not_decode_over_memory_and_says_why() -> None:
    model = longrope()
    assert rope_border(model) == BORDER
    assert not decodes(model)
    assert "'llama' recomputes its rotary embeddings past 16 tokens" in why_unpacked(model)
    assert not check_twin(model).trustworthy


def test_the_border_follows_the_config() -> None:
    model = longrope()
    assert rope_border(model) == BORDER
    model.config.rope_parameters["original_max_position_embeddings"] = BORDER - 4
    assert rope_border(model) == BORDER - 4
    model.config.rope_parameters["original_max_position_embeddings"] = BORDER
    assert rope_border(model) == BORDER


def test_one_that_never_turns_is_as_any_other() -> None:
    model = longrope(max_position_embeddings=BORDER)
    assert rope_border(model) is None
    assert decodes(model)
    assert why_unpacked(model) == ""


def test_dynamic_scaling_decodes_and_is_never_stretched() -> None:
    model = tiny_model("llama", rope_parameters=DYNAMIC, max_position_embeddings=BORDER).eval()
    assert decodes(model)
    assert check_twin(model).gap < 1e-5
    hidden_states(model, ragged_batch((BORDER, 3)))
    with pytest.raises(ShapeError, match="must fit the 16 positions of a model with dynamic rope"):
        hidden_states(model, ragged_batch((BORDER + 1, 3)))


def test_longrope_keeps_the_length_of_its_sequences() -> None:
    """No token is left out of a forward, as that would change the others' frequencies."""
    batch = ragged_batch((9, 5))
    asked = batch.response_mask.roll(-1, 1)
    real, found = computed_tokens(longrope(), batch, ends=False)
    assert torch.equal(real, batch.attention_mask)
    assert torch.equal(found, asked)
    shorter, found = computed_tokens(tiny_model("llama"), batch, ends=False)
    assert torch.equal(shorter, batch.attention_mask & (asked.flip(1).cumsum(1) > 0).flip(1))
    assert torch.equal(found, asked)
