"""What an RL stage's knobs make of its answers: advantages, where the KL goes, and the loss.

PPO and the algorithms without a critic are values of one record, read by one trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from tandem.config.schema import GRPOConfig, PPOConfig, RLConfig
from tandem.engine.divergence import compared_with_reference
from tandem.engine.hybrid import RLHFEngine
from tandem.engine.update import MicroBatchLoss
from tandem.errors import ConfigError
from tandem.models.replayed import KeptStates
from tandem.objectives.advantages import critic_free_advantages, generalized_advantages
from tandem.objectives.divergence import EXACT, Divergence
from tandem.objectives.kl import Estimator, KLLoss, kl_loss
from tandem.objectives.losses import value_loss
from tandem.objectives.masked import masked_sum, whiten
from tandem.objectives.policy import (
    Aggregation,
    PolicyLoss,
    TokenLosses,
    aggregation_weights,
    capped_reinforce_loss,
    given_policy_loss,
    policy_loss,
    sequence_ratio_loss,
)
from tandem.training.policy_functions import try_token_losses
from tandem.types import Experience

AdvantagesOf = Callable[[Experience], tuple[Tensor, Tensor | None]]
"""An experience without advantages to these, (B, T), and to the returns that a critic learns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One RL algorithm, by its parts.

    advantages: of an experience. whitened: what becomes of them, with the response mask, once they
        were measured (PPO, REINFORCE++); None: they stay.
    loss: of log-probs, old log-probs, advantages and response mask, with token_weights.
    normalization, max_tokens: how token losses become one number (`aggregation`).
    reward_kl: the estimator of what the KL takes from each token's reward; None: nothing.
    loss_kl: the KL's term of the loss; None: none.
    is_rewarded: whether answers have rewards; else the KL alone is learned from.
    shares_advantage: whether an answer's tokens have one advantage, by the sum of its rewards.
    ptx_divergence: what mixed-in texts teach in place of their tokens.
    has_critic: whether one is trained, by value_clip, after critic_warmup_steps without the actor.
    overlong_penalty, overlong_buffer, overlong_filter, sampling_rounds: as in CriticFreeConfig.
    given_advantages, given_loss: whether they are functions of the user's, which may do anything.
    """

    advantages: AdvantagesOf
    loss: Callable[..., PolicyLoss]
    normalization: Aggregation = "token"
    max_tokens: int = 0
    reward_kl: Estimator | None = None
    loss_kl: KLLoss | Divergence | None = None
    is_rewarded: bool = True
    shares_advantage: bool = False
    entropy_coef: float = 0.0
    ptx_divergence: Divergence | None = None
    whitened: Callable[[Tensor, Tensor], Tensor] | None = None
    has_critic: bool = False
    value_clip: float = 0.0
    critic_warmup_steps: int = 0
    overlong_penalty: float = 0.0
    overlong_buffer: float = 1.0
    overlong_filter: bool = False
    sampling_rounds: int = 1
    given_advantages: bool = False
    given_loss: bool = False

    @property
    def divergence(self) -> Divergence | None:
        """The KL's term of the loss where it is summed over the vocabulary."""
        return self.loss_kl if isinstance(self.loss_kl, Divergence) else None

    def skips_without_signal(self) -> bool:
        """Whether an answer whose advantages are all 0 adds nothing to any gradient."""
        given = self.given_advantages or self.given_loss
        return not (self.has_critic or self.loss_kl or self.entropy_coef or given)


def algorithm_of(
    section: RLConfig,
    max_new_tokens: int,
    advantages_of: AdvantagesOf | None = None,
    token_losses: TokenLosses | None = None,
    *,
    is_rewarded: bool = True,
) -> Algorithm:
    """The algorithm that a stage's section describes.

    Args:
        max_new_tokens: sampling's.
        advantages_of: in place of the section's advantages; they are used as they come, not
            whitened.
        token_losses: in place of the section's loss.
        is_rewarded: answers have rewards.
    Raises:
        ConfigError: the section is of no algorithm that is known here, or `token_losses` is no
            loss (see `try_token_losses`).
    """
    if isinstance(section, PPOConfig):
        found = _ppo(section)
    elif isinstance(section, GRPOConfig):
        found = _critic_free(section, max_new_tokens)
    else:
        raise ConfigError(
            "an RL stage's section must be a PPOConfig or a GRPOConfig; got "
            f"{type(section).__name__}. Derive it from one of them."
        )
    if advantages_of is not None:
        found = replace(found, advantages=advantages_of, whitened=None, given_advantages=True)
        found = replace(found, shares_advantage=False)
    if token_losses is not None:
        try_token_losses(token_losses, "token_losses")
        loss = partial(given_policy_loss, token_losses=token_losses)
        found = replace(found, loss=loss, given_loss=True)
    return replace(found, is_rewarded=is_rewarded)


def _ppo(ppo: PPOConfig) -> Algorithm:
    loss_kl: KLLoss | None = None
    reward_kl: Estimator | None = None
    if ppo.kl_in == "loss":
        loss_kl = "forward-k3-in-loss" if ppo.kl_estimator == "k3" else "k2-in-loss"
    else:
        reward_kl = "k1" if ppo.kl_estimator == "auto" else ppo.kl_estimator
    return Algorithm(
        advantages=partial(_by_critic, ppo),
        loss=partial(policy_loss, clip_low=ppo.clip_ratio, clip_high=ppo.clip_ratio),
        reward_kl=reward_kl,
        loss_kl=loss_kl,
        entropy_coef=ppo.entropy_coef,
        whitened=whiten if ppo.whiten_advantages else None,
        has_critic=True,
        value_clip=ppo.value_clip,
        critic_warmup_steps=ppo.critic_warmup_steps,
    )


def _critic_free(grpo: GRPOConfig, max_new_tokens: int) -> Algorithm:
    low, high = grpo.clip_low, grpo.clip_high
    losses: dict[str, Callable[..., PolicyLoss]] = {
        "clip": partial(policy_loss, clip_low=low, clip_high=high, dual_clip=grpo.dual_clip),
        "gspo": partial(sequence_ratio_loss, clip_low=low, clip_high=high),
        "cispo": partial(capped_reinforce_loss, max_ratio=grpo.cispo_max_ratio),
    }
    loss_kl = _loss_kl(grpo)
    exact = loss_kl if isinstance(loss_kl, Divergence) else None
    return Algorithm(
        advantages=partial(_by_rewards, grpo),
        loss=losses[grpo.loss],
        normalization=grpo.normalization,
        max_tokens=max_new_tokens,
        reward_kl="k1" if grpo.kl == "k1-in-reward" else None,
        loss_kl=loss_kl,
        ptx_divergence=exact if grpo.ptx_target == "reference" else None,
        shares_advantage=grpo.baseline != "none",
        entropy_coef=grpo.entropy_coef,
        whitened=partial(whiten, correction=1) if grpo.advantage_scale == "whiten" else None,
        overlong_penalty=grpo.overlong_penalty,
        overlong_buffer=grpo.overlong_buffer,
        overlong_filter=grpo.overlong_filter,
        sampling_rounds=grpo.sampling_rounds,
    )


def _loss_kl(grpo: GRPOConfig) -> KLLoss | Divergence | None:
    if grpo.kl in EXACT:
        return Divergence(grpo.kl, grpo.jsd_beta)
    return None if grpo.kl in ("none", "k1-in-reward") else grpo.kl  # type: ignore[return-value]


def _by_critic(ppo: PPOConfig, made: Experience) -> tuple[Tensor, Tensor | None]:
    """PPO's advantages and returns, by the critic's values (GAE)."""
    assert made.values is not None
    return generalized_advantages(
        made.rewards, made.values, made.batch.response_mask, gamma=ppo.gamma, lam=ppo.lam
    )


def _by_rewards(grpo: GRPOConfig, made: Experience) -> tuple[Tensor, None]:
    """Advantages without a critic: by the other answers to the prompt, or by all of the step."""
    scale = grpo.advantage_scale
    advantages = critic_free_advantages(
        made.rewards,
        made.group,
        made.batch.response_mask,
        baseline=grpo.baseline,
        scale="none" if scale == "whiten" else scale,  # `Algorithm.whitened` does it
    )
    return advantages, None


def require_roles(engine: RLHFEngine, algorithm: Algorithm, section: str, kl_coef: float) -> None:
    """Refuse an engine without a role that the algorithm needs, or with one that it would not
    train.

    Raises:
        ConfigError: it has other roles.
    """
    if engine.critic is None and algorithm.has_critic and not algorithm.given_advantages:
        raise ConfigError(
            "PPOTrainer must have a critic for its advantages; the engine has none. Pass "
            "advantages_of=, or an engine with a critic."
        )
    if engine.critic is not None and not algorithm.has_critic:
        raise ConfigError(
            "PPOTrainer must get no critic, which this algorithm would not train; the engine "
            "has one. Use RLHFEngine(has_critic=False)."
        )
    if not engine.has_reference and kl_coef > 0:
        raise ConfigError(
            f"{section}.kl_coef must be 0 without a reference; got "
            f"{kl_coef:g}. Set it to 0, or use an engine with a reference."
        )


def actor_loss(
    engine: RLHFEngine,
    algorithm: Algorithm,
    part: Experience,
    *,
    kl_coef: float,
    kept: KeptStates | None = None,
) -> MicroBatchLoss:
    """The actor's loss of some answers, and what to watch, as sums over response tokens.

    The loss's denominator is `aggregation`'s over the whole optimizer step, that of the others
    the tokens. `kept` as of `RLHFEngine.actor_logprobs`.
    """
    mask = part.batch.response_mask
    weights = aggregation_weights(mask, algorithm.normalization)
    exact, with_entropy = None, algorithm.entropy_coef > 0
    if algorithm.divergence and kl_coef > 0 and engine.has_reference:
        exact = compared_with_reference(
            engine,
            part.batch,
            algorithm.divergence,
            token_weights=weights,
            learns_logprobs=algorithm.is_rewarded or with_entropy,
            with_entropy=with_entropy,
            kept=kept,
        )
        logprobs, entropy = exact.logprobs, exact.entropy
    else:
        logprobs, entropy = engine.actor_logprobs(part.batch, with_entropy=with_entropy, kept=kept)
    found = algorithm.loss(
        logprobs, part.old_logprobs, part.advantages, mask, token_weights=weights
    )
    loss = found.loss
    sums = {
        "policy_loss": found.loss,
        "clip_fraction": found.clipped,
        "clip_fraction_low": found.clipped_low,
        "clip_fraction_high": found.clipped_high,
        "policy_kl": found.kl,
        "ratio_mean": found.ratio,
        "ratio_gap": found.abs_log_ratio,
    }

    def weighted(values: Tensor) -> Tensor:
        return masked_sum(values if weights is None else values * weights, mask)

    if with_entropy:
        loss = loss - algorithm.entropy_coef * weighted(entropy)
    if exact is not None:
        loss = loss + kl_coef * exact.kl_sum
        sums["kl_loss"] = exact.kl.sum()
    elif algorithm.loss_kl is not None and kl_coef > 0 and part.ref_logprobs is not None:
        kl = kl_loss(logprobs, part.ref_logprobs, part.old_logprobs, algorithm.loss_kl)  # type: ignore[arg-type]
        loss = loss + kl_coef * weighted(kl)
        sums["kl_loss"] = masked_sum(kl, mask)
    apart = (logprobs.detach() - part.old_logprobs).abs().masked_fill(~mask, 0.0).amax()
    return MicroBatchLoss(loss, sums, {"ratio_max": found.max_ratio, "gap_max": apart})


def critic_loss(engine: RLHFEngine, algorithm: Algorithm, part: Experience) -> MicroBatchLoss:
    """The critic's loss of some answers as a sum over response tokens."""
    return _critic_loss(algorithm, part, engine.values(part.batch))


def first_critic_loss(engine: RLHFEngine, algorithm: Algorithm, part: Experience) -> MicroBatchLoss:
    """The same of answers that have no values yet, with their values `per_token`: before its update
    the critic says what it said when the values were made, so one forward serves for both."""
    values = engine.values(part.batch)
    part = replace(part, values=values.detach())
    part = replace(part, returns=algorithm.advantages(part)[1])
    return replace(_critic_loss(algorithm, part, values), per_token=values.detach().float())


def _critic_loss(algorithm: Algorithm, part: Experience, values: Tensor) -> MicroBatchLoss:
    assert part.values is not None
    assert part.returns is not None
    found = value_loss(
        values, part.values, part.returns, part.batch.response_mask,
        value_clip=algorithm.value_clip,
    )  # fmt: skip
    sums = {"value_loss": found.loss, "value_clip_fraction": found.clipped}
    return MicroBatchLoss(found.loss, sums)
