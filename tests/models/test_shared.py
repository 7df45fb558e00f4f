"""One base under four roles: held once, and every number that of separate models."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from tandem.config.lora import LoraConfig
from tandem.config.schema import SamplingConfig
from tandem.engine.forward import response_logprobs, sequence_scores, token_values
from tandem.errors import ModelError
from tandem.generation.generator import generate
from tandem.generation.stops import Stops
from tandem.models.frozen import freeze_quantized
from tandem.models.lora import (
    adapters_off,
    add_lora,
    lora_parameters,
)
from tandem.models.shared import share_base
from tandem.models.twin import shares_every_tensor
from tandem.types import PromptRow, Source

from .families import FAMILIES, merged_state_dict, ragged_batch, tiny_model, tiny_scalar

STOPS = Stops((2,), 0, lambda ids: " ".join(map(str, ids)))
ROWS = [PromptRow(tuple(range(4, 4 + n)), (), {}, Source("test", "test", n)) for n in (5, 9)]
Roles = dict[str, PreTrainedModel]


def on_base_of(model: PreTrainedModel, family: str) -> PreTrainedModel:
    """A scalar model whose base model has the same numbers in tensors of its own."""
    scalar = tiny_scalar(family)
    scalar.base_model.load_state_dict(copy.deepcopy(model.base_model.state_dict()))
    return scalar


def separate_roles(family: str, kind: str | None) -> Roles:
    """Actor, critic and reward model as they are loaded: each whole, from one start."""
    start = tiny_model(family)
    roles = {
        "actor": copy.deepcopy(start),
        "critic": on_base_of(start, family),
        "reward_model": on_base_of(start, family),
    }
    for seed, (role, model) in enumerate(roles.items()):
        if kind:
            freeze_quantized(model.requires_grad_(False), kind)
        add_lora(model, LoraConfig(rank=2), seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in lora_parameters(model):
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        if role == "reward_model":
            model.requires_grad_(False)
    return roles


def a_step(roles: Roles) -> list[Tensor]:
    """Every role's numbers over a rollout, before and after an update of actor and critic."""
    found = []
    actor, critic = roles["actor"], roles["critic"]
    parts = [p for model in (actor, critic) for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parts, lr=1e-2)
    for step in range(2):
        made = generate(actor, ROWS, SamplingConfig(max_new_tokens=4), STOPS, seed=1, step=step)
        batch = made.batch
        with torch.no_grad(), adapters_off(actor):
            found.append(response_logprobs(actor, batch)[0])
        with torch.no_grad():
            found.append(sequence_scores(roles["reward_model"], batch))
        logprobs, values = response_logprobs(actor, batch)[0], token_values(critic, batch)
        found += [made.rollout_logprobs, logprobs.detach(), values.detach()]
        (logprobs.sum() + values.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def frozen_bytes(*models: nn.Module) -> int:
    """Bytes of all tensors that are no adapter and no scalar head, each counted once."""
    sizes = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
        for model in models
        for n, p in model.named_parameters()
        if "lora_" not in n and not n.startswith("score")
    }
    return sum(sizes.values())


# How a weight is packed is no matter of the family: both kinds for two of them.
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        (f, k)
        for f in FAMILIES
        for k in (None, "int8", "nf4")
        if k != "nf4" or f in ("llama", "gpt2")
    ],
)
def test_four_roles_on_one_base(family: str, kind: str | None) -> None:
    roles, others = separate_roles(family, kind), separate_roles(family, kind)
    expected = a_step(others)
    token_values(roles["critic"], ragged_batch())  # a twin that is there already follows
    actor, critic, reward_model = roles.values()
    one, all_of_them = frozen_bytes(actor), frozen_bytes(*roles.values())
    watched = [
        StorageWeakRef(p.untyped_storage())
        for model in (critic, reward_model)
        for n, p in model.named_parameters()
        if "lora_" not in n and not n.startswith("score")
    ]
    before = {n: p.clone() for n, p in actor.named_parameters() if not p.requires_grad}

    saved = share_base(actor, critic, reward_model)
    assert saved == all_of_them - one
    assert frozen_bytes(*roles.values()) == one
    gc.collect()
    assert all(weight.expired() for weight in watched), "one base, and nobody holds another"
    assert all(shares_every_tensor(model) for model in roles.values())

    found = a_step(roles)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[2], found[-2])
    after = dict(actor.named_parameters())
    assert all(torch.equal(after[n], weight) for n, weight in before.items())
    for role, model in roles.items():
        state, reference = merged_state_dict(model), merged_state_dict(others[role])
        assert state.keys() == reference.keys()
        assert all(torch.equal(state[n], reference[n]) for n in reference)
    assert share_base(actor, critic, reward_model) == 0


def test_casts_and_moves_keep_it_one() -> None:
    roles = separate_roles("opt", "int8")
    share_base(roles["actor"], roles["critic"])
    roles["actor"].to("cpu", torch.bfloat16)
    assert roles["critic"].base_model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert share_base(roles["actor"], roles["critic"]) == 0


def test_what_is_no_one_base() -> None:
    roles = separate_roles("llama", None)
    actor, critic, reward_model = roles.values()
    name = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        reward_model.get_parameter(name)[0, 0] += 1.0
    own = dict(critic.named_parameters())
    with pytest.raises(ModelError, match=rf"got {name} of model 2, whose values differ"):
        share_base(actor, critic, reward_model)
    assert all(own[n] is p for n, p in critic.named_parameters()), "none is changed"
    with pytest.raises(ModelError, match=r"got model.*weight.packed of model 1, which the first"):
        share_base(actor, separate_roles("llama", "int8")["critic"])
    other = tiny_scalar("llama", vocab_size=101).requires_grad_(False)
    with pytest.raises(ModelError, match=r"embed_tokens.weight of model 1, \(101, 32\).*has \(99"):
        share_base(actor, other)
    with pytest.raises(ModelError, match=r"model 1 to share a base must have frozen weights"):
        share_base(actor, tiny_scalar("llama"))
    critic.base_model.get_input_embeddings().weight.requires_grad_(True)
    with pytest.raises(
        ModelError, match=r"embed_tokens.weight of model 1, which the first model tr"
    ):
        share_base(critic, actor)


def test_a_model_without_memory_takes_the_owners_weights() -> None:
    roles = separate_roles("llama", "int8")
    actor, critic = roles["actor"], roles["critic"]
    expected = token_values(critic, ragged_batch())
    own = {id(p) for n, p in critic.named_parameters() if "lora_" in n or n.startswith("score")}
    for module in critic.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in own:
                module._parameters[key] = nn.Parameter(parameter.to("meta"), requires_grad=False)
    assert share_base(actor, critic) == 0
    assert torch.equal(token_values(critic, ragged_batch()), expected)
    other = tiny_scalar("llama", intermediate_size=40).to("meta").requires_grad_(False)
    with pytest.raises(ModelError, match=r"mlp.gate_proj.weight of model 1, \(40, 32\).* has \(48"):
        share_base(tiny_model("llama").requires_grad_(False), other)
