"""What a step's first update takes from its rollout, so that no forward runs twice.

Before that update the models are those that the rollout was made and scored by. So the forward that
makes the critic's values makes its gradient too, and what generation computed in the actor's layers
stands for the actor's forward. Both belong to one experience, and to weights that nobody has
written to since; else they are dropped, and the update computes everything itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.config.schema import RunConfig
from tandem.engine.divergence import release_reference
from tandem.engine.forward import Rows
from tandem.engine.hybrid import RLHFEngine
from tandem.engine.oom import MicroBatchBudget
from tandem.engine.update import BegunUpdate, LossTerm, MicroBatchLoss, begin_update, training_mode
from tandem.errors import NumericsError
from tandem.generation.blocks import free_bytes
from tandem.generation.keeping import StateKeeper
from tandem.metrics.timing import Phases
from tandem.models.replayed import KeptStates
from tandem.models.twin import has_dropout
from tandem.training.algorithm import Algorithm, first_critic_loss
from tandem.training.minibatches import minibatches, updates_per_epoch
from tandem.training.operations import batch_flops
from tandem.types import Experience


@dataclass(frozen=True, slots=True)
class _Owner:
    """The experience and the step that something was begun for, and the versions of its tensors
    and of the trained weights."""

    experience: Experience
    step: int
    versions: list[int]


class FirstUpdate:
    """The critic's gradient and the actor's states for the update to come.

    Attributes:
        has_measured: whether an update of this process has run the actor's forward and compared it
            with the sampler; nothing is kept before.
    """

    def __init__(
        self,
        engine: RLHFEngine,
        config: RunConfig,
        algorithm: Algorithm,
        budget: MicroBatchBudget,
        phases: Phases,
    ) -> None:
        """Nothing is begun."""
        self.has_measured = False
        self._engine, self._config, self._algorithm = engine, config, algorithm
        self._budget, self._phases = budget, phases
        self._critic: BegunUpdate | None = None
        self._states: KeptStates | None = None
        self._owner: _Owner | None = None

    def keeper(self, step: int) -> StateKeeper | None:
        """What keeps the states of a step's rollout; None where the update runs the actor: where
        it is not the rollout's only one, or another forward than decoding's."""
        engine, config = self._engine, self._config
        if (
            config.kept_states == 0
            or updates_per_epoch(config) > 1
            or step <= self._algorithm.critic_warmup_steps
            or not self.has_measured
            or engine.world.size > 1
            or engine.actor_learner.shards.is_split  # one rank's too, where weights are offloaded
            or engine.device.type != "cpu"
            or not engine.trusts_sampler
            or not engine.agreement.bitwise
            or "actor" in engine.settings.checkpointed
        ):
            return None
        if has_dropout(engine.actor):
            return None
        return StateKeeper(int(config.kept_states * free_bytes(engine.device)))

    def can_begin(self) -> bool:
        """Whether the forward of the critic's first gradient makes its values too."""
        critic = self._engine.critic
        return critic is not None and not has_dropout(critic)

    def values(self, made: Experience, step: int) -> Tensor:
        """The critic's values of all answers, (B, T), and its gradient over the step's first
        minibatch: the others' forward in training is by other weights."""
        engine, learner = self._engine, self._engine.critic_learner
        assert engine.critic is not None
        assert learner is not None
        _, rows = next(minibatches(self._config, made, step))
        values = torch.zeros_like(made.rewards)
        others = torch.ones(len(made), dtype=torch.bool).index_fill(0, rows, value=False)
        if bool(others.any()):
            with self._phases("score") as phase:
                place = others.nonzero().flatten()
                batch = made.batch.select(place)
                found = engine.all_values(batch)
                values[place.to(values.device), : found.shape[1]] = found
                phase.flops = batch_flops(engine.critic, batch)
        minibatch = made.select(rows)
        kept = torch.zeros_like(minibatch.rewards)

        def loss(part: Rows) -> MicroBatchLoss:
            return first_critic_loss(engine, self._algorithm, part_of(minibatch, part))

        # The operations count where the update ends.
        with self._phases("train"), training_mode(engine.critic):
            term = replace(critic_term(minibatch, loss), keep=kept)
            self._critic = begin_update(self._budget, learner, [term])
        values[rows.to(values.device), : kept.shape[1]] = kept
        return values

    def belongs_to(self, experience: Experience, step: int, states: KeptStates | None) -> None:
        """What was begun, and these states of its tokens, are this experience's."""
        self._states = states
        if self._critic is not None or states is not None:
            self._owner = _Owner(experience, step, self._versions(experience))

    @contextmanager
    def taken(
        self, experience: Experience, step: int
    ) -> Iterator[tuple[BegunUpdate | None, KeptStates | None]]:
        """Within: the critic's gradient and the actor's states, if they are this experience's;
        afterwards neither is left, whatever was raised."""
        critic, states = self._take(experience, step)
        try:
            yield critic, states
        finally:
            if critic is not None:
                critic.drop()
            if self._algorithm.divergence:
                release_reference(self._engine)
            if states is not None:
                states.release()

    def _take(
        self, experience: Experience, step: int
    ) -> tuple[BegunUpdate | None, KeptStates | None]:
        owner, critic, states = self._owner, self._critic, self._states
        if owner is None or not self._is(owner, experience, step):
            self.drop()
            return None, None
        self._owner = self._critic = self._states = None
        return critic, states

    def drop(self) -> None:
        """Forget what was begun."""
        if self._critic is not None:
            self._critic.drop()
        if self._states is not None:
            self._states.release()
        self._owner = self._critic = self._states = None

    def _is(self, owner: _Owner, experience: Experience, step: int) -> bool:
        given, begun = _learned_from(experience), _learned_from(owner.experience)
        return (
            step == owner.step
            and all(a is b for a, b in zip(given, begun, strict=True))
            and self._versions(experience) == owner.versions
        )

    def _versions(self, experience: Experience) -> list[int]:
        tensors = [tensor for tensor in _learned_from(experience) if tensor is not None]
        for model in self._engine.trained_models:
            tensors += model.parameters()
        # A fused optimizer writes without a new version.
        steps = [learner.steps_taken for learner in self._engine.learners.values()]
        return [*steps, *(tensor._version for tensor in tensors)]


def _learned_from(experience: Experience) -> list[Tensor | None]:
    """What the critic's gradient, the actor's states and the choice of minibatches depend on."""
    batch = experience.batch
    return [
        batch.token_ids,
        batch.attention_mask,
        batch.response_mask,
        experience.values,
        experience.returns,
        experience.group,
        experience.in_loss,
    ]


def critic_term(minibatch: Experience, loss: Callable[[Rows], MicroBatchLoss]) -> LossTerm:
    """The critic's loss as a mean over a minibatch's response tokens."""
    batch = minibatch.batch
    lengths = batch.on_host().lengths().tolist()
    return LossTerm(lengths, batch.num_response_tokens, loss, batch=batch)


def part_of(minibatch: Experience, rows: Rows) -> Experience:
    """A micro-batch of a minibatch."""
    return minibatch.select(rows.host, rows.on(minibatch.batch.token_ids.device))


def require_same_policy(
    config: RunConfig,
    tolerance: float,
    num_answers: int,
    per_token: float,
    means: Mapping[str, float],
) -> None:
    """The policy must not differ from itself before it is updated.

    Args:
        per_token: makes the loss's `means` those of a token.
    Raises:
        NumericsError: two forwards of it disagree.
    """
    gap = means["ratio_gap"] * per_token
    if gap <= tolerance:
        return
    cause = (
        "dropout is on: two forwards of one policy differ. Use --dropout 0"
        if config.dropout > 0 or config.lora.dropout > 0
        else "the training and scoring forwards of this model disagree, or, in a loop of your own, "
        "the policy was updated since it answered. Use --dtype fp32; learn from an experience once "
        "(`epochs` for more passes); or raise ratio_tolerance if you know why"
    )
    raise NumericsError(
        "the policy ratio before the first update must be 1 (mean |log-ratio| at most "
        f"{tolerance:g}); got {gap:.3g} over {num_answers} answers: {cause}."
    )
