"""Convolutions and recurrences against loops in float64, and against themselves in other modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.ops import native
from tandem.ops.attention_context import (
    Before,
    Decode,
    KVMemory,
    LayerShape,
    Packed,
    Recording,
    StateShape,
    attending,
)
from tandem.ops.recurrence import causal_conv, recurrence, sigmoid, softplus

CPU = torch.device("cpu")
bitwise = pytest.mark.skipif(not native.available(), reason=native.why_not() or "available")
SEGMENTS = {
    "whole": ((7, 30, 1, 50), (-1, -1, -1, -1)),
    "of one prompt": ((20, 5, 3, 9, 40), (-1, 0, 0, 0, -1)),
    "of beginnings": ((17, 1, 33, 2, 1), (-1, 0, 1, 1, 0)),
}
"""Lengths of segments, and the segment that each continues."""


@dataclass
class Case:
    """Shared heads, heads, widths of a key and of a value; whether the delta rule writes."""

    groups: int
    heads: int
    keys: int
    values: int
    delta: bool

    def inputs(self, tokens: int, seed: int = 0) -> list[Tensor]:
        g = torch.Generator().manual_seed(seed)
        q, k = (torch.randn(tokens, self.groups, self.keys, generator=g) for _ in range(2))
        v = torch.randn(tokens, self.heads, self.values, generator=g)
        decay, beta = (torch.rand(tokens, self.heads, generator=g) for _ in range(2))
        made = [q, F.normalize(k, dim=-1), v, -decay]
        return [*made, beta] if self.delta else made


CASES = {
    "delta rule": Case(2, 4, 8, 8, True),
    "odd widths": Case(1, 3, 5, 40, True),
    "wide": Case(2, 2, 128, 64, True),
    "no delta rule": Case(1, 4, 24, 17, False),
}


def step_over(segments: str) -> Packed:
    lengths, prefixes = SEGMENTS[segments]
    return Packed.of_lengths(lengths, CPU, prefixes if max(prefixes) >= 0 else None)


def looped(inputs: Sequence[Tensor], segments: str) -> Tensor:
    """The formula, a token at a time; u as the delta rule writes it, or v."""
    q, k, v, decay, *rest = inputs
    shared = v.shape[1] // q.shape[1]
    q, k = q.repeat_interleave(shared, 1), k.repeat_interleave(shared, 1)
    out, lasts, at = [], list[Tensor](), 0
    for length, prefix in zip(*SEGMENTS[segments], strict=True):
        state = lasts[prefix] if prefix >= 0 else q.new_zeros(*q.shape[1:], v.shape[2])
        for t in range(at, at + length):
            state = state * decay[t].exp()[:, None, None]
            found = torch.einsum("hkv,hk->hv", state, k[t])
            u = rest[0][t, :, None] * (v[t] - found) if rest else v[t]
            state = state + torch.einsum("hk,hv->hkv", k[t], u)
            out.append(torch.einsum("hkv,hk->hv", state, q[t]))
        lasts.append(state)
        at += length
    return torch.stack(out)


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, segments: str) -> Tensor:
    out, rows, at = [], list[list[Tensor]](), 0
    for length, prefix in zip(*SEGMENTS[segments], strict=True):
        row = list(rows[prefix]) if prefix >= 0 else []
        for t in range(at, at + length):
            row.append(x[t])
            taken = zip(reversed(row), reversed(weight.unbind(1)), strict=False)
            total = torch.stack([a * b for a, b in taken]).sum(0)
            total = total if bias is None else total + bias
            out.append(F.silu(total) if silu else total)
        rows.append(row)
        at += length
    return torch.stack(out)


def assert_near(ours: Tensor, theirs: Tensor, eps: float) -> None:
    with torch.no_grad():
        apart, size = (ours.double() - theirs).abs().max(), theirs.abs().max()
    assert float(apart) <= eps * float(size)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
@pytest.mark.parametrize("name", CASES)
def test_what_is_no_number_reaches_later_tokens_of_its_sequence_alone(
    name: str, broken: float
) -> None:
    case, lengths, at = CASES[name], (10, 20, 90), 17
    step = Packed.of_lengths(lengths, CPU)
    names = ("q", "k", "v", "decay", "beta")
    with attending(step):
        whole = recurrence(0, *case.inputs(sum(lengths)))
        for which in names[: 5 if case.delta else 4]:
            inputs = case.inputs(sum(lengths))
            inputs[names.index(which)][at] = -broken
            out = recurrence(0, *inputs)
            untouched = torch.cat([out[:at], out[30:]]) - torch.cat([whole[:at], whole[30:]])
            assert float(untouched.abs().max()) < 1e-5, which
            is_reset = which == "decay" and broken == torch.inf  # e^-inf lets nothing through
            assert is_reset or not bool(out[at].isfinite().any()), which


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("name", CASES)
def test_a_recurrence_is_the_loop_and_so_is_its_gradient(
    name: str, segments: str, arithmetic: str
) -> None:
    ours = [x.requires_grad_() for x in CASES[name].inputs(sum(SEGMENTS[segments][0]))]
    exact = [x.detach().double().requires_grad_() for x in ours]
    with attending(step_over(segments)):
        out = recurrence(0, *ours)
    theirs = looped(exact, segments)
    assert_near(out, theirs, 2e-6)
    weights = torch.randn_like(out)
    found = torch.autograd.grad((out * weights).sum(), ours)
    for one, other in zip(found, torch.autograd.grad((theirs * weights).sum(), exact), strict=True):
        assert_near(one, other, 5e-6)


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize(
    ("channels", "width", "biased", "silu"),
    [(5, 3, False, False), (300, 4, True, True), (16, 4, False, True), (33, 2, True, False)],
)
def test_a_convolution_is_the_loop_and_so_is_its_gradient(
    channels: int, width: int, biased: bool, silu: bool, segments: str, arithmetic: str
) -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(sum(SEGMENTS[segments][0]), channels, generator=g)
    ours = [x, torch.randn(channels, width, generator=g), torch.randn(channels, generator=g)]
    ours = [tensor.requires_grad_() for tensor in ours[: 3 if biased else 2]]
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    with attending(step_over(segments)):
        out = causal_conv(0, ours[0], ours[1][:, None], ours[2] if biased else None, silu=silu)
    theirs = convolved(exact[0], exact[1], exact[2] if biased else None, silu, segments)
    assert_near(out, theirs, 1e-6)
    weights = torch.randn_like(out)
    found = torch.autograd.grad((out * weights).sum(), ours)
    for one, other in zip(found, torch.autograd.grad((theirs * weights).sum(), exact), strict=True):
        assert_near(one, other, 3e-6)


def test_strong_decays_and_no_tokens_are_no_special_case(arithmetic: str) -> None:
    inputs = CASES["delta rule"].inputs(sum(SEGMENTS["whole"][0]))
    inputs[3] = inputs[3] * 80  # a state is forgotten at once, and its sums are large
    ours = [x.requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in ours]
    with attending(step_over("whole")):
        out = recurrence(0, *ours)
    theirs = looped(exact, "whole")
    assert_near(out, theirs, 2e-6)
    for one, other in zip(
        torch.autograd.grad(out.sum(), ours), torch.autograd.grad(theirs.sum(), exact), strict=True
    ):
        assert_near(one, other, 1e-5)
    with attending(Packed.of_lengths([0], CPU)):
        assert recurrence(0, *(x[:0] for x in ours)).shape == (0, 4, 8)
        assert causal_conv(0, torch.ones(0, 6), torch.ones(6, 4), None, silu=True).shape == (0, 6)


@bitwise
@pytest.mark.parametrize("segments", ["of one prompt", "of beginnings"])
def test_what_continues_a_segment_has_the_bits_of_the_whole_sequence(segments: str) -> None:
    step, case = step_over(segments), CASES["delta rule"]
    inputs = case.inputs(sum(SEGMENTS[segments][0]))
    x, weight = torch.randn(len(inputs[0]), 20), torch.randn(20, 4)
    whole = step.whole()
    with attending(step):
        shared = recurrence(0, *inputs), causal_conv(0, x, weight, None, silu=True)
    with attending(whole.packed):
        apart = (
            recurrence(0, *(part[whole.tokens] for part in inputs)),
            causal_conv(0, x[whole.tokens], weight, None, silu=True),
        )
    for one, other in zip(shared, apart, strict=True):
        assert torch.equal(one, other[whole.back])


@bitwise
def test_threads_change_no_bit(threads: Callable[[int], None]) -> None:
    segments, case = "of one prompt", CASES["wide"]
    inputs = [x.requires_grad_() for x in case.inputs(sum(SEGMENTS[segments][0]))]
    x = torch.randn(len(inputs[0]), 600, requires_grad=True)
    weight = torch.randn(600, 4, requires_grad=True)
    found = []
    for count in (1, 2):
        threads(count)
        with attending(step_over(segments)):
            outs = recurrence(0, *inputs), causal_conv(0, x, weight, None, silu=True)
        total = outs[0].square().sum() + outs[1].square().sum()
        found.append([*outs, *torch.autograd.grad(total, [*inputs, x, weight])])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_and_single_tokens_go_on_from_the_state(arithmetic: str, dtype: torch.dtype) -> None:
    """Two sequences: a first part, a second one, then token by token; in slots that held others."""
    lengths, case, channels = (37, 20), CASES["odd widths"], 50
    inputs = case.inputs(sum(lengths))
    x = torch.randn(sum(lengths), channels).to(dtype)
    weight = torch.randn(channels, 4).to(dtype)
    with attending(Packed.of_lengths(lengths, CPU)):
        whole = recurrence(0, *inputs), causal_conv(0, x, weight, None, silu=True)
    state = StateShape((3, channels), (case.heads, case.keys, case.values))
    memory = KVMemory([LayerShape(state=state)], 1, dtype=dtype, device=CPU, num_slots=3)
    for tensor in memory.states[0]:
        tensor.fill_(7.0)
    slots, tables = torch.tensor([2, 0]), torch.zeros(2, 3, dtype=torch.int32)
    made: list[list[tuple[Tensor, Tensor]]] = [[], []]

    def run(step: Packed | Decode, at: Sequence[tuple[int, int, int]]) -> None:
        """Tokens of rows: (row, from, to)."""
        index = torch.cat([torch.arange(a, b) + row * lengths[0] for row, a, b in at])
        with attending(step):
            out = recurrence(0, *(part[index] for part in inputs))
            conv = causal_conv(0, x[index], weight, None, silu=True)
        ends = [0, *torch.tensor([b - a for _, a, b in at]).cumsum(0).tolist()]
        for (row, _, _), (a, b) in zip(at, pairwise(ends), strict=True):
            made[row].append((out[a:b], conv[a:b]))

    for starts, counts in [((0, 0), (16, 1)), ((16, 1), (16, 2))]:
        plain = Packed.of_lengths(counts, CPU)
        before = Before(tables, starts, counts, CPU) if any(starts) else None
        longest = max(a + b for a, b in zip(starts, counts, strict=True))
        step = Packed(plain.cu_seqlens, longest, memory, tables, before=before, slots=slots)
        run(step, [(row, starts[row], starts[row] + counts[row]) for row in (0, 1)])
    at = [32, 3]
    while live := [row for row in (0, 1) if at[row] < lengths[row]]:
        positions = torch.tensor([at[row] for row in live])
        run(
            Decode(positions, tables[live], memory, slots[live]),
            [(row, at[row], at[row] + 1) for row in live],
        )
        at = [n + (row in live) for row, n in enumerate(at)]
    for number, theirs in enumerate(whole):
        ours = torch.cat([part[number] for row in made for part in row])
        if arithmetic == "native":
            assert torch.equal(ours, theirs)
        else:
            assert_near(ours, theirs.double(), 1e-2 if number and dtype != torch.float32 else 2e-6)
    assert bool((memory.states[0][1][1] == 7.0).all())  # nobody's


def test_slots_are_copied_for_samples_of_one_prompt() -> None:
    shapes = [LayerShape(2, 4, 4), LayerShape(state=StateShape((3, 5), (2, 4, 4)))]
    memory = KVMemory(shapes, 2, dtype=torch.float32, device=CPU, num_slots=4)
    for tensor in memory.states[1]:
        tensor.copy_(torch.randn_like(tensor))
    before = [tensor.clone() for tensor in memory.states[1]]
    memory.copy_states(torch.tensor([1, 1]), torch.tensor([3, 0]))
    for tensor, old in zip(memory.states[1], before, strict=True):
        assert torch.equal(tensor, old[[1, 1, 2, 1]])
    assert shapes[1].state.bytes_per_sequence(torch.bfloat16) == 15 * 2 + 32 * 4


def test_a_recording_learns_what_a_layer_keeps() -> None:
    case = CASES["odd widths"]
    step = Recording(Packed.of_lengths([3], CPU))
    with attending(step):
        recurrence(4, *case.inputs(3))
        causal_conv(4, torch.randn(3, 6), torch.randn(6, 4), None, silu=False)
        causal_conv(5, torch.randn(3, 8), torch.randn(8, 3), None, silu=False)
    assert step.states == {4: StateShape((3, 6), (3, 5, 40)), 5: StateShape((2, 8))}


def test_gates_are_torchs(arithmetic: str) -> None:
    x = torch.linspace(-90, 90, 3 * 37).view(37, 3).requires_grad_()
    bias = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    exact = x.detach().double().requires_grad_()
    bias64 = bias.detach().double().requires_grad_()
    pairs = [
        (sigmoid(x), torch.sigmoid(exact)), (softplus(x, bias), F.softplus(exact + bias64)),
    ]  # fmt: skip
    for ours, theirs in pairs:
        assert_near(ours, theirs, 1e-6)
    ours = torch.autograd.grad(sum(one.sum() for one, _ in pairs), [x, bias])
    theirs = torch.autograd.grad(sum(other.sum() for _, other in pairs), [exact, bias64])
    for one, other in zip(ours, theirs, strict=True):
        assert_near(one, other, 1e-6)


def test_a_convolution_over_no_channels(arithmetic: str) -> None:
    x, weight = torch.empty(4, 0, requires_grad=True), torch.empty(0, 1, 3, requires_grad=True)
    packed = Packed.of_lengths([3, 1], CPU)
    for step in (packed, Recording(packed)):
        with attending(step):
            made = causal_conv(0, x, weight, None, silu=True)
        found = torch.autograd.grad(made.sum(), (x, weight), allow_unused=True)
        assert (made.shape, [one is None or one.shape for one in found]) == (
            (4, 0), [(4, 0), (0, 1, 3)]
        )  # fmt: skip


def test_gates_of_no_heads(arithmetic: str) -> None:
    x, bias = torch.empty(4, 0, requires_grad=True), torch.empty(0, requires_grad=True)
    made = softplus(x, bias) + sigmoid(x)
    found = torch.autograd.grad(made.sum(), (x, bias))
    assert [one.shape for one in (made, *found)] == [(4, 0), (4, 0), (0,)]


@bitwise
def test_operands_that_do_not_fit_are_named() -> None:
    q, k, v, decay, beta = CASES["delta rule"].inputs(4)
    with attending(Packed.of_lengths([4], CPU)):
        with pytest.raises(RuntimeError, match="with H a multiple of G"):
            recurrence(0, q, k, v[:, :3], decay, beta)
        with pytest.raises(RuntimeError, match="a weight \\(C, W\\), W of 1 to 8"):
            causal_conv(0, torch.randn(4, 6), torch.randn(6, 9), None, silu=True)
    memory = KVMemory(
        [LayerShape(state=StateShape((3, 6)))], 1, dtype=torch.float32, device=CPU, num_slots=2
    )  # fmt: skip
    step = Decode(torch.tensor([0]), torch.zeros(1, 1).int(), memory, torch.tensor([2]))
    with attending(step), pytest.raises(RuntimeError, match="slots below 2; got 2"):
        causal_conv(0, torch.randn(1, 6), torch.randn(6, 4), None, silu=True)
