"""Low-rank adapters, live: y = W x + b + (alpha / rank) B A x, never fused into W.

An adapted layer replaces the linear layer and holds the same weight and bias objects under the same
names, so that the base model's state keeps Hugging Face's names and bits; `lora_A.weight` (rank,
in) and `lora_B.weight` (out, rank) are beside them, as in PEFT. The weight may be quantized
(`frozen`) before or after. `keep_start` keeps a frozen copy of adapters that are trained further.
Source: arXiv:2106.09685. Differs: A starts as torch's linear layers do (PEFT's choice), not normal.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tandem.config.lora import LoraConfig
from tandem.errors import ModelError
from tandem.models.frozen import LinearLayer
from tandem.models.modes import AdapterSwitch, evaluating
from tandem.models.token_layers import (
    attach_token_rows,
    matrices_of,
    start_token_rows,
    token_rows,
)
from tandem.models.token_rows import TokenRows

ALL_LINEAR = "all-linear"
SCALAR_HEAD = "score"
"""What Hugging Face calls the head of a decoder's sequence-classification class."""

_PARTS = (".lora_A", ".lora_B", ".start_a", ".start_b")


class LoraLayer(LinearLayer):
    """The code of both adapted layers: A, B, the scale and the switch.

    Attributes:
        switch: whether forward adds the adapter's output as trained.
        rank, alpha: the update is scaled by alpha / rank.
        start_a, start_b: the adapter that is added while the switch is off; None: nothing.
    """

    start_a: nn.Linear | None
    start_b: nn.Linear | None

    def attach(self, base: nn.Linear | Conv1D, rank: int, alpha: float, dropout: float) -> None:
        """Take over the base layer's parameters, freeze them, add A (zeros) and B (zeros)."""
        self.take_over(base)
        inputs, outputs = _shape(base)
        # With memory even if the base has none yet (meta_init): adapters may be loaded at once.
        device = self.weight.device
        with torch.device("cpu" if device.type == "meta" else device):
            self.lora_A = nn.Linear(inputs, rank, bias=False, dtype=torch.float32)
            self.lora_B = nn.Linear(rank, outputs, bias=False, dtype=torch.float32)
        nn.init.zeros_(self.lora_A.weight)
        nn.init.zeros_(self.lora_B.weight)
        self.lora_dropout = nn.Dropout(dropout)
        self.rank, self.alpha, self.switch = rank, alpha, AdapterSwitch()
        self.start_a = self.start_b = None
        self.train(base.training)

    def adapted(self, x: Tensor, output: Tensor) -> Tensor:
        """Add the adapter's output to the base layer's (..., out), as trained or as it started."""
        acting = self.acting()
        if acting is None:
            return output
        down, up = acting
        x = x.to(down.weight.dtype)  # a base in bf16 beside adapters in float32
        inner = down(self.lora_dropout(x) if self.switch.on else x) * self.scale
        return output + up(inner).to(output.dtype)

    def acting(self) -> tuple[nn.Linear, nn.Linear] | None:
        """A and B as trained, or, with the switch off, as they started; None: nothing to add."""
        if self.switch.on:
            return self.lora_A, self.lora_B
        if self.start_a is None or self.start_b is None:
            return None
        return self.start_a, self.start_b

    @property
    def scale(self) -> float:
        """What B A x is multiplied by."""
        return self.alpha / self.rank

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return self.adapted(x, self.product(x))

    def merged_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """A new tensor: the weight with the adapter merged in, in the weight's layout.

        A quantized weight is dequantized first, and the sum is not quantized again.

        Args:
            dtype: of the result, which is summed in float32; None: the weight's.
        """
        down, up = self.lora_A.weight.float(), self.lora_B.weight.float()
        # The small factor travels, and the product stays split as B is; of Conv1D, whose weight is
        # split along the other dimension, both do.
        if isinstance(down, DTensor):
            down = down.redistribute(placements=[Replicate()] * down.device_mesh.ndim)
        if isinstance(up, DTensor) and isinstance(self, Conv1D):
            up = up.redistribute(placements=[Replicate()] * up.device_mesh.ndim)
        update: Tensor = (up @ down) * self.scale
        if isinstance(self, Conv1D):
            update = update.T
        merged: Tensor = self.plain_weight().float() + update
        return merged.to(dtype or self.weight.dtype)


class LoraLinear(LoraLayer, nn.Linear):
    """nn.Linear with an adapter."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float) -> None:
        self.attach(base, rank, alpha, dropout)


class LoraConv1D(LoraLayer, Conv1D):
    """GPT-2's Conv1D, a linear layer with its weight stored (in, out), with an adapter."""

    def __init__(self, base: Conv1D, rank: int, alpha: float, dropout: float) -> None:
        self.attach(base, rank, alpha, dropout)


def add_lora(
    model: PreTrainedModel, config: LoraConfig, seed: int, tokens: Sequence[int] = ()
) -> list[str]:
    """Adapt a model in place: base frozen, adapters (and a scalar head) trainable.

    B is zero, so outputs are unchanged; A is uniform in +-1/sqrt(in), from `seed`. Trained rows
    start as the base's.

    Args:
        tokens: whose embeddings, and rows of the vocabulary head, are trained too.
    Returns:
        the names of the adapted layers.
    Raises:
        ModelError: rank 0, a model with adapters already, targets that match nothing, tokens
            that it cannot train.
    """
    names = match_targets(model, config.targets)
    rows = dict.fromkeys(matrices_of(model), tokens) if tokens else {}
    attach_adapters(model, names, config.rank, config.alpha, config.dropout)
    if rows:
        attach_token_rows(model, rows)
        train_adapters(model)
        start_token_rows(model)
    _start_adapters(model, seed)
    return names


@torch.no_grad()
def _start_adapters(model: nn.Module, seed: int) -> None:
    """Initialize A from `seed`, and B to zeros."""
    generator = torch.Generator().manual_seed(seed)
    for _, layer in lora_layers(model):
        start = torch.empty(layer.lora_A.weight.shape)
        nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
        layer.lora_A.weight.copy_(start)
        layer.lora_B.weight.zero_()


def attach_adapters(
    model: PreTrainedModel, names: Sequence[str], rank: int, alpha: float, dropout: float
) -> None:
    """Put zero adapters on the named layers and freeze everything but them and a scalar head.

    Raises:
        ModelError: rank below 1, or adapters already there.
    """
    if rank < 1:
        raise ModelError(f"lora.rank must be at least 1 to adapt; got {rank}. Set --lora.rank.")
    if is_adapted(model):
        raise ModelError(
            "a model must get its adapters once; got one that has adapters. Merge it first."
        )
    for name in names:
        base = model.get_submodule(name)
        layer: LoraLayer
        if isinstance(base, nn.Linear):
            layer = LoraLinear(base, rank, alpha, dropout)
        else:
            assert isinstance(base, Conv1D), name
            layer = LoraConv1D(base, rank, alpha, dropout)
        model.set_submodule(name, layer)
    train_adapters(model)


def train_adapters(model: PreTrainedModel) -> None:
    """Freeze everything but the adapters, rows of tokens and a scalar head, and train those; in
    place."""
    model.requires_grad_(False)
    for parameter in lora_parameters(model):
        parameter.requires_grad_(True)
    for rows in token_rows(model):
        rows.weight.requires_grad_(True)
    head = scalar_head(model)
    if head is not None:
        head.requires_grad_(True)


def keep_start(model: PreTrainedModel) -> None:
    """Keep a frozen copy of the adapters, which is used while they are off; in place.

    For adapters that are trained further, where the reference is the policy at the start and not
    the base, and for a reference that moves.
    """
    for _, layer in lora_layers(model):
        layer.start_a, layer.start_b = (
            copy.deepcopy(part).requires_grad_(False) for part in (layer.lora_A, layer.lora_B)
        )
    for rows in token_rows(model):
        rows.keep_start()


def kept_start(model: nn.Module) -> dict[str, Tensor]:
    """The copies of `keep_start`, by the names of the parameters that they are of."""
    kept: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and module.start_a is not None and module.start_b:
            kept[f"{name}.lora_A.weight"] = module.start_a.weight
            kept[f"{name}.lora_B.weight"] = module.start_b.weight
        elif isinstance(module, TokenRows) and module.start is not None:
            kept[f"{name}.weight"] = module.start
    return kept


def match_targets(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """Names of the linear layers that `targets` (`all-linear` or endings of names) match.

    The vocabulary head and the scalar head are never among them. Experts in stacked tensors are
    not linear layers and stay as they are, as in PEFT. A target without a match may be of another
    model of the run (see `require_targets`).

    Raises:
        ModelError: no target matches a linear layer, with the endings that exist.
    """
    linear = adaptable(model)
    chosen = {name for target in targets for name in linear if _is_target(target, name)}
    if not chosen:
        raise _unmatched([model], targets)
    return [name for name in linear if name in chosen]


def require_targets(models: Sequence[PreTrainedModel], targets: Sequence[str]) -> None:
    """Check targets for all models that a run adapts: each matches a linear layer of some model,
    and each model has a layer that matches.

    Raises:
        ModelError: they do not.
    """
    linear = [name for model in models for name in adaptable(model)]
    for target in targets:
        if not any(_is_target(target, name) for name in linear):
            raise _unmatched(models, [target])
    for model in models:
        match_targets(model, targets)


def _is_target(target: str, name: str) -> bool:
    return target in (ALL_LINEAR, name) or name.endswith(f".{target}")


def _unmatched(models: Sequence[PreTrainedModel], targets: Sequence[str]) -> ModelError:
    families = " or ".join(dict.fromkeys(model.config.model_type for model in models))
    endings = sorted({name.rsplit(".", 1)[-1] for model in models for name in adaptable(model)})
    match = "matches" if len(targets) == 1 else "match"
    return ModelError(
        f"lora.targets must match linear layers of {families}; got {' '.join(targets)!r}, which "
        f"{match} none. Use {ALL_LINEAR} or endings among: {', '.join(endings)}."
    )


def adaptable(model: PreTrainedModel) -> list[str]:
    """Names of every plain linear layer but the vocabulary head and the scalar head."""
    heads = {id(model.get_output_embeddings()), id(scalar_head(model))}
    return [
        name
        for name, module in model.named_modules()
        if (isinstance(module, LinearLayer) or type(module) in (nn.Linear, Conv1D))
        and id(module) not in heads
        and not name.endswith(_PARTS)
    ]


def scalar_head(model: PreTrainedModel) -> nn.Linear | None:
    """The head of a sequence-classification model, None for a language model."""
    head = getattr(model, SCALAR_HEAD, None)
    return head if isinstance(head, nn.Linear) else None


def lora_layers(model: nn.Module) -> list[tuple[str, LoraLayer]]:
    """The adapted layers with their names."""
    return [(n, module) for n, module in model.named_modules() if isinstance(module, LoraLayer)]


def is_adapted(model: nn.Module) -> bool:
    """Whether the model has adapters."""
    return any(isinstance(module, LoraLayer) for module in model.modules())


def lora_parameters(model: nn.Module) -> list[nn.Parameter]:
    """A and B of every adapted layer, without trainable rows of tokens and a scalar head."""
    return [
        weight
        for _, layer in lora_layers(model)
        for part in (layer.lora_A, layer.lora_B)
        for weight in part.parameters()
    ]


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within: the model as it started, bit for bit: the base, or with the adapters of `keep_start`;
    in evaluation mode, as a frozen model is.

    This is the reference, without extra memory for a model. Nests, and restores on errors. A scalar
    head stays the trained one. Do not leave it between a gradient-checkpointed forward and its
    backward, which recomputes the forward.
    """
    switches = adapter_switches(model)
    before = [switch.on for switch in switches]
    for switch in switches:
        switch.on = False
    try:
        with evaluating(model) if model.training else nullcontext():
            yield
    finally:
        for switch, was_on in zip(switches, before, strict=True):
            switch.on = was_on


def adapter_switches(model: nn.Module) -> list[AdapterSwitch]:
    """The switches of all adapters and trained rows."""
    return [layer.switch for _, layer in lora_layers(model)] + [
        rows.switch for rows in token_rows(model)
    ]


def _shape(base: nn.Linear | Conv1D) -> tuple[int, int]:
    """(in, out) of a linear layer."""
    return (base.nx, base.nf) if isinstance(base, Conv1D) else (base.in_features, base.out_features)
