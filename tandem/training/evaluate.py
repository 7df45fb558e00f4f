"""Evaluation on held-out rows: loss and perplexity, preferences, and a policy's own answers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.config.schema import RunConfig, rl_section
from tandem.data.render import Renderer
from tandem.engine.divergence import heldout_divergence
from tandem.engine.forward import response_logprobs, scored
from tandem.engine.hybrid import RLHFEngine
from tandem.engine.scoring import RewardScorer
from tandem.models.modes import evaluating
from tandem.models.scalar import grade_scales
from tandem.objectives.divergence import Divergence
from tandem.objectives.grades import Scale, explained, pearson, scale_of, spearman
from tandem.objectives.losses import wins_of
from tandem.objectives.masked import masked_sum
from tandem.parallel.shard import shards_of
from tandem.rewards.scoring import RewardFunctions
from tandem.text import ignore_line
from tandem.training.calibration import calibration_error
from tandem.training.rollout_source import RolloutSource
from tandem.training.scored_answers import ScoredAnswers, score_answers
from tandem.types import GradedRow, LabelledRow, PairRow, PromptRow, Rollout, TokenBatch, TokenRow


def language_model_metrics(
    model: PreTrainedModel, rows: Sequence[TokenRow], renderer: Renderer, config: RunConfig
) -> dict[str, float]:
    """Mean loss (nats) and perplexity over the rows' learned tokens; nothing for no rows."""
    losses: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    for row, logprob in zip(rows, row_logprobs(model, rows, renderer, config), strict=True):
        for name in ("", f"/{row.source.dataset}"):
            losses[name] -= float(logprob)
            counts[name] += sum(row.response_mask)
    means = {name: losses[name] / counts[name] for name in losses if counts[name]}
    if len(means) == 2:  # with one data set, its own value is that of all
        means.pop(next(name for name in means if name))
    return {f"heldout_loss{name}": loss for name, loss in means.items()} | {
        f"heldout_perplexity{name}": math.exp(min(loss, 700.0)) for name, loss in means.items()
    }


def row_logprobs(
    model: PreTrainedModel, rows: Sequence[TokenRow], renderer: Renderer, config: RunConfig
) -> Tensor:
    """(B,) float32 on the CPU: each row's log-prob summed over its learned tokens; no gradient."""
    if not rows:
        return torch.zeros(0)
    device = shards_of(model).world.device
    batch = TokenBatch.from_rows(rows, renderer.pad_token_id)

    def forward(part: TokenBatch) -> tuple[Tensor, ...]:
        return (response_logprobs(model, part.to(device))[0].sum(dim=1),)

    with evaluating(model):
        (sums,) = scored(batch, config.micro_batch_tokens, forward, [model])
    return sums.cpu()


def pair_margins(scorer: RewardScorer, pairs: Sequence[PairRow]) -> Tensor:
    """(B,) chosen minus rejected score, raw reward-model units."""
    if not pairs:
        return torch.zeros(0)
    scorer.model.eval()
    return scorer.raw_rows([pair.chosen for pair in pairs]) - scorer.raw_rows(
        [pair.rejected for pair in pairs]
    )


def by_dataset(
    datasets: Sequence[str], measure: Callable[[Tensor], dict[str, float]]
) -> dict[str, float]:
    """Numbers of all held-out rows, and of each data set's under `name/data set` if there are
    several.

    Args:
        datasets: of each of B rows.
        measure: numbers of some rows, which a (B,) bool on the CPU marks.
    """
    found = measure(torch.ones(len(datasets), dtype=torch.bool))
    if len(set(datasets)) > 1:
        for dataset in sorted(set(datasets)):
            own = measure(torch.tensor([other == dataset for other in datasets]))
            found |= {f"{name}/{dataset}": value for name, value in own.items()}
    return found


def metrics_of_margins(margins: Tensor, pairs: Sequence[PairRow]) -> dict[str, float]:
    """Accuracy, margin and calibration of a reward model on pairs, over all and per data set."""
    if not pairs:
        return {}
    margins = margins.cpu()
    return by_dataset(datasets_of_pairs(pairs), lambda rows: _margin_metrics(margins[rows]))


def datasets_of_pairs(pairs: Sequence[PairRow]) -> list[str]:
    """The data set of each."""
    return [pair.chosen.source.dataset for pair in pairs]


def _margin_metrics(margins: Tensor) -> dict[str, float]:
    return {
        "heldout_accuracy": float(wins_of(margins).mean()),
        "heldout_margin": float(margins.mean()),
        "heldout_calibration_error": calibration_error(margins),
    }


def grade_metrics(
    scores: Tensor, rows: Sequence[GradedRow], scales: Mapping[str, Scale]
) -> dict[str, float]:
    """How a reward model's raw scores (B,) agree with the grades, over all rows and per data set.

    Args:
        scales: of the grades that it has learned by regression; none if it has learned pairs.
    Returns:
        correlations, where scores and grades vary; with `scales` also the share of the grades'
        variance that the scores explain.
    """
    if not rows:
        return {}
    standard, scores = standardized_grades(rows, scales), scores.cpu()
    return by_dataset(
        datasets_of_answers(rows),
        lambda some: _grade_metrics(scores[some], standard[some], bool(scales)),
    )


def datasets_of_answers(rows: Sequence[GradedRow | LabelledRow]) -> list[str]:
    """The data set of each."""
    return [row.answer.source.dataset for row in rows]


def heldout_grade_metrics(scorer: RewardScorer, rows: Sequence[GradedRow]) -> dict[str, float]:
    """`grade_metrics` of a reward model, on the scales that it was saved with."""
    if not rows:
        return {}
    scorer.model.eval()
    scales = {name: Scale(*scale) for name, scale in grade_scales(scorer.model).items()}
    return grade_metrics(scorer.raw_rows([row.answer for row in rows]), rows, scales)


def standardized_grades(rows: Sequence[GradedRow], scales: Mapping[str, Scale]) -> Tensor:
    """(B,) float32: grades on the scale of their data set. Those of one that was not learned from
    are put on their own: data sets are never compared in raw grades."""
    names = datasets_of_answers(rows)
    grades = torch.tensor([row.grade for row in rows], dtype=torch.float64)
    standard = torch.zeros(len(rows))
    for name in dict.fromkeys(names):
        chosen = torch.tensor([other == name for other in names])
        scale = scales.get(name) or scale_of(grades[chosen])
        if scale is not None:
            standard[chosen] = scale.standardized(grades[chosen])
    return standard


def _grade_metrics(scores: Tensor, standard: Tensor, is_regression: bool) -> dict[str, float]:
    found = {
        "heldout_grade_correlation": pearson(scores, standard),
        "heldout_grade_rank_correlation": spearman(scores, standard),
        "heldout_grade_explained": explained(scores, standard) if is_regression else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def answer_metrics(rollout: Rollout, answers: ScoredAnswers) -> dict[str, float]:
    """EOS rate, length and, if there are scores, the mean score of a policy's answers, without
    penalties and clips, and the share of answers that it is not of."""
    metrics = {
        "heldout_eos_rate": float(rollout.finished.float().mean()),
        "heldout_response_tokens": rollout.batch.num_response_tokens / len(rollout),
    }
    if bool(answers.is_scored.any()):
        metrics["heldout_reward"] = float(answers.mixed[answers.is_scored].mean())
        if answers.num_unscored:
            metrics["heldout_unscored"] = answers.num_unscored / len(rollout)
    return metrics


def policy_metrics(
    engine: RLHFEngine,
    prompts: Sequence[PromptRow],
    config: RunConfig,
    reward_function: RewardFunctions | None,
    keep: Callable[[Rollout, ScoredAnswers, Tensor | None], None] | None = None,
    source: RolloutSource | None = None,
    divergence: Divergence | None = None,
    print_line: Callable[[str], None] = ignore_line,
) -> dict[str, float]:
    """Held-out reward, KL, EOS rate and length of the actor, and the reward of its EMA.

    Every call uses the random numbers of step 0, so that differences come from the policy alone.

    Args:
        keep: gets the answers, their scores and, with a reference, each token's log(policy /
            reference), (B, T) nats.
        source: where answers come from; None: the engine's rollouts.
        divergence: what is learned over the vocabulary, measured too.
        print_line: shows what reward models failed on, on the first rank.
    """
    if not prompts:
        return {}
    collect = engine.rollout if source is None else source.collect
    rollout = collect(prompts, step=0)

    def scores(rollout: Rollout) -> ScoredAnswers:
        with reward_function.on_heldout() if reward_function is not None else nullcontext():
            return score_answers(
                rollout,
                engine.scorer,
                engine.renderer,
                rl_section(config),
                reward_function,
                engine.world,
            )

    answers = scores(rollout)
    answers.tell_failed_models(print_line, "held-out answers")
    metrics = answer_metrics(rollout, answers)
    ratios = None
    if divergence is not None:
        tokens = config.micro_batch_tokens
        found, ratios = heldout_divergence(engine, rollout.batch, divergence, tokens)
        metrics["heldout_divergence"] = found
    elif engine.has_reference:
        ratios = _log_ratios(engine, rollout, config)
    if ratios is not None:
        kl = masked_sum(ratios, rollout.batch.response_mask)
        metrics["heldout_kl"] = float(kl) / len(rollout)
    if keep is not None:
        keep(rollout, answers, ratios)
    if not bool(answers.function.isnan().all()):
        metrics["heldout_reward_function_score"] = float(answers.function.nanmean())
    if engine.ema is not None:
        with engine.ema.applied():
            average = collect(prompts, step=0)
            of_average = scores(average)
        if bool(of_average.is_scored.any()):
            mixed = of_average.mixed[of_average.is_scored]
            metrics["heldout_reward_ema"] = float(mixed.mean())
    return metrics


def _log_ratios(engine: RLHFEngine, rollout: Rollout, config: RunConfig) -> Tensor:
    """(B, T) nats: log(actor / reference) of every token, with the actor as it is."""

    def log_ratios(part: TokenBatch) -> tuple[Tensor, ...]:
        logprobs, _ = engine.actor_logprobs(part, with_entropy=False)
        return (logprobs - engine.reference_logprobs(part),)

    (ratios,) = scored(rollout.batch, config.micro_batch_tokens, log_ratios, engine.policy_models)
    return ratios
