"""One trained model's optimizer, its schedule, and the only place that divides a loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from tandem.config.schema import OptimizerConfig
from tandem.errors import CheckpointError, NumericsError
from tandem.parallel.pieces import fill, local, piece_like
from tandem.parallel.shard import shards_of


def learning_rate_factor(step: int, num_steps: int, settings: OptimizerConfig) -> float:
    """Share of the peak learning rate at `step` (0-based) of `num_steps`.

    Rises linearly over the first `warmup` share, then falls to 0.1 along the schedule; at the
    last step of a falling schedule it is just above 0.1.
    """
    warmup_steps = math.ceil(settings.warmup * num_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if settings.schedule == "constant":
        return 1.0
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    progress = min(progress, 1.0)
    fall = (1 + math.cos(math.pi * progress)) / 2 if settings.schedule == "cosine" else 1 - progress
    return 0.1 + 0.9 * fall


class Trainee:
    """A model in training: gradients are summed into it, then it takes a step.

    backward() may be called any number of times per step(), with sums divided by the step's whole
    denominator, so the gradient does not depend on how the step was cut up, nor over how many
    ranks. Over several ranks every rank calls it as often as every other.
    """

    def __init__(self, name: str, model: nn.Module, settings: OptimizerConfig, num_steps: int):
        """`name` is for messages; `num_steps` is how long the schedule lasts."""
        self.name = name
        self.model = model
        self.shards = shards_of(model)
        self.settings = settings
        self.num_steps = num_steps
        self.steps_taken = 0
        self.shards.rest()  # what is trained is the pieces
        self.optimizer = torch.optim.AdamW(
            list(parameter_groups(model, settings)), betas=settings.betas, fused=True
        )
        self._set_learning_rates()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Every tensor that is trained."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def learning_rate(self) -> float:
        """What the next step will use: the adapters' where there are some, beside a scalar head's
        full weights too; else the full weights'."""
        return float(self.optimizer.param_groups[-1]["lr"])

    def backward(
        self, loss_sum: Tensor, denominator: float, *, weight: float = 1.0, is_last: bool = True
    ) -> None:
        """Add the gradient of weight * loss_sum / denominator.

        Args:
            loss_sum: a sum over tokens or rows of one micro-batch.
            denominator: their count over the whole step: every micro-batch, every rank.
            weight: 0 where this rank only keeps in step with the others.
            is_last: whether it is the step's last backward on every rank; where weights lie in
                pieces, gradients may not be reduced before.
        """
        self.shards.before_backward(last=is_last)
        (loss_sum * (weight / denominator) if weight != 1.0 else loss_sum / denominator).backward()

    def step(self) -> float:
        """Clip, update, forget the gradient. Returns the gradient's norm before the clip.

        Raises:
            NumericsError: the gradient is not finite; no weight has changed.
        """
        parameters = self.parameters
        self.shards.finish_gradients(parameters)
        norm_value = self.shards.gradient_norm(parameters)
        if not math.isfinite(norm_value):
            self.optimizer.zero_grad(set_to_none=True)
            raise NumericsError(
                f"{self.name}: the gradient must be finite; got norm {norm_value} at optimizer "
                f"step {self.steps_taken + 1}. Lower the learning rate ({self.learning_rate:.3g})."
            )
        # torch.nn.utils.clip_grad_norm_'s rule, on the pieces that lie here.
        scale = min(1.0, self.settings.max_grad_norm / (norm_value + 1e-6))
        if scale < 1.0:
            torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], scale)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_taken += 1
        self._set_learning_rates()
        return norm_value

    def state_tensors(self) -> dict[str, Tensor]:
        """AdamW's moments by parameter name, and the count of steps, as tensors to save.

        Those of split weights are split alike.
        """
        tensors = {"steps_taken": torch.tensor(self.steps_taken)}
        for name, parameter in self._named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from `state_tensors` of the same model.

        Raises:
            CheckpointError: the moments are of another model.
        """
        named = dict(self._named_parameters())
        for key, value in tensors.items():
            if key == "steps_taken":
                self.steps_taken = int(value)
                continue
            moment, name = key.split(".", 1)
            if name not in named or (value.dim() and value.shape != named[name].shape):
                raise CheckpointError(
                    f"the optimizer state of {self.name} must fit the model; got {key} of shape "
                    f"{tuple(value.shape)}. The checkpoint is of another model: use another "
                    "--output-dir."
                )
            place = value.clone() if value.dim() == 0 else piece_like(value, named[name])
            self.optimizer.state[named[name]][moment] = place
        self._set_learning_rates()

    def weights(self) -> dict[str, Tensor]:
        """The trained weights by name, as they lie over the ranks, to save."""
        return {name: parameter.detach() for name, parameter in self._named_parameters()}

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy whole saved weights into the model, in place."""
        parameters = dict(self._named_parameters())
        for name, tensor in tensors.items():
            fill(parameters[name], tensor)

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        self.shards.rest()
        return ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)

    def _set_learning_rates(self) -> None:
        factor = learning_rate_factor(self.steps_taken, self.num_steps, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def parameter_groups(
    model: nn.Module, settings: OptimizerConfig
) -> Iterator[dict[str, list[nn.Parameter] | float]]:
    """The trained parameters by learning rate and decay; empty groups are left out.

    Decay is for matrices, not for biases and norms' gains. Adapters (named `lora_A`, `lora_B`)
    have their own learning rate.
    """
    chosen: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_adapter = "lora_" in name
            chosen.setdefault((is_adapter, parameter.dim() >= 2), []).append(parameter)
    for (is_adapter, decays), parameters in sorted(chosen.items()):
        peak = settings.lora_learning_rate if is_adapter else settings.learning_rate
        yield {
            "params": parameters,
            "weight_decay": settings.weight_decay if decays else 0.0,
            "lr": peak,
            "peak_lr": peak,
        }
