"""Checks of every model that a run will load, before its first stage, by configs and headers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.config.engine import engine_settings
from tandem.config.rules import has_reference
from tandem.config.schema import RunConfig, rl_section
from tandem.config.scoring import weighted_models
from tandem.config.stages import Stage, in_order, leaving, of_family
from tandem.data.trained_tokens import tokens_to_train
from tandem.engine.dry_placement import check_start
from tandem.models.load import check_causal_lm, outline
from tandem.models.lora import ALL_LINEAR, require_targets
from tandem.models.scalar import check_scalar_model
from tandem.training.reward_model import has_policy
from tandem.training.run_folder import Run
from tandem.training.stage_data import StepRows


@dataclass(frozen=True, slots=True)
class _Role:
    """What a model is loaded for: with a scalar head (`scalar`), which must be there already
    (`needs_head`)."""

    source: str
    scalar: bool = False
    needs_head: bool = False


def check_models(run: Run, stages: Sequence[str], policy: str, reward: str) -> None:
    """Check that each model that the stages will load can be what it is given for.

    Args:
        policy, reward: the models whose tokenizers policy and reward model use.
    Raises:
        ModelError: a model is no decoder, or not with the head that its role needs.
    """
    remote = run.config.trust_remote_code
    for role in dict.fromkeys(_roles(run, stages, policy, reward)):
        if role.scalar:
            check_scalar_model(role.source, needs_head=role.needs_head, trust_remote_code=remote)
        else:
            check_causal_lm(role.source, trust_remote_code=remote)


def notes_on_starts(config: RunConfig, stage: Stage) -> Iterator[str]:
    """What reference and critic of a stage are, where that is not what they are by default."""
    moving = config.reference
    if has_reference(config, stage) and config.reference_model:
        yield f"{stage.name}: the reference is {config.reference_model}"
    elif has_reference(config, stage) and moving.update_every:
        moves = "becomes the policy"
        if moving.update_rate < 1:
            moves = f"moves {moving.update_rate:g} of the way to the policy"
        steps = "each optimizer step"
        if moving.update_every > 1:
            steps = f"every {moving.update_every} optimizer steps"
        yield f"{stage.name}: the reference {moves} after {steps}"
    if config.critic_model and stage.has_critic:
        yield f"{stage.name}: the critic starts from {config.critic_model}"


def _roles(run: Run, stages: Sequence[str], policy: str, reward: str) -> Iterator[_Role]:
    config = run.config
    if has_policy(run):
        yield _Role(policy)
    trains_reward = leaving(stages, "reward model")
    if trains_reward:
        yield _Role(reward, scalar=True)
    for stage in in_order(stages):
        if config.reference_model and has_reference(config, stage):
            yield _Role(config.reference_model)
    for stage in of_family(stages, "rl"):
        rl = rl_section(config)
        scores = stage.rewarded and rl.reward_model_weight > 0 and run.reward_module is None
        given = run.reward_source(stage.name) if scores and not trains_reward else None
        if given:
            yield _Role(given, scalar=True, needs_head=True)
        elif rl.has_critic and not (config.critic_model or (scores and trains_reward)):
            yield _Role(policy, scalar=True)  # the critic starts from it
        if config.critic_model and stage.has_critic:
            yield _Role(config.critic_model, scalar=True)
        for model in weighted_models(config.scoring.reward_models):
            yield _Role(model.source, scalar=True, needs_head=True)


def check_trained(
    run: Run, stages: Sequence[str], rows: StepRows, policy: str, reward: str
) -> None:
    """Check that all models that the stages will train can be adapted as `lora` says, and recompute
    what they are to recompute.

    Args:
        policy, reward: as for `check_models`.
    Raises:
        ModelError: a target matches in none of them, or one has no layer that matches; one comes
            with other adapters than it is to be trained with, or cannot recompute that.
    """
    trained = tuple(dict.fromkeys(_trained(run, stages, rows, policy, reward)))
    _check_targets(run, trained)
    settings = engine_settings(run.config)
    for role in trained:
        if role.scalar and role.source != policy:
            own = rows.reward_tokenizer if role.source == reward else rows.tokenizer
            tokens = tokens_to_train(settings.lora.of("critic"), own)
            check_start(role.source, settings, "critic", tokens)
        elif not role.scalar and run.trained("policy") is None:  # else that is the start
            tokens = tokens_to_train(settings.lora, rows.tokenizer)
            check_start(role.source, settings, "actor", tokens)


def _check_targets(run: Run, trained: Sequence[_Role]) -> None:
    """`lora.targets` against the layers of all models that are adapted."""
    lora, remote = run.config.lora, run.config.trust_remote_code
    if ALL_LINEAR in lora.targets:
        return
    roles = [role for role in trained if lora.of("critic" if role.scalar else "actor").rank]
    models = [outline(r.source, scalar=r.scalar, trust_remote_code=remote) for r in roles]
    require_targets(models, lora.targets)


def _trained(
    run: Run, stages: Sequence[str], rows: StepRows, policy: str, reward: str
) -> Iterator[_Role]:
    trains_reward = leaving(stages, "reward model")
    if leaving(stages, "policy"):
        yield _Role(policy)
    if trains_reward:
        yield _Role(reward, scalar=True)
    for stage in of_family(stages, "rl"):
        rl = rl_section(run.config)
        scores = stage.rewarded and rl.reward_model_weight > 0 and run.reward_module is None
        given = run.reward_source(stage.name) if scores else None
        if run.config.critic_model and stage.has_critic:
            yield _Role(run.config.critic_model, scalar=True)
        elif given and not trains_reward and rl.has_critic:
            # As in engine/hybrid: a critic must read the policy's tokens.
            shares_tokens = rows.reward_renderer.renders_like(rows.renderer)
            yield _Role(given if shares_tokens else policy, scalar=True)
