"""A finished run predicted again, after formulas or constants changed, beside what it measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tandem.config.load import load_config
from tandem.config.recorded import with_found_models
from tandem.config.stages import stage_of
from tandem.predict.constants import Constants, constants
from tandem.predict.hardware import Hardware
from tandem.predict.memory import Models
from tandem.predict.models import config_of, configs_beside
from tandem.predict.record import EVALUATE, WHOLE, Outcome, add_outcomes, read_outcomes
from tandem.predict.rows import recorded_rows
from tandem.predict.seconds import PhaseWork
from tandem.predict.stage import StagePrediction, predict_stage


def predict_again(folder: Path, hardware: Hardware) -> None:
    """Add predictions of now to a run's predictions.jsonl, from its configuration and the lengths
    of its rows; what was measured stays. A stage recorded without lengths is left as it is.

    Args:
        hardware: the machine that it ran on.
    Raises:
        ConfigError, ModelError: the run's configuration or models are gone.
    """
    outcomes = read_outcomes(folder)
    for whole in [outcome for outcome in outcomes if outcome.phase == WHOLE and outcome.rows]:
        found = _prediction(folder, whole, hardware)
        own = [outcome for outcome in outcomes if outcome.stage == whole.stage]
        add_outcomes(folder, [_with(outcome, found) for outcome in own])


def _prediction(folder: Path, whole: Outcome, hardware: Hardware) -> StagePrediction:
    config = with_found_models(load_config(folder / "config.yaml"), folder)
    policy = config_of(config.actor_model or config.reward_model)
    value = config_of(config.reward_model) if config.reward_model else policy
    models = Models.of(policy, value, **configs_beside(config))
    rows = recorded_rows(whole.rows)
    return predict_stage(config, stage_of(whole.stage), models, rows, hardware, whole.ranks)


def _with(outcome: Outcome, found: StagePrediction) -> Outcome:
    known = constants(found.hardware.kind, found.hardware.name)
    outcome = replace(
        outcome, hardware=found.hardware.name, constants=known.fitted_on,
        slack_bytes=known.slack(outcome.ranks),
    )  # fmt: skip
    if outcome.phase == EVALUATE:
        return _evaluated(outcome, found, known)
    if outcome.phase == WHOLE:
        return replace(
            outcome,
            predicted_bytes=found.peak,
            live_bytes=found.phases[found.peak_phase].peak,
            predicted_seconds=found.step_seconds,
        )
    phase = found.phases.get(outcome.phase)
    if phase is None:
        return outcome
    return replace(
        outcome,
        predicted_bytes=phase.reserved,
        live_bytes=phase.peak,
        predicted_seconds=phase.seconds,
        parts=phase.live,
        terms=phase.terms or {},
    )


def _evaluated(outcome: Outcome, found: StagePrediction, known: Constants) -> Outcome:
    """An evaluation. Of a run from before held-out rows were recorded, their forwards stay as they
    were counted."""
    if outcome.predicted_seconds is None:
        return outcome
    if found.evaluations is not None:
        each, terms = found.evaluations.each, found.evaluations.terms
        return replace(outcome, predicted_seconds=each, terms=terms)
    if not outcome.terms:
        return outcome
    coefficients = known.phases.get(EVALUATE) or known.phases["score"]
    return replace(outcome, predicted_seconds=PhaseWork(dict(outcome.terms)).seconds(coefficients))
