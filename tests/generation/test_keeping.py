"""What generation computed is what the layers compute, and stands for the training forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.config.lora import LoraConfig
from tandem.config.schema import SamplingConfig
from tandem.engine.forward import response_logprobs
from tandem.generation.generator import generate
from tandem.generation.keeping import StateKeeper
from tandem.models.lora import add_lora
from tandem.models.packed import computed_tokens
from tandem.models.recompute import enable_gradient_checkpointing
from tandem.models.replayed import KeptStates, replays
from tandem.models.twin import twin_of
from tandem.ops import native
from tandem.types import PromptRow, Rollout
from tests.generation.rollouts import STOPS, prompts
from tests.models.families import tiny_model

pytestmark = pytest.mark.skipif(not native.available(), reason="states are kept by the C++ runner")

FAMILIES = ("llama", "mistral", "qwen2")
ROOM = 1 << 28


def rows_that_begin_alike() -> list[PromptRow]:
    """Prompts that share whole blocks, one of them twice, and short ones."""
    rows = prompts(41, 3, 41, 16, 33, 7, 1)
    first = rows[0].token_ids

    def of(ids: tuple[int, ...], like: PromptRow) -> PromptRow:
        return PromptRow(ids, like.messages, like.columns, like.source)

    rows[2] = of(first, rows[2])
    rows[4] = of((*first[:32], *rows[4].token_ids[:5]), rows[4])
    rows.append(of(first[:32], rows[3]))
    return rows


def kept(
    model: PreTrainedModel, rows: Sequence[PromptRow], samples: int = 1, **how: Any
) -> tuple[Rollout, KeptStates]:
    keeper = StateKeeper(ROOM)
    sampling = SamplingConfig(max_new_tokens=12, samples_per_prompt=samples)
    rollout = generate(model, rows, sampling, STOPS, seed=5, step=1, keeper=keeper, **how)
    plain = generate(model, rows, sampling, STOPS, seed=5, step=1, **how)
    assert torch.equal(rollout.batch.token_ids, plain.batch.token_ids)
    assert torch.equal(rollout.rollout_logprobs, plain.rollout_logprobs)
    assert keeper.states is not None
    return rollout, keeper.states


def small_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    sizes: dict[str, Any] = {"max_position_embeddings": 128, "num_hidden_layers": 3, **changes}
    return tiny_model(family, **sizes).to(dtype)


HOW: list[dict[str, Any]] = [
    {},
    {"samples": 3},
    {"samples": 3, "batch_size": 4},
    {"samples": 2, "batch_size": 5, "refill": 1, "chunk_tokens": 16},
    {"samples": 2, "share_prompts": False},
    {"samples": 2, "kv_blocks": 14},
]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_kept_states_are_those_of_hugging_faces_layers(family: str, how: dict[str, Any]) -> None:
    model = small_model(family)
    rollout, states = kept(model, rows_that_begin_alike(), **how)
    batch = rollout.batch
    real, asked = computed_tokens(model, batch, ends=False)
    assert bool((states.rows[real] >= 0).all())
    assert torch.equal(states.token_ids[states.rows[real]], batch.token_ids[real])
    for row, n in enumerate(real.sum(1).tolist()):
        ids, there = batch.token_ids[row, :n], states.rows[row, :n]
        with torch.no_grad():
            found = model(ids[None], output_hidden_states=True, output_attentions=False)
        # The list ends with normed states; the last layer's are kept only where they are asked for.
        for layer, expected in zip(states.layers[:-1], found.hidden_states[1:-1], strict=True):
            torch.testing.assert_close(layer.out[there], expected[0], atol=1e-5, rtol=1e-4)
        last = model.model.norm(states.layers[-1].out[there])[asked[row, :n]]
        expected = found.hidden_states[-1][0][asked[row, :n]]
        torch.testing.assert_close(last, expected, atol=1e-5, rtol=1e-4)


def gradients(
    model: PreTrainedModel, rollout: Rollout, states: KeptStates | None, parts: int
) -> tuple[Tensor, list[Tensor]]:
    """Log-probs, and all gradients of a weighted sum of them, over several micro-batches."""
    model.zero_grad()
    shape = rollout.batch.token_ids.shape
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    found = torch.zeros(shape)
    for rows in torch.arange(len(rollout)).chunk(parts):
        part = rollout.batch.select(rows)
        width = part.token_ids.shape[1]
        of_part = None if states is None else states.of(rows, width)
        logprobs, _ = response_logprobs(model, part, temperature=0.8, kept=of_part)
        (logprobs * weights[rows, :width]).sum().backward()
        found[rows, :width] = logprobs.detach()
    return found, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_have_the_bits_of_a_forward_and_backward(
    family: str, dtype: torch.dtype, parts: int
) -> None:
    model = small_model(family, dtype).train()
    rollout, states = kept(model.eval(), rows_that_begin_alike(), samples=2, batch_size=5)
    model.train()
    for frozen in ((), ("embed_tokens",), ("layers.0.", "k_proj", "post_attention")):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
        expected, plain = gradients(model, rollout, None, parts)
        found, replayed = gradients(model, rollout, states, parts)
        assert torch.equal(found, expected)
        assert len(found) > 0
        assert len(plain) == len(replayed) == sum(p.requires_grad for p in model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(plain, replayed, strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 9},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1, "head_dim": 16},
        {"attention_bias": True},
    ],
    ids=str,
)
def test_other_shapes_have_the_bits_too(changes: dict[str, Any]) -> None:
    family = "mistral" if "sliding_window" in changes else "llama"
    model = small_model(family, **changes)
    rollout, states = kept(model, rows_that_begin_alike())
    expected, plain = gradients(model, rollout, None, 2)
    found, replayed = gradients(model, rollout, states, 2)
    assert torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(plain, replayed, strict=True))


def test_the_layers_do_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("llama")
    rollout, states = kept(model, prompts(5, 9))

    def runs(*_: Any, **__: Any) -> None:
        raise AssertionError("a layer ran")

    layers = twin_of(model).model.layers
    monkeypatch.setattr(type(layers[0]), "forward", runs)
    with torch.no_grad():
        found, _ = response_logprobs(model, rollout.batch, kept=states)
    assert torch.equal(found, rollout.rollout_logprobs)
    with pytest.raises(AssertionError, match="a layer ran"):
        response_logprobs(model, rollout.batch)


def test_tokens_that_were_not_kept_run_the_layers() -> None:
    model = small_model("llama")
    rollout, states = kept(model, prompts(5, 9))
    states.rows[1, 3] = -1
    found, _ = response_logprobs(model, rollout.batch, kept=states)
    expected, _ = response_logprobs(model, rollout.batch)
    assert torch.equal(found, expected)


def test_states_of_other_tokens_are_refused() -> None:
    model = small_model("llama")
    rollout, states = kept(model, prompts(5, 9))
    states.rows[0, 1], states.rows[0, 2] = states.rows[0, 2].clone(), states.rows[0, 1].clone()
    with pytest.raises(AssertionError, match="other tokens"):
        response_logprobs(model, rollout.batch, kept=states)


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma2"])
def test_other_families_keep_nothing(family: str) -> None:
    keeper = StateKeeper(ROOM)
    model = tiny_model(family)
    sampling = SamplingConfig(max_new_tokens=4)
    generate(model, prompts(5, 9), sampling, STOPS, keeper=keeper)
    assert keeper.states is None


def test_nothing_is_kept_beyond_the_room() -> None:
    model = small_model("llama")
    # Two prompts of 5 and 9 tokens, and answers of 4 of which the last is not run.
    tokens, numbers = 5 + 9 + 2 * 3, (4 + 2 * 2) * 8 + 32 + 2 * 48 + 32
    for room, is_kept in ((tokens * numbers * 3 * 4, True), (tokens * numbers * 3 * 4 - 1, False)):
        keeper = StateKeeper(room)
        generate(model, prompts(5, 9), SamplingConfig(max_new_tokens=4), STOPS, keeper=keeper)
        assert (keeper.states is not None) == is_kept


def test_layers_that_recompute_or_have_adapters_are_not_replayed() -> None:
    plain, recomputing, adapted = (small_model("llama") for _ in range(3))
    enable_gradient_checkpointing(recomputing, "mlp")
    add_lora(adapted, LoraConfig(rank=2), seed=1)
    assert replays(twin_of(plain))
    assert not replays(twin_of(recomputing))
    assert not replays(twin_of(adapted))
