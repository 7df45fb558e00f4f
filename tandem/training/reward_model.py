"""Step 2: the reward model, a score at an answer's last real token (its EOS included).

It learns pairs and rankings by Bradley-Terry, and grades of single answers by squared error (see
`reward_objective`). Afterwards its scores are given a scale: mean 0 and sd 1 on the SFT policy's
own answers, so that PPO's knobs (KL coefficient, clips) mean the same for every reward model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.nn.functional import softplus

from tandem.data.trained_tokens import tokens_to_train
from tandem.engine.scoring import RewardScorer
from tandem.errors import ModelError
from tandem.models.adapter import set_value_head
from tandem.models.load import check_vocabulary
from tandem.models.scalar import set_grade_scales, set_normalization
from tandem.objectives.grades import Scale
from tandem.text import counted, visible
from tandem.training.comparing.compare import answer
from tandem.training.evaluate import (
    by_dataset,
    datasets_of_answers,
    datasets_of_pairs,
    grade_metrics,
    metrics_of_margins,
    pair_margins,
    standardized_grades,
)
from tandem.training.reward_objective import objective_of, scales_of
from tandem.training.run_folder import Run
from tandem.training.saving import save_anywhere, with_template
from tandem.training.stage_data import StepRows
from tandem.training.stage_loop import StageJob
from tandem.training.supervised import SupervisedTrainer
from tandem.types import GradedRow, RankedRow


def prepare(run: Run, rows: StepRows) -> StageJob:
    """Step 2, ready to run; it leaves `RUN/reward`, which AutoModelForSequenceClassification
    opens.

    Raises:
        DataError: grades that are to be learned by regression are all the same.
    """
    config = run.config
    scales = scales_of(rows.pairs)
    for line in grade_lines(rows, scales):
        run.print_line(f"reward: {line}")
    if scales and config.reward.grade_margin:
        run.print_line("reward: grade_margin is not read, since no graded answers are compared")
    source = config.reward_model or run.policy_source("reward")
    tokens = tokens_to_train(config.lora.of("critic"), rows.reward_tokenizer)
    model = run.placement.scalar(source, trained=True, tokens=tokens)
    check_vocabulary(model, rows.reward_tokenizer)
    set_normalization(model, 0.0, 1.0)  # an earlier reward model's are not this one's
    set_value_head(model, is_critics=False)  # what it starts from may be one
    set_grade_scales(model, {name: (scale.mean, scale.std) for name, scale in scales.items()})
    scorer = RewardScorer(model, rows.reward_renderer, max_tokens=config.micro_batch_tokens)

    def evaluate() -> dict[str, float]:
        return evaluated(scorer, rows, scales)

    objective = objective_of(run, rows, model, scales)
    trainer = SupervisedTrainer(
        run, "reward", model, config.reward, rows.pairs, objective, evaluate
    )
    masters = trainer.learner.masters

    def save(folder: Path) -> None:
        tokenizer = with_template(rows.reward_tokenizer, rows.reward_renderer)
        save_anywhere(model, tokenizer, folder, masters, config.save_dtype)

    def complete(evaluation: dict[str, float]) -> dict[str, float]:
        with trainer.phases("normalize"):
            return evaluation | normalize(run, scorer, rows)

    return trainer.job(save, complete)


def evaluated(
    scorer: RewardScorer, rows: StepRows, scales: Mapping[str, Scale]
) -> dict[str, float]:
    """The model on held-out rows: on pairs, those of graded answers among them, and on grades.

    The loss is of the graded answers where grades are learned by regression, else of the pairs.
    """
    pairs, graded = rows.heldout_pairs, rows.heldout_graded
    margins = pair_margins(scorer, pairs)
    found = metrics_of_margins(margins, pairs)
    if graded:
        scorer.model.eval()
        scores = scorer.raw_rows([row.answer for row in graded]).cpu()
        found |= grade_metrics(scores, graded, scales)
    losses, datasets = softplus(-margins).cpu(), datasets_of_pairs(pairs)
    if scales and graded:
        losses = (scores - standardized_grades(graded, scales)).square()
        datasets = datasets_of_answers(graded)
    if not datasets:
        return found
    loss = by_dataset(datasets, lambda some: {"heldout_loss": float(losses[some].mean())})
    return {**loss, **found}


def grade_lines(rows: StepRows, scales: Mapping[str, Scale]) -> list[str]:
    """How graded answers are learned, and on which scale; nothing without any."""
    graded = sum(isinstance(row, GradedRow) for row in rows.pairs)
    ranked = [row for row in rows.pairs if isinstance(row, RankedRow) and row.grades]
    others = len(rows.pairs) - graded - len(ranked)
    beside = f", beside {counted(others, 'row')} of pairs and rankings" if others else ""
    if ranked:
        answers = sum(len(row.sequences) for row in ranked)
        pairs = sum(len(row.pairs) for row in ranked)
        line = (
            f"learns {counted(answers, 'graded answer')} as {counted(pairs, 'pair')} of one "
            f"prompt's answers{beside} (--reward.grades regression learns the grades themselves)"
        )
        return [line]
    if not graded:
        return []
    line = (
        f"learns {counted(graded, 'grade')} by regression{beside} (--reward.grades pairs compares "
        "one prompt's answers instead)"
    )
    of_scales = (
        f"a raw score s means the grade {scale.mean:.4g} + {scale.std:.4g} s of {visible(name)}"
        for name, scale in scales.items()
    )
    return [line, *of_scales]


def has_policy(run: Run) -> bool:
    """Whether there is a policy: one that was given, or SFT's."""
    return bool(run.config.actor_model or run.trained("policy"))


def normalize(run: Run, scorer: RewardScorer, rows: StepRows) -> dict[str, float]:
    """Measure the SFT policy's answers and keep their scores' mean and sd with the model.

    Returns:
        normalize_mean and normalize_std, raw reward units; nothing when normalization is off.
    Raises:
        ModelError: all answers get one score, so that there is no spread to speak in.
    """
    config = run.config
    prompts = rows.prompts[: config.reward.normalize_prompts]
    if not prompts:
        run.print_line("reward: scores stay raw (no prompts to normalize them on)")
        return {}
    if not has_policy(run):
        run.print_line(
            "reward: scores stay raw (no policy whose answers they could be normalized on; "
            "--actor-model names one)"
        )
        return {}
    policy = run.placement.policy(run.policy_source("reward"), trained=False)
    rollout = answer(policy, prompts, rows, run.settings)
    raw = scorer.raw(rollout, rows.renderer)
    exact = raw.double()  # the mean of equal float32 numbers may be a rounding error off
    mean, std = float(exact.mean()), float(exact.std(correction=0))
    if len(raw) < 2 or std < 1e-6:
        raise ModelError(
            f"the reward model must tell the policy's answers apart; got {len(raw)} scores with "
            f"sd {std:.2g}. Train it longer, use more prompts, or set reward.normalize_prompts 0."
        )
    set_normalization(scorer.model, mean, std)
    run.print_line(f"reward: scores of {len(raw)} SFT answers have mean {mean:.3f}, sd {std:.3f}")
    return {"normalize_mean": mean, "normalize_std": std}
