"""Training on a GPU: streams, offload, packed optimizer states, determinism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tandem.config.optimizer import OptimizerConfig
from tandem.config.parallel import OptimizerStates, ParallelConfig
from tandem.devices import ask_for_determinism
from tandem.engine.forward import response_logprobs
from tandem.engine.learner import Learner
from tandem.objectives.divergence import EXACT, Divergence, ExactKL, Predictions, exact_divergence
from tandem.parallel.lanes import Lane, StreamLane
from tandem.parallel.masters import MasterAdamW
from tandem.parallel.moments import from_8bit, random_bits, to_8bit, to_bf16
from tests.gpu.conftest import DEVICE, IS_DRY, needs_gpu
from tests.models.families import ragged_batch, tiny_model

SETTINGS = OptimizerConfig(learning_rate=1e-3, warmup=0.0)
LENGTHS = (9, 5, 12, 3, 7)


def trained(
    *, states: OptimizerStates = "fp32", offload: bool = False, down: bool = True, steps: int = 3
) -> tuple[Learner, list[float]]:
    """A tiny Llama's learner after some steps, and its losses."""
    torch.manual_seed(3)
    model = tiny_model("llama")
    nn.Module.to(model, DEVICE)
    parallel = ParallelConfig(
        optimizer_states=states,
        offload=("optimizer",) if offload else (),
        offload_gradients=down,
    )
    learner = Learner("actor", model, SETTINGS, parallel=parallel, dtype=torch.bfloat16)
    losses = []
    for seed in range(steps):
        batch = ragged_batch(LENGTHS, seed=seed).to(DEVICE)
        for half in (torch.arange(3), torch.arange(3, 5)):  # two micro-batches
            part = batch.select(half.to(DEVICE))
            loss = -response_logprobs(model, part)[0].sum()
            learner.backward(loss, batch.num_response_tokens)
            losses.append(float(loss.detach()))
        learner.step()
    return learner, losses


def weights(learner: Learner) -> Tensor:
    return torch.cat([w.float().flatten().cpu() for w in learner.weights().values()])


@pytest.mark.parametrize("down", [True, False], ids=["gradients leave", "gradients stay"])
@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_an_offloaded_optimizer_computes_the_same(states: OptimizerStates, down: bool) -> None:
    here, losses = trained(states=states)
    there, found = trained(states=states, offload=True, down=down)
    assert found == pytest.approx(losses, rel=1e-2)
    # AdamW on the host may round otherwise; a step is at most the learning rate.
    assert float((weights(here) - weights(there)).abs().mean()) < 3e-4
    assert isinstance(there.optimizer, MasterAdamW)
    assert all(m.device.type == "cpu" for m in there.optimizer.masters.values())
    assert all(p.device == DEVICE or p.device.type == DEVICE.type for p in there.parameters)


@needs_gpu
def test_an_offloaded_optimizer_leaves_the_device_after_a_step() -> None:
    """Weights in bf16 stay: no masters, moments or sums of gradients."""
    learner, _ = trained(offload=True, down=False)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    num_bytes = sum(p.nbytes for p in learner.parameters)
    del learner
    freed = before - torch.cuda.memory_allocated()
    assert freed < 1.5 * num_bytes + 2**20


@needs_gpu
def test_copies_on_a_stream_arrive_whole_and_in_order() -> None:
    lane, arrived = StreamLane(DEVICE, 2**20), []
    sources = [torch.full((2**16,), float(i), device=DEVICE) for i in range(40)]
    for i, source in enumerate(sources):
        source.mul_(2)  # queued before the copy
        lane.down(
            source, lambda host, i=i: arrived.append((i, float(host.min()), float(host.max())))
        )
        source.mul_(0)  # and after it
    lane.land()
    assert [i for i, *_ in arrived] == list(range(40))
    target = torch.zeros(2**16, device=DEVICE, dtype=torch.bfloat16)
    host = torch.full((2**16,), 3.0)
    lane.up(target, host)
    host.fill_(9.0)  # may change at once
    lane.land()
    assert float(target.float().mean()) == 3.0


def test_a_plain_lane_is_for_one_memory() -> None:
    found: list[Tensor] = []
    Lane().down(torch.ones(2), found.append)
    assert found[0].tolist() == [1.0, 1.0]


def test_packed_moments_have_the_hosts_bits() -> None:
    """The hash is of integers: a device rounds as the host, so a run may move between them."""
    values = torch.randn(8, 300) * torch.logspace(-6, 0, 300)
    step = torch.tensor(5.0)
    bits = random_bits(values.numel(), 7, 2, step)
    there = random_bits(values.numel(), 7, 2, step.to(DEVICE))
    assert torch.equal(there.cpu(), bits)
    assert torch.equal(
        to_bf16(values.flatten().to(DEVICE), there).cpu(), to_bf16(values.flatten(), bits)
    )
    for name in ("exp_avg", "exp_avg_sq"):
        given = values if name == "exp_avg" else values.square()
        ours = to_8bit(name, given.clone(), bits.view_as(given))
        theirs = to_8bit(name, given.to(DEVICE), there.view_as(given))
        assert float((ours[0] != theirs[0].cpu()).float().mean()) < 1e-3, "but for a last bit"
        back = from_8bit(name, *theirs).cpu()
        torch.testing.assert_close(back, from_8bit(name, *ours), rtol=0.15, atol=1e-9)


@pytest.mark.parametrize("placement", EXACT)
def test_an_exact_kl_is_that_of_the_host(placement: ExactKL) -> None:
    """In chunks, with the gradients of states and weights."""
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(shape, generator=generator) for shape in ((9, 8), (40, 8), (9, 6), (40, 6))]
    found = []
    for device in (torch.device("cpu"), DEVICE):
        hidden, weight, others, other = (tensor.to(device) for tensor in made)
        hidden.requires_grad_()
        head = nn.Parameter(weight)
        total, each = exact_divergence(
            Predictions(lambda h, w=head: h @ w.T, hidden),
            Predictions(lambda h, w=other: h @ w.T, others),
            torch.linspace(0, 1, 9, device=device), Divergence(placement), vocabulary=38,
            weights=[head], max_rows=4,
        )  # fmt: skip
        gradients = torch.autograd.grad(total, [hidden, head])
        found.append([x.detach().cpu() for x in (total, each, *gradients)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-4)


@pytest.fixture
def deterministic() -> Iterator[None]:
    fill: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), fill.fill_uninitialized_memory
    ask_for_determinism(DEVICE, strict=True)
    yield
    torch.use_deterministic_algorithms(before[0])
    fill.fill_uninitialized_memory = before[1]


def test_repeated_steps_have_the_same_bits(deterministic: None) -> None:
    assert torch.are_deterministic_algorithms_enabled() is not IS_DRY
    (one, losses), (other, again) = trained(), trained()
    assert losses == again
    assert torch.equal(weights(one), weights(other))
