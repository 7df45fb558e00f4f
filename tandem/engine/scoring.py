"""A reward model's scores for answers, with the policy's tokenizer or another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.config.engine import EngineSettings
from tandem.config.scoring import EnsembleName
from tandem.data.chat.own_template import put_template, read_template
from tandem.data.render import Renderer
from tandem.data.spoken import as_judged
from tandem.engine.forward import scored, sequence_scores
from tandem.engine.placement import Base, Model, Placement
from tandem.models.load import check_vocabulary, load_tokenizer
from tandem.models.scalar import is_normalized, normalization, require_reward_head
from tandem.objectives.rewards import ensemble_scores, normalized_scores
from tandem.parallel.shard import shards_of
from tandem.types import Rollout, TokenBatch, TokenRow


class RewardScorer:
    """Scores at the last real token, raw or in units of the SFT policy's spread.

    A rollout is scored as it was sampled if policy and reward model share a tokenizer, else through
    its text.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        renderer: Renderer,
        *,
        max_tokens: int = 8192,
        ensemble: Ensemble | None = None,
    ) -> None:
        """The model is used without gradient.

        Args:
            max_tokens: padded tokens per forward.
            ensemble: reward models whose scores count beside this one's; None: there is none.
        """
        self.model = model
        self.renderer = renderer
        self.max_tokens = max_tokens
        self.ensemble = ensemble or Ensemble()

    @property
    def models(self) -> list[PreTrainedModel]:
        """This model and the further ones."""
        return [scorer.model for scorer in self._named.values()]

    def note_on_text(self, policy_renderer: Renderer) -> str:
        """Which of this model and the further ones read the answers of `policy_renderer`'s policy
        as text, since its tokens are not theirs; "" if none does."""
        readers = [
            name
            for name, scorer in self._named.items()
            if not scorer.renderer.renders_like(policy_renderer)
        ]
        if not readers:
            return ""
        return (
            f"{' and '.join(readers)}: another tokenizer or chat template than the policy's, so "
            "answers are scored as text"
        )

    def note_on_units(self) -> str:
        """Which of several models' scores are raw, so that they cannot be compared with others'; ""
        if none are, or there is one model."""
        raw = [
            name
            for name, scorer in self._named.items()
            if isinstance(scorer.model, PreTrainedModel) and not is_normalized(scorer.model)
        ]
        if not raw or not self.ensemble.others:
            return ""
        return (
            f"{' and '.join(raw)}: raw scores, in units of {'its' if len(raw) == 1 else 'their'} "
            "own (tandem reward normalizes them on the answers of its --actor-model)"
        )

    @property
    def _named(self) -> dict[str, RewardScorer]:
        others = {other.label: other.scorer for other in self.ensemble.others}
        return {"reward model": self, **others}

    def raw(self, rollout: Rollout, policy_renderer: Renderer) -> Tensor:
        """(B,) float32 raw scores of a rollout that `policy_renderer`'s policy made."""
        if self.renderer.renders_like(policy_renderer):
            return self.raw_batch(rollout.batch)
        rows = []
        for prompt, response, finished in zip(
            rollout.prompts, rollout.responses, rollout.finished.tolist(), strict=True
        ):
            answer = policy_renderer.spoken(response, prompt.tools, prompt.messages).turn
            read = prompt.messages, answer, prompt.source, prompt.tools
            rows.append(as_judged(self.renderer, *read, is_finished=finished))
        return self.raw_rows(rows)

    def raw_rows(self, rows: Sequence[TokenRow]) -> Tensor:
        """(B,) float32 raw scores of rendered conversations."""
        batch = TokenBatch.from_rows(rows, self.renderer.pad_token_id)
        return self.raw_batch(batch.to(shards_of(self.model).world.device))

    def raw_batch(self, batch: TokenBatch) -> Tensor:
        """(B,) float32 raw scores of a batch in this model's own tokens."""

        def forward(part: TokenBatch) -> tuple[Tensor, ...]:
            return (sequence_scores(self.model, part),)

        return scored(batch, self.max_tokens, forward, [self.model])[0]

    def normalized(self, raw: Tensor) -> Tensor:
        """Raw scores in units of the SFT policy's spread, by the constants kept with the model."""
        mean, std = normalization(self.model)
        return normalized_scores(raw, mean, std)


@dataclass(frozen=True, slots=True)
class FurtherScorer:
    """A reward model beside the first: its name in metrics, its weight against the first's 1."""

    label: str
    weight: float
    scorer: RewardScorer


@dataclass(frozen=True, slots=True)
class Ensemble:
    """The reward models beside the first, and what the scores of all make.

    how, uncertainty_coef: `scoring.ensemble` and the knob of that name.
    """

    others: tuple[FurtherScorer, ...] = ()
    how: EnsembleName = "sum"
    uncertainty_coef: float = 0.0

    @property
    def weights(self) -> list[float]:
        """Each model's, the first one's first."""
        return [1.0, *(other.weight for other in self.others)]

    def columns(self, scores: Tensor) -> tuple[Tensor, list[float]]:
        """What rewards an answer of all the models' normalized scores, (B, K), the first model's
        first: (B, K') and a weight each. The sum keeps them apart; all else makes one of them."""
        if self.how == "sum":
            return scores, self.weights
        made = ensemble_scores(
            scores, self.weights, self.how, uncertainty_coef=self.uncertainty_coef
        )
        return made[:, None], [1.0]


def place_scorer(
    placement: Placement,
    source: Model,
    tokenizer: PreTrainedTokenizerBase,
    *,
    base: Base | None = None,
) -> RewardScorer:
    """A reward model laid out over the ranks, ready to score, and those that the run's settings
    name beside it (`scoring.reward_models`).

    Args:
        source: a folder or hub name, or a module.
        base: use its frozen weights instead of the model's own.
    Raises:
        ModelError: it cannot be used, or has no scalar head: a new one would reward at random.
    """
    return _placed(placement, source, tokenizer, base, place_ensemble(placement))


def place_ensemble(placement: Placement) -> Ensemble:
    """The reward models that the run's settings name beside the first."""
    settings = placement.settings
    others = tuple(
        FurtherScorer(
            other.label,
            other.weight,
            _placed(placement, other.source, scorer_tokenizer(other.source, settings)),
        )
        for other in settings.further_rewards
    )
    return Ensemble(others, settings.ensemble, settings.uncertainty_coef)


def scorer_tokenizer(source: str, settings: EngineSettings) -> PreTrainedTokenizerBase:
    """The tokenizer of a finished reward model. It keeps its own chat template, which the model was
    trained with, and gets the run's if it has none."""
    tokenizer = load_tokenizer(source, trust_remote_code=settings.trust_remote_code)
    put_template(tokenizer, read_template(settings.chat_template), unless_its_own=True)
    return tokenizer


def _placed(
    placement: Placement,
    source: Model,
    tokenizer: PreTrainedTokenizerBase,
    base: Base | None = None,
    ensemble: Ensemble | None = None,
) -> RewardScorer:
    on_host = "reward" in placement.settings.parallel.offload
    model = placement.scalar(source, trained=False, needs_head=True, on_host=on_host, base=base)
    require_reward_head(model, source if isinstance(source, str) else type(source).__name__)
    check_vocabulary(model, tokenizer)
    max_tokens = placement.settings.micro_batch_tokens
    return RewardScorer(model, Renderer(tokenizer), max_tokens=max_tokens, ensemble=ensemble)
