"""One trained model's optimizer, its schedule, and the only place that divides a loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from tandem.config.optimizer import OptimizerConfig
from tandem.config.parallel import ParallelConfig
from tandem.engine.grad_norm_guard import SpikeGuard
from tandem.engine.parameter_groups import parameter_groups
from tandem.errors import BadStepError, CheckpointError, ModelError
from tandem.parallel.dtensor import Saved, as_piece, fill, local, part_of, whole_of
from tandem.parallel.masters import (
    MasterAdamW,
    cast_weights,
    exactly,
    is_superseded,
    release,
    take_masters,
)
from tandem.parallel.moments import exact_moments
from tandem.parallel.scaling import LossScaler
from tandem.parallel.shard import shards_of


def learning_rate_factor(step: int, num_steps: int, settings: OptimizerConfig) -> float:
    """Share of the peak learning rate at `step` (0-based) of `num_steps`.

    Rises linearly over the first `warmup` share, then falls to 0.1 along the schedule; at the
    last step of a falling schedule it is just above 0.1.
    """
    warmup_steps = math.ceil(round(settings.warmup * num_steps, 6))
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if settings.schedule == "constant":
        return 1.0
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    progress = min(progress, 1.0)
    fall = (1 + math.cos(math.pi * progress)) / 2 if settings.schedule == "cosine" else 1 - progress
    return 0.1 + 0.9 * fall


class Learner:
    """A model in training: gradients are summed into it, then it takes a step.

    backward() may be called any number of times per step(), with sums divided by the step's whole
    denominator, so the gradient does not depend on micro-batches or ranks. All ranks call it
    equally often.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        settings: OptimizerConfig,
        num_steps: int | None = None,
        *,
        parallel: ParallelConfig | None = None,
        dtype: torch.dtype | None = None,
        scaler: LossScaler | None = None,
        spike_sigma: float = 0.0,
    ):
        """Begin with the weights as they are.

        Args:
            name: for messages.
            num_steps: length of the schedule; None stays at the peak until `schedule` is called.
            parallel: what is kept in host memory, and how AdamW's states are kept; None: the
                defaults.
            dtype: compute type of whole weights; None leaves them as they are. In half precision
                the optimizer keeps float32 masters; split weights are their own masters.
            scaler: of the losses, in fp16; then `step_learners` takes the steps.
            spike_sigma: skip a step whose gradient norm is this many standard deviations above the
                recent ones (see `SpikeGuard`); 0 takes any finite one.
        Raises:
            ModelError: the model is frozen.
        """
        self.name = name
        self.model = model
        self.shards = shards_of(model)
        self.settings = settings
        self.num_steps = num_steps
        self.scaler = scaler
        self.spikes = SpikeGuard(spike_sigma, settings.max_grad_norm)
        self.steps_taken = 0
        self.times_used = 0  # backwards, steps and forgotten gradients: who else was here
        self.shards.reshard()  # what is trained is the pieces
        # Offloaded weights are on the host already, and so is everything made from them.
        parallel = parallel or ParallelConfig()
        on_host = "optimizer" in parallel.offload and not self.shards.plan.offload_params
        is_split = self.shards.is_split
        if dtype is not None and not is_split:
            cast_weights(model, dtype)
        masters = take_masters(model)
        groups = list(parameter_groups(model, settings))
        if not groups:
            raise ModelError(
                f"{name} must have weights that require gradients; got none. Call "
                "requires_grad_() on the module, or give a folder."
            )
        are_rounded = any(p.requires_grad and p.dtype != torch.float32 for p in model.parameters())
        self.optimizer: torch.optim.AdamW | MasterAdamW
        if on_host or are_rounded or parallel.optimizer_states != "fp32":
            self.optimizer = MasterAdamW(
                groups,
                betas=settings.betas,
                device=torch.device("cpu") if on_host else None,
                masters=masters,
                # Gradients of whole weights are summed over the ranks where the weights are.
                sums_on_device=not parallel.offload_gradients
                or (self.shards.world.size > 1 and not is_split),
                host_share=parallel.offload_share,
                states=parallel.optimizer_states,
            )
        else:
            self.optimizer = torch.optim.AdamW(groups, betas=settings.betas, fused=True)
            release(self.parameters)
        self._set_learning_rates()

    def schedule(self, num_steps: int) -> None:
        """Set the length of the learning rate's schedule, in optimizer steps."""
        self.num_steps = num_steps
        self._set_learning_rates()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Every tensor that is trained."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def learning_rate(self) -> float:
        """Of the next step: the adapters' if there are any, else the full weights'."""
        return float(self.optimizer.param_groups[-1]["lr"])

    def backward(
        self, loss_sum: Tensor, denominator: float, *, weight: float = 1.0, is_last: bool = True
    ) -> None:
        """Add the gradient of weight * loss_sum / denominator.

        Args:
            loss_sum: a sum over tokens or rows of one micro-batch.
            denominator: their count over the whole step: every micro-batch, every rank.
            weight: 0 where this rank only keeps in step with the others.
            is_last: whether it is the step's last backward on every rank; gradients of split
                weights may be reduced only then.
        Raises:
            ModelError: the rows use no weight that is trained, in a model split over ranks; or
                another learner was made of the model since, which has taken over its gradients.
        """
        self.times_used += 1
        if is_superseded(self.optimizer, self.parameters):
            raise ModelError(
                f"{self.name}: a model must be trained by the last learner that was made of it; "
                "got an earlier one. Use the newest engine, or give each a copy of the model."
            )
        if not loss_sum.requires_grad:
            self._require_unsplit()
            return
        self.shards.before_backward(last=is_last)
        factor = weight * (self.scaler.scale if self.scaler is not None else 1.0)
        (loss_sum * (factor / denominator) if factor != 1.0 else loss_sum / denominator).backward()

    def _require_unsplit(self) -> None:
        if self.shards.is_split and self.shards.world.size > 1:
            raise ModelError(
                f"{self.name}: a micro-batch of a sharded model must use a weight that is trained; "
                "got rows that use none. Train layers that all rows use (lora.targets), or use "
                "ZeRO stage 0."
            )

    def finished_gradients(self) -> list[Tensor]:
        """After the last backward: this rank's pieces of the gradients that the step will use."""
        self.shards.reshard()
        if isinstance(self.optimizer, MasterAdamW):
            if self.shards.sums_gradients:
                return self.optimizer.collect_sums(self.shards.sum_gradients)
            return self.optimizer.collect()
        self.shards.finish_gradients(self.parameters)
        return [local(p.grad) for p in self.parameters if p.grad is not None]

    def step(self) -> float:
        """Clip, update, drop the gradient. Returns the gradient's norm before the clip.

        Raises:
            BadStepError: the gradient is not finite, or out of line; no weight has changed.
        """
        gradients = self.finished_gradients()
        norm = self.sound_norm(gradients)
        self.apply(gradients, norm)
        return norm

    def sound_norm(self, gradients: list[Tensor]) -> float:
        """The norm of `finished_gradients`, the same number on every rank. Weights that no rank has
        used lose their gradient of zeros, so that the optimizer leaves them.

        Raises:
            BadStepError: it is not finite, or out of line; the gradients are forgotten.
        """
        norm, unused = self.shards.gradient_norm(gradients)
        if not math.isfinite(norm):
            self.forget()
            raise BadStepError(
                f"{self.name}: the gradient must be finite; got norm {norm} at optimizer "
                f"step {self.steps_taken + 1}. Lower the learning rate ({self.learning_rate:.3g})."
            )
        limit = self.spikes.limit
        self.spikes.add(norm)
        if norm > limit:
            self.forget()
            raise BadStepError(
                f"{self.name}: the gradient's norm must be at most {limit:.3g}, within "
                f"guards.spike_sigma={self.spikes.sigma:g} of the last steps'; got {norm:.3g}. "
                "Look at the rows, or raise it (0 takes any)."
            )
        for parameter in unused:
            if isinstance(self.optimizer, MasterAdamW):
                self.optimizer.drop(parameter)
            parameter.grad = None
        return norm

    def apply(self, gradients: list[Tensor], norm: float) -> None:
        """Clip `finished_gradients`, whose norm is sound, update, and forget them."""
        self.times_used += 1
        # torch.nn.utils.clip_grad_norm_'s rule, on this rank's pieces.
        scale = min(1.0, self.settings.max_grad_norm / (norm + 1e-6))
        if isinstance(self.optimizer, MasterAdamW):
            self.optimizer.step(scale)
        else:
            if scale < 1.0 and gradients:
                torch._foreach_mul_(gradients, scale)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.shards.forget_gradients()
        self.steps_taken += 1
        self._set_learning_rates()

    def forget(self) -> None:
        """Drop the gradients and gathered weights."""
        self.times_used += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.shards.forget_gradients()
        self.shards.reshard()

    def missing_state_bytes(self) -> int:
        """Memory on the weights' device that the first step will take for optimizer states."""
        if isinstance(self.optimizer, MasterAdamW):
            return 0
        return sum(
            2 * local(p).numel() * p.element_size()
            for p in self.parameters
            if p not in self.optimizer.state
        )

    @property
    def masters(self) -> dict[nn.Parameter, Tensor]:
        """Float32 masters of weights that are rounded to another type; empty if none is."""
        if isinstance(self.optimizer, MasterAdamW) and not self.shards.is_split:
            return self.optimizer.masters
        return {}

    def exact(self) -> AbstractContextManager[None]:
        """Within: the model's weights are the masters, to be saved; nothing may compute."""
        return exactly(self.masters)

    def state_tensors(self) -> dict[str, Tensor]:
        """AdamW's moments by parameter name, split as the weights are, and the count of steps."""
        tensors = {
            "steps_taken": torch.tensor(self.steps_taken),
            "recent_norms": torch.tensor(self.spikes.history(), dtype=torch.float64),
        }
        for name, parameter in self._named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if key != "master":  # these are the weights
                    tensors[f"{key}.{name}"] = value
        if self.shards.quantized is not None:
            residuals = self.shards.quantized.residuals()
            tensors |= {f"residual.{name}": value for name, value in residuals.items()}
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, Tensor | Saved]) -> None:
        """Continue from `state_tensors` of the same model.

        Raises:
            CheckpointError: the moments are of another model.
        """
        residuals: dict[str, Tensor | Saved] = {}
        moments: dict[str, dict[str, Tensor | Saved]] = {}
        for key, value in tensors.items():
            kind, _, name = key.partition(".")
            if key == "steps_taken":
                self.steps_taken = int(whole_of(value))
            elif key == "recent_norms":
                self.spikes.restore(whole_of(value).tolist())
            elif kind == "residual":
                residuals[name] = value
            else:
                moments.setdefault(name, {})[kind] = value
        named = dict(self._named_parameters())
        for name, saved in moments.items():
            self._require_fits(name, saved, named.get(name))
            self._load_moments(named[name], saved)
        if self.shards.quantized is not None:
            self.shards.quantized.restore(residuals)
        self._set_learning_rates()

    def _require_fits(
        self, name: str, saved: Mapping[str, Tensor | Saved], parameter: nn.Parameter | None
    ) -> None:
        for kind, value in saved.items():
            # Scales of 8-bit moments have the weight's rows.
            rows = 1 if kind.endswith("_scale") else None
            fits = parameter is not None and (
                not value.dim() or value.shape[:rows] == parameter.shape[:rows]
            )
            if not fits:
                raise CheckpointError(
                    f"the optimizer state of {self.name} must fit the model; got {kind}.{name} of "
                    f"shape {tuple(value.shape)}. The checkpoint is of another model: use another "
                    "--output-dir."
                )

    def _load_moments(self, parameter: nn.Parameter, saved: Mapping[str, Tensor | Saved]) -> None:
        """Copy a weight's state, which may have been saved by another kind of optimizer."""
        state: Any = self.optimizer.state[parameter]
        ours = isinstance(self.optimizer, MasterAdamW)
        device = local(state["master"] if ours else parameter).device
        pieces = {
            kind: part_of(value, parameter).to(device) if value.dim() else whole_of(value)
            for kind, value in saved.items()
        }
        if isinstance(self.optimizer, MasterAdamW):
            self.optimizer.state[parameter].load(pieces)
            return
        for kind, value in exact_moments(pieces).items():
            state[kind] = as_piece(value.clone(), parameter) if value.dim() else value.clone()

    def weights(self) -> dict[str, Tensor]:
        """The trained weights by name, split as they are, to save: the float32 masters where the
        model computes with rounded weights, so that a run may continue in another type."""
        named = self._named_parameters()
        if isinstance(self.optimizer, MasterAdamW):
            return {name: self.optimizer.state[parameter]["master"] for name, parameter in named}
        return {name: parameter.detach() for name, parameter in named}

    def load_weights(self, tensors: Mapping[str, Tensor | Saved]) -> None:
        """Copy saved weights into the model, in place."""
        parameters = dict(self._named_parameters())
        for name, tensor in tensors.items():
            fill(parameters[name], tensor)
            if isinstance(self.optimizer, MasterAdamW):
                fill(self.optimizer.state[parameters[name]]["master"], tensor)

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        self.shards.reshard()
        return ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)

    def _set_learning_rates(self) -> None:
        factor = 1.0
        if self.num_steps is not None:
            factor = learning_rate_factor(self.steps_taken, self.num_steps, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
