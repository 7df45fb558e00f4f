"""The two halves of a decoder layer on a CPU, before and after attention, as an operation each.

They compute what the operations of `dense` compute one by one, to the last bit, over blocks of rows
that stay in the second cache (`csrc/layers.cpp`); their gradients agree to rounding. A weight may
have an adapter beside it, or be kept in another form and unpacked on use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.ops import native, summed
from tandem.ops.gpu import Sums, opened_sums


class Norm(NamedTuple):
    """A root-mean-square norm, as `dense.rms_norm` takes it."""

    weight: Tensor
    eps: float
    unit_offset: bool


class Adapter(NamedTuple):
    """What a weight (out, in) has beside it: the product by scale * up @ down is added to its own,
    rounded after every step (arXiv:2106.09685).

    down: (rank, in). up: (out, rank). Both of the weight's dtype.
    """

    down: Tensor
    up: Tensor
    scale: float


class Stored(NamedTuple):
    """A frozen weight in another form: `unpack(*tensors, dtype)` makes the weight itself, again in
    the backward pass, which keeps only the tensors."""

    tensors: tuple[Tensor, ...]
    unpack: Callable[..., Tensor]


Weight = Tensor | Stored
Adapters = Sequence[Adapter | None]


def takes(x: Tensor) -> bool:
    """Whether these operations compute on such a tensor."""
    return x.is_cpu and x.dtype in (torch.float32, torch.bfloat16) and native.available()


def before_attention(
    x: Tensor,
    norm: Norm,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None],
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    adapters: Adapters = (None, None, None),
    asked: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values of x's norm, the first two turned by rotary positions.

    Args:
        x: (..., D), N rows in all.
        weights: (Hq * head_dim, D) and twice (Hkv * head_dim, D), of x's dtype.
        biases: one for each weight, or None for each.
        cos, sin: (N, R) of x's dtype.
        adapters: of each weight.
        asked: (K,) int64, the rows whose queries are wanted; None: all.
    Returns:
        (N, Hq, head_dim), twice (N, Hkv, head_dim), and x, to be added after attention: so its
        gradient there and here are added as they are made. Queries and x are of the rows `asked`.
    """
    if asked is not None and x.dtype != torch.float32 and torch.is_grad_enabled():
        # Gradients by queries alone are rounded before they are added, which would show here.
        q, k, v, x = before_attention(x, norm, weights, biases, cos, sin, head_dim, adapters)
        return q.index_select(0, asked), k, v, x.index_select(-2, asked)
    if asked is not None:
        none, no_bias = x.new_empty(0, x.shape[-1]), None if biases[0] is None else x.new_empty(0)
        q, _, _, residual = before_attention(
            x.index_select(-2, asked), norm, [weights[0], none, none],
            [biases[0], no_bias, no_bias], cos[asked], sin[asked], head_dim,
            [adapters[0], None, None],
        )  # fmt: skip
        _, k, v, _ = before_attention(
            x, norm, [none, *weights[1:]], [no_bias, *biases[1:]], cos, sin, head_dim,
            [None, *adapters[1:]],
        )  # fmt: skip
        return q, k, v, residual
    if _are_plain(weights, adapters):
        return native.op("before_attention")(x, *norm, weights, biases, cos, sin, head_dim, [], [])
    made, tensors = _flattened(weights, adapters)
    if not _is_differentiated(x, norm.weight, *biases, *tensors):
        own, beside, scales = made.of(tensors, x.dtype)
        return native.op("before_attention")(
            x, *norm, own, biases, cos, sin, head_dim, beside, scales
        )
    return _Before.apply(x, *norm, cos, sin, head_dim, made, *biases, *tensors)


def after_attention(
    attended: Tensor,
    residual: Tensor,
    out: tuple[Weight, Tensor | None],
    norm: Norm,
    gate: Weight,
    up: Weight,
    down: Weight,
    tanh: bool,
    adapters: Adapters = (None, None, None, None),
    *,
    recomputes: bool = False,
) -> Tensor:
    """h + down(act(gate) * up) of h's norm, where h = residual + out(attended).

    Args:
        attended: (..., A). residual: (..., D), as many rows.
        out: weight (D, A) and bias (D,). gate, up: (I, D). down: (D, I).
        tanh: act is the tanh GELU, else SiLU.
        adapters: of out, gate, up and down, as in `before_attention`.
        recomputes: gate and up are computed again in the backward pass rather than kept.
    Returns:
        (..., D), shaped as the residual.
    """
    weight, bias = out
    weights = weight, gate, up, down
    if _are_plain(weights, adapters):
        return native.op("after_attention")(
            attended, residual, weight, bias, *norm, gate, up, down, tanh, recomputes, [], []
        )
    made, tensors = _flattened(weights, adapters)
    if not _is_differentiated(attended, residual, bias, norm.weight, *tensors):
        (weight, gate, up, down), beside, scales = made.of(tensors, residual.dtype)
        return native.op("after_attention")(
            attended, residual, weight, bias, *norm, gate, up, down, tanh, recomputes,
            beside, scales,
        )  # fmt: skip
    return _After.apply(attended, residual, bias, *norm, tanh, recomputes, made, *tensors)


def before_backward(
    given: Sequence[Tensor | None],
    x: Tensor,
    norm: tuple[Tensor, float, bool],
    weights: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    needed: Sequence[bool],
    sums: Sums,
    adapters: Sequence[Tensor | None] = (),
    scales: Sequence[float] = (),
    rows: Tensor | None = None,
) -> list[Tensor | None]:
    """Gradients of `before_attention`'s x, norm, weights, biases and adapters, in this order.

    Args:
        given: of its four results.
        needed: which of them are wanted.
        sums: of the weights.
        adapters, scales: down and up of each weight, None where it has none; a scale for each.
        rows: (N,) int64, those of x that are meant where it holds more, in this order.
    """
    made: list[Tensor | None] = native.op("before_attention_backward")(
        *given,
        x,
        *norm,
        weights,
        cos,
        sin,
        head_dim,
        adapters,
        scales,
        _bits(needed),
        *sums,
        rows,
    )
    return made


def after_backward(
    given: Tensor,
    attended: Tensor,
    hidden: Tensor,
    both: Tensor | None,
    out: Tensor,
    norm: tuple[Tensor, float, bool],
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    tanh: bool,
    needed: Sequence[bool],
    sums: Sums,
    adapters: Sequence[Tensor | None] = (),
    scales: Sequence[float] = (),
    rows: Tensor | None = None,
) -> list[Tensor | None]:
    """Gradients of `after_attention`'s attended, residual, bias, norm, out, gate, up, down and
    adapters, in this order.

    Args:
        hidden, both: the sum behind attention; gate and up side by side.
        needed, sums, adapters, scales: as of `before_backward`.
        rows: (N,) int64, those of hidden and both that are meant where these hold more.
    """
    made: list[Tensor | None] = native.op("after_attention_backward")(
        given,
        attended,
        hidden,
        both,
        out,
        *norm,
        gate,
        up,
        down,
        tanh,
        adapters,
        scales,
        _bits(needed),
        *sums,
        rows,
    )
    return made


class _Made(NamedTuple):
    """How tensors side by side make up weights and the adapters beside them.

    parts: how many tensors each weight takes, and what unpacks them, None for a weight itself.
    scales: of each weight's adapter, None where it has none.
    """

    parts: tuple[tuple[int, Callable[..., Tensor] | None], ...]
    scales: tuple[float | None, ...]

    def of(
        self, tensors: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[list[Tensor], list[Tensor | None], list[float]]:
        """The weights; down and up of each, with None where it has none; a scale for each."""
        weights, place = [], 0
        for count, unpack in self.parts:
            some = tensors[place : place + count]
            weights.append(some[0] if unpack is None else unpack(*some, dtype))
            place += count
        if all(scale is None for scale in self.scales):
            return weights, [], []
        return weights, self.beside(tensors[place:], None), [scale or 0.0 for scale in self.scales]

    def beside(self, adapters: Sequence[Any], without: Any) -> list[Any]:
        """Two for every weight: what is there for its adapter, `without` where it has none."""
        given = iter(adapters)
        return [
            without if scale is None else next(given) for scale in self.scales for _ in range(2)
        ]

    def each(self, tensors: Sequence[Any], stored: Any) -> list[Any]:
        """What is there for each weight, `stored` where it is stored in another form; then
        `beside`'s two for each, where that has adapters."""
        own, place = [], 0
        for count, unpack in self.parts:
            own.append(tensors[place] if unpack is None else stored)
            place += count
        return own + self.beside(tensors[place:], stored)

    def gradients(
        self, own: Sequence[Tensor | None], beside: Sequence[Tensor | None]
    ) -> Iterator[Tensor | None]:
        """The gradient of every tensor, from those of the weights and of `beside`'s."""
        for (count, _), gradient in zip(self.parts, own, strict=True):
            yield from (gradient, *[None] * (count - 1))
        for number, scale in enumerate(self.scales):
            if scale is not None:
                yield from beside[2 * number : 2 * number + 2]


class _Before(torch.autograd.Function):
    """`before_attention` where some weights' gradients go into float32 sums, or with adapters."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Tensor, eps: float, offset: bool, cos: Tensor, sin: Tensor,
        head_dim: int, made: _Made, *others: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        biases, tensors = others[:3], others[3:]
        ctx.save_for_backward(x, norm, cos, sin, *tensors)
        ctx.leaves = tensors  # what was saved may come back as another object
        ctx.rest = eps, offset, head_dim, made
        ctx.set_materialize_grads(False)
        weights, beside, scales = made.of(tensors, x.dtype)
        return native.op("before_attention")(
            x, norm, eps, offset, weights, biases, cos, sin, head_dim, beside, scales
        )

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        _check_first_derivative("before_attention")
        x, norm, cos, sin, *tensors = ctx.saved_tensors
        eps, offset, head_dim, made = ctx.rest
        if all(one is None for one in given[:3]):
            return given[3], *[None] * (len(ctx.needs_input_grad) - 1)
        needs, leaves = ctx.needs_input_grad, made.each(ctx.leaves, None)
        wanted = made.each(needs[11:], stored=False)
        needed = [*needs[:2], *wanted[:3], *needs[8:11], *wanted[3:]]
        weights, beside, scales = made.of(tensors, x.dtype)
        with opened_sums(leaves, wanted, summed.adds()) as sums:
            of_x, of_norm, *others = before_backward(
                given, x, (norm, eps, offset), weights, cos, sin, head_dim, needed, sums, beside,
                scales,
            )  # fmt: skip
        of_tensors = made.gradients(others[:3], others[6:])
        return of_x, of_norm, None, None, None, None, None, None, *others[3:6], *of_tensors


class _After(torch.autograd.Function):
    """`after_attention` where some weights' gradients go into float32 sums, or with adapters."""

    @staticmethod
    def forward(
        ctx: Any, attended: Tensor, residual: Tensor, bias: Tensor | None, norm: Tensor, eps: float,
        offset: bool, tanh: bool, recomputes: bool, made: _Made, *tensors: Tensor,
    ) -> Tensor:  # fmt: skip
        (out, gate, up, down), beside, scales = made.of(tensors, residual.dtype)
        result, hidden, both = native.op("after_attention_kept")(
            attended, residual, out, bias, norm, eps, offset, gate, up, down, tanh, recomputes,
            beside, scales,
        )  # fmt: skip
        ctx.save_for_backward(attended, norm, hidden, both, *tensors)
        ctx.leaves = tensors
        ctx.rest = eps, offset, tanh, made
        return result

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        _check_first_derivative("after_attention")
        attended, norm, hidden, both, *tensors = ctx.saved_tensors
        eps, offset, tanh, made = ctx.rest
        needs, leaves = ctx.needs_input_grad, made.each(ctx.leaves, None)
        wanted = made.each(needs[9:], stored=False)
        weights, beside, scales = made.of(tensors, attended.dtype)
        out, gate, up, down = weights
        with opened_sums(leaves, wanted, summed.adds()) as sums:
            found = after_backward(
                given, attended, hidden, both, out, (norm, eps, offset), gate, up, down, tanh,
                [*needs[:4], *wanted], sums, beside, scales,
            )  # fmt: skip
        of_tensors = made.gradients(found[4:8], found[8:])
        return *found[:4], None, None, None, None, None, *of_tensors


def _check_first_derivative(name: str) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} must be differentiated once; got create_graph=True. Use TANDEM_NATIVE=off."
        )


def _are_plain(weights: Sequence[Weight], adapters: Adapters) -> bool:
    """Whether an operation of its own computes gradients of such weights."""
    return all(adapter is None for adapter in adapters) and all(
        isinstance(weight, Tensor) and not summed.sums(weight) for weight in weights
    )


def _flattened(weights: Sequence[Weight], adapters: Adapters) -> tuple[_Made, list[Tensor]]:
    parts: list[tuple[int, Callable[..., Tensor] | None]] = []
    tensors: list[Tensor] = []
    for weight in weights:
        own = weight.tensors if isinstance(weight, Stored) else (weight,)
        parts.append((len(own), weight.unpack if isinstance(weight, Stored) else None))
        tensors.extend(own)
    for adapter in adapters:
        tensors.extend(() if adapter is None else adapter[:2])
    scales = tuple(None if adapter is None else adapter.scale for adapter in adapters)
    return _Made(tuple(parts), scales), tensors


def _is_differentiated(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )


def _bits(flags: Sequence[bool]) -> int:
    return sum(1 << place for place, flag in enumerate(flags) if flag)
