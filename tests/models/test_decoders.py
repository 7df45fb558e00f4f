"""Decoders of transformers: how each runs, and that replaced layers compute what theirs do."""

from __future__ import annotations

import ast
import copy
import re
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig

from tandem.engine.checks import check_policy, check_same_start
from tandem.engine.forward import response_logprobs
from tandem.errors import ModelError
from tandem.generation.native_runner import runs_natively
from tandem.models.build import require_decoder
from tandem.models.fused import _BY_NAME, _UNIT_OFFSET, _gated_mlp, _norm
from tandem.models.scalar import load_scalar_model, sequence_scores, token_values
from tandem.models.selfcheck import check_twin
from tandem.models.twin import decodes, supports_packing, why_unpacked
from tandem.ops import native
from tests.generation.test_exactness import answer, by_row, prompts

from .decoders import DECODERS, PADDED, SOME_LAYERS
from .families import ragged_batch, saved, scaled
from .measure_decoders import measure, tiny_decoder

_KINDS = ["sliding_attention", "full_attention"]
needs_native = pytest.mark.skipif(not native.available(), reason=native.why_not())


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_runs_as_the_table_says(name: str) -> None:
    family, model = name.split()[0], tiny_decoder(name)
    check_policy(model)
    check_same_start(model, copy.deepcopy(model))
    found = measure(model)
    assert found.logprobs < 1e-6
    assert found.gradients < 5e-6
    assert found.greedy
    assert found.packs == (family not in PADDED), found.why
    exact = family not in PADDED | SOME_LAYERS
    assert found.sampled <= (0.0 if exact else 6e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_its_reward_model_is_made_and_opened_again(name: str, tmp_path: Path) -> None:
    saved(tiny_decoder(name), tmp_path / "policy")
    model = load_scalar_model(tmp_path / "policy", seed=1)
    batch = ragged_batch((9, 2, 14))
    scores = sequence_scores(model, batch)
    (scores.sum() + token_values(model, batch).sum()).backward()
    for row, n in enumerate(batch.lengths().tolist()):
        ids = batch.token_ids[row : row + 1, :n]
        with torch.no_grad():
            states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            assert scaled(scores[row], model.score(states[0, -1])[0])
    saved(model, tmp_path / "reward")
    again = load_scalar_model(tmp_path / "reward", seed=9, from_causal_lm=False)
    assert scaled(sequence_scores(again, batch), scores, 1e-6)


@needs_native
@pytest.mark.parametrize("name", ["cwm", "ministral3 scaled", "diffllama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_scaled_by_position_and_differences_of_maps_are_exact(
    name: str, dtype: torch.dtype
) -> None:
    model = tiny_decoder(name).to(dtype)
    assert check_twin(model).bitwise
    assert runs_natively(model, 1 << 40) == (name == "cwm")
    made = answer(model, prompts(5, 17, 30), samples_per_prompt=2)
    with torch.enable_grad():
        scored, _ = response_logprobs(model, made.batch)
    assert torch.equal(made.rollout_logprobs, scored.detach())


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("doge", {}, "masks keys in a way of its own"),
        ("inkling_text", {}, "passes position_bias to attention"),
        ("minimax_m3_vl_text", {}, "passes block_indices to attention"),
        ("hrm_text", {}, "attends more than once a layer"),
        ("phimoe", {"sliding_window": 5}, "has layers of sliding_attention, known to its own"),
        (
            "qwen2_moe",
            {"sliding_window": 5, "use_sliding_window": True, "layer_types": _KINDS},
            "has layers of sliding_attention, known to its own masks alone",
        ),
    ],
)
def test_what_packed_attention_would_lose_goes_another_way_by_name(
    name: str, changes: dict[str, object], why: str
) -> None:
    model = tiny_decoder(name, **changes)
    assert not supports_packing(model)
    assert why in why_unpacked(model)
    assert f"family {name!r}" in why_unpacked(model)


def test_chosen_keys_are_named() -> None:
    model = tiny_decoder("deepseek_v32")
    (kind,) = set(model.config.layer_types)  # its name differs between versions of transformers
    assert not supports_packing(model)
    assert why_unpacked(model) == (
        f"family 'deepseek_v32' does not run on packed tokens (layers of {kind})"
    )


@pytest.mark.parametrize(
    ("family", "changes", "found"),
    [
        ("doge", {"is_moe": True}, "whose router mixes a row's tokens, later ones too"),
        ("cpmant", {}, "whose forward puts prompts of its own before every row"),
    ],
)
def test_families_that_read_more_than_the_tokens_before_are_refused(
    family: str, changes: dict[str, object], found: str
) -> None:
    with pytest.raises(ModelError, match=f"must be a decoder; got family {family!r}, {found}"):
        require_decoder(AutoConfig.for_model(family, **changes), "m")


@pytest.mark.parametrize("name", ["longcat_flash", "openai-gpt", "hrm_text"])
def test_policy_and_reference_are_compared_whatever_blocks_give(name: str) -> None:
    model = tiny_decoder(name)
    assert check_same_start(model, copy.deepcopy(model)) == 0.0


def test_a_window_as_wide_as_the_positions_hides_nothing() -> None:
    assert decodes(tiny_decoder("phimoe", sliding_window=64))


def test_padding_does_not_shift_blocks_of_keys() -> None:
    model = tiny_decoder("minimax_m3_vl_text")
    rows = prompts(3, 9, 14, 9)
    together = by_row(answer(model, rows, max_new_tokens=8))
    for i, row in enumerate(rows):
        ids, logprobs = by_row(answer(model, [row], numbers=[i], max_new_tokens=8))[0]
        assert ids == together[i][0]
        assert logprobs == pytest.approx(together[i][1], abs=2e-5)


def test_layers_that_are_replaced_by_name_are_the_ones_that_were_read() -> None:
    """Norms and MLPs of other families have Llama's code, or Gemma's, in this transformers."""
    # The same to rounding; without its dropout.
    others = {"Olmo2RMSNorm", "OlmoHybridRMSNorm", "SeedOssMLP"}
    by_kind = {_norm: "RMSNorm", _gated_mlp: "MLP"}
    named = {
        name: by_kind[how]
        for name, how in _BY_NAME.items()
        if how in by_kind and f"\nclass {name}(" in _sources()
    }
    assert len(named) > 80  # an older transformers has not all of them
    read = {
        f"{family}{kind}": _forward(f"{family}{kind}", family)
        for family in ("Llama", "Gemma")
        for kind in ("RMSNorm", "MLP")
    }
    for name, kind in named.items():
        if name not in others:
            is_offset = kind == "RMSNorm" and name.startswith(_UNIT_OFFSET)
            family = "Gemma" if is_offset else "Llama"
            assert _forward(name, name.removesuffix(kind)) == read[f"{family}{kind}"], name


def _forward(name: str, family: str) -> str:
    """A class's forward in transformers, without comments, and without its family's name."""
    begin = _sources().index(f"\nclass {name}(")
    end = _NEXT.search(_sources(), begin + 2)
    assert end is not None
    methods = ast.parse(_sources()[begin : end.start()]).body[0].body  # type: ignore[attr-defined]
    forward = next(m for m in methods if isinstance(m, ast.FunctionDef) and m.name == "forward")
    return "\n".join(ast.unparse(part) for part in forward.body).replace(family, "")


_NEXT = re.compile(r"^\S", re.MULTILINE)


@cache
def _sources() -> str:
    models = Path(transformers.__file__).parent / "models"
    return "\n".join(path.read_text() for path in sorted(models.glob("*/modeling_*.py")))
