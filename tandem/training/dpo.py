"""Preference optimization on pairs, in place of reward model and PPO.

DPO and its relatives by name (`dpo.loss`). The reference, where the loss needs one, is the policy
as it starts, with LoRA the model with its adapters off, else a frozen copy; it may follow the
policy (`reference.update_every`). Log-probs are summed over the answer, its EOS included; ipo,
simpo and orpo divide them by its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from tandem.config.preferences import DPOConfig
from tandem.objectives.preferences import (
    AnswerLogprobs,
    PairLoss,
    PairLosses,
    given_pair_loss,
    pair_loss,
)
from tandem.training.evaluate import by_dataset, datasets_of_pairs
from tandem.training.policy_functions import named_pair_losses
from tandem.training.reference import ReferencedPolicy, halves, place_referenced
from tandem.training.run_folder import Run
from tandem.training.stage_data import StepRows
from tandem.training.stage_loop import StageJob
from tandem.training.supervised import SupervisedTrainer, objective_of_pairs
from tandem.types import PairRow


def prepare(run: Run, rows: StepRows) -> StageJob:
    """DPO, ready to run; it leaves `RUN/dpo`, a folder that from_pretrained opens."""
    settings = run.config.dpo
    run.print_line(f"dpo: {describe_loss(settings)}")
    given = named_pair_losses(settings)
    policy = place_referenced(run, rows, "dpo", has_reference=settings.needs_reference)

    def loss(part: Sequence[PairRow]) -> tuple[Tensor, dict[str, Tensor]]:
        sequences = [pair.chosen for pair in part] + [pair.rejected for pair in part]
        chosen, rejected = halves(policy.logprobs(sequences))
        result = loss_of_pairs(chosen, rejected, settings, given)
        return result.loss, {**pair_sums(chosen, rejected, result), "accuracy": result.accuracy}

    objective = objective_of_pairs(loss, scoring_passes=int(settings.needs_reference))
    evaluate = _evaluation(policy, rows.heldout_dpo_pairs, settings, given)
    trainer = SupervisedTrainer(
        run, "dpo", policy.model, settings, rows.dpo_pairs, objective, evaluate, policy.moving
    )
    return trainer.policy_job(rows)


def describe_loss(settings: DPOConfig) -> str:
    """The loss in one line, with the defaults that it was given."""
    if settings.loss_function:
        return (
            f"loss {settings.loss_function}, against the reference; implicit rewards with beta "
            f"{settings.effective_beta:g}"
        )
    whose = "" if settings.beta else " (its paper's)"
    parts = [f"loss {settings.loss}", f"beta {settings.effective_beta:g}{whose}"]
    if settings.effective_smoothing:
        parts.append(f"label smoothing {settings.effective_smoothing:g}")
    if settings.loss == "simpo":
        parts.append(f"gamma {settings.simpo_gamma:g}")
    if settings.loss == "ipo":
        parts.append(f"log-ratios {settings.ipo_logprobs} over the answer")
    if settings.sft_coef:
        parts.append(f"SFT term {settings.sft_coef:g} (per token of the chosen answer)")
    parts.append("against the reference" if settings.needs_reference else "no reference is loaded")
    return ", ".join(parts)


def loss_of_pairs(
    chosen: AnswerLogprobs,
    rejected: AnswerLogprobs,
    settings: DPOConfig,
    given: PairLosses | None = None,
) -> PairLoss:
    """The configured loss of some pairs, as sums.

    Args:
        given: the function that `loss_function` names (`named_pair_losses`).
    """
    if given is not None:
        beta, sft_coef = settings.effective_beta, settings.sft_coef
        return given_pair_loss(given, chosen, rejected, beta=beta, sft_coef=sft_coef)
    return pair_loss(
        settings.loss,
        chosen,
        rejected,
        beta=settings.effective_beta,
        label_smoothing=settings.effective_smoothing,
        gamma=settings.simpo_gamma,
        average=settings.ipo_logprobs == "mean",
        sft_coef=settings.sft_coef,
    )


def pair_sums(
    chosen: AnswerLogprobs, rejected: AnswerLogprobs, result: PairLoss
) -> Mapping[str, Tensor]:
    """What a stage on pairs measures beside its loss and wins, as sums over pairs."""
    return {
        "implicit_reward_chosen": result.chosen_reward,
        "implicit_reward_rejected": result.rejected_reward,
        "implicit_reward_margin": result.chosen_reward - result.rejected_reward,
        "logprob_chosen": chosen.mean.detach().sum(),
        "logprob_rejected": rejected.mean.detach().sum(),
    }


def pair_metrics(
    chosen: AnswerLogprobs,
    rejected: AnswerLogprobs,
    settings: DPOConfig,
    given: PairLosses | None = None,
) -> dict[str, float]:
    """Loss, accuracy and margin of the implicit reward, means over some held-out pairs."""
    result = loss_of_pairs(chosen, rejected, settings, given)
    sums = {
        "heldout_loss": result.loss,
        "heldout_accuracy": result.accuracy,
        "heldout_margin": result.chosen_reward - result.rejected_reward,
    }
    return {name: float(value) / len(chosen.total) for name, value in sums.items()}


def _evaluation(
    policy: ReferencedPolicy,
    pairs: Sequence[PairRow],
    settings: DPOConfig,
    given: PairLosses | None,
) -> Callable[[], dict[str, float]]:
    """Held-out loss, accuracy and margin of the implicit reward, over all and per data set."""
    sides = [
        policy.heldout([pair.chosen for pair in pairs]),
        policy.heldout([pair.rejected for pair in pairs]),
    ]

    def evaluate() -> dict[str, float]:
        if not pairs:
            return {}
        chosen, rejected = (measure() for measure in sides)

        def measure(some: Tensor) -> dict[str, float]:
            return pair_metrics(chosen.select(some), rejected.select(some), settings, given)

        return by_dataset(datasets_of_pairs(pairs), measure)

    return evaluate
