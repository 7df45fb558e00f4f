"""The memory of a whole step: its roles, and what each phase adds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tandem.memory.dimensions import Shape
from tandem.memory.model import (
    FLOAT,
    Bytes,
    Layout,
    MemoryPlan,
    Role,
    in_flight_bytes,
    quantized_weights,
    role_memory,
    working_bytes,
)
from tandem.memory.work import (
    activation_bytes,
    answering_weights,
    backward_bytes,
    forward_bytes,
    generation_bytes,
    logits_bytes,
    narrowed_bytes,
    narrows,
    states_bytes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOWork:
    """What one rank does in a PPO step.

    rows: answers generated in parallel. prompt, new: tokens of each. tokens: of the largest
    micro-batch, of which `answered` are response tokens. packs: decoding reads a second, packed
    copy. slices: ranks that hold slices of the actor while it generates. num_reward_models:
    that score, 0 where only a function does. has_critic, has_reference: the step has those roles.
    hosted: frozen models (`reference`, `reward`) in host memory. states: tokens whose states are
    kept from the rollout for the actor's update.
    """

    rows: int
    prompt: int
    new: int
    tokens: int
    answered: int
    packs: bool = False
    slices: int = 1
    num_reward_models: int = 1
    has_critic: bool = True
    has_reference: bool = True
    hosted: tuple[str, ...] = ()
    states: int = 0


def supervised_memory(
    shape: Shape,
    layout: Layout,
    *,
    tokens: int,
    answered: int,
    later: int | None = None,
    reference: bool = False,
    other: Shape | None = None,
    reference_on_host: bool = False,
    packs: bool = False,
) -> MemoryPlan:
    """SFT, and with a scalar head the reward model; DPO with a reference.

    Args:
        tokens: of the largest micro-batch on a rank, of which `answered` go through the head.
        later: of the largest that adds to an earlier one's gradients, 0 if none does; None:
            gradients are counted as if always there.
        reference: the loss needs one: a frozen copy, or the model itself under LoRA.
        other: the shape of a reference that is another model.
        reference_on_host: its weights are in host memory.
        packs: it is a policy that would decode from packed weights, which its check makes.
    """
    layout = replace(layout, shares_base=False)  # the one model here has a base of its own
    layouts, trains_policy = {"model": (shape, layout)}, not shape.is_scalar
    checks = {"model": _checking(shape, layout, packs, compared=reference)} if trains_policy else {}
    if reference and (other or layout.lora_rank == 0):
        layouts["reference"] = (other or shape, _frozen(layout, on_host=reference_on_host))
    roles = {name: role_memory(*laid) for name, laid in layouts.items()}
    return MemoryPlan(
        resting=_named(roles, "resting"),
        phases={"train": _training(shape, layout, roles["model"], tokens, answered, later)},
        host=_named(roles, "host"),
        loading=_loading(layouts, roles, checks),
        moments=_moments(roles),
    )


def ppo_memory(
    actor: Shape,
    critic: Shape,
    policy: Layout,
    value: Layout,
    work: PPOWork,
    *,
    other: Shape | None = None,
    judge: Shape | None = None,
) -> MemoryPlan:
    """An RL stage: the actor, and the critic, reference and reward model that it has.

    Under LoRA the reference is the actor with its adapters off, unless it is another model. Actor
    and critic never have gradients at the same time.

    Args:
        policy, value: of actor and critic, and of their frozen copies.
        other: the shape of a reference that is another model.
        judge: the reward model's; None: the critic's.
    """
    layouts = _rl_layouts(actor, critic, policy, value, work, other, judge or critic)
    roles = {name: role_memory(*laid) for name, laid in layouts.items()}
    # The sampler's own log-probs serve as the actor's, which runs only as the reference.
    compared = "reference" if "reference" in layouts else "actor"
    asked = [compared] * work.has_reference
    # Of one shape, the critic needs at least as much memory as the reward model.
    values = [name for name in ("critic", "reward model") if name in layouts]
    asked += [max(values, key=lambda name: layouts[name][0].parameters)] if values else []
    scoring = [layouts[name] for name in asked]
    tokens, answered = work.tokens, work.answered
    generating = generation_bytes(
        actor,
        policy,
        rows=work.rows,
        prompt=work.prompt,
        new=work.new,
        packs=work.packs,
        slices=work.slices,
    )
    phases: dict[str, Bytes] = {"generate": generating}
    if scoring:
        phases["score"] = {
            f"{name}: {part}": size
            for name in asked
            for part, size in working_bytes(*layouts[name]).items()
        } | {
            "activations": forward_bytes(actor, tokens, policy),
            "weights in flight": _in_flight_of(scoring),
            "logits": logits_bytes(actor, answered, policy, backward=False),
        }
    training = _training(actor, policy, roles["actor"], tokens, answered)
    if work.has_critic:
        phases["train critic"] = _training(critic, value, roles["critic"], tokens, answered)
    if work.states:  # from the second step on; in the first the actor runs
        kept: Bytes = {"kept states": states_bytes(actor, work.states, policy)}
        phases = {name: parts | kept for name, parts in phases.items()}
        phases["train actor, kept states"] = kept | training | {"activations": 0.0}
    phases["train actor"] = training
    checks = {
        "actor": _checking(*layouts["actor"], work.packs, work.slices, compared=work.has_reference)
    }
    return MemoryPlan(
        resting=_named(roles, "resting"),
        phases=phases,
        loading=_loading(layouts, roles, checks),
        host=_named(roles, "host"),
        moments=_moments(roles),
    )


def _rl_layouts(
    actor: Shape,
    critic: Shape,
    policy: Layout,
    value: Layout,
    work: PPOWork,
    other: Shape | None,
    judge: Shape,
) -> dict[str, tuple[Shape, Layout]]:
    """The roles that are models of their own."""
    layouts = {
        "actor": (actor, replace(policy, shares_base=False)),
        "critic": (critic, value),
        "reference": (other or actor, _frozen(policy, "reference" in work.hosted)),
        "reward model": (judge, _frozen(value, "reward" in work.hosted)),
    }
    if not work.has_reference or (policy.lora_rank and other is None):
        del layouts["reference"]
    if not work.num_reward_models:
        del layouts["reward model"]
    for number in range(2, work.num_reward_models + 1):  # taken to be as large as the first
        layouts[f"reward model {number}"] = layouts["reward model"]
    if not work.has_critic:
        del layouts["critic"]
    return layouts


def answering_memory(
    shape: Shape, layout: Layout, *, rows: int, prompt: int, new: int, packs: bool, slices: int = 1
) -> Bytes:
    """What a policy that only answers prompts needs beside the models of a stage.

    Args:
        layout: the trained policy's.
        rows, prompt, new, packs, slices: as of `generation_bytes`.
    """
    frozen = _frozen(replace(layout, shares_base=False), on_host=False)
    resting = role_memory(shape, frozen).resting
    answering = generation_bytes(
        shape, frozen, rows=rows, prompt=prompt, new=new, packs=packs, slices=slices
    )
    return {f"policy: {name}": size for name, size in resting.items()} | answering


def _frozen(layout: Layout, on_host: bool) -> Layout:
    """The layout of a trained model's frozen copy."""
    adapters = layout.lora_rank if layout.shares_base else 0
    return replace(
        layout,
        is_trained=False,
        lora_rank=adapters,
        token_rows=layout.token_rows if layout.shares_base else 0,
        moving_average=False,
        reference_rate=0.0,
        offload_optimizer=False,
        offload_params=on_host,
    )


def _training(
    shape: Shape,
    layout: Layout,
    role: Role,
    tokens: int,
    answered: int,
    later: int | None = None,
) -> Bytes:
    """The instant with the most bytes of the forwards and backwards of one model.

    A backward makes gradients while it frees activations, so all of both are there only where a
    micro-batch adds to gradients of an earlier one. Where `later` says how large such a micro-batch
    is, the peak is where it begins, or where the largest of all begins or ends.
    """
    whole = role.working | role.backward
    if later is None or layout.is_split or layout.lora_rank:
        return whole | _beginning(shape, layout, tokens, answered)
    before = dict.fromkeys(role.backward, 0.0)
    # The first micro-batch's gradients are not added to any, but to masters' of another type.
    alone = {} if later or layout.has_masters else {"gradient under way": 0.0}
    # The embeddings' gradient is made last, from that of their output, which is still there too.
    ending: Bytes = {"activations' gradients": 2.0 * layout.compute_bytes * shape.width * tokens}
    instants = [
        role.working | before | _beginning(shape, layout, tokens, answered),
        whole | alone | ending,
    ]
    if later:
        share = later / max(1, tokens)
        instants.append(whole | _beginning(shape, layout, later, round(answered * share)))
    return max(instants, key=lambda parts: sum(parts.values()))


def _beginning(shape: Shape, layout: Layout, tokens: int, answered: int) -> Bytes:
    """Where a backward begins: all activations, and beside them logits or a layer's gradients:
    logits are freed before the layers' backward begins. Where the last block has few tokens behind
    attention, what comes after them may be more."""
    few = answered if 0 < answered < tokens and narrows(shape, layout) else None
    kept = activation_bytes(shape, tokens, layout, few)
    gradients = backward_bytes(shape, tokens if few is None else few, layout)
    instants: list[Bytes] = [
        {"activations": kept, "activations' gradients": gradients},
        {"activations": kept, "logits": logits_bytes(shape, answered, layout, backward=True)},
    ]
    if few is not None:
        for kept, gradients in narrowed_bytes(shape, tokens, layout):
            instants.append({"activations": kept, "activations' gradients": gradients})
    return max(instants, key=lambda parts: sum(parts.values()))


def _named(roles: dict[str, Role], part: str) -> Bytes:
    return {
        f"{role}: {name}": size
        for role, memory in roles.items()
        for name, size in getattr(memory, part).items()
    }


def _moments(roles: Mapping[str, Role]) -> float:
    return sum(role.moments for role in roles.values())


def _in_flight_of(layouts: Iterable[tuple[Shape, Layout]]) -> float:
    """Of models that are gathered whole, one after another; at stage 3 none is."""
    return max(
        (in_flight_bytes(*laid) for laid in layouts if not laid[1].gathers_blocks), default=0.0
    )


def _checking(
    shape: Shape, layout: Layout, packs: bool, slices: int = 1, *, compared: bool
) -> float:
    """What the checks of a policy make (engine/checks.py): its weights as it answers with them;
    beside slices its own forward runs, which gathers for itself. So does that which is `compared`
    with a reference's: on a CPU, what it gathers seldom fits where weights before were freed.
    """
    checked = sum(answering_weights(shape, layout, packs=packs, slices=slices).values())
    gathers_again = compared and layout.on_cpu and layout.ranks > 1 and layout.is_split
    if slices > 1 or gathers_again:
        checked += sum(working_bytes(shape, layout).values()) + _in_flight_of([(shape, layout)])
    return checked


def _loading(
    layouts: Mapping[str, tuple[Shape, Layout]],
    roles: dict[str, Role],
    checks: Mapping[str, float],
) -> Bytes:
    """Memory until the first step: what is kept, and of one model what its check makes, or its
    largest weight as it is read; then the optimizer's states.

    Args:
        checks: what `_checking` says of a role whose model is tried out; others' weights stay in
            pieces. A reference runs as it will, beside which the policy's check is larger.
    """
    held: Bytes = {}
    states, transient = 0.0, [0.0]
    for name, (shape, layout) in layouts.items():
        resting = roles[name].resting
        held[f"{name}: weights"] = resting.get("weights", 0.0)
        if layout.is_trained and layout.has_masters:
            if layout.half:  # what the weights were before they were rounded
                held[f"{name}: masters"] = resting.get("masters", 0.0)
            else:
                states += resting.get("masters", 0.0)
            states += resting.get("AdamW", 0.0)
        # A weight's file is mapped, and in memory, while the weight is copied or quantized. That of
        # the embeddings, which come first, is gone before the other weights have memory.
        one_by_one = shape.largest_linear if quantized_weights(shape, layout) else 0
        read = FLOAT * max(shape.untied_head, one_by_one) * layout.on_cpu
        transient.append(max(checks.get(name, 0.0), read))
    return held | {"read or checked, then AdamW and masters": max(states, *transient)}
