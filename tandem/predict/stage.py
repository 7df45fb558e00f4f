"""A stage predicted whole: memory of every phase, time, disk, price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tandem.config.critic_free_rules import EXACT_KL
from tandem.config.schema import RunConfig
from tandem.config.stages import Stage, in_order
from tandem.memory.dimensions import Shape
from tandem.memory.model import FLOAT, MemoryPlan, checkpoint_bytes
from tandem.memory.work import logits_rows, packed_bytes
from tandem.predict.constants import constants
from tandem.predict.evaluation import Comparison, Evaluating, Evaluations
from tandem.predict.hardware import Hardware
from tandem.predict.memory import Device, Models, StageCase, by_part, stage_memory
from tandem.predict.record import OF_A_STEP
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
    work = work_of(config, stage, ranks, rows, models.positions)
    device = Device(
        on_cpu=hardware.on_cpu, half=dtype != "fp32", packs=hardware.packs, memory=hardware.memory,
        per_node=hardware.per_node,
    )  # fmt: skip
    case = StageCase(config, stage, models, work, device, ranks)
    memory = stage_memory(case)
    pace = Pace(machine=hardware, dtype=dtype, threads=hardware.cores)
    times = _phase_work(case, pace)
    if hardware.on_cpu:
        _add_first_touches(times, memory, work.steps, pace)
    if not case.saves:
        times.pop("save", None)
    phases = _with_memory(memory, times, hardware, ranks, rows.count)
    evaluations = comparison = None
    if rows.heldout is not None:
        phases_of = constants(hardware.kind, hardware.name).phases
        evaluating = Evaluating(case=case, heldout=rows.heldout, pace=pace, known=phases_of)
        evaluations = evaluating.of_stage()
        if stage == in_order(config.stages)[-1]:
            comparison = evaluating.comparison()
    return StagePrediction(
        stage=stage.name,
        ranks=ranks,
        hardware=hardware,
        dtype=dtype,
        work=work,
        phases=phases,
        disk=_disk(case),
        models=_saved_width(case) * _saved(case),
        host=sum(memory.host.values()) + config.save_async * checkpoint_bytes(case.trained),
        evaluations=evaluations,
        comparison=comparison,
    )


def _phase_work(case: StageCase, pace: Pace) -> dict[str, PhaseWork]:
    config, stage, models, work = case.config, case.stage, case.models, case.work
    policy, trained = case.policy, case.trained
    compared, frozen = models.reference or models.policy, replace(policy, is_trained=False)
    held = [*(shape for shape, _ in trained), *_references(case)]
    found: dict[str, PhaseWork] = {}
    kept = 0.0  # of the steps; a run's first update computes the actor's forward itself
    if case.kept_states:
        kept = 1.0 - 1.0 / work.steps if work.steps else 1.0
    if stage.family == "rl":
        rows = min(work.at_once, logits_rows(models.policy, policy, FLOAT))
        found["generate"] = generating(
            models.policy, policy, work, pace, rows,
            packs=case.decodes_packed, kept=kept * case.kept_states,
        )  # fmt: skip
        scored: list[PhaseWork] = []
        if case.has_reference:
            scored.append(scoring(compared, frozen, work, pace))
        judge = replace(case.value, is_trained=False)
        scored += [scoring(models.value, judge, work, pace)] * num_reward_models(config, stage)
        if case.has_critic:
            scored.append(scoring(models.critic, judge, _beyond_first_update(work), pace))
        held += [models.value] * num_reward_models(config, stage)
        if scored:
            found["score"] = sum(scored[1:], scored[0])
    passes = [training(shape, layout, work, pace) for shape, layout in trained]
    if kept:
        passes[0] = training(*trained[0], work, pace, read=kept * work.tokens)
    if stage.family != "rl" and case.has_reference:
        passes.append(scoring(compared, frozen, work, pace))
    if stage.labelled:  # the baseline: both models on answers behind other prompts
        passes += [scoring(shape, frozen, work, pace) for shape in (models.policy, compared)]
    if getattr(getattr(config, stage.section), "kl", "") in EXACT_KL:
        passes += [scoring(compared, frozen, work, pace)] * round(work.passes)
        if getattr(config, stage.section).ptx_target == "reference":
            passes.append(scoring(compared, frozen, _mixed_in(work), pace))
    found["train"] = sum(passes[1:], passes[0])
    tried = [shape for shape in held if not shape.is_scalar]
    packed = packed_bytes(models.policy, policy) if tried and case.decodes_packed else 0.0
    adapted = [shape for shape, layout in trained if layout.lora_rank]
    load = loading(held, pace, tried=tried, adapted=adapted, packed=packed, ranks=case.ranks)
    return {"load": load, **found, "save": saving(checkpoint_bytes(trained), pace.machine)}


def _add_first_touches(
    times: dict[str, PhaseWork], memory: MemoryPlan, steps: int, pace: Pace
) -> None:
    """To each phase, the clearing and writing of memory by which it is the first to raise what the
    process holds. Freed memory stays with the process, so only loading, the rehearsal, which is not
    timed, and the first step pay; the system takes long to find and clear pages."""
    held = 0.0
    for name in ("load", "rehearse", *OF_A_STEP):
        peak = max((float(memory.peak(i)) for i in _of_phase(name, memory)), default=0.0)
        if name not in ("load", "train"):  # the first update makes the moments
            peak -= memory.moments
        times_of = 1 if name == "load" else steps
        if name in times and times_of:
            new = pace.moving(2.0 * max(0.0, peak - held) / times_of)
            times[name] = times[name] + PhaseWork({"first": new})
        held = max(held, peak)


def _references(case: StageCase) -> list[Shape]:
    """The reference, where it is a model beside the policy."""
    other = case.models.reference
    if not case.has_reference or (case.policy.lora_rank and other is None):
        return []
    return [other or case.models.policy]


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
    beside = hardware.process + known.imports + known.slack(ranks) + known.row * num_rows
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
                peak -= memory.moments
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
            seconds=None if time is None else time.seconds(known.phases[name]),
            tokens=0.0 if time is None else time.tokens * ranks,
            flops=0.0 if time is None else time.flops,
            moved=0.0 if time is None else time.moved,
            terms=None if time is None else dict(time.terms),
        )
    return found


def _of_phase(name: str, memory: MemoryPlan) -> list[str]:
    """The instants of a phase, by their names in the memory plan."""
    if name == "load":
        return ["load"]
    return [instant for instant in memory.phases if instant.split()[0] == name]


def _disk(case: StageCase) -> float:
    """Bytes of the checkpoints that are kept and of the saved models."""
    config = case.config
    states = checkpoint_bytes(case.trained, whole=True)
    section = getattr(config, case.stage.section)
    # The next checkpoint is written before the oldest is removed; the best is kept beside them.
    saves = config.save_every or section.keep_best
    checkpoints = (config.keep_checkpoints + 1 if saves else 1) + section.keep_best
    return checkpoints * states + FLOAT * _saved(case)


def _saved(case: StageCase) -> float:
    """Parameters of the models that the stage leaves, averages included."""
    own = sum(shape.parameters for shape, _ in case.trained)
    return own + case.policy.moving_average * case.models.policy.parameters


def _saved_width(case: StageCase) -> int:
    """Bytes of a saved parameter, at least."""
    if case.config.save_dtype == "auto":
        return case.models.saved_width
    return FLOAT if case.config.save_dtype == "fp32" else FLOAT // 2
