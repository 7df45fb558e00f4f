"""One trained model's optimizer, its schedule, and the only place that divides a loss."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tandem.config.schema import OptimizerConfig
from tandem.errors import CheckpointError, NumericsError


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
    denominator, so the gradient does not depend on how the step was cut up.
    """

    def __init__(self, name: str, model: nn.Module, settings: OptimizerConfig, num_steps: int):
        """`name` is for messages; `num_steps` is how long the schedule lasts."""
        self.name = name
        self.model = model
        self.settings = settings
        self.num_steps = num_steps
        self.steps_taken = 0
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

    def backward(self, loss_sum: Tensor, denominator: float) -> None:
        """Add the gradient of loss_sum / denominator.

        Args:
            loss_sum: a sum over tokens or rows of one micro-batch.
            denominator: their count over the whole step: every micro-batch, every rank.
        """
        (loss_sum / denominator).backward()

    def step(self) -> float:
        """Clip, update, forget the gradient. Returns the gradient's norm before the clip.

        Raises:
            NumericsError: the gradient is not finite; no weight has changed.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm)
        norm_value = float(norm)
        if not math.isfinite(norm_value):
            self.optimizer.zero_grad(set_to_none=True)
            raise NumericsError(
                f"{self.name}: the gradient must be finite; got norm {norm_value} at optimizer "
                f"step {self.steps_taken + 1}. Lower the learning rate ({self.learning_rate:.3g})."
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_taken += 1
        self._set_learning_rates()
        return norm_value

    def state_tensors(self) -> dict[str, Tensor]:
        """AdamW's moments by parameter name, and the count of steps, as tensors to save."""
        tensors = {"steps_taken": torch.tensor(self.steps_taken)}
        for name, parameter in self._named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value
        return tensors

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
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
            place = value.clone() if value.dim() == 0 else value.to(named[name].device).clone()
            self.optimizer.state[named[name]][moment] = place
        self._set_learning_rates()

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
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
