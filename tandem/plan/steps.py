"""The memory of a whole step: which roles are there, and what each phase adds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem.plan.memory import (
    Bytes,
    Layout,
    MemoryPlan,
    Role,
    activation_bytes,
    forward_bytes,
    generation_bytes,
    logits_bytes,
    role_memory,
)
from tandem.plan.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOWork:
    """What one rank does in a PPO step.

    rows: answers it generates side by side. prompt, new: tokens of each. tokens: of the largest
    micro-batch, of which `answered` are answers'. packs: decoding reads a second, packed copy.
    has_reward_model: a model scores, not only a function.
    """

    rows: int
    prompt: int
    new: int
    tokens: int
    answered: int
    packs: bool = False
    has_reward_model: bool = True


def supervised_memory(
    shape: Shape, layout: Layout, *, tokens: int, answered: int, reference: bool = False
) -> MemoryPlan:
    """SFT, and with a scalar head the reward model; DPO with a reference.

    Args:
        tokens: of the largest micro-batch on a rank, of which `answered` go through the head.
        reference: a frozen copy is there too; under LoRA there never is one.
    """
    roles = {"model": role_memory(shape, layout)}
    if reference and layout.lora_rank == 0:
        roles["reference"] = role_memory(shape, replace(layout, is_trained=False))
    return MemoryPlan(
        resting=_named(roles, "resting"),
        phases={"train": _training(shape, layout, roles["model"], tokens, answered)},
        host=_named(roles, "host"),
        loading=_loading(roles),
    )


def ppo_memory(
    actor: Shape, critic: Shape, policy: Layout, value: Layout, work: PPOWork
) -> MemoryPlan:
    """Step 3: actor, critic, and frozen copies of how they started, reference and reward model.

    Under LoRA the reference is the actor with its adapters off. Gradients of actor and critic are
    never there together.

    Args:
        policy, value: how actor and critic lie; their frozen copies lie alike.
    """
    frozen = {"reference": (actor, policy), "reward model": (critic, value)}
    if policy.lora_rank:
        del frozen["reference"]
    if not work.has_reward_model:
        del frozen["reward model"]
    layouts = {"actor": (actor, policy), "critic": (critic, value)} | {
        name: (shape, replace(layout, is_trained=False, lora_rank=0, moving_average=False))
        for name, (shape, layout) in frozen.items()
    }
    roles = {name: role_memory(shape, layout) for name, (shape, layout) in layouts.items()}
    # The sampler's own log-probs serve as the actor's, so it only runs where it is the reference.
    asked = "actor" if policy.lora_rank else "reference"
    scoring = {asked: roles[asked], "critic": roles["critic"]}
    tokens, answered = work.tokens, work.answered
    return MemoryPlan(
        resting=_named(roles, "resting"),
        phases={
            "generate": generation_bytes(
                actor, policy, rows=work.rows, prompt=work.prompt, new=work.new, packs=work.packs
            ),
            "score": _named(scoring, "working")
            | {
                "activations": forward_bytes(actor, tokens, policy),
                "logits": logits_bytes(actor, answered, policy, backward=False),
            },
            "train actor": _training(actor, policy, roles["actor"], tokens, answered),
            "train critic": _training(critic, value, roles["critic"], tokens, answered),
        },
        loading=_loading(roles),
        host=_named(roles, "host"),
    )


def _training(shape: Shape, layout: Layout, role: Role, tokens: int, answered: int) -> Bytes:
    """A forward and backward of one model."""
    return {
        **role.working,
        **role.backward,
        "activations": activation_bytes(shape, tokens, layout),
        "activations' gradients": forward_bytes(shape, tokens, layout),
        "logits": logits_bytes(shape, answered, layout, backward=True),
    }


def _named(roles: dict[str, Role], part: str) -> Bytes:
    return {
        f"{role}: {name}": size
        for role, memory in roles.items()
        for name, size in getattr(memory, part).items()
    }


def _loading(roles: dict[str, Role]) -> Bytes:
    """Weights are read straight to where they rest; no optimizer is there yet."""
    return {name: role.resting.get("weights", 0.0) for name, role in roles.items()}
