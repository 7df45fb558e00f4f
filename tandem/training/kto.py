"""KTO: a policy from answers that are called good or bad one by one, without pairs of them.

The baseline z is an estimate of the KL from the reference: the mean log-ratio of answers put behind
prompts that they do not answer, over all rows of the optimizer step and all ranks, so that no
micro-batch has a baseline of its own. Pairs are taken apart into a good and a bad answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tandem.config.preferences import KTOConfig
from tandem.engine.forward import response_logprobs, scored
from tandem.errors import DataError
from tandem.models.modes import evaluating
from tandem.objectives.losses import wins_of
from tandem.objectives.preferences import AnswerLogprobs, KTOLoss, kto_baseline, kto_loss
from tandem.training.evaluate import by_dataset, datasets_of_answers
from tandem.training.reference import ReferencedPolicy, place_referenced
from tandem.training.run_folder import Run
from tandem.training.stage_data import StepRows
from tandem.training.stage_loop import StageJob
from tandem.training.supervised import Loss, Objective, SupervisedTrainer
from tandem.types import LabelledRow, TokenBatch, TokenRow

BALANCE = (1.0, 4 / 3)
"""Where lambda_D n_D / (lambda_U n_U) should be (arXiv:2402.01306 eq. 9)."""


def prepare(run: Run, rows: StepRows) -> StageJob:
    """KTO, ready to run; it leaves `RUN/kto`, a folder that from_pretrained opens.

    Raises:
        DataError: there are no good or no bad answers, or all rows have the same prompt.
    """
    settings = run.config.kto
    _check_rows(rows.labelled)
    if line := imbalance(rows.labelled, settings):
        run.print_line(f"kto: {line}")
    policy = place_referenced(run, rows, "kto")

    def loss_around(baseline: float, scale: Mapping[bool, float]) -> Loss[LabelledRow]:
        def loss(part: Sequence[LabelledRow]) -> tuple[Tensor, dict[str, Tensor]]:
            labels = torch.tensor([row.is_desirable for row in part], device=run.device)
            answers = policy.logprobs([row.answer for row in part])
            result = _loss(answers, labels, baseline, settings)
            metrics: dict[str, Tensor] = {}
            if True in scale:
                metrics["implicit_reward_chosen"] = scale[True] * result.desirable_reward
            if False in scale:
                metrics["implicit_reward_rejected"] = scale[False] * result.undesirable_reward
            if len(scale) == 2:
                chosen, rejected = metrics.values()
                metrics["implicit_reward_margin"] = chosen - rejected
            return result.loss, metrics

        return loss

    def per_step(batch: Sequence[LabelledRow]) -> tuple[Loss[LabelledRow], Mapping[str, float]]:
        baseline = measure_baseline(policy, batch)
        good = sum(row.is_desirable for row in batch)
        counts = {True: good, False: len(batch) - good}
        # Sums are divided by all rows, but an implicit reward is the mean of its own label's: none
        # of a label that the step does not have.
        scale = {label: len(batch) / count for label, count in counts.items() if count}
        metrics = {"kto_baseline": baseline, "desirable_share": good / len(batch)}
        return loss_around(baseline, scale), metrics

    objective: Objective[LabelledRow] = Objective(
        units=lambda row: 1,
        sequences=lambda row: row.sequences,
        loss=loss_around(0.0, {True: 1.0, False: 1.0}),
        scoring_passes=3,  # the reference's, and both models' for the baseline
        per_step=per_step,
    )
    evaluate = _evaluation(policy, rows.heldout_labelled, settings)
    trainer = SupervisedTrainer(
        run, "kto", policy.model, settings, rows.labelled, objective, evaluate, policy.moving
    )
    return trainer.policy_job(rows)


def imbalance(rows: Sequence[LabelledRow], settings: KTOConfig) -> str:
    """What to set where good and bad answers do not weigh about the same; "" where they do."""
    good = sum(row.is_desirable for row in rows)
    bad = len(rows) - good
    ratio = settings.desirable_weight * good / (settings.undesirable_weight * bad)
    low, high = BALANCE
    if low <= ratio <= high:
        return ""
    if ratio < low:
        weights = [settings.undesirable_weight * bad * bound / good for bound in BALANCE]
        knob = "--kto.desirable-weight"
    else:
        weights = [settings.desirable_weight * good / bound / bad for bound in (high, low)]
        knob = "--kto.undesirable-weight"
    return (
        f"{good} good answers x {settings.desirable_weight:g} weigh {ratio:.3g} times as much as "
        f"{bad} bad ones x {settings.undesirable_weight:g}; KTO works best from {low:g} to "
        f"{high:.3g}: give {knob} {weights[0]:.3g} to {weights[1]:.3g}"
    )


def mismatched(rows: Sequence[LabelledRow]) -> list[TokenRow]:
    """Each row's prompt with the answer of the next row that has another prompt, the first row
    after the last; rows without such a next one are left out.

    A sequence is no longer than the longest of the rows: the answer is cut there.
    """
    longest = max(map(len, rows), default=0)
    answers = [row.answer for row in rows]
    lengths = [_prompt_length(answer) for answer in answers]
    prompts = [a.token_ids[:n] for a, n in zip(answers, lengths, strict=True)]
    found = []
    for i, j in enumerate(next_others(prompts)):
        if j < 0:
            continue
        ids = (*prompts[i], *answers[j].token_ids[lengths[j] :])[:longest]
        mask = (False,) * lengths[i] + (True,) * (len(ids) - lengths[i])
        found.append(TokenRow(ids, mask, answers[i].source))
    return found


def next_others(items: Sequence[object]) -> list[int]:
    """For each item the place of the next one that differs, the first behind the last; -1 where all
    are the same."""
    places, other = [-1] * len(items), -1
    for i in reversed(range(2 * len(items))):
        here, behind = i % len(items), (i + 1) % len(items)
        other = behind if items[behind] != items[here] else other
        places[here] = other
    return places


def measure_baseline(policy: ReferencedPolicy, rows: Sequence[LabelledRow]) -> float:
    """z of these rows: the same on every rank, whatever the micro-batches."""
    pairs = mismatched(rows)
    if not pairs:
        return 0.0
    batch = TokenBatch.from_rows(pairs, policy.renderer.pad_token_id)

    def forward(part: TokenBatch) -> tuple[Tensor, ...]:
        part = part.to(policy.device)
        mine = response_logprobs(policy.model, part)[0].sum(dim=1)
        return (mine - policy.reference_sums(part),)

    with evaluating(policy.model):
        (ratios,) = scored(batch, policy.config.micro_batch_tokens, forward, policy.models)
    return kto_baseline(ratios)


def _loss(answers: AnswerLogprobs, labels: Tensor, baseline: float, settings: KTOConfig) -> KTOLoss:
    return kto_loss(
        answers,
        labels,
        baseline,
        beta=settings.beta,
        desirable_weight=settings.desirable_weight,
        undesirable_weight=settings.undesirable_weight,
    )


def label_metrics(
    answers: AnswerLogprobs, labels: Tensor, baseline: float, settings: KTOConfig
) -> dict[str, float]:
    """Loss of some held-out answers and, where there are good and bad ones, accuracy and margin of
    the implicit reward over every good with every bad one, which no baseline changes."""
    result = _loss(answers, labels, baseline, settings)
    found = {"heldout_loss": float(result.loss) / len(labels)}
    good, bad = answers.log_ratio[labels], answers.log_ratio[~labels]
    if len(good) and len(bad):
        margins = good[:, None] - bad
        found["heldout_accuracy"] = float(wins_of(margins).mean())
        found["heldout_margin"] = settings.beta * float(margins.mean())
    return found


def _evaluation(
    policy: ReferencedPolicy, rows: Sequence[LabelledRow], settings: KTOConfig
) -> Callable[[], dict[str, float]]:
    """Held-out loss, and how far the implicit reward tells good answers from bad ones, over all and
    per data set; the baseline is that of all."""
    measure = policy.heldout([row.answer for row in rows])
    measure_mismatched = policy.heldout(mismatched(rows))
    labels = torch.tensor([row.is_desirable for row in rows], dtype=torch.bool)

    def evaluate() -> dict[str, float]:
        if not rows:
            return {}
        answers, baseline = measure(), kto_baseline(measure_mismatched().log_ratio)

        def measured(some: Tensor) -> dict[str, float]:
            return label_metrics(answers.select(some), labels[some], baseline, settings)

        return by_dataset(datasets_of_answers(rows), measured)

    return evaluate


def _check_rows(rows: Sequence[LabelledRow]) -> None:
    good = sum(row.is_desirable for row in rows)
    if not rows or good in (0, len(rows)):
        raise DataError(
            "stage kto must have good and bad answers to train on; got "
            f"{good} good and {len(rows) - good} bad. Give rows of prompt, completion and label, "
            "or pairs, and look at the drops above."
        )
    first = rows[0].answer
    prompt = first.token_ids[: _prompt_length(first)]
    if all(row.answer.token_ids[: _prompt_length(row.answer)] == prompt for row in rows):
        raise DataError(
            "stage kto must have answers to two prompts at least (the baseline is measured on "
            "answers to other prompts); got one prompt. Give more rows."
        )


def _prompt_length(row: TokenRow) -> int:
    """Tokens before the answer, which alone is marked."""
    return row.response_mask.index(True)
