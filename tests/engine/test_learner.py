"""Schedules, parameter groups, and gradients that do not depend on how a step is cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig

from tandem.config.engine import engine_settings
from tandem.config.parallel import OptimizerStates, ParallelConfig
from tandem.config.schema import OptimizerConfig, RunConfig
from tandem.engine.ema import MovingAverage
from tandem.engine.forward import Rows
from tandem.engine.learner import Learner, learning_rate_factor
from tandem.engine.oom import MicroBatchBudget
from tandem.engine.parameter_groups import decays, parameter_groups
from tandem.engine.update import LossTerm, MicroBatchLoss, Update, _accumulated
from tandem.errors import CheckpointError, ModelError, NumericsError
from tandem.models.load import new_causal_lm
from tandem.parallel.masters import MasterAdamW
from tandem.parallel.shard import ShardPlan, shard
from tandem.parallel.world import World
from tests.models.decoders import decoder_config
from tests.models.hybrid_families import hybrid_config
from tests.ranks import on_ranks


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedule_rises_then_falls_to_a_tenth(schedule: str) -> None:
    settings = OptimizerConfig(schedule=schedule, warmup=0.1)
    factors = [learning_rate_factor(step, 100, settings) for step in range(101)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10] == pytest.approx(1.0)
    middle, end = {"cosine": (0.55, 0.1), "linear": (0.55, 0.1), "constant": (1.0, 1.0)}[schedule]
    assert factors[55] == pytest.approx(middle)
    assert factors[100] == pytest.approx(end)
    quarter = 10 + 22.5
    if schedule == "cosine":
        expected = 0.1 + 0.9 * (1 + math.cos(math.pi * (32 - 10) / 90)) / 2
        assert factors[32] == pytest.approx(expected)
        assert quarter > 32


@pytest.mark.parametrize("percent", range(1, 100))
def test_warmup_is_the_share_as_it_is_written(percent: int) -> None:
    """0.07 * 100 is a little over 7 in floating point, which must not become an eighth step."""
    settings = OptimizerConfig(schedule="constant", warmup=percent / 100)
    for num_steps in (10, 50, 100, 300, 1000):
        rising = -(-percent * num_steps // 100)
        factors = [learning_rate_factor(step, num_steps, settings) for step in range(num_steps)]
        assert factors[rising - 1] == 1.0
        assert rising == 1 or factors[rising - 2] < 1.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.LayerNorm(2)
        self.lora_A = nn.Parameter(torch.randn(2, 2))
        self.frozen = nn.Parameter(torch.zeros(4, 4), requires_grad=False)


def test_groups_split_by_decay_and_adapter_and_leave_the_frozen_out() -> None:
    model = Model()
    settings = OptimizerConfig(weight_decay=0.1, learning_rate=1e-3, lora_learning_rate=1e-2)
    groups = list(parameter_groups(model, settings))
    found = {(g["weight_decay"], g["lr"]): len(g["params"]) for g in groups}
    assert found == {(0.1, 1e-3): 1, (0.0, 1e-3): 3, (0.1, 1e-2): 1}


@pytest.mark.parametrize(
    ("config", "spared"),
    [
        (lambda: hybrid_config("falcon_mamba"), {"A_log"}),
        (lambda: hybrid_config("zamba"), {"A_log", "D", "dt_proj_bias"}),
        (lambda: hybrid_config("kimi_linear"), {"A_log"}),
        (lambda: hybrid_config("mamba2"), set()),
        (lambda: hybrid_config("recurrent_gemma"), {"input_gate_bias", "recurrent_gate_bias"}),
        (lambda: decoder_config("gpt_oss"), {"gate_up_proj_bias", "down_proj_bias"}),
        (lambda: decoder_config("cohere qk"), {"q_norm.weight", "k_norm.weight"}),
        (lambda: decoder_config("inkling2_text"), {"scale"}),
        (lambda: decoder_config("gpt2"), set()),
    ],
)
def test_what_is_no_matrix_does_not_decay_in_whatever_shape(
    config: Callable[[], PreTrainedConfig], spared: set[str]
) -> None:
    model = new_causal_lm(config(), seed=0)
    for name, parameter in model.named_parameters():
        of_none = name.endswith(tuple(spared)) if spared else False
        assert decays(model, name) == (parameter.dim() > 1 and not of_none), name
    found = {name for name in spared if any(n.endswith(name) for n, _ in model.named_parameters())}
    assert found == spared
    recurrent = [n for n, _ in model.named_parameters() if n.endswith(("A_log", ".D", "dt_bias"))]
    assert not any(decays(model, name) for name in recurrent)


def test_a_scalar_head_and_an_adapter_of_rank_1_decay() -> None:
    model = Model()
    model.layer = nn.Linear(3, 1)
    model.lora_A = nn.Parameter(torch.randn(1, 2))
    assert decays(model, "layer.weight")
    assert decays(model, "lora_A")
    assert not decays(model, "layer.bias")


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises(ModelError, match="test must have weights that require gradients; got none"):
        Learner("test", nn.Linear(3, 2).requires_grad_(False), OptimizerConfig(), 10)


def test_a_step_cut_into_micro_batches_has_the_gradient_of_the_whole() -> None:
    inputs, targets = torch.randn(10, 3), torch.randn(10, 2)
    grads = []
    for cuts in ([10], [4, 6], [1] * 10):
        torch.manual_seed(5)
        model = nn.Linear(3, 2)
        learner = Learner("test", model, OptimizerConfig(), 10)
        for x, y in zip(inputs.split(cuts), targets.split(cuts), strict=True):
            learner.backward((model(x) - y).square().sum(), 10)
        assert model.weight.grad is not None
        grads.append(model.weight.grad.clone())
    torch.testing.assert_close(grads[0], grads[1])
    torch.testing.assert_close(grads[0], grads[2])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_half_a_gradient_that_was_interrupted_is_not_in_the_next_step(
    error: type[BaseException],
) -> None:
    inputs = torch.randn(4, 3)

    def after_a_step(*, is_interrupted: bool) -> torch.Tensor:
        torch.manual_seed(5)
        model = nn.Linear(3, 2)
        learner = Learner("test", model, OptimizerConfig(), 10)
        budget = MicroBatchBudget(engine_settings(RunConfig()), World(), None)
        budget.tokens = 2
        parts = [] if is_interrupted else [None, None]

        def loss(rows: Rows) -> MicroBatchLoss:
            parts.append(None)
            if len(parts) == 2:
                raise error("stopped")
            return MicroBatchLoss(model(inputs[rows.host]).square().sum())

        term = LossTerm([1] * 4, 4.0, loss)
        if is_interrupted:
            with pytest.raises(error, match="stopped"), Update(budget) as update:
                update.learn(learner, [term])
        with Update(budget) as update:
            update.learn(learner, [term])
        return model.weight.detach()

    assert torch.equal(after_a_step(is_interrupted=False), after_a_step(is_interrupted=True))


@pytest.mark.parametrize("kinds", [("fp32", "8bit"), ("8bit", "fp32"), ("bf16", "8bit")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_learner_of_a_model_has_its_whole_gradient(
    dtype: torch.dtype, kinds: tuple[OptimizerStates, OptimizerStates]
) -> None:
    """An earlier one may live on, where a traceback or a notebook still holds it."""
    inputs = torch.randn(4, 3, dtype=dtype)

    def norm_of(*states: OptimizerStates) -> tuple[float, list[Learner]]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)).to(dtype)
        parallel = [ParallelConfig(optimizer_states=kind) for kind in states]
        made = [Learner("test", model, OptimizerConfig(), parallel=p) for p in parallel]
        made[-1].backward(model(inputs).float().pow(3).sum(), 4.0)
        return made[-1].step(), made

    first, last = kinds
    (alone, _), (norm, made) = norm_of(last), norm_of(first, last)
    assert norm == alone > 0
    with pytest.raises(ModelError, match="test: a model must be trained by the last learner"):
        made[0].backward(torch.zeros((), requires_grad=True), 1.0)


class Reads(TorchDispatchMode):
    """Counts the numbers that are read from tensors one by one, and what is put together to be
    read."""

    num = together = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten._local_scalar_dense.default
        self.together += func is torch.ops.aten.stack.default
        return func(*args, **(kwargs or {}))


def test_no_number_is_read_before_all_micro_batches_are_under_way() -> None:
    model = nn.Linear(3, 2)
    learner = Learner("test", model, OptimizerConfig(), 10)
    inputs, targets = torch.randn(10, 3), torch.randn(10, 2)
    before: list[int] = []

    def loss(rows: list[int]) -> MicroBatchLoss:
        before.append(reads.num + reads.together)
        errors = (model(inputs[rows]) - targets[rows]).square().sum(1)
        return MicroBatchLoss(errors.sum(), {"twice": 2 * errors.sum()}, {"worst": errors.max()})

    with Reads() as reads:
        means = _accumulated(learner, LossTerm([1] * 10, 10, loss), 2, is_last=True)
    assert before == [0] * 5
    assert (reads.num, reads.together) == (0, 1)
    errors = (model(inputs) - targets).square().sum(1)
    expected = {"loss": errors.mean(), "twice": 2 * errors.mean(), "worst": errors.max()}
    assert {name: means[name] for name in expected} == pytest.approx(
        {name: float(value.detach()) for name, value in expected.items()}
    )


def largest_of(world: World, numbers: list[float]) -> list[float]:
    """What an update says of micro-batches of one row each, of which these are the largest."""
    model = nn.Linear(1, 1)
    shard(model, (), ShardPlan(), world)
    learner = Learner("test", model, OptimizerConfig(), 10)

    def loss(rows: Rows) -> MicroBatchLoss:
        worst = max(torch.tensor(numbers)[rows.host])
        return MicroBatchLoss(model(torch.zeros(1, 1)).sum(), largest={"worst": worst})

    term = LossTerm([1] * len(numbers), len(numbers), loss)
    return [_accumulated(learner, term, 1, is_last=True)["worst"]]


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("size", [1, 2])
def test_the_largest_over_micro_batches_is_nan_where_one_is_and_may_be_negative(
    place: int, size: int
) -> None:
    """Three rows on two ranks: one computes a filler, which says nothing."""
    numbers = [-3.0, -1.0, -2.0]
    assert on_ranks(size, largest_of, numbers) == [[-1.0]] * size
    numbers[place] = math.nan
    for (found,) in on_ranks(size, largest_of, numbers):
        assert math.isnan(found)


def test_step_equals_adamw_with_clipping_by_hand() -> None:
    torch.manual_seed(1)
    model, reference = nn.Linear(3, 2), nn.Linear(3, 2)
    reference.load_state_dict(model.state_dict())
    settings = OptimizerConfig(learning_rate=1e-2, schedule="constant", warmup=0, max_grad_norm=0.5)
    learner = Learner("test", model, settings, 3)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0)
    for _ in range(3):
        x = torch.randn(4, 3)
        learner.backward(model(x).square().sum(), 4)
        (reference(x).square().sum() / 4).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        plain.step()
        plain.zero_grad()
        assert learner.step() == pytest.approx(norm.item(), rel=1e-6)
    torch.testing.assert_close(model.weight, reference.weight)


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change() -> None:
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    learner = Learner("actor", model, OptimizerConfig(), 3)
    learner.backward(model(torch.tensor([[math.inf, 1.0]])).sum(), 1)
    with pytest.raises(NumericsError, match="actor: the gradient must be finite; got norm"):
        learner.step()
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_saved_state_continues_bit_for_bit() -> None:
    def run(steps: int, learner: Learner, model: nn.Linear, start: int = 0) -> None:
        for step in range(start, start + steps):
            torch.manual_seed(step)
            learner.backward(model(torch.randn(4, 3)).square().sum(), 4)
            learner.step()

    torch.manual_seed(2)
    whole = nn.Linear(3, 2)
    first = nn.Linear(3, 2)
    first.load_state_dict(whole.state_dict())
    settings = OptimizerConfig(learning_rate=1e-2)
    run(6, Learner("a", whole, settings, 6), whole)
    learner = Learner("a", first, settings, 6)
    run(3, learner, first)
    second = nn.Linear(3, 2)
    second.load_state_dict(first.state_dict())
    continued = Learner("a", second, settings, 6)
    continued.load_state_tensors(learner.state_tensors())
    run(3, continued, second, start=3)
    assert torch.equal(second.weight, whole.weight)


def test_state_of_another_model_is_refused() -> None:
    learner = Learner("critic", nn.Linear(3, 2), OptimizerConfig(), 1)
    with pytest.raises(CheckpointError, match="the optimizer state of critic must fit the model"):
        learner.load_state_tensors({"exp_avg.weight": torch.zeros(5, 5)})


def test_moving_average_equals_its_closed_form_even_in_half_precision() -> None:
    """shadow_n = d^n w_0 + (1 - d) sum d^(n - k) w_k, with updates that bf16 would round away."""
    decay, steps = 0.992, 300
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    average = MovingAverage(model, decay)
    expected = model.weight.detach().double()
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        with torch.no_grad():
            model.weight += (0.01 * torch.randn(4, 4, generator=generator)).to(torch.bfloat16)
        average.update()
        expected = decay * expected + (1 - decay) * model.weight.detach().double()
    torch.testing.assert_close(average.shadow["weight"].double(), expected, atol=1e-5, rtol=1e-5)
    assert average.shadow["weight"].dtype == torch.float32


def test_applied_average_is_taken_off_bit_for_bit_even_after_an_error() -> None:
    model = nn.Linear(4, 4)
    average = MovingAverage(model, 0.5)
    with torch.no_grad():
        model.weight += 1.0
    own = model.weight.detach().clone()
    seen = None
    try:
        with average.applied():
            seen = model.weight.detach().clone()
            raise RuntimeError("inside")
    except RuntimeError:
        pass
    assert seen is not None
    assert torch.equal(seen, average.shadow["weight"])
    assert torch.equal(model.weight, own)


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_an_average_gives_back_weights_that_are_their_own_masters(states: Any) -> None:
    model = nn.Linear(32, 32)
    optimizer = MasterAdamW(
        [{"params": list(model.parameters()), "lr": 1e-3}], betas=(0.9, 0.95), states=states
    )
    average = MovingAverage(model, 0.9, optimizer.masters)
    with torch.no_grad():
        model.weight += 1.0
    own = model.weight.detach().clone()
    with average.applied():
        assert not model.weight.equal(own)
    assert model.weight.equal(own)
