"""The actor's forward in training, taken from what generation computed.

Before its first update a policy is the one that sampled, and a token's numbers do not depend on
whether it was decoded or trained. Where the generator kept the states of every token, the layers
need not run again: their last states are read, and the backward pass reads the rest, a layer at a
time, so that besides what was kept no activations are held.

Only attention is computed again, in the backward pass: it is a small part of a layer, and what its
gradient needs is not kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from tandem.models.blocks import decoder_blocks
from tandem.models.cpu_blocks import PlainBlock, plain_block
from tandem.ops import layer, summed
from tandem.ops.attention import attend
from tandem.ops.attention_context import Packed, attending
from tandem.ops.gpu import Sums, opened_sums


class LayerStates(NamedTuple):
    """What one layer computed, a row for each token in the order in which they were run.

    qkv: queries and keys, turned, and values. hidden: the sum behind attention. inner: gate and up.
    out: what the layer gives.
    """

    qkv: Tensor
    hidden: Tensor
    inner: Tensor
    out: Tensor


@dataclass(slots=True)
class KeptStates:
    """The states of a rollout's tokens.

    layers: of each layer. token_ids: of each row. rows: (B, T) int64, the row of each token of the
    rollout's batch, -1 where it was not run.
    """

    layers: list[LayerStates]
    token_ids: Tensor
    rows: Tensor

    def of(self, rows: Tensor, width: int) -> KeptStates:
        """Those of some rows of the batch, trimmed to `width` tokens."""
        return KeptStates(self.layers, self.token_ids, self.rows[rows, :width])

    def release(self) -> None:
        """Free the memory, even if something still refers to this."""
        self.layers.clear()


def state_widths(twin: PreTrainedModel) -> tuple[int, int, int, int]:
    """Numbers of a token in each of `LayerStates`."""
    block = _plain_blocks(twin)[0]
    widths = [linear.out_features for linear in block.linears]
    return sum(widths[:3]), widths[3], widths[4] + widths[5], widths[6]


def replays(twin: PreTrainedModel) -> bool:
    """Whether a Llama-like twin's layers can be read from kept states."""
    blocks = [plain_block(block, twin.dtype) for block in decoder_blocks(twin)]
    return all(block is not None and not block.recomputes for block in blocks)


def replayed_states(
    twin: Any, token_ids: Tensor, positions: Tensor, step: Packed, kept: KeptStates, rows: Tensor
) -> Tensor:
    """`base_forward` of packed tokens (N,) whose states are `rows` (N,) of those kept: the normed
    states of the tokens that `step` wants, with gradient."""
    base = twin.base_model
    assert torch.equal(kept.token_ids[rows], token_ids), "kept states are of other tokens"
    with attending(step):
        x = base.embed_tokens(token_ids[None])
        cos, sin = base.rotary_emb(x, position_ids=positions[None])
        blocks = _plain_blocks(twin)
        weights = [weight for block in blocks for weight in block.weights()]
        plan = _Plan(blocks, step, kept.layers, rows, cos[0], sin[0])
        states = _Replayed.apply(plan, x[0], *weights)
        if step.wanted is not None:
            step.wanted.alone = True
        normed: Tensor = base.norm(states[None])
    return normed[0]


def _plain_blocks(twin: PreTrainedModel) -> list[PlainBlock]:
    found = [plain_block(block, twin.dtype) for block in decoder_blocks(twin)]
    blocks = [block for block in found if block is not None]
    assert len(blocks) == len(found), "states were kept of layers that cannot be replayed"
    return blocks


@dataclass(frozen=True, slots=True)
class _Plan:
    """One micro-batch: its layers, its sequences, and where its tokens' states are."""

    blocks: list[PlainBlock]
    step: Packed
    layers: list[LayerStates]
    rows: Tensor
    cos: Tensor
    sin: Tensor

    @property
    def wanted(self) -> Tensor | None:
        return None if self.step.wanted is None else self.step.wanted.rows

    @property
    def rows_wanted(self) -> Tensor:
        return self.rows if self.wanted is None else self.rows[self.wanted]


class _Replayed(torch.autograd.Function):
    """All layers at once: the embeddings x (N, D) to the last layer's states (K, D)."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, x: Tensor, *weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.plan, ctx.leaves = plan, weights  # what was saved may come back as another object
        return plan.layers[-1].out.index_select(0, plan.rows_wanted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        x, *weights = ctx.saved_tensors
        per_layer = len(weights) // len(plan.blocks)
        needed = ctx.needs_input_grad[2:]
        made: list[Tensor | None] = [None] * len(weights)
        for number in reversed(range(len(plan.blocks))):
            part = slice(number * per_layer, (number + 1) * per_layer)
            given, made[part] = _layer_back(
                plan, number, given, x, weights[part], ctx.leaves[part], needed[part]
            )
        return None, given, *made


def _layer_back(
    plan: _Plan,
    number: int,
    given: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    leaves: Sequence[Tensor],
    needed: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """Gradients of a layer's input (N, D) and of its weights, in the order of `PlainBlock.weights`,
    from that of what it gives: (N, D), or in the last layer (K, D).

    x: (N, D), the first layer's input. Only queries, keys and values are
    gathered; other states are read where they are kept.
    """
    block, kept, rows = plan.blocks[number], plan.layers[number], plan.rows
    wanted = plan.wanted if number == len(plan.blocks) - 1 else None
    norm, q, k, v, _, _, _, out, _, second, gate, up, down = weights
    heads = [weight.shape[0] // block.head_dim for weight in (q, k, v)]
    turned = kept.qkv.index_select(0, rows).view(len(rows), sum(heads), block.head_dim)
    parts, there = [*turned.split(heads, dim=1)], rows
    if wanted is not None:
        parts[0], there = parts[0].index_select(0, wanted), rows[wanted]
    with torch.enable_grad(), attending(plan.step):
        queries, keys, values = (part.detach().requires_grad_() for part in parts)
        attended = attend(block.layer, queries, keys, values, block.kind, wanted)
    mixed = attended.detach().flatten(1)
    four = [leaves[7], *leaves[10:]]
    with _sums(four, [needed[7], *needed[10:]]) as sums:
        of_mixed, of_sum, of_bias, of_second, *of_four = layer.after_backward(
            given, mixed, kept.hidden, kept.inner, out, (second, *block.second), gate, up, down,
            block.tanh, [True, True, needed[8], needed[9], needed[7], *needed[10:]], sums,
            rows=there,
        )  # fmt: skip
    assert of_mixed is not None
    assert of_sum is not None
    of_q, of_k, of_v = torch.autograd.grad(
        attended, (queries, keys, values), of_mixed.view_as(attended)
    )
    inputs, those = (plan.layers[number - 1].out, rows) if number else (x, None)
    with _sums(leaves[1:4], needed[1:4]) as sums:
        before = _Before(
            inputs, those, (norm, *block.first), [q, k, v], plan.cos, plan.sin, block.head_dim,
            needed[:7], sums,
        )  # fmt: skip
        of_x, of_norm, *of_three = before.gradients(of_q, of_k, of_v, of_sum, wanted)
    assert of_x is not None
    of_out, *of_rest = of_four
    return of_x, [of_norm, *of_three, of_out, of_bias, of_second, *of_rest]


@dataclass(frozen=True, slots=True)
class _Before:
    """What of a layer is before attention, as `layer.before_backward` takes it.

    rows: those of x that are meant, all if None. needed: of norm, weights and biases.
    """

    x: Tensor
    rows: Tensor | None
    norm: tuple[Tensor, float, bool]
    weights: Sequence[Tensor]
    cos: Tensor
    sin: Tensor
    head_dim: int
    needed: Sequence[bool]
    sums: Sums

    def gradients(
        self, of_q: Tensor, of_k: Tensor, of_v: Tensor, of_sum: Tensor, wanted: Tensor | None
    ) -> list[Tensor | None]:
        """Gradients of x, norm, weights and biases. Where rows `wanted` alone have queries, they
        are summed as `layer.before_attention` of rows `asked` for sums them, to the bit."""
        if wanted is None:
            return self._back(of_q, of_k, of_v, of_sum)
        if self.x.dtype != torch.float32:
            of_q, of_sum = (
                part.new_zeros(len(self.cos), *part.shape[1:]).index_copy_(0, wanted, part)
                for part in (of_q, of_sum)
            )
            return self._back(of_q, of_k, of_v, of_sum)
        queries, others = self._at(wanted)._only(True, False, False), self._only(False, True, True)
        of_few, norm_of_few, grad_q, _, _, grad_bias_q, _, _ = queries._back(
            of_q, None, None, of_sum
        )
        of_x, norm_of_all, _, grad_k, grad_v, _, grad_bias_k, grad_bias_v = others._back(
            None, of_k, of_v, None
        )
        assert of_x is not None
        assert of_few is not None
        of_x.index_add_(0, wanted, of_few)
        if norm_of_all is not None and norm_of_few is not None:
            norm_of_all += norm_of_few
        return [of_x, norm_of_all, grad_q, grad_k, grad_v, grad_bias_q, grad_bias_k, grad_bias_v]

    def _back(self, *given: Tensor | None) -> list[Tensor | None]:
        return layer.before_backward(
            given, self.x, self.norm, self.weights, self.cos, self.sin, self.head_dim,
            [True, *self.needed], self.sums, rows=self.rows,
        )  # fmt: skip

    def _at(self, places: Tensor) -> _Before:
        """The same of some of its rows."""
        rows = places if self.rows is None else self.rows[places]
        return replace(self, rows=rows, cos=self.cos[places], sin=self.sin[places])

    def _only(self, *chosen: bool) -> _Before:
        """The same of the chosen ones of its three weights."""
        none, (of_norm, *needed) = self.weights[0].new_empty(0, self.x.shape[1]), self.needed
        return replace(
            self,
            weights=[w if this else none for w, this in zip(self.weights, chosen, strict=True)],
            needed=[of_norm, *(n and this for n, this in zip(needed, chosen * 2, strict=True))],
            sums=self.sums.only(chosen),
        )


@contextmanager
def _sums(leaves: Sequence[Tensor], needed: Sequence[bool]) -> Iterator[Sums]:
    """Within: where these weights' gradients are added as they are made: the optimizer's sums of
    bfloat16 weights, and gradients of float32 ones that are there already."""
    adds = summed.adds()
    if any(map(summed.keeps, leaves)):
        with opened_sums(leaves, needed, adds) as opened:
            yield opened
        return
    totals = [
        weight.grad if adds and need and summed.adds_to_grad(weight) else None
        for weight, need in zip(leaves, needed, strict=True)
    ]
    yield Sums(totals)
