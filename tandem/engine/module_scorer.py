"""Any torch module as a reward model: one call, one score per sequence."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandem.data.chat.own_template import put_template, read_template
from tandem.data.render import Renderer
from tandem.engine.placement import Base, Model, Placement
from tandem.engine.scoring import Ensemble, RewardScorer, place_ensemble, place_scorer
from tandem.errors import ConfigError, ModelError
from tandem.parallel.shard import ShardPlan, shard
from tandem.parallel.world import World
from tandem.types import TokenBatch


@dataclass(frozen=True, slots=True)
class RewardModule:
    """A torch module that scores sequences, and the tokenizer of its ids (None: the policy's).

    It is called as `module(token_ids, attention_mask)`, both (B, T) int64, rows padded on the
    right, and returns (B,) or (B, 1) scores, or an object whose `logits` are that. It runs in eval
    mode, without gradient, whole on every rank; its scores are rewards as they are.
    """

    module: nn.Module
    tokenizer: PreTrainedTokenizerBase | None = None


def any_scorer(
    placement: Placement,
    source: Model | nn.Module | None,
    tokenizer: PreTrainedTokenizerBase | None,
    policy: Renderer,
    base: Base | None = None,
) -> RewardScorer | None:
    """What scores answers by a model: `place_scorer`, or a `ModuleScorer` for any other module.

    Args:
        source: a folder or hub name, or a module; None: nothing scores.
        tokenizer: the model's; None: the policy's, where any torch module may do without.
        policy: the policy's renderer.
        base: as for `place_scorer`.
    Raises:
        ConfigError: there is none, but the settings name others beside it.
        ModelError: it cannot be used.
    """
    if source is None and placement.settings.further_rewards:
        named = placement.settings.further_rewards[0].source
        raise ConfigError(
            "scoring.reward_models must be empty without a reward model, beside which they count; "
            f"got {named}. Give it as --reward-model."
        )
    if isinstance(source, nn.Module) and not isinstance(source, PreTrainedModel):
        renderer = policy
        if tokenizer is not None:
            tokenizer = copy.copy(tokenizer)
            own = read_template(placement.settings.chat_template)
            put_template(tokenizer, own, unless_its_own=True)
            renderer = Renderer(tokenizer)
        max_tokens = placement.settings.micro_batch_tokens
        return ModuleScorer(
            source,
            renderer,
            placement.world,
            max_tokens=max_tokens,
            ensemble=place_ensemble(placement),
        )
    if source is None or tokenizer is None:
        return None
    return place_scorer(placement, source, tokenizer, base=base)


class ModuleScorer(RewardScorer):
    """Scores by a `RewardModule`; ranks share the rows."""

    def __init__(
        self,
        module: nn.Module,
        renderer: Renderer,
        world: World,
        *,
        max_tokens: int = 8192,
        ensemble: Ensemble | None = None,
    ) -> None:
        """`max_tokens`, `ensemble`: as for `RewardScorer`."""
        module.requires_grad_(False).eval().to(world.device)
        shard(module, (), ShardPlan(), world)  # only notes the ranks
        super().__init__(module, renderer, max_tokens=max_tokens, ensemble=ensemble)  # type: ignore[arg-type]
        self._module, self._world = module, world

    def raw_batch(self, batch: TokenBatch) -> Tensor:
        """(B,) float32 scores.

        Raises:
            ModelError: the module returns something else.
        """
        scores = torch.zeros(len(batch), device=self._world.device)
        mine = torch.arange(self._world.rank, len(batch), self._world.size)
        self._module.eval()
        with torch.no_grad():
            for rows in mine.split(max(1, self.max_tokens // batch.token_ids.shape[1])):
                part = batch.select(rows.to(batch.token_ids.device))
                scores[rows.to(scores.device)] = self._scores(part)
        self._world.all_reduce_(scores)
        return scores

    def normalized(self, raw: Tensor) -> Tensor:
        """The scores as they are."""
        return raw

    def _scores(self, part: TokenBatch) -> Tensor:
        output = self._module(part.token_ids, part.attention_mask.long())
        found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        shape = None if found is None else tuple(found.shape)
        if found is None or shape not in {(len(part),), (len(part), 1)}:
            raise ModelError(
                f"reward module {type(self._module).__name__} must return one score per sequence, "
                f"({len(part)},) or ({len(part)}, 1); got "
                f"{type(output).__name__ if shape is None else shape}. It is called as "
                "module(token_ids, attention_mask)."
            )
        return found.reshape(len(part)).float()
