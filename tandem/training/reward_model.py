"""Step 2: the reward model, Bradley-Terry on the score at the last real token (its EOS included).

Afterwards its scores are given a scale: mean 0 and sd 1 on the SFT policy's own answers, so that
PPO's knobs (KL coefficient, clips) mean the same for every reward model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from tandem.engine.forward import sequence_scores
from tandem.engine.scoring import RewardScorer
from tandem.errors import ModelError
from tandem.models.load import check_vocabulary
from tandem.models.scalar import set_normalization
from tandem.objectives.losses import pairwise_loss
from tandem.training.compare import answer
from tandem.training.evaluate import preference_metrics
from tandem.training.run_folder import Run
from tandem.training.saving import save_anywhere, with_template
from tandem.training.stage_data import StepRows
from tandem.training.stage_loop import StageJob
from tandem.training.supervised import SupervisedTrainer, objective_of_pairs
from tandem.types import PairRow, TokenBatch


def prepare(run: Run, rows: StepRows) -> StageJob:
    """Step 2, ready to run; it leaves `RUN/reward`, which AutoModelForSequenceClassification
    opens."""
    config, device = run.config, run.device
    source = config.reward_model or run.policy_source("reward")
    model = run.placement.scalar(source, trained=True)
    check_vocabulary(model, rows.reward_tokenizer)
    set_normalization(model, 0.0, 1.0)  # an earlier reward model's are not this one's
    scorer = RewardScorer(model, rows.reward_renderer, max_tokens=config.micro_batch_tokens)

    def loss(part: Sequence[PairRow]) -> tuple[Tensor, dict[str, Tensor]]:
        both = [pair.chosen for pair in part] + [pair.rejected for pair in part]
        batch = TokenBatch.from_rows(both, rows.reward_renderer.pad_token_id).to(device)
        chosen, rejected = sequence_scores(model, batch).chunk(2)
        result = pairwise_loss(chosen, rejected, center_coef=config.reward.center_coef)
        return result.loss, {
            "accuracy": result.accuracy,
            "margin": result.margin,
            "center_penalty": result.center_penalty,
            "score_chosen": chosen.sum(),
            "score_rejected": rejected.sum(),
        }

    def evaluate() -> dict[str, float]:
        return preference_metrics(scorer, rows.heldout_pairs)

    trainer = SupervisedTrainer(
        run, "reward", model, config.reward, rows.pairs, objective_of_pairs(loss), evaluate
    )
    masters = trainer.learner.masters

    def save(folder: Path) -> None:
        tokenizer = with_template(rows.reward_tokenizer, rows.reward_renderer)
        save_anywhere(model, tokenizer, folder, masters, config.save_dtype)

    return trainer.job(save, lambda evaluation: evaluation | normalize(run, scorer, rows))


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
