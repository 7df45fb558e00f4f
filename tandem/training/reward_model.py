"""Step 2: the reward model, Bradley-Terry on the score at the last real token (its EOS included).

It learns from pairs, and from rankings of several answers: all pairs of a ranking are in one
micro-batch, count as one row together, and each answer goes through the model once (InstructGPT,
arXiv:2203.02155 section 3.5). A row's margin is taken off the difference (Llama 2).

Afterwards its scores are given a scale: mean 0 and sd 1 on the SFT policy's own answers, so that
PPO's knobs (KL coefficient, clips) mean the same for every reward model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import softplus

from tandem.engine.forward import sequence_scores
from tandem.engine.scoring import RewardScorer
from tandem.errors import ModelError
from tandem.models.load import check_vocabulary
from tandem.models.scalar import set_normalization
from tandem.objectives.losses import pairwise_loss
from tandem.training.compare import answer
from tandem.training.evaluate import metrics_of_margins, pair_margins
from tandem.training.run_folder import Run
from tandem.training.saving import save_anywhere, with_template
from tandem.training.stage_data import Comparison, StepRows
from tandem.training.stage_loop import StageJob
from tandem.training.supervised import Objective, SupervisedTrainer
from tandem.types import TokenBatch


def prepare(run: Run, rows: StepRows) -> StageJob:
    """Step 2, ready to run; it leaves `RUN/reward`, which AutoModelForSequenceClassification
    opens."""
    config, device = run.config, run.device
    source = config.reward_model or run.policy_source("reward")
    model = run.placement.scalar(source, trained=True)
    check_vocabulary(model, rows.reward_tokenizer)
    set_normalization(model, 0.0, 1.0)  # an earlier reward model's are not this one's
    scorer = RewardScorer(model, rows.reward_renderer, max_tokens=config.micro_batch_tokens)

    def loss(part: Sequence[Comparison]) -> tuple[Tensor, dict[str, Tensor]]:
        batch, compared = side_by_side(part, rows.reward_renderer.pad_token_id)
        scores = sequence_scores(model, batch.to(device))
        compared = compared.to(device)
        chosen, rejected = scores[compared.better], scores[compared.worse]
        result = pairwise_loss(
            chosen,
            rejected,
            center_coef=config.reward.center_coef,
            margins=compared.margins,
            weights=compared.weights,
        )
        return result.loss, {
            "accuracy": result.accuracy,
            "margin": result.margin,
            "center_penalty": result.center_penalty,
            "score_chosen": (compared.weights * chosen).sum(),
            "score_rejected": (compared.weights * rejected).sum(),
        }

    def evaluate() -> dict[str, float]:
        pairs = rows.heldout_pairs
        margins = pair_margins(scorer, pairs)
        loss = {"heldout_loss": float(softplus(-margins).mean())} if pairs else {}
        return {**loss, **metrics_of_margins(margins, pairs)}

    objective: Objective[Comparison] = Objective(
        ends=True, units=lambda row: 1, sequences=lambda row: row.sequences, loss=loss
    )
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


@dataclass(frozen=True, slots=True)
class Compared:
    """The pairs among the answers of a batch.

    better, worse: (P,) int64 rows of the batch. margins: (P,) reward-model units. weights: (P,)
    1 / pairs of the row that each comes from, so that a ranking counts as one row however long.
    """

    better: Tensor
    worse: Tensor
    margins: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> Compared:
        """The same on `device`."""
        return Compared(
            self.better.to(device),
            self.worse.to(device),
            self.margins.to(device),
            self.weights.to(device),
        )


def side_by_side(rows: Sequence[Comparison], pad_token_id: int) -> tuple[TokenBatch, Compared]:
    """The answers of some rows as one batch, each once, and the pairs among them.

    The batch has the first answers of all rows, then the second ones, and so on.
    """
    most = max(len(row.sequences) for row in rows)
    places = [(k, i) for k in range(most) for i, row in enumerate(rows) if k < len(row.sequences)]
    place = {where: number for number, where in enumerate(places)}
    batch = TokenBatch.from_rows([rows[i].sequences[k] for k, i in places], pad_token_id)
    pairs = [(row, i, pair) for i, row in enumerate(rows) for pair in row.pairs]
    return batch, Compared(
        better=torch.tensor([place[better, i] for _, i, (better, _) in pairs]),
        worse=torch.tensor([place[worse, i] for _, i, (_, worse) in pairs]),
        margins=torch.tensor([row.margin for row, _, _ in pairs]),
        weights=torch.tensor([1 / len(row.pairs) for row, _, _ in pairs]),
    )


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
    mean, std = float(raw.mean()), float(raw.std(correction=0))
    if len(raw) < 2 or std < 1e-6:
        raise ModelError(
            f"the reward model must tell the policy's answers apart; got {len(raw)} scores with "
            f"sd {std:.2g}. Train it longer, use more prompts, or set reward.normalize_prompts 0."
        )
    set_normalization(scorer.model, mean, std)
    run.print_line(f"reward: scores of {len(raw)} SFT answers have mean {mean:.3f}, sd {std:.3f}")
    return {"normalize_mean": mean, "normalize_std": std}
