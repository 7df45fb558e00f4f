"""The memory of a stage, from its run's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from tandem.config.engine import engine_settings
from tandem.config.lora import TrainedRole
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
    are packed weights to decode from. memory: its bytes. per_node: ranks that share a node (None:
    all), where the configuration does not say it."""

    on_cpu: bool
    half: bool
    packs: bool = False
    memory: float = 0.0
    per_node: int | None = None


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


@dataclass(frozen=True)
class StageCase:
    """A stage on some ranks of a machine. work: of a step."""

    config: RunConfig
    stage: Stage
    models: Models
    work: Work
    device: Device
    ranks: int

    @property
    def has_reference(self) -> bool:
        """Whether its loss or reward reads one."""
        return has_reference(self.config, self.stage)

    @cached_property
    def policy(self) -> Layout:
        """How the policy is placed, with what follows it."""
        rl, moving = getattr(self.config, self.stage.section), self.config.reference
        moves = moving.update_every > 0 and self.has_reference
        return self._layout(
            "actor",
            average=isinstance(rl, RLConfig) and rl.ema,
            reference_rate=moving.update_rate if moves else 0.0,
        )

    @cached_property
    def value(self) -> Layout:
        """How reward model and critic are placed."""
        return self._layout("critic")

    def _layout(self, role: TrainedRole, **more: Any) -> Layout:
        device, settings = self.device, engine_settings(self.config)
        return layout_of(
            settings, self.ranks, role,
            on_cpu=device.on_cpu, half=device.half, per_node=device.per_node, **more,
        )  # fmt: skip

    @property
    def trained(self) -> list[tuple[Shape, Layout]]:
        """The models that the stage trains."""
        models = self.models
        if self.stage.leaves == "reward model":
            return [(models.value, self.value)]
        return [(models.policy, self.policy)] + [(models.critic, self.value)] * self.has_critic

    @property
    def has_critic(self) -> bool:
        """Whether it trains one beside the policy."""
        return self.stage.family == "rl" and "critic" in self.stage.trains

    @property
    def saves(self) -> bool:
        """Whether it writes a checkpoint before it ends."""
        every = self.config.save_every
        return bool(every) and not 0 < self.work.steps <= every

    @property
    def decodes_packed(self) -> bool:
        """Whether generation reads a second, packed copy of the weights, quantized ones unpacked.
        It may take a share of what is free there, here of all memory."""
        config, models, device = self.config, self.models, self.device
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

    @cached_property
    def kept_states(self) -> int:
        """Tokens whose states one rank keeps from generation for the actor's only update
        (training/first_update.py); 0 where it keeps none."""
        config, work, policy = self.config, self.work, self.models.policy
        rl = getattr(config, self.stage.section)
        if not (
            self.stage.family == "rl"
            and not self.stage.compares_answers
            and self.ranks == 1
            and work.updates == work.passes
            and work.steps != 1  # the first update of a process runs the actor
            and self.decodes_packed
            and not config.lora.rank
            and keeps_states(policy, self.policy)
            and rl.old_logprobs != "forward"
            and config.dropout == 0
            and not self.policy.offload_params
            and getattr(rl, "sampling_rounds", 1) <= 1
        ):
            return 0
        tokens = round(work.prompts * work.prompt + work.rows * (work.new - 1))
        fits = states_bytes(policy, tokens, self.policy) <= config.kept_states * self.device.memory
        return tokens if fits else 0


def stage_memory(case: StageCase) -> MemoryPlan:
    """What a stage needs per rank, by phase."""
    config, stage, models, work = case.config, case.stage, case.models, case.work
    ending: dict[str, Bytes] = {}
    if stage.family == "rl":
        of_step = partial(
            ppo_memory, models.policy, models.critic, case.policy, case.value,
            other=models.reference, judge=models.value,
        )  # fmt: skip
        step = _ppo_work(case)
        plan = of_step(replace(step, states=case.kept_states))
        answered = _answered(work, work.rehearsed)
        tried = of_step(replace(step, tokens=work.rehearsed, answered=answered))
    else:
        scalar = stage.leaves == "reward model"
        ((shape, placed),) = case.trained
        of_tokens = partial(
            supervised_memory,
            shape,
            placed,
            reference=case.has_reference,
            other=models.reference,
            reference_on_host="reference" in config.parallel.offload,
            packs=not scalar and case.decodes_packed,
        )
        share = work.answered / max(1.0, work.tokens)
        micro, largest = work.micro_tokens, work.rehearsed
        # Of a policy, what loading leaves in the process was measured to take what gradients free.
        later, none_later = (work.later, 0) if scalar else (None, None)
        plan = of_tokens(tokens=micro, answered=round(micro * share), later=later)
        tried = of_tokens(tokens=largest, answered=round(largest * share), later=none_later)
        if scalar and answers_are_scored(config):
            ending = {"normalize": _normalizing(case)}
    rehearsal = {f"rehearse{name[5:]}": size for name, size in tried.phases.items()
                 if name.startswith("train")}  # fmt: skip
    saved: dict[str, Bytes] = {"save": {}}
    if case.saves and config.save_async and case.device.on_cpu:
        # The next step runs while the copy is written.
        copied = {"copy to write": checkpoint_bytes(case.trained)}
        saved = {f"save beside {name}": size | copied for name, size in plan.phases.items()}
    return replace(plan, phases={**rehearsal, **plan.phases, **saved, **ending})


def answers_are_scored(config: RunConfig) -> bool:
    """Whether a reward model's stage ends with the scores of a policy's answers."""
    has_policy = bool(config.actor_model) or bool(leaving(config.stages, "policy"))
    return config.reward.normalize_prompts > 0 and has_policy


def _normalizing(case: StageCase) -> Bytes:
    """What the policy whose answers are scored needs beside the reward model."""
    config = case.config
    slices = config.parallel.inference_tp_size
    rows = -(-config.reward.normalize_prompts * slices // case.ranks)
    return answering_memory(
        case.models.policy,
        case.policy,
        rows=min(config.generation_batch_size, rows),
        prompt=min(config.dataset.max_prompt_tokens, case.work.longest),
        new=config.sampling.max_new_tokens,
        packs=case.decodes_packed,
        slices=slices,
    )


def _ppo_work(case: StageCase) -> PPOWork:
    config, work = case.config, case.work
    slices = config.parallel.inference_tp_size
    return PPOWork(
        # Ranks that hold slices together answer together what each would answer.
        rows=min(config.generation_batch_size, round(work.rows) * slices),
        prompt=work.longest_prompt,
        new=work.new,
        tokens=work.micro_tokens,
        answered=_answered(work, work.micro_tokens),
        packs=case.decodes_packed,
        slices=slices,
        hosted=tuple(set(config.parallel.offload) & {"reference", "reward"}),
        num_reward_models=num_reward_models(config, case.stage),
        has_critic=case.has_critic,
        has_reference=case.has_reference,
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
