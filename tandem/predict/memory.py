"""The memory of a stage, from its run's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tandem.config.engine import engine_settings
from tandem.config.rules import has_reference
from tandem.config.schema import RLConfig, RunConfig
from tandem.config.stages import Stage, leaving
from tandem.memory.dimensions import Shape
from tandem.memory.model import FLOAT, Bytes, Layout, MemoryPlan, checkpoint_bytes, layout_of
from tandem.memory.steps import PPOWork, answering_memory, ppo_memory, supervised_memory
from tandem.memory.work import keeps_states, states_bytes
from tandem.ops.sizes import SHARE_TO_PACK
from tandem.predict.models import shape_for
from tandem.predict.work import Work, num_reward_models

Config = Mapping[str, Any]
PACKED_FAMILIES = (
    "llama", "mistral", "ministral", "cwm", "qwen2", "qwen3", "internlm3", "iquestcoder",
)  # fmt: skip
"""Model types that decode from packed weights on a CPU (generation/native_runner.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What of a machine decides memory. on_cpu: the host computes. half: in two bytes. packs: there
    are packed weights to decode from. memory: its bytes."""

    on_cpu: bool
    half: bool
    packs: bool = False
    memory: float = 0.0


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a stage: the policy's shape and the reward model's; the policy's model type;
    the shape of a reference that is another model (None: the policy as it begins); the policy's
    positions, if they are limited; the bytes of a parameter in the files that they come from; the
    shape of a critic that starts from another model (None: the reward model's)."""

    policy: Shape
    value: Shape
    kind: str = ""
    reference: Shape | None = None
    positions: int | None = None
    saved_width: int = 2
    other_critic: Shape | None = None

    @property
    def critic(self) -> Shape:
        """The critic's shape."""
        return self.other_critic or self.value

    @staticmethod
    def of(
        policy: Config,
        value: Config,
        reference: Config | None = None,
        critic: Config | None = None,
    ) -> Models:
        """By their configs, as `config.json` has them; `value` is the reward model's.

        Raises:
            ModelError: a family is not known.
        """
        return Models(
            shape_for(policy),
            shape_for(value, scalar=True),
            str(policy.get("model_type", "")),
            None if reference is None else shape_for(reference),
            policy.get("max_position_embeddings") or policy.get("n_positions"),
            min(_width(policy), _width(value)),
            None if critic is None else shape_for(critic, scalar=True),
        )


def _width(config: Config) -> int:
    """Bytes of a parameter in a model's files; of two possible ones the lower."""
    return 4 if "float32" in (config.get("dtype"), config.get("torch_dtype")) else 2


def stage_memory(
    config: RunConfig, stage: Stage, models: Models, work: Work, device: Device, ranks: int
) -> MemoryPlan:
    """What a stage needs per rank, by phase."""
    parallel = config.parallel
    ending: dict[str, Bytes] = {}
    layout = partial(
        layout_of, engine_settings(config), ranks, on_cpu=device.on_cpu, half=device.half
    )
    if stage.family == "rl":
        policy = layout("actor", **following(config, stage))
        value = layout("critic")
        of_step = partial(
            ppo_memory, models.policy, models.critic, policy, value,
            other=models.reference, judge=models.value,
        )  # fmt: skip
        step = _ppo_work(config, stage, models, work, device)
        states = kept_states(config, stage, models, work, device, policy, ranks)
        step = replace(step, states=states)
        plan = of_step(step)
        answered = _answered(work, work.rehearsed)
        rehearsed = replace(step, tokens=work.rehearsed, answered=answered, states=0)
        tried = of_step(rehearsed)
        layouts = [(models.policy, policy)] + [(models.critic, value)] * step.has_critic
    else:
        scalar = stage.leaves == "reward model"
        shape = models.value if scalar else models.policy
        placed = layout(stage.trains[0], **following(config, stage))
        of_tokens = partial(
            supervised_memory,
            shape,
            placed,
            reference=has_reference(config, stage),
            other=models.reference,
            reference_on_host="reference" in parallel.offload,
            packs=not scalar and decodes_packed(config, models, device),
        )
        share = work.answered / max(1.0, work.tokens)
        micro, largest = work.micro_tokens, work.rehearsed
        # Of a policy, what loading leaves in the process was measured to take what gradients free.
        later, none_later = (work.later, 0) if scalar else (None, None)
        plan = of_tokens(tokens=micro, answered=round(micro * share), later=later)
        tried = of_tokens(tokens=largest, answered=round(largest * share), later=none_later)
        layouts = [(shape, placed)]
        if scalar and answers_are_scored(config):
            policy = layout("actor")
            ending = {"normalize": _normalizing(config, models, work, device, policy, ranks)}
    rehearsal = {f"rehearse{name[5:]}": size for name, size in tried.phases.items()
                 if name.startswith("train")}  # fmt: skip
    saved: dict[str, Bytes] = {"save": {}}
    if saves(config, work) and config.save_async and device.on_cpu:
        # The next step runs while the copy is written.
        copied = {"copy to write": checkpoint_bytes(layouts)}
        saved = {f"save beside {name}": size | copied for name, size in plan.phases.items()}
    return replace(plan, phases={**rehearsal, **plan.phases, **saved, **ending})


def following(config: RunConfig, stage: Stage) -> dict[str, Any]:
    """What follows the policy that a stage trains, for `layout_of`."""
    rl, moving = getattr(config, stage.section), config.reference
    moves = moving.update_every > 0 and has_reference(config, stage)
    return {
        "average": isinstance(rl, RLConfig) and rl.ema,
        "reference_rate": moving.update_rate if moves else 0.0,
    }


def answers_are_scored(config: RunConfig) -> bool:
    """Whether a reward model's stage ends with the scores of a policy's answers."""
    has_policy = bool(config.actor_model) or bool(leaving(config.stages, "policy"))
    return config.reward.normalize_prompts > 0 and has_policy


def _normalizing(
    config: RunConfig, models: Models, work: Work, device: Device, policy: Layout, ranks: int
) -> Bytes:
    """What the policy whose answers are scored needs beside the reward model."""
    slices = config.parallel.inference_tp_size
    rows = -(-config.reward.normalize_prompts * slices // ranks)
    return answering_memory(
        models.policy,
        policy,
        rows=min(config.generation_batch_size, rows),
        prompt=min(config.dataset.max_prompt_tokens, work.longest),
        new=config.sampling.max_new_tokens,
        packs=decodes_packed(config, models, device),
        slices=slices,
    )


def saves(config: RunConfig, work: Work) -> bool:
    """Whether the stage writes a checkpoint before it ends."""
    return bool(config.save_every) and not 0 < work.steps <= config.save_every


def decodes_packed(config: RunConfig, models: Models, device: Device) -> bool:
    """Whether generation reads a second, packed copy of the weights, quantized ones unpacked. It
    may take a share of what is free there, here of all memory."""
    copied = models.policy.parameters * (2 if device.half else FLOAT)
    return (
        models.kind in PACKED_FAMILIES
        and device.on_cpu
        and device.packs
        and config.dtype != "fp16"
        and config.parallel.inference_tp_size == 1
        and config.hybrid_engine
        and copied <= SHARE_TO_PACK * device.memory
    )


def kept_states(
    config: RunConfig,
    stage: Stage,
    models: Models,
    work: Work,
    device: Device,
    policy: Layout,
    ranks: int,
) -> int:
    """Tokens whose states one rank keeps from generation for the actor's only update
    (training/first_update.py); 0 where it keeps none."""
    rl = getattr(config, stage.section)
    if not (
        stage.family == "rl"
        and not stage.compares_answers
        and ranks == 1
        and work.updates == work.passes
        and work.steps != 1  # the first update of a process runs the actor
        and decodes_packed(config, models, device)
        and not config.lora.rank
        and keeps_states(models.policy, policy)
        and rl.old_logprobs != "forward"
        and config.dropout == 0
        and not policy.offload_params
        and getattr(rl, "sampling_rounds", 1) <= 1
    ):
        return 0
    tokens = round(work.prompts * work.prompt + work.rows * (work.new - 1))
    fits = states_bytes(models.policy, tokens, policy) <= config.kept_states * device.memory
    return tokens if fits else 0


def _ppo_work(
    config: RunConfig, stage: Stage, models: Models, work: Work, device: Device
) -> PPOWork:
    slices = config.parallel.inference_tp_size
    return PPOWork(
        # Ranks that hold slices together answer together what each would answer.
        rows=min(config.generation_batch_size, round(work.rows) * slices),
        prompt=work.longest_prompt,
        new=work.new,
        tokens=work.micro_tokens,
        answered=_answered(work, work.micro_tokens),
        packs=decodes_packed(config, models, device),
        slices=slices,
        hosted=tuple(set(config.parallel.offload) & {"reference", "reward"}),
        num_reward_models=num_reward_models(config, stage),
        has_critic="critic" in stage.trains,
        has_reference=has_reference(config, stage),
    )


def _answered(work: Work, tokens: int) -> int:
    return tokens * work.new // max(1, work.longest_prompt + work.new)


def by_part(plan: MemoryPlan, phase: str) -> Bytes:
    """Everything that is in memory in a phase (`load` too), by what it is, over all roles."""
    whole = plan.loading if phase == "load" else {**plan.resting, **plan.phases[phase]}
    parts: Bytes = {}
    for name, size in whole.items():
        part = name.rpartition(": ")[2]
        parts[part] = parts.get(part, 0.0) + size
    return {name: size for name, size in parts.items() if size > 0}
