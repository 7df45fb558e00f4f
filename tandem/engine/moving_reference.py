"""A reference that follows the policy: every so many optimizer steps it is mixed with it.

Source: TR-DPO, arXiv:2404.09656; TRL's `SyncRefModelCallback`. Differs: the mixture is
kept in float32, where TRL rounds it to the reference's type each time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tandem.config.engine import EngineSettings
from tandem.config.moving_reference import ReferenceConfig
from tandem.engine.ema import MovingAverage
from tandem.engine.learner import Learner
from tandem.models.lora import kept_start
from tandem.parallel.dtensor import Saved, as_piece, fill, local, whole
from tandem.parallel.quantize import through_codes
from tandem.parallel.shard import shards_of


class MovingReference:
    """reference = rate * policy + (1 - rate) * reference, after every N steps of the optimizer.

    The reference is a frozen model, or, under LoRA, the adapters that act while the policy's are
    off. Below rate 1 the mixture is a `MovingAverage` of the masters: the reference itself where
    that is in float32 and split as the policy is, else beside it, and the reference computes with
    it rounded. After a move at rate 1 it computes with the policy's bits.
    """

    def __init__(
        self, settings: ReferenceConfig, learner: Learner, reference: PreTrainedModel | None
    ) -> None:
        """Both are placed, and the policy has not been trained yet.

        Args:
            learner: of the policy.
            reference: None: the policy with its adapters off.
        """
        self._settings, self._learner = settings, learner
        self._policy, self._reference = learner.model, reference
        self._average: MovingAverage | None = None
        own = self._targets()
        assert own, "new adapters keep their start where the reference moves (placement)"
        if settings.update_rate < 1:
            parameters = self._named(self._policy)
            is_exact = all(
                target.dtype == torch.float32 and _split_alike(target, parameters[name])
                for name, target in own.items()
            )
            self._average = MovingAverage(
                self._policy,
                1 - settings.update_rate,
                learner.masters,
                shadow={n: t.detach() for n, t in own.items()} if is_exact else None,
            )

    @torch.no_grad()
    def follow(self) -> bool:
        """Move if it is time; call it after each optimizer step of the policy. All ranks call it.

        Returns:
            whether it has moved.
        """
        if self._learner.steps_taken % self._settings.update_every:
            return False
        if self._average is not None:
            self._average.update()
        self._write()
        return True

    def state_tensors(self) -> dict[str, Tensor]:
        """The reference by the policy's parameter names, to save."""
        return self._targets() if self._average is None else self._average.state_tensors()

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor | Saved]) -> None:
        """Continue from a saved reference of the same policy."""
        if self._average is not None:
            self._average.load_state_tensors(tensors)
            self._write()
            return
        targets = self._targets()
        for name, value in tensors.items():
            fill(targets[name], value)
        self._round()

    def _write(self) -> None:
        """Give the reference the policy's weights, or the mixture, rounded to its own type."""
        values: Mapping[str, Tensor] = (
            self._named(self._policy) if self._average is None else self._average.shadow
        )
        device = shards_of(self._policy).world.device
        for name, target in self._targets().items():
            value = values[name].detach()
            piece = local(value)
            if isinstance(value, DTensor) and not isinstance(target, DTensor):
                # Below stage 3 a frozen model is whole. Pieces on the host travel by the device.
                piece = whole(as_piece(piece.to(device), value))
            own = local(target)
            if own.data_ptr() != piece.data_ptr():
                own.copy_(piece)
        self._round()

    def _round(self) -> None:
        """Round a whole reference as the policy's pieces are on their way (qwZ)."""
        if self._reference is None:
            return
        shards = shards_of(self._reference)
        if shards.plan.stage == 0 and shards.plan.quantized_weights:
            through_codes(self._reference, shards.world.size)

    def _targets(self) -> dict[str, Tensor]:
        """What of the reference moves, by the policy's parameter names."""
        if self._reference is None:
            self._named(self._policy)
            return {name: kept.detach() for name, kept in kept_start(self._policy).items()}
        own = self._named(self._reference)
        trained = (n for n, p in self._named(self._policy).items() if p.requires_grad)
        return {name: own[name].detach() for name in trained}

    @staticmethod
    def _named(model: nn.Module) -> dict[str, nn.Parameter]:
        """A model's parameters, in pieces where it is split."""
        shards_of(model).reshard()
        return dict(model.named_parameters())


def moving_reference(
    settings: EngineSettings, learner: Learner, reference: PreTrainedModel | None
) -> MovingReference | None:
    """A reference that follows the learner's policy; None where it stays as it is."""
    moving = settings.moving
    return MovingReference(moving, learner, reference) if moving.update_every else None


def _split_alike(one: Tensor, other: Tensor) -> bool:
    return isinstance(one, DTensor) == isinstance(other, DTensor)
