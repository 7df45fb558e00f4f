"""A stage predicted whole: memory of every phase, time, disk, price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from tandem.config.critic_free_rules import EXACT_KL
from tandem.config.engine import engine_settings
from tandem.config.rules import has_reference
from tandem.config.schema import RLConfig, RunConfig
from tandem.config.stages import Stage, in_order
from tandem.memory.dimensions import Shape
from tandem.memory.model import FLOAT, Layout, MemoryPlan, checkpoint_bytes, layout_of
from tandem.memory.work import logits_rows
from tandem.predict.constants import constants
from tandem.predict.evaluation import Comparison, Evaluating, Evaluations
from tandem.predict.hardware import Hardware
from tandem.predict.memory import (
    Device,
    Models,
    by_part,
    decodes_packed,
    following,
    kept_states,
    saves,
    stage_memory,
)
from tandem.predict.rows import Rows
from tandem.predict.seconds import (
    Pace,
    PhaseWork,
    generating,
    loading,
    saving,
    scoring,
    training,
)
from tandem.predict.work import Work, num_reward_models, work_of

RESERVED = 1.1
"""What torch's allocator on a GPU holds over the live peak; fragmentation can make it 1.43."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase, per rank.

    live: bytes in use at its peak, by part. peak: their sum, beside the process itself. reserved:
    of the device (a CPU: the process's resident bytes). instant: when the peak is. seconds: per
    step (load: once); None where the machine's speed is not known. tokens: per step of all ranks.
    flops, moved: per rank and step. terms: ideal seconds, for fitting.
    """

    live: Mapping[str, float]
    peak: float
    reserved: float
    instant: str = ""
    seconds: float | None = None
    tokens: float = 0.0
    flops: float = 0.0
    moved: float = 0.0
    terms: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """A stage on some ranks.

    phases: by name, in order. work: of a step. disk: bytes written at most. models: bytes of the
    models that it leaves, at least. host: bytes per rank in host memory beside a GPU. hardware:
    what for. evaluations: None where held-out rows are not known. comparison: of the run's models,
    behind its last stage.
    """

    stage: str
    ranks: int
    hardware: Hardware
    dtype: str
    work: Work
    phases: Mapping[str, Phase]
    disk: float
    models: float
    host: float
    evaluations: Evaluations | None = None
    comparison: Comparison | None = None

    @cached_property
    def peak(self) -> float:
        """The largest reserved bytes of a rank."""
        return max(phase.reserved for phase in self.phases.values())

    @property
    def peak_phase(self) -> str:
        """The phase of that peak."""
        return max(self.phases, key=lambda name: self.phases[name].reserved)

    @property
    def step_seconds(self) -> float:
        """Of a training step."""
        once = ("load", "rehearse", "save")
        return sum(p.seconds or 0.0 for name, p in self.phases.items() if name not in once)

    @property
    def total_seconds(self) -> float | None:
        """Of the whole stage, with its evaluations where they are known; None where the number of
        its steps is not."""
        if not self.work.steps:
            return None
        once = sum(p.seconds or 0.0 for name, p in self.phases.items() if name in ("load", "save"))
        evaluated = 0.0 if self.evaluations is None else self.evaluations.seconds
        return once + self.work.steps * self.step_seconds + evaluated

    @property
    def dollars(self) -> float | None:
        """Price of the stage on all devices; None without a price or a number of steps."""
        if self.hardware.price is None or self.total_seconds is None:
            return None
        return self.hardware.price * self.ranks * self.total_seconds / 3600

    @property
    def budget(self) -> float:
        """Bytes that one rank may hold: of a CPU its share of the machine's."""
        shared = self.ranks if self.hardware.on_cpu else 1
        return self.hardware.memory / shared


def compute_dtype(config: RunConfig, hardware: Hardware) -> str:
    """The compute type of the run on that hardware."""
    if config.dtype != "auto":
        return config.dtype
    return "fp32" if hardware.on_cpu else "bf16"


def predict_stage(
    config: RunConfig,
    stage: Stage,
    models: Models,
    rows: Rows,
    hardware: Hardware,
    ranks: int,
) -> StagePrediction:
    """What a stage will need on `ranks` devices."""
    dtype = compute_dtype(config, hardware)
    half = dtype != "fp32"
    work = work_of(config, stage, ranks, rows, models.positions)
    device = Device(on_cpu=hardware.on_cpu, half=half, packs=hardware.packs, memory=hardware.memory)
    memory = stage_memory(config, stage, models, work, device, ranks)
    layout = partial(layout_of, engine_settings(config), ranks, on_cpu=hardware.on_cpu, half=half)
    policy = layout("actor", **following(config, stage))
    value = layout("critic")
    pace = Pace(machine=hardware, dtype=dtype, threads=hardware.cores)
    packs = decodes_packed(config, models, device)
    keeps = kept_states(config, stage, models, work, device, policy, ranks) > 0
    times = _phase_work(config, stage, models, work, pace, policy, value, packs=packs, keeps=keeps)
    if not saves(config, work):
        times.pop("save", None)
    phases = _with_memory(memory, times, hardware, ranks, rows.count)
    trained = _trained(config, stage, models, policy, value)
    evaluations = comparison = None
    if rows.heldout is not None:
        phases_of = constants(hardware.kind, hardware.name).phases
        evaluating = Evaluating(
            config=config, models=models, heldout=rows.heldout, pace=pace, policy=policy,
            value=value, ranks=ranks, packs=packs, known=phases_of,
        )  # fmt: skip
        evaluations = evaluating.of_stage(stage, work.steps)
        if stage == in_order(config.stages)[-1]:
            comparison = evaluating.comparison()
    return StagePrediction(
        stage=stage.name,
        ranks=ranks,
        hardware=hardware,
        dtype=dtype,
        work=work,
        phases=phases,
        disk=_disk(config, trained, models, stage),
        models=_saved_width(config, models) * _saved(config, trained, models, stage),
        host=sum(memory.host.values()) + config.save_async * checkpoint_bytes(trained),
        evaluations=evaluations,
        comparison=comparison,
    )


def _trained(
    config: RunConfig, stage: Stage, models: Models, policy: Layout, value: Layout
) -> list[tuple[Shape, Layout]]:
    """The models that the stage trains."""
    if stage.family == "rl":
        return [(models.policy, policy)] + [(models.critic, value)] * ("critic" in stage.trains)
    scalar = stage.leaves == "reward model"
    return [(models.value, value) if scalar else (models.policy, policy)]


def _phase_work(
    config: RunConfig,
    stage: Stage,
    models: Models,
    work: Work,
    pace: Pace,
    policy: Layout,
    value: Layout,
    *,
    packs: bool,
    keeps: bool,
) -> dict[str, PhaseWork]:
    trained = _trained(config, stage, models, policy, value)
    held = [shape for shape, _ in trained]
    found: dict[str, PhaseWork] = {}
    if stage.family == "rl":
        frozen = replace(policy, is_trained=False)
        rows = min(work.at_once, logits_rows(models.policy, policy, FLOAT))
        found["generate"] = generating(models.policy, policy, work, pace, rows, packs=packs)
        scored: list[PhaseWork] = []
        if has_reference(config, stage):
            scored.append(scoring(models.reference or models.policy, frozen, work, pace))
        judge = replace(value, is_trained=False)
        scored += [scoring(models.value, judge, work, pace)] * num_reward_models(config, stage)
        if "critic" in stage.trains:
            scored.append(scoring(models.critic, judge, _beyond_first_update(work), pace))
        held += [models.value] * num_reward_models(config, stage)
        held += _references(config, stage, models, policy)
        if scored:
            found["score"] = sum(scored[1:], scored[0])
    passes = [training(shape, layout, work, pace) for shape, layout in trained]
    if keeps:
        passes[0] = training(*trained[0], work, pace, read=work.tokens)
    if stage.family != "rl" and has_reference(config, stage):
        compared = models.reference or models.policy
        passes.append(scoring(compared, replace(policy, is_trained=False), work, pace))
        held += _references(config, stage, models, policy)
    if getattr(getattr(config, stage.section), "kl", "") in EXACT_KL:
        compared = models.reference or models.policy
        frozen = replace(policy, is_trained=False)
        passes += [scoring(compared, frozen, work, pace)] * round(work.passes)
        if getattr(config, stage.section).ptx_target == "reference":
            passes.append(scoring(compared, frozen, _mixed_in(work), pace))
    found["train"] = sum(passes[1:], passes[0])
    size = sum(FLOAT * shape.parameters for shape in held)
    state = checkpoint_bytes(trained)
    policies = sum(FLOAT * shape.parameters for shape in held if not shape.is_scalar)
    return {"load": loading(size, policies, len(held), pace), **found,
            "save": saving(state, pace.machine)}  # fmt: skip


def _references(config: RunConfig, stage: Stage, models: Models, policy: Layout) -> list[Shape]:
    """The reference, where it is a model beside the policy."""
    if not has_reference(config, stage) or (policy.lora_rank and models.reference is None):
        return []
    return [models.reference or models.policy]


def _mixed_in(work: Work) -> Work:
    """Of the `ptx_data` texts of a step's updates."""
    texts = work.ptx * work.updates
    return replace(work, tokens=texts, answered=texts, sequences=texts / max(1.0, work.length))


def _beyond_first_update(work: Work) -> Work:
    """Of the answers that are not in the step's first update, whose values come with it."""
    left = 1.0 - work.passes / max(work.passes, work.updates)
    return replace(
        work,
        tokens=left * work.tokens,
        answered=left * work.answered,
        sequences=left * work.sequences,
    )


def _with_memory(
    memory: MemoryPlan,
    times: Mapping[str, PhaseWork],
    hardware: Hardware,
    ranks: int,
    num_rows: int,
) -> dict[str, Phase]:
    known = constants(hardware.kind, hardware.name)
    beside = hardware.process + known.imports + known.step + (known.per_rank if ranks > 1 else 0.0)
    beside += known.row * num_rows
    in_order = ("load", "rehearse", *times, "normalize")
    names = {name: _of_phase(name, memory) for name in in_order}
    found: dict[str, Phase] = {}
    kept = 0.0
    for name, instants in names.items():
        if not instants:
            continue
        instant = max(instants, key=memory.peak)
        peak = float(memory.peak(instant))
        time = times.get(name)
        if hardware.on_cpu:
            if name == "rehearse":  # moments are not written yet, so they are not resident
                peak -= sum(size for part, size in memory.resting.items() if "AdamW" in part)
            if name in ("rehearse", "train"):  # freed memory stays with the process
                peak = kept = max(kept, peak)
            reserved = peak + beside
        else:
            reserved = peak * RESERVED + beside
        found[name] = Phase(
            live=by_part(memory, instant),
            peak=peak,
            reserved=reserved,
            instant=instant,
            seconds=_seconds(name, time, known.phases, ranks),
            tokens=0.0 if time is None else time.tokens * ranks,
            flops=0.0 if time is None else time.flops,
            moved=0.0 if time is None else time.moved,
            terms=None if time is None else dict(time.terms),
        )
    return found


def _seconds(
    name: str, time: PhaseWork | None, known: Mapping[str, Mapping[str, float]], ranks: int
) -> float | None:
    return None if time is None else time.seconds(known[name])


def _of_phase(name: str, memory: MemoryPlan) -> list[str]:
    """The instants of a phase, by their names in the memory plan."""
    if name == "load":
        return ["load"]
    return [instant for instant in memory.phases if instant.split()[0] == name]


def _disk(
    config: RunConfig, trained: list[tuple[Shape, Layout]], models: Models, stage: Stage
) -> float:
    """Bytes of the checkpoints that are kept and of the saved models."""
    states = checkpoint_bytes(trained, whole=True)
    section = getattr(config, stage.section)
    # The next checkpoint is written before the oldest is removed; the best is kept beside them.
    saves = config.save_every or section.keep_best
    checkpoints = (config.keep_checkpoints + 1 if saves else 1) + section.keep_best
    return checkpoints * states + FLOAT * _saved(config, trained, models, stage)


def _saved(
    config: RunConfig, trained: list[tuple[Shape, Layout]], models: Models, stage: Stage
) -> float:
    """Parameters of the models that the stage leaves, averages included."""
    section = getattr(config, stage.section)
    averages = isinstance(section, RLConfig) and section.ema
    return sum(shape.parameters for shape, _ in trained) + averages * models.policy.parameters


def _saved_width(config: RunConfig, models: Models) -> int:
    """Bytes of a saved parameter, at least."""
    if config.save_dtype == "auto":
        return models.saved_width
    return FLOAT if config.save_dtype == "fp32" else FLOAT // 2
