"""Which models decode in one call, and that a wrong one is found out before it draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

from tandem.errors import ModelError
from tandem.generation.make_runner import make_runner
from tandem.generation.native_runner import NativeRunner, runs_natively
from tandem.generation.runner import Runner, TwinRunner
from tandem.models.selfcheck import check_twin
from tandem.ops import native
from tandem.ops.attention_context import KVMemory

from ..models.families import tiny_config, tiny_model

pytestmark = pytest.mark.skipif(not native.available(), reason=native.why_not())
ROOM = 1 << 40


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


def scaled_embedding(model: Any) -> None:
    embedding = Scaled(99, 32)
    embedding.weight = model.model.embed_tokens.weight
    model.model.embed_tokens = embedding


def renormalized_embedding(model: Any) -> None:
    model.model.embed_tokens.max_norm = 0.1


def last_layer_norm(model: Any) -> None:
    model.model.norm = nn.LayerNorm(32)


def own_epsilon(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def own_scaling(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 0.9


def own_forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: 2 * type(mlp).forward(mlp, x)


@pytest.mark.parametrize(
    "change",
    [scaled_embedding, renormalized_embedding, last_layer_norm, own_epsilon, own_scaling,
     own_forward],
)  # fmt: skip
def test_what_the_call_does_not_compute_runs_by_the_modules(change: Callable[[Any], None]) -> None:
    model = tiny_model("llama")
    change(model)
    assert not runs_natively(model, ROOM)
    assert check_twin(model, make_decoder=make_runner).trustworthy


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_families_that_it_computes(family: str) -> None:
    model = tiny_model(family)
    assert runs_natively(model, ROOM)
    assert check_twin(model, make_decoder=make_runner).bitwise


def test_a_class_of_the_same_name_is_another() -> None:
    def halved(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = LlamaForCausalLM.forward(self, *args, **kwargs)
        output.logits = output.logits * 0.5
        return output

    own = type("LlamaForCausalLM", (LlamaForCausalLM,), {"forward": halved})
    assert not runs_natively(own(tiny_config("llama")), ROOM)


def test_attention_dropout_is_the_modules() -> None:
    model: Any = tiny_model("llama")
    model.model.layers[1].self_attn.attention_dropout = 0.1
    assert runs_natively(model.eval(), ROOM)
    assert not runs_natively(model.train(), ROOM)


def test_the_check_runs_what_will_draw() -> None:
    model = tiny_model("llama")
    made: list[Runner] = []

    def remembered(model: PreTrainedModel, memory: KVMemory, longest: int) -> Runner:
        made.append(make_runner(model, memory, longest))
        return made[-1]

    assert check_twin(model, make_decoder=remembered).bitwise
    assert [type(runner) for runner in made] == [NativeRunner]

    class Wrong(TwinRunner):
        def __init__(self, model: PreTrainedModel, memory: KVMemory, longest: int) -> None:
            super().__init__(model, memory)

        def decode(self, token_ids: Tensor, positions: Tensor, *others: Any) -> Tensor:
            return super().decode(token_ids, positions + 1, *others)

    class Late(Wrong):
        def prefill(self, token_ids: Tensor, lengths: Sequence[int], *others: Any) -> Tensor:
            return super().prefill(token_ids, lengths, *others) + 1

        decode = TwinRunner.decode

    for wrong in (Wrong, Late):
        with pytest.raises(ModelError, match="the decoding forward of family 'llama' must give"):
            check_twin(model, make_decoder=wrong)
