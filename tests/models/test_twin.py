"""The twin shares every weight and follows its model; families it cannot compute are told apart."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tandem.config.lora import LoraConfig
from tandem.errors import ModelError, ShapeError
from tandem.models import selfcheck
from tandem.models.load import new_causal_lm
from tandem.models.lora import adapters_off, add_lora
from tandem.models.packed import hidden_states
from tandem.models.selfcheck import check_twin
from tandem.models.twin import (
    kv_shapes,
    shares_every_tensor,
    supports_packing,
    twin_of,
    why_unpacked,
)
from tandem.ops import native
from tandem.ops.attention_context import LayerShape

from .families import (
    CAUSAL_ONLY,
    FAMILIES,
    LLAMA,
    TOKEN_IDS,
    perturbed,
    ragged_batch,
    scaled,
    tiny_model,
)
from .measure_decoders import tiny_decoder


@pytest.mark.parametrize("family", [*FAMILIES, *CAUSAL_ONLY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_twin_decodes_and_packs_as_the_model_does(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family).to(dtype)
    agreement = check_twin(model)
    assert agreement.gap < (1e-5 if dtype == torch.float32 else 2e-2)


def test_every_tensor_is_the_models_own(family: str) -> None:
    model = tiny_model(family)
    assert shares_every_tensor(model)
    model.lm_head if hasattr(model, "lm_head") else model.embed_out
    name, parameter = next(iter(model.named_parameters()))
    owner = model.get_submodule(name.rpartition(".")[0])
    replaced = torch.nn.Parameter(torch.zeros_like(parameter))
    setattr(owner, name.rpartition(".")[2], replaced)
    assert shares_every_tensor(model), "a parameter that is replaced is replaced in the twin"


def test_the_model_itself_is_as_it_was(family: str) -> None:
    model = tiny_model(family)
    classes = [type(module) for module in model.modules()]
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        before = model(ids).logits
        hidden_states(model, ragged_batch())
        after = model(ids).logits
    assert torch.equal(before, after)
    assert [type(module) for module in model.modules()] == classes
    assert model.config._attn_implementation != twin_of(model).config._attn_implementation


def test_it_follows_mode_and_structure() -> None:
    model = tiny_model("llama")
    twin = twin_of(model)
    assert not any(module.training for module in twin.modules())
    model.train()
    assert twin_of(model) is twin
    assert all(module.training for module in twin.modules())
    add_lora(model, LoraConfig(rank=2), seed=0)
    assert twin_of(model) is not twin
    assert shares_every_tensor(model)


def test_adapters_are_live_in_the_twin_and_go_off_with_the_models() -> None:
    model = tiny_model("llama")
    batch = ragged_batch()
    with torch.no_grad():
        base = hidden_states(model, batch)
        add_lora(model, LoraConfig(rank=2), seed=0)
        assert torch.equal(hidden_states(model, batch), base)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B.weight"):
                parameter += 0.1
        assert not scaled(hidden_states(model, batch), base, 1e-3)
        with adapters_off(model):
            assert torch.equal(hidden_states(model, batch), base)


def test_a_copy_of_a_model_has_a_twin_of_its_own() -> None:
    model = tiny_model("llama")
    twin_of(model)
    other = copy.deepcopy(model)
    assert twin_of(other) is not twin_of(model)
    assert shares_every_tensor(other)


def test_no_model_is_kept_alive() -> None:
    model = tiny_model("llama")
    twin_of(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_shapes_of_the_memory() -> None:
    assert kv_shapes(tiny_model("llama")) == (LayerShape(2, 8, 8),) * 2


def test_a_family_whose_attention_is_its_own() -> None:
    config = AutoConfig.for_model("bloom", vocab_size=99, hidden_size=32, n_layer=2, n_head=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert not supports_packing(model)
    assert "'bloom'" in why_unpacked(model)
    batch = ragged_batch()
    with torch.no_grad():
        own = model.transformer(batch.token_ids, use_cache=False).last_hidden_state
        assert scaled(hidden_states(model, batch), own[batch.attention_mask])


def test_a_twins_forward_says_what_it_is_over() -> None:
    with pytest.raises(ShapeError, match="must run inside `attending`"):
        twin_of(tiny_model("llama"))(input_ids=torch.tensor([[1, 2]]), use_cache=False)


def test_a_twin_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(selfcheck, "_packed_logits", lambda *_: torch.zeros(32, 99))
    with pytest.raises(ModelError, match="packed forward of family 'llama' must give its own"):
        check_twin(model)


@pytest.mark.skipif(not native.available(), reason=native.why_not())
@pytest.mark.parametrize("family", ["phi3", "glm", "glm4"])
def test_halves_of_one_projection_are_gated_alike_by_any_number_of_threads(family: str) -> None:
    config = AutoConfig.for_model(
        family, vocab_size=99, hidden_size=32, intermediate_size=1001, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    require_equal_bits(perturbed(new_causal_lm(config, seed=3)))


@pytest.mark.skipif(not native.available(), reason=native.why_not())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "activation"),
    [
        ("gpt_neox", "gelu"),
        ("gpt_neox", "gelu_pytorch_tanh"),
        ("persimmon", "silu"),
        ("llama", "gelu"),
    ],
)
def test_activations_without_a_gate_of_ours_are_as_steady(
    family: str, activation: str, dtype: torch.dtype
) -> None:
    config = AutoConfig.for_model(
        family, vocab_size=99, hidden_size=32, intermediate_size=1001, num_hidden_layers=2,
        num_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        initializer_range=0.2, hidden_act=activation,
    )  # fmt: skip
    require_equal_bits(perturbed(new_causal_lm(config, seed=3)).to(dtype))


def require_equal_bits(model: PreTrainedModel) -> None:
    """Decoding gives the packed forward's bits, and so does any number of threads."""
    assert check_twin(model).bitwise
    batch = ragged_batch(tuple(range(20, 40)))
    before = torch.get_num_threads()
    states = []
    with torch.no_grad():
        for threads in (1, 3):
            torch.set_num_threads(threads)
            try:
                states.append(hidden_states(model, batch))
            finally:
                torch.set_num_threads(before)
    assert torch.equal(*states)


def test_weights_of_two_types_go_another_way_by_name() -> None:
    model = tiny_model("llama")
    model.model.embed_tokens.bfloat16()  # type: ignore[union-attr]
    assert not supports_packing(model)
    assert "computes in float32 and begins with embeddings in bfloat16" in why_unpacked(model)
    assert hidden_states(model, ragged_batch()).dtype == torch.float32


@torch.no_grad()
@pytest.mark.parametrize("family", ["phimoe", "mixtral"])
def test_routers_are_as_steady_in_training_as_in_evaluation(family: str) -> None:
    config = AutoConfig.for_model(
        family, **TOKEN_IDS, **LLAMA, num_local_experts=4, num_experts_per_tok=2,
        router_jitter_noise=0.1, **({"input_jitter_noise": 0.1} if family == "phimoe" else {}),
    )  # fmt: skip
    model = perturbed(new_causal_lm(config, seed=3))
    batch = ragged_batch()
    calm = hidden_states(model.eval(), batch)
    assert torch.equal(hidden_states(model.train(), batch), calm)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [4, 5])
def test_rounding_may_send_a_few_tokens_to_other_experts(
    family: str, dtype: torch.dtype, tokens: int
) -> None:
    """Of a mixture in half precision; as many as a wrong layer changes are refused."""
    model = tiny_decoder(family)
    own = torch.randn(32, 99, generator=torch.Generator().manual_seed(3)).to(dtype)
    others = own.clone()
    others[4 : 4 + tokens] = -own[4 : 4 + tokens]
    if (family, dtype, tokens) == ("mixtral", torch.bfloat16, 4):
        assert selfcheck._require_close(model, own, others, "packed") > 1
    else:
        with pytest.raises(ModelError, match="must give its own forward's logits; got a largest"):
            selfcheck._require_close(model, own, others, "packed")
    others[0, 0] = torch.nan
    with pytest.raises(ModelError, match="got a largest difference of nan of"):
        selfcheck._require_close(model, own, others, "packed")
