"""Memory that runs out: refused with advice before the first step, or mended without a trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import MambaConfig, PreTrainedModel

from tandem.config.engine import engine_settings
from tandem.config.lora import LoraConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.schema import OptimizerConfig, RunConfig
from tandem.engine import learner
from tandem.engine.forward import Rows
from tandem.engine.learner import Learner
from tandem.engine.oom import MicroBatchBudget, is_out_of_memory
from tandem.engine.update import LossTerm, MicroBatchLoss, Update
from tandem.errors import OutOfMemoryError
from tandem.memory.ways import size_text
from tandem.models.load import new_causal_lm
from tandem.parallel.scaling import LossScaler
from tandem.parallel.world import World
from tandem.plan.run import plan_memory
from tandem.training.run_stages import train
from tandem.training.stage_loop import StepLoop
from tests.tiny import tiny_config, tiny_llama
from tests.training.runs import records

TOKENS = 512


def config_of(folder: Path, model: str, data: str, **changes: Any) -> RunConfig:
    return replace(
        tiny_config(folder, model, data), micro_batch_tokens=TOKENS, save_every=0, **changes
    )


def too_small_for(tokens: int, patch: pytest.MonkeyPatch) -> None:
    """A device on which a backward of more than so many tokens' activations fails."""
    backward = learner.Learner.backward
    budgets: list[MicroBatchBudget] = []
    built = MicroBatchBudget.__init__

    def building(self: MicroBatchBudget, *args: Any) -> None:
        built(self, *args)
        budgets.append(self)

    def failing(self: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        backward(self, loss, *args, **kwargs)
        if budgets[-1].tokens > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    patch.setattr(MicroBatchBudget, "__init__", building)
    patch.setattr(learner.Learner, "backward", failing)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tiny_model: str, preferences: str) -> RunConfig:
    """A run that found memory enough."""
    config = config_of(tmp_path_factory.mktemp("plain") / "run", tiny_model, preferences)
    train(config, command="x", print_line=lambda line: None)
    return config


def test_what_does_not_fit_is_refused_before_the_first_step(
    tmp_path: Path, tiny_model: str, preferences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    begin = StepLoop.begin

    def beginning(self: StepLoop, step: int, rows: Any) -> None:
        begun.append(step)
        begin(self, step, rows)

    monkeypatch.setattr(StepLoop, "begin", beginning)
    too_small_for(200, monkeypatch)
    with pytest.raises(OutOfMemoryError) as refused:
        train(
            config_of(tmp_path, tiny_model, preferences), command="x", print_line=lambda line: None
        )
    message = str(refused.value)
    assert message.startswith(f"sft: a micro-batch of {TOKENS} tokens must fit into memory; got ")
    assert "Tried to allocate 20.00 GiB" in message
    assert "The predicted peak is " in message
    assert "the cheapest ways out: --micro-batch-tokens 256 (" in message
    assert "--halve-micro-batches goes on" in message
    assert "\n" not in message
    assert not begun


def test_halved_micro_batches_are_the_same_run(
    tmp_path: Path, plain: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Path(plain.output_dir)
    lines: list[str] = []
    with monkeypatch.context() as patch:
        too_small_for(200, patch)
        halved = replace(plain, output_dir=str(tmp_path / "halved"), halve_micro_batches=True)
        train(halved, command="x", print_line=lines.append)
    said = [line for line in lines if "out of memory" in line]
    assert [line.split(":")[0] for line in said] == [
        "sft",
        "sft",
        "reward",
        "reward",
        "actor",
        "actor",
    ]
    assert "micro-batches of 128 tokens from here on" in said[1]
    for left, right in zip(records(tmp_path / "halved"), records(whole), strict=True):
        for name in ("loss", "policy_loss", "value_loss", "actor_grad_norm", "grad_norm"):
            if name in right["values"]:
                expected = pytest.approx(right["values"][name], rel=1e-4, abs=1e-6)
                assert left["values"][name] == expected
    for part in ("sft", "ppo/actor", "ppo/critic"):
        ours = load_file(tmp_path / "halved" / part / "model.safetensors")
        for name, weight in load_file(whole / part / "model.safetensors").items():
            assert float((ours[name] - weight).abs().mean()) < 1e-5


def test_a_rehearsal_leaves_no_trace(
    tmp_path: Path, plain: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("tandem.training.supervised.SupervisedTrainer.rehearse", lambda *args: None)
        patch.setattr("tandem.training.ppo_trainer.PPOTrainer.rehearse", lambda *args: None)
        other = replace(plain, output_dir=str(tmp_path / "other"))
        train(other, command="x", print_line=lambda line: None)
    for part in ("sft", "reward", "ppo/actor", "ppo/critic"):
        ours = load_file(Path(plain.output_dir) / part / "model.safetensors")
        for name, weight in load_file(tmp_path / "other" / part / "model.safetensors").items():
            assert torch.equal(ours[name], weight)


def sft_learner(model: PreTrainedModel) -> Learner:
    return Learner("sft", model, OptimizerConfig())


def test_other_errors_are_not_taken_for_it() -> None:
    budget = MicroBatchBudget(engine_settings(RunConfig()), World(), print)

    def work() -> None:
        raise RuntimeError("a shape is wrong")

    with pytest.raises(RuntimeError, match="a shape is wrong"):
        budget.retry_on_oom(sft_learner(tiny_llama(50)), work)
    assert budget.tokens == RunConfig().micro_batch_tokens


def updated(learner: Learner, budget: MicroBatchBudget) -> None:
    """One update of a learner by eight rows, in micro-batches of as many tokens as there may be."""
    weight = next(learner.model.parameters())

    def loss(rows: Rows) -> MicroBatchLoss:
        return MicroBatchLoss(weight.square().sum() * len(rows))

    with Update(budget) as update:
        update.learn(learner, [LossTerm([64] * 8, 8, loss)])


@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_a_step_that_runs_out_of_memory_half_way_is_not_taken_twice(
    monkeypatch: pytest.MonkeyPatch, states: Any
) -> None:
    model = tiny_llama(50)
    config = RunConfig(halve_micro_batches=True, micro_batch_tokens=TOKENS)
    budget = MicroBatchBudget(engine_settings(config), World(), print)
    learner = Learner(
        "sft", model, OptimizerConfig(), parallel=ParallelConfig(optimizer_states=states)
    )
    steps, step = list[int](), learner.optimizer.step

    def failing(*args: Any) -> None:
        step(*args)
        steps.append(budget.tokens)
        raise MemoryError("no more of it")

    monkeypatch.setattr(learner.optimizer, "step", failing)
    said = (
        "^sft: the optimizer's step must fit into memory; got 'no more of it', and is not repeated"
    )
    with pytest.raises(OutOfMemoryError, match=said):
        updated(learner, budget)
    assert steps == [TOKENS]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_joint_step_that_runs_out_of_memory_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = MicroBatchBudget(engine_settings(RunConfig(dtype="fp16")), World(), print)
    scaler = LossScaler(1.0)
    learners = [
        Learner(name, tiny_llama(50), OptimizerConfig(), scaler=scaler, dtype=torch.float16)
        for name in ("critic", "actor")
    ]

    def failing(*args: Any) -> None:
        raise MemoryError("no more of it")

    monkeypatch.setattr(learners[1].optimizer, "step", failing)
    said = (
        "^critic, actor: the optimizer's step must fit into memory; got 'no more of it', and is "
        "not repeated: some weights may have changed. The predicted peak"
    )

    def updated_together() -> None:
        with Update(budget) as update:
            for each in learners:
                loss = MicroBatchLoss(each.parameters[0].float().sum())
                update.learn(each, [LossTerm([64], 1, lambda _, loss=loss: loss)])

    with pytest.raises(OutOfMemoryError, match=said):
        updated_together()
    assert not any(each.finished_gradients() for each in learners)


def test_a_gradient_that_has_no_room_for_its_norm_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = RunConfig(halve_micro_batches=True, micro_batch_tokens=TOKENS)
    budget = MicroBatchBudget(engine_settings(config), World(), lambda line: None)
    ours, expected = sft_learner(tiny_llama(50)), sft_learner(tiny_llama(50))
    norm = ours.shards.gradient_norm

    def failing(gradients: Any) -> Any:
        if budget.tokens == TOKENS:
            raise MemoryError
        return norm(gradients)

    monkeypatch.setattr(ours.shards, "gradient_norm", failing)
    updated(ours, budget)
    updated(expected, MicroBatchBudget(engine_settings(config), World(), None))
    assert (budget.tokens, ours.steps_taken) == (TOKENS // 2, 1)
    assert ours.spikes.history() == pytest.approx(expected.spikes.history())
    for left, right in zip(ours.parameters, expected.parameters, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize(
    ("changes", "knobs"),
    [
        (
            {},
            ("--micro-batch-tokens 4096", "--gradient-checkpointing --recompute mlp",
             "--gradient-checkpointing"),
        ),
        (  # two knobs alone, so two together are the third
            {"gradient_checkpointing": True, "micro_batch_tokens": 64, "lora": LoraConfig(rank=2)},
            ("--micro-batch-tokens 32", "--frozen-weights nf4",
             "--micro-batch-tokens 32 --frozen-weights nf4"),
        ),
    ],
)  # fmt: skip
def test_the_advice_is_the_cheapest_ways_out_and_their_peaks(
    changes: dict[str, Any], knobs: tuple[str, ...]
) -> None:
    config = RunConfig(dtype="fp32", **changes)
    model = tiny_llama(600, width=128, layers=6)

    def work() -> None:
        raise MemoryError

    ways = ", ".join(rf"{knob} \([0-9.]+ [MG]iB\)" for knob in knobs)
    with pytest.raises(OutOfMemoryError, match=f"cheapest ways out: {ways}"):
        MicroBatchBudget(engine_settings(config), World(), print).retry_on_oom(
            sft_learner(model), work
        )


def test_what_torch_says_where_the_host_has_no_memory_left() -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**62, dtype=torch.uint8)
    assert is_out_of_memory(failed.value)


def test_the_advice_says_what_the_memory_formula_says() -> None:
    model = tiny_llama(600, width=128, layers=6)
    config = RunConfig(dtype="fp32", gradient_checkpointing=True, lora=LoraConfig(rank=2))
    peak, fewer = [
        plan_memory(replace(config, micro_batch_tokens=tokens), "sft", model.config).peak("train")
        for tokens in (2**20, 2**19)
    ]

    def work() -> None:
        raise MemoryError

    budget = MicroBatchBudget(
        engine_settings(replace(config, micro_batch_tokens=2**20)), World(), print
    )
    said = f"peak is {size_text(peak)}; .*--micro-batch-tokens {2**19} \\({size_text(fewer)}\\)"
    with pytest.raises(OutOfMemoryError, match=said):
        budget.retry_on_oom(sft_learner(model), work)


def test_a_model_without_attention_gets_advice_too() -> None:
    config = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4)

    def work() -> None:
        raise MemoryError

    with pytest.raises(OutOfMemoryError, match="cheapest ways out: --"):
        MicroBatchBudget(engine_settings(RunConfig()), World(), print).retry_on_oom(
            sft_learner(new_causal_lm(config, seed=0)), work
        )
