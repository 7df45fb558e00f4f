"""Families without a twin: Hugging Face's generate is compared with the forward."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from tandem.engine.checks import check_policy
from tandem.errors import ConfigError, ModelError
from tandem.models.load import new_causal_lm
from tandem.models.selfcheck import Agreement
from tandem.ops import native
from tandem.parallel.shard import ShardPlan, shard
from tandem.parallel.world import World
from tandem.training.checks import agreement
from tandem.training.checks.agreement import unlike_ranks
from tests.models.families import perturbed, tiny_model
from tests.ranks import on_ranks


def bloom() -> PreTrainedModel:
    config = AutoConfig.for_model("bloom", vocab_size=99, hidden_size=32, n_layer=2, n_head=4)
    return perturbed(new_causal_lm(config, seed=3)).eval()


def test_generate_that_draws_as_the_forward_says_is_used() -> None:
    state = torch.get_rng_state()
    found = check_policy(bloom())
    assert math.isinf(found.gap)  # it does not decode from the twin
    assert 0 < found.largest_gap < 1e-5
    assert torch.equal(torch.get_rng_state(), state)


def test_generate_that_draws_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bloom()
    forward = type(model.base_model).forward

    def shifted(self: Any, input_ids: Any, *args: Any, **keywords: Any) -> Any:
        """A family whose steps with a cache take another token than was given."""
        cache = keywords.get("cache", keywords.get("past_key_values"))  # from 5.24 on, and before
        if cache is not None and input_ids.shape[1] == 1:
            input_ids = (input_ids + 1) % 99
        return forward(self, input_ids, *args, **keywords)

    monkeypatch.setattr(type(model.base_model), "forward", shifted)
    with pytest.raises(ModelError, match="must generate by the probabilities that its forward"):
        check_policy(model)


def test_prompts_of_a_family_that_looks_past_its_mask_are_not_padded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = bloom()
    forward = type(model.base_model).forward

    def unmasked(self: Any, *args: Any, attention_mask: Any = None, **keywords: Any) -> Any:
        return forward(self, *args, **keywords)

    monkeypatch.setattr(type(model.base_model), "forward", unmasked)
    assert check_policy(model).largest_gap < 1e-5


def checked_beside_plain_torch(world: World) -> tuple[Agreement, list[str]]:
    if world.rank == 1:
        os.environ["TANDEM_NATIVE"] = "off"  # as where there is no compiler
    native.why_not.cache_clear()
    model = tiny_model("llama").to(torch.bfloat16).eval()
    shard(model, (), ShardPlan(), world)
    return check_policy(model), unlike_ranks(world)


def test_ranks_that_compute_otherwise_decide_alike() -> None:
    """Else one of them would take the sampler's log-probs and another wait for its forward."""
    (found, lines), (other, others) = on_ranks(2, checked_beside_plain_torch)
    assert found == other
    assert not found.bitwise
    assert not found.trustworthy
    if native.available():
        (line,) = lines
        assert line.startswith("note: rank 1 on ")
        assert " computes by plain torch (TANDEM_NATIVE is off), others by C++ operations" in line
        assert lines == others


def told_of_other_instructions(world: World) -> tuple[list[str], str]:
    if world.rank == 1:
        agreement.computed_by = lambda device: "AVX2, torch 2.13.0"  # type: ignore[assignment]
    else:
        agreement.computed_by = lambda device: "AVX-512, torch 2.13.0"  # type: ignore[assignment]
    lines = unlike_ranks(world)
    with pytest.raises(ConfigError) as refused:
        unlike_ranks(world, together=2)
    return lines, str(refused.value)


def test_ranks_of_other_instructions_are_told_and_do_not_draw_together() -> None:
    """An answer would end on one of them alone, and the others would wait for it for ever."""
    first, second = on_ranks(2, told_of_other_instructions)
    assert first == second
    (line,), refused = first
    assert line.endswith(
        " computes by AVX2, torch 2.13.0, rank 0 by AVX-512, torch 2.13.0: numbers agree to "
        "rounding alone"
    )
    assert "(--inference-tp-size) must compute the same bits; got AVX-512" in refused
    assert refused.endswith("or use --inference-tp-size 1.")


def test_ranks_of_one_kind_need_no_line() -> None:
    assert on_ranks(2, unlike_ranks) == [[], []]


def test_generate_that_fails_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bloom()

    def fails(*args: Any, **keywords: Any) -> Any:
        raise IndexError("list index out of range")

    monkeypatch.setattr(model, "generate", fails)
    with pytest.raises(ModelError, match="must generate by transformers' generate; got IndexError"):
        check_policy(model)
