"""Every stage of a run predicted before it starts, and compared with what it then measured."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch

from tandem import processor
from tandem.config.schema import RLConfig
from tandem.config.stages import stage_of
from tandem.errors import ModelError
from tandem.metrics.text import duration, with_unit
from tandem.metrics.timing import Phases, Whole, peak_bytes, reset_peak
from tandem.ops import native
from tandem.predict.constants import constants
from tandem.predict.hardware import Hardware
from tandem.predict.machine import known_machine, memory_bytes
from tandem.predict.memory import Models
from tandem.predict.models import config_of, configs_beside
from tandem.predict.record import EVALUATE, OF_A_STEP, WHOLE, Outcome, add_outcomes
from tandem.predict.rows import Rows
from tandem.predict.stage import Phase, StagePrediction, predict_stage
from tandem.process import resident_bytes
from tandem.text import named_line
from tandem.training.measured_rows import measured_heldout, measured_rows
from tandem.training.run_folder import Run
from tandem.training.stage_data import StepRows
from tandem.training.stage_loop import StageJob

_UNMEASURED = "machine not measured: memory only"


class Forecast:
    """A stage's prediction, and what is measured beside it.

    Attributes:
        prediction: None where it failed, which a line has said.
    """

    def __init__(self, run: Run, stage: str, rows: StepRows) -> None:
        self.prediction: StagePrediction | None = None
        self._rows = Rows()
        self._run, self._stage = run, stage
        self._load = Whole()
        self._knows_times = False
        self._process = resident_bytes()
        try:
            self.prediction = self._predict(rows)
        except Exception as error:  # a run must not end because it cannot be predicted
            run.print_line(f"{stage}: no prediction: {named_line(error)}")

    def _predict(self, rows: StepRows) -> StagePrediction:
        run, stage = self._run, self._stage
        known = known_machine(run.config.device)
        section = getattr(run.config, stage_of(stage).section)
        # How many answers a conversation comes to have is not known.
        converses = isinstance(section, RLConfig) and section.converses
        self._knows_times = known is not None and not converses
        models, own = models_in_use(run, stage, rows), measured_rows(run, stage, rows)
        self._rows = replace(own, heldout=measured_heldout(rows))
        name = known.name if known else processor.kind()
        slack = constants("cpu", name)  # which the prediction adds
        without = self._process - slack.imports - slack.row * self._rows.count
        hardware = replace(known or _unmeasured(run, without), per_node=run.world.ranks_per_node)
        return predict_stage(
            run.config, stage_of(stage), models, self._rows, hardware, run.world.size
        )

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around the loading of the stage's models."""
        reset_peak()
        start, cpu = time.perf_counter(), time.process_time()
        yield
        self._load = Whole(1, time.perf_counter() - start, time.process_time() - cpu, peak_bytes())

    def compared_before_saving(self, job: StageJob) -> StageJob:
        """The job that calls `compare` before it writes its models: a run that is killed between
        the two would never do it, for the stage is then finished."""

        def save(folder: Path) -> None:
            try:
                self.compare(job.trainer.phases)
            except Exception as error:  # the models count more
                self._run.print_line(
                    f"{self._stage}: predictions not recorded: {named_line(error)}"
                )
            job.save(folder)

        return replace(job, save=save)

    def compare(self, phases: Phases) -> None:
        """Show predicted beside measured in a line, and write it into the run's folder.

        Raises:
            OSError: the disk refuses.
        """
        prediction = self.prediction
        if prediction is None or not self._run.world.is_first or not self._run.writes:
            return
        measured = {"load": self._load, **phases.whole}
        steps = measured["step"].blocks if "step" in measured else 0
        if not steps:
            return
        outcomes = [
            self._outcome(name, phase, measured[name], steps)
            for name, phase in prediction.phases.items()
            if name in measured
        ]
        peak = max(whole.peak_bytes for whole in measured.values())
        step = measured["step"]
        live = prediction.phases[prediction.peak_phase].peak
        whole = Phase(live={}, peak=live, reserved=prediction.peak, seconds=prediction.step_seconds)
        seconds = sum(measured[n].seconds for n in OF_A_STEP if n in measured)
        cpu = sum(measured[n].cpu_seconds for n in OF_A_STEP if n in measured)
        outcomes += self._evaluations(measured, steps)
        outcomes.append(self._outcome(WHOLE, whole, Whole(step.blocks, seconds, cpu, peak), steps))
        self._show(outcomes[-1])
        add_outcomes(self._run.path, outcomes)

    def _evaluations(self, measured: Mapping[str, Whole], steps: int) -> list[Outcome]:
        """One of the stage's evaluations, on average; none where none was predicted or made."""
        assert self.prediction is not None
        found = self.prediction.evaluations
        if found is None or not found.each or EVALUATE not in measured:
            return []
        phase = Phase(live={}, peak=0.0, reserved=0.0, seconds=found.each, terms=found.terms)
        return [self._outcome(EVALUATE, phase, measured[EVALUATE], steps)]

    def _outcome(self, name: str, phase: Phase, whole: Whole, steps: int) -> Outcome:
        assert self.prediction is not None
        hardware = self.prediction.hardware
        times = whole.blocks if name in ("load", "save", EVALUATE) else steps
        # A rank that waits for others, or for the cores, loses wall time: one thread's CPU time is
        # what is predicted.
        in_cpu = hardware.on_cpu and hardware.cores == 1
        known = constants(hardware.kind, hardware.name)
        return Outcome(
            stage=self._stage,
            phase=name,
            ranks=self._run.world.size,
            hardware=hardware.name,
            dtype=self.prediction.dtype,
            predicted_bytes=phase.reserved,
            measured_bytes=float(whole.peak_bytes),
            live_bytes=phase.peak,
            process_bytes=self._process,
            slack_bytes=known.slack(self._run.world.size),
            predicted_seconds=phase.seconds if self._knows_times else None,
            measured_seconds=whole.seconds / max(1, times),
            cpu_seconds=whole.cpu_seconds / max(1, times) if in_cpu else None,
            steps=steps,
            parts=phase.live,
            terms=phase.terms or {},
            rows=asdict(self._rows) if name == WHOLE else {},
            constants=known.fitted_on,
        )

    def _show(self, whole: Outcome) -> None:
        line = (
            f"{self._stage}: peak {with_unit(whole.measured_bytes, 'bytes')}, predicted "
            f"{with_unit(whole.predicted_bytes, 'bytes')} ({whole.memory_error:+.0%})"
        )
        measured = whole.cpu_seconds or whole.measured_seconds
        if whole.predicted_seconds is not None and measured:
            kind = "CPU time of a step" if whole.cpu_seconds else "a step"
            line += (
                f"; {kind} {duration(measured)}, predicted {duration(whole.predicted_seconds)} "
                f"({whole.time_error:+.0%})"
            )
        self._run.print_line(line)


def models_in_use(run: Run, stage: str, rows: StepRows) -> Models:
    """The stage's models by their configs.

    Raises:
        ModelError: a config cannot be read.
    """
    record = stage_of(stage)
    code = run.config.trust_remote_code
    if code:
        raise ModelError("models with code of their own have no formula.")
    if record.leaves == "reward model":
        value = config_of(run.config.reward_model or run.policy_source(stage))
        return Models.of(value, value)
    policy = config_of(run.policy_source(stage))
    is_rewarded = record.family == "rl" and record.rewarded
    reward = run.reward_source(stage) if is_rewarded else None
    value = config_of(reward) if reward else policy
    beside = configs_beside(run.config)
    if reward and not rows.reward_renderer.renders_like(rows.renderer):
        beside.setdefault("critic", policy)  # it must read the policy's tokens
    return Models.of(policy, value, **beside)


def _unmeasured(run: Run, process: float) -> Hardware:
    """This machine where its speed is not known: for memory alone. process: resident bytes."""
    on_gpu = run.device.type == "cuda"
    return Hardware(
        name=f"{_UNMEASURED} ({processor.kind()})",
        kind="gpu" if on_gpu else "cpu",
        flops={"fp32": 1.0},
        bandwidth=1.0,
        link=1.0,
        network=1.0,
        memory=torch.cuda.mem_get_info(run.device)[1] if on_gpu else memory_bytes(),
        process=process,
        packs=native.available(),
    )
