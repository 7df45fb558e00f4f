"""A comparison of the run's models: perplexity, rewards, and answers to held-out prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from tandem.config.conversations import CONVERSATION_KNOBS
from tandem.config.engine import EngineSettings
from tandem.config.load import config_knobs
from tandem.config.schema import RunConfig, rl_section
from tandem.config.scoring import weighted_models
from tandem.config.stages import leaving, of_family, policy_folders, rl_stage
from tandem.engine.module_scorer import any_scorer
from tandem.engine.rollouts import rollout_of
from tandem.engine.scoring import RewardScorer, place_scorer, scorer_tokenizer
from tandem.generation.limits import max_positions
from tandem.generation.stops import Stops
from tandem.metrics.folder import EVALUATION_FILE, finished_stages
from tandem.rewards.scoring import RewardFunctions
from tandem.text import counted
from tandem.training.calibration import reliability
from tandem.training.comparing.implicit import ImplicitRewards
from tandem.training.conversations import ConversationSource, conversation_source, said
from tandem.training.evaluate import (
    answer_metrics,
    heldout_grade_metrics,
    language_model_metrics,
    metrics_of_margins,
    pair_margins,
)
from tandem.training.own_folder import names_data
from tandem.training.reward_function import columns_given, rewards_of
from tandem.training.run_folder import Run
from tandem.training.scored_answers import score_answers
from tandem.training.stage_data import StepRows
from tandem.types import Message, PromptRow, Rollout

NUM_SHOWN = 8
_MEASURING = (
    *("actor_model", "reward_model", "data", "stages", "seed", "dtype", "hybrid_engine"),
    *("sampling.", "scoring.", "sft.loss_on"),
)
"""Prefixes of the names of the knobs that a comparison depends on, besides the RL stage's."""


def policies(run: Run) -> Iterator[tuple[str, str]]:
    """(label, folder or hub name) of every policy of the run, in the order of training, and of
    those beside it."""
    if run.config.actor_model:
        yield "base", run.config.actor_model
    for label, folder in policy_folders().items():
        if (run.path / folder / "config.json").exists():
            yield label, str(run.path / folder)
    yield from run.beside.items()


def policy_of_program(run: Run) -> str:
    """The first policy in the folder of a run whose prompts only its program has, which need not
    name what it started from; "" in other runs."""
    return "" if names_data(run.config) else next((source for _, source in policies(run)), "")


def is_compared(run: Run) -> bool:
    """Whether evaluation.json was made from the models and knobs that the run has now; the same on
    every rank."""
    try:
        evaluation = json.loads((run.path / EVALUATION_FILE).read_text(encoding="utf-8"))
        known = evaluation["made_from"]
    except (OSError, ValueError, KeyError, TypeError):
        known = None
    return bool(run.world.all_gather_object(known == _made_from(run))[0])


def compare(
    run: Run,
    rows: StepRows,
    *,
    num_prompts: int | None = None,
    which: str = "held out",
    save: bool = True,
    implicit: ImplicitRewards | None = None,
) -> dict[str, Any]:
    """Evaluate every policy and the reward model on held-out rows; `save` writes evaluation.json.

    All policies answer the same prompts with the same random numbers.

    Args:
        num_prompts: answered at most; None: the run's own number.
        which: of which rows, for the lines that tell how far it is.
        implicit: also measures how policies tell preferences apart.
    Returns:
        {"models": {label: {metric: value}}, "answers": [{"prompt", "answers": {label: {"text",
        "score"}}}], "made_from": what the metrics depend on}, as written; with a reward also
        "scores" {label: [of each held-out prompt, None if unscored]}, with a reward model
        "reliability" (`calibration.Reliability`).
    Raises:
        CheckpointError: a finished stage's folder is damaged.
    """
    config, made_from = run.config, _made_from(run)
    rl = rl_section(config)
    prompts = rows.heldout_prompts[: rl.eval_prompts if num_prompts is None else num_prompts]
    models: dict[str, dict[str, float]] = {}
    every_score: dict[str, list[float | None]] = {}
    places = first_of_each(prompts, NUM_SHOWN)
    answers: list[dict[str, Any]] = [
        {"prompt": prompts[place].messages[-1].content, "answers": {}} for place in places
    ]
    with rewarding(run, rows) as (scorer, rewards, conversations):
        found = list(policies(run))
        measured = f"{counted(len(rows.heldout_sft), 'text')} and {counted(len(prompts), 'prompt')}"
        for number, (label, source) in enumerate(found, start=1):
            # A large model may take longer than the steps before it.
            run.print_line(f"comparing: {label} ({number} of {len(found)}) on {measured}, {which}")
            model = run.placement.policy(source, trained=False)
            models[label] = language_model_metrics(model, rows.heldout_sft, rows.renderer, config)
            if implicit is not None:
                models[label] |= implicit.metrics(label, source, model)
            if prompts:
                rollout = answer(model, prompts, rows, run.settings, conversations=conversations)
                scored = score_answers(rollout, scorer, rows.renderer, rl, rewards, run.world)
                scored.tell_failed_models(run.print_line, "held-out answers")
                # Without penalties and clips; NaN without a score.
                scores = scored.mixed.masked_fill(~scored.is_scored, torch.nan).cpu()
                models[label] |= answer_metrics(rollout, scored)
                values = every_score[label] = [None if s != s else s for s in scores.tolist()]
                for place, shown in zip(places, answers, strict=True):
                    text = said(rollout.prompts[place], rollout.responses[place])
                    shown["answers"][label] = {"text": text, "score": values[place]}
    shown_answers = [shown for shown in answers if shown["answers"]]
    evaluation = {"models": models, "answers": shown_answers, "made_from": made_from}
    if any(value is not None for values in every_score.values() for value in values):
        evaluation["scores"] = _counted_scores(every_score, models)
    reads_rows = scorer is not None and (
        scorer.renderer.renders_like(rows.reward_renderer) or run.reward_module is None
    )
    if scorer is not None and reads_rows and (rows.heldout_pairs or rows.heldout_graded):
        margins = pair_margins(scorer, rows.heldout_pairs)
        models["reward model"] = {
            **metrics_of_margins(margins, rows.heldout_pairs),
            **heldout_grade_metrics(scorer, rows.heldout_graded),
        }
        if rows.heldout_pairs:
            evaluation["reliability"] = [asdict(row) for row in reliability(margins)]
    if save:
        run.write_json(EVALUATION_FILE, evaluation)
    return evaluation


def _counted_scores(
    scores: dict[str, list[float | None]], models: dict[str, dict[str, float]]
) -> dict[str, list[float | None]]:
    """`scores` as they are; `models` hear of those none of whose answers has a score, which must
    not look fully scored beside others."""
    for label, values in scores.items():
        if all(value is None for value in values):
            models[label]["heldout_unscored"] = 1.0
    return scores


def first_of_each(prompts: Sequence[PromptRow], most: int) -> list[int]:
    """Where the first prompts are that differ: several pairs may share one."""
    places: dict[tuple[tuple[Message, ...], str], int] = {}
    for place, prompt in enumerate(prompts):
        places.setdefault((prompt.messages, prompt.tools), place)
    return list(places.values())[:most]


@contextmanager
def rewarding(
    run: Run, rows: StepRows
) -> Iterator[tuple[RewardScorer | None, RewardFunctions | None, ConversationSource | None]]:
    """What scores answers in a run: its reward model, its reward functions, both or neither; and
    what they hear back, if they do."""
    named = rl_section(run.config).reward_function if _uses_function(run.config) else None
    columns = columns_given(run.config, rows).names
    rewards = rewards_of(named, run.config.scoring, run.print_line, columns)
    conversations = None
    if of_family(run.config.stages, "rl"):
        conversations = conversation_source(
            run.config, rows.renderer, columns=columns, world=run.world, print_line=run.print_line
        )
    try:
        with rewards.on_heldout() if rewards is not None else nullcontext():
            yield _scorer(run, rows), rewards, conversations
    finally:
        for used in (rewards, conversations):
            if used is not None:
                used.close()


def _made_from(run: Run) -> dict[str, Any]:
    """What a comparison depends on: models, knobs and rows, as JSON returns them."""
    finished = finished_stages(run.path)
    for stage in finished:
        run.verify(stage)
    identity = run.identity
    section = rl_stage(run.config.stages).section
    own = ["eval_prompts", "reward_"]
    if rl_section(run.config).converses:
        own += CONVERSATION_KNOBS
    measuring = (*_MEASURING, *(f"{section}.{name}" for name in own))
    knobs = identity.knobs(name for name, _ in config_knobs() if name.startswith(measuring))
    if template := identity.of_template():  # where its file lies does not matter
        knobs["dataset.chat_template"] = template
    if schema := identity.of_schema():
        knobs["sampling.json_schema"] = schema
    made_from: dict[str, Any] = {
        "stages": finished,
        "knobs": knobs,
        "rows": identity.fingerprints,
    }
    for knob in ("actor_model", "reward_model"):
        made_from[f"the files of {knob}"] = identity.files_of(knob)
    for further in weighted_models(run.config.scoring.reward_models):
        made_from[f"the files of {further.source}"] = identity.files.of_model(further.source)
    if _uses_function(run.config):
        made_from["the reward function"] = identity.files.reward_function()
    if of_family(run.config.stages, "rl"):
        made_from |= identity.files.conversations()
    return made_from | identity.in_memory


def answer(
    model: PreTrainedModel,
    prompts: Sequence[PromptRow],
    rows: StepRows,
    settings: EngineSettings,
    samples: int = 1,
    conversations: ConversationSource | None = None,
) -> Rollout:
    """Sampled answers, `samples` per prompt, with the same random numbers for every policy.

    Args:
        conversations: which they begin; None: answers alone.
    """
    sampling = replace(settings.sampling, samples_per_prompt=samples)
    settings = replace(settings, sampling=sampling)
    stops = Stops.of(rows.renderer)
    if conversations is None:
        return rollout_of(model, prompts, settings, stops, step=0)
    with conversations.talking(sampling.max_new_tokens, max_positions(model)) as talk:
        return rollout_of(model, prompts, settings, stops, step=0, conversing=talk)


def _uses_function(config: RunConfig) -> bool:
    return bool(rl_section(config).reward_function and of_family(config.stages, "rl"))


def judge_of(run: Run) -> str | None:
    """The reward model that a comparison loads; None if it loads none, as before the stage that
    trains it is finished: `reward_model` is then what that stage starts from."""
    if run.judge:
        return run.judge
    source = run.reward_source()
    rl = [stage for stage in of_family(run.config.stages, "rl") if stage.rewarded]
    if leaving(run.config.stages, "reward model"):
        source = run.trained("reward model")
    if source is None or not (rl or run.trained("reward model")):
        return None
    if rl and rl_section(run.config).reward_model_weight == 0:
        return None
    return source


def _scorer(run: Run, rows: StepRows) -> RewardScorer | None:
    if run.reward_module is not None:
        module, own = run.reward_module.module, run.reward_module.tokenizer
        return any_scorer(run.placement, module, own, policy=rows.renderer)
    source = judge_of(run)
    if source is None:
        return None
    return place_scorer(run.placement, source, scorer_tokenizer(source, run.settings))
