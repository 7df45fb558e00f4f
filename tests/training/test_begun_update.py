"""What a step's first update takes from the rollout: the critic's gradient, from the forward that
its values come from, and the actor's states, from generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.data.render import Renderer
from tandem.engine.forward import Rows
from tandem.engine.hybrid import RLHFEngine
from tandem.engine.learner import Learner
from tandem.engine.update import LossTerm, MicroBatchLoss, Update
from tandem.errors import BadStepError
from tandem.models import packed
from tandem.models.load import load_tokenizer
from tandem.models.replayed import replayed_states
from tandem.ops import native
from tandem.parallel.dtensor import whole
from tandem.parallel.world import World
from tandem.training import ppo_trainer
from tandem.training.algorithm import AdvantagesOf
from tandem.training.make_engine import make_engine
from tandem.training.ppo_trainer import PPOTrainer
from tandem.types import Experience, Message, PromptRow, Rollout
from tests.ranks import on_ranks
from tests.tiny import tiny_config

WORDS = ("cat", "elephant", "sun", "green", "a", "house", "yes", "nineteen")
ONE_UPDATE = {"ppo__minibatch_size": 8, "ppo__epochs": 1}


def vowels(prompts: list[str], completions: list[str], **columns: object) -> list[float | None]:
    return [sum(char in "aeiou" for char in text) / max(1, len(text)) for text in completions]


def make(
    model: str,
    folder: Path,
    *,
    world: World | None = None,
    advantages_of: AdvantagesOf | None = None,
    reward: Callable[..., Any] = vowels,
    **changes: object,
) -> tuple[PPOTrainer, list[PromptRow]]:
    torch.manual_seed(0)
    config = tiny_config(folder, model, "unused", **changes)
    engine = make_engine(actor=model, config=config, world=world)
    renderer = Renderer(load_tokenizer(model))
    prompts = [renderer.prompt([Message("user", f"Say the word {word}.")]) for word in WORDS]
    trainer = PPOTrainer(
        engine, config, num_steps=10, reward_function=reward, advantages_of=advantages_of
    )
    return trainer, prompts


def after_steps(
    trainer: PPOTrainer, prompts: Sequence[PromptRow], *, begins: bool, steps: int = 2
) -> tuple[Tensor, list[dict[str, float]]]:
    """All trained weights, and every step's metrics."""
    metrics = []
    for step in range(1, steps + 1):
        made = trainer.generate_experience(prompts, step=step, begins_update=begins)
        found = {**made.metrics, **trainer.train_rlhf(made, step=step)}
        metrics.append({k: v for k, v in found.items() if "seconds" not in k})
    weights = [
        whole(p.detach()).float().flatten()
        for model in trainer.engine.trained_models
        for p in model.parameters()
    ]
    return torch.cat(weights), metrics


@pytest.fixture
def rows_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every forward of the critic."""
    rows: list[int] = []
    values = RLHFEngine.values

    def counted(self: RLHFEngine, batch: Any) -> Tensor:
        rows.append(len(batch))
        return values(self, batch)

    monkeypatch.setattr(RLHFEngine, "values", counted)
    return rows


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "bf16"},
        {"dtype": "fp16"},
        {"micro_batch_tokens": 64},
        {"ppo__lam": 0.9, "ppo__gamma": 0.97, "ppo__kl_coef": 0.3},
        {"sampling__samples_per_prompt": 2, "ppo__minibatch_size": 16},
        {"lora__rank": 4},
        {"ppo__critic_warmup_steps": 1},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
def test_one_update_of_all_answers_is_the_same_with_half_of_the_critics_forwards(
    tiny_model: str, tmp_path: Path, rows_run: list[int], changes: dict[str, object]
) -> None:
    found, forwards = [], []
    for begins in (False, True):
        trainer, prompts = make(tiny_model, tmp_path, **{**ONE_UPDATE, **changes})
        rows_run.clear()
        found.append(after_steps(trainer, prompts, begins=begins))
        forwards.append(sum(rows_run))
    (plain, metrics), (begun, begun_metrics) = found
    assert torch.equal(plain, begun)
    assert metrics == begun_metrics
    assert metrics[0]["value_loss"] > 0
    assert forwards[0] == 2 * forwards[1]


def test_of_several_updates_only_the_first_saves_its_forward(
    tiny_model: str, tmp_path: Path, rows_run: list[int]
) -> None:
    found, forwards = [], []
    for begins in (False, True):
        trainer, prompts = make(tiny_model, tmp_path, ppo__minibatch_size=3, ppo__epochs=2)
        rows_run.clear()
        found.append(after_steps(trainer, prompts, begins=begins, steps=2))
        forwards.append(sum(rows_run))
    if native.available():
        assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-6, rtol=1e-5)
    assert forwards == [2 * (8 + 2 * 8), 2 * (8 - 3 + 2 * 8)]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every forward that was read from kept states."""
    tokens: list[int] = []

    def counted(twin: Any, token_ids: Tensor, *rest: Any) -> Tensor:
        tokens.append(len(token_ids))
        return replayed_states(twin, token_ids, *rest)

    monkeypatch.setattr(packed, "replayed_states", counted)
    return tokens


GRPO = {
    "stages": ["grpo"],
    "grpo": {"prompts_per_step": 8, "minibatch_size": 16, "kl": "none"},
    "sampling__samples_per_prompt": 2,
}


@pytest.mark.skipif(not native.available(), reason="states are kept by the C++ runner")
@pytest.mark.parametrize(
    "changes",
    [
        ONE_UPDATE,
        {**ONE_UPDATE, "dtype": "bf16", "micro_batch_tokens": 64},
        {**ONE_UPDATE, "ppo__epochs": 2, "ppo__kl_in": "loss", "ppo__entropy_coef": 0.1},
        {**ONE_UPDATE, "generation_batch_size": 3, "generation_prefill_tokens": 16},
        GRPO,
        {**GRPO, "dtype": "bf16"},
    ],
    ids=str,
)
def test_the_actors_layers_run_once_for_rollout_and_update(
    tiny_model: str, tmp_path: Path, replays: list[int], changes: dict[str, object]
) -> None:
    found = []
    for share in (0.0, 0.1):
        assert not replays
        trainer, prompts = make(tiny_model, tmp_path, kept_states=share, **changes)
        assert trainer.engine.agreement is not None
        assert trainer.engine.agreement.bitwise
        found.append(after_steps(trainer, prompts, begins=True, steps=3))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    computed = len(replays)
    assert computed >= 2  # in the second step and the third; the first measures the gap
    answers = trainer.generate_experience(prompts, step=4, begins_update=True)
    states = trainer.first_update._states
    assert states is not None
    replays.clear()
    trainer.train_rlhf(answers, step=4)
    mask = answers.batch.attention_mask & ~answers.batch.response_mask
    prompts_once = int(mask.sum()) // trainer.config.sampling.samples_per_prompt
    own = answers.batch.num_response_tokens - len(answers)
    assert sum(replays) == prompts_once + own
    assert states.layers == []


@pytest.mark.skipif(not native.available(), reason="states are kept by the C++ runner")
def test_states_of_other_weights_or_answers_are_not_read(
    tiny_model: str, tmp_path: Path, replays: list[int]
) -> None:
    trainer, prompts = make(tiny_model, tmp_path, **ONE_UPDATE)
    after_steps(trainer, prompts, begins=True, steps=1)

    def made(step: int) -> Experience:
        found = trainer.generate_experience(prompts, step=step, begins_update=True)
        assert trainer.first_update._states is not None
        return found

    first = made(2)
    made(3)
    trainer.train_rlhf(first, step=2)
    changed = made(4)
    with torch.no_grad():
        next(trainer.engine.actor.parameters()).mul_(1 + 1e-6)
    trainer.train_rlhf(changed, step=4)
    assert not replays
    trainer.train_rlhf(made(5), step=5)
    assert replays


@pytest.mark.skipif(not native.available(), reason="states are kept by the C++ runner")
@pytest.mark.parametrize(
    "changes",
    [
        {"kept_states": 0.0},
        {"kept_states": 1e-12},
        {"ppo__minibatch_size": 4},
        {"lora__rank": 4},
        {"gradient_checkpointing": True},
        {"ppo__old_logprobs": "forward"},
        {"hybrid_engine": False},
        {"parallel__offload": ["params"]},
        {"ppo__critic_warmup_steps": 9},
    ],
    ids=str,
)
def test_nothing_is_kept_where_the_update_cannot_read_it(
    tiny_model: str, tmp_path: Path, replays: list[int], changes: dict[str, object]
) -> None:
    trainer, prompts = make(tiny_model, tmp_path, **{**ONE_UPDATE, **changes})
    after_steps(trainer, prompts, begins=True, steps=1)  # from the second on they are kept
    made = trainer.generate_experience(prompts, step=2, begins_update=True)
    assert trainer.first_update._states is None
    trainer.train_rlhf(made, step=2)
    assert not replays


class _OwnSource:
    """A source that changes what the engine would do."""

    def __init__(self, engine: RLHFEngine) -> None:
        self._engine = engine

    def collect(
        self, prompts: Sequence[PromptRow], *, step: int, numbers: Sequence[int] | None = None
    ) -> Rollout:
        return self._engine.rollout(prompts[::-1], step=step, numbers=numbers)


@pytest.mark.skipif(not native.available(), reason="states are kept by the C++ runner")
def test_a_source_of_ones_own_collects_by_itself(
    tiny_model: str, tmp_path: Path, replays: list[int]
) -> None:
    trainer, prompts = make(tiny_model, tmp_path, **ONE_UPDATE)
    own = PPOTrainer(
        trainer.engine, trainer.config, reward_function=vowels, source=_OwnSource(trainer.engine)
    )
    after_steps(own, prompts, begins=True, steps=1)
    made = own.generate_experience(prompts, step=2, begins_update=True)
    assert made.rollout.prompts[0] == prompts[-1]
    own.train_rlhf(made, step=2)
    assert not replays


def _step_on_ranks(world: World, model: str, folder: Path, begins: bool, stage: int) -> Tensor:
    trainer, prompts = make(
        model,
        folder,
        world=world,
        parallel__critic_zero_stage=stage,
        micro_batch_tokens=1,
        **ONE_UPDATE,
    )
    # The long row keeps one rank busy, which fills up with a short row of the other's, of weight 0.
    prompts[0] = trainer.engine.renderer.prompt([Message("user", "Say the word " + "cat " * 20)])
    weights = []
    for step in (1, 2):
        made = trainer.generate_experience(prompts[:3], step=step, begins_update=begins)
        assert made.values is not None
        weights.append(made.values.flatten())
        trainer.train_rlhf(made, step=step)
    critic = trainer.engine.critic
    assert critic is not None
    named = trainer.engine.learners["critic"].weights()
    weights += [getattr(w, "full_tensor", lambda w=w: w)().flatten() for w in named.values()]
    return torch.cat(weights)


@pytest.fixture(scope="module")
def step_alone(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """By one process."""
    return _step_on_ranks(World(), tiny_model, tmp_path_factory.mktemp("alone"), True, 0)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_several_ranks_make_the_same_update(
    tiny_model: str, tmp_path: Path, step_alone: Tensor, stage: int
) -> None:
    plain = on_ranks(2, _step_on_ranks, tiny_model, tmp_path, False, stage)
    begun = on_ranks(2, _step_on_ranks, tiny_model, tmp_path, True, stage)
    for rank in range(2):
        torch.testing.assert_close(begun[rank], plain[rank], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(begun[rank], step_alone, atol=2e-5, rtol=1e-4)


def _doubled(made: Experience) -> Experience:
    assert made.returns is not None
    return replace(made, returns=2 * made.returns)


def _written_to(made: Experience) -> Experience:
    assert made.returns is not None
    made.returns.mul_(2)
    return made


@pytest.mark.parametrize("change", [_doubled, _written_to])
def test_an_experience_that_was_changed_makes_its_own_gradient(
    tiny_model: str, tmp_path: Path, change: Callable[[Experience], Experience]
) -> None:
    weights = []
    for begins in (False, True):
        trainer, prompts = make(tiny_model, tmp_path, **ONE_UPDATE)
        made = trainer.generate_experience(prompts, step=1, begins_update=begins)
        trainer.train_rlhf(change(made), step=1)
        weights.append(after_steps(trainer, prompts, begins=False, steps=0)[0])
    assert torch.equal(*weights)


def test_what_was_begun_for_another_step_or_experience_is_dropped(
    tiny_model: str, tmp_path: Path
) -> None:
    weights = []
    for begins in (False, True):
        trainer, prompts = make(tiny_model, tmp_path, **ONE_UPDATE)
        first = trainer.generate_experience(prompts, step=1, begins_update=begins)
        trainer.generate_experience(prompts, step=2, begins_update=begins)
        trainer.train_rlhf(first, step=1)
        later = trainer.generate_experience(prompts, step=3, begins_update=begins)
        trainer.train_rlhf(later, step=4)
        weights.append(after_steps(trainer, prompts, begins=False, steps=0)[0])
    assert torch.equal(*weights)


def _own(made: Experience) -> tuple[Tensor, Tensor]:
    advantages = made.rewards.flip(0) * made.batch.response_mask
    return advantages, advantages


@pytest.mark.parametrize("reason", ["dropout", "advantages"])
def test_nothing_is_begun_where_the_forwards_differ(
    tiny_model: str, tmp_path: Path, rows_run: list[int], reason: str
) -> None:
    changes: dict[str, Any] = {"dropout": 0.1} if reason == "dropout" else {"advantages_of": _own}
    trainer, prompts = make(tiny_model, tmp_path, **{**ONE_UPDATE, **changes})
    trainer.generate_experience(prompts, step=1, begins_update=True)
    assert sum(rows_run) == 8
    critic = trainer.engine.critic
    assert critic is not None
    assert all(p.grad is None for p in critic.parameters())


@pytest.mark.parametrize("between", ["forget", "backward", "weights", "rehearse", "failure"])
def test_a_gradient_that_somebody_touched_is_made_again(
    tiny_model: str, tmp_path: Path, between: str
) -> None:
    weights = []
    for begins in (False, True):
        trainer, prompts = make(tiny_model, tmp_path, **ONE_UPDATE)
        learner = trainer.engine.critic_learner
        assert learner is not None
        made = trainer.generate_experience(prompts, step=1, begins_update=begins)
        if between == "forget":
            learner.forget()
        elif between == "backward":
            learner.backward(trainer.engine.values(made.batch).sum(), 1.0)
            learner.forget()
        elif between == "weights":
            with torch.no_grad():
                for parameter in learner.parameters:
                    parameter.mul_(1.1)
        elif between == "rehearse":
            trainer.rehearse(prompts)
        else:
            with pytest.raises(IndexError):
                trainer.train_rlhf(replace(made, advantages=made.advantages[:4]), step=1)
            made = trainer.generate_experience(prompts, step=1, begins_update=begins)
        metrics = trainer.train_rlhf(made, step=1)
        assert metrics["critic_grad_norm"] > 0
        weights.append(after_steps(trainer, prompts, begins=False, steps=0)[0])
    assert torch.equal(*weights)


def test_a_step_without_memory_makes_the_gradient_again(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = Learner.finished_gradients
    failures = ["critic"]

    def fails_once(self: Learner) -> list[Tensor]:
        if self.name in failures:
            failures.remove(self.name)
            raise torch.OutOfMemoryError("out of memory")
        return finished(self)

    monkeypatch.setattr(Learner, "finished_gradients", fails_once)
    weights = []
    for begins in (False, True):
        failures[:] = ["critic"]
        trainer, prompts = make(
            tiny_model, tmp_path, halve_micro_batches=True, micro_batch_tokens=512, **ONE_UPDATE
        )
        weights.append(after_steps(trainer, prompts, begins=begins, steps=1)[0])
        assert not failures
    assert torch.equal(*weights)


def test_a_rollout_that_is_refused_leaves_no_gradient(tiny_model: str, tmp_path: Path) -> None:
    def broken(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
        return [0.5] * len(completions)

    trainer, prompts = make(tiny_model, tmp_path, reward=broken, **ONE_UPDATE)
    critic = trainer.engine.critic
    assert critic is not None
    with torch.no_grad():
        head = next(p for name, p in critic.named_parameters() if p.shape[0] == 1)
        head.fill_(torch.nan)
    with pytest.raises(BadStepError, match="values of the rollout must be finite"):
        trainer.generate_experience(prompts, step=1, begins_update=True)
    assert all(p.grad is None for p in critic.parameters())


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("bad", ["critic", "actor"])
def test_a_loss_that_is_not_finite_stops_both_models_in_fp16_and_its_own_else(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, bad: str
) -> None:
    """In fp16 all models step or none, whatever was not finite: a gradient or a loss."""
    trainer, prompts = make(tiny_model, tmp_path, dtype=dtype, **ONE_UPDATE)
    made = trainer.generate_experience(prompts, step=1)
    module, name = ppo_trainer, f"{bad}_loss"
    plain = getattr(module, name)

    def overflowed(*args: Any, **knobs: Any) -> MicroBatchLoss:
        found = plain(*args, **knobs)
        return replace(found, loss=found.loss * torch.inf)

    def weights() -> dict[str, Tensor]:
        learners = trainer.engine.learners.values()
        return {
            learner.name: torch.cat([whole(w).flatten() for w in learner.weights().values()])
            for learner in learners
        }

    before, skipped = {n: w.clone() for n, w in weights().items()}, list[str]()
    monkeypatch.setattr(module, name, overflowed)
    trainer.train_rlhf(made, step=1, skip=lambda why, _: skipped.append(str(why)))
    assert len(skipped) == 1
    assert skipped[0].startswith(f"{bad}: the loss must be finite")
    stepped = {name for name, now in weights().items() if not torch.equal(now, before[name])}
    assert stepped == (set() if dtype == "fp16" else {"actor", "critic"} - {bad})
    monkeypatch.setattr(module, name, plain)
    trainer.train_rlhf(trainer.generate_experience(prompts, step=2), step=2)
    assert all(not torch.equal(now, before[name]) for name, now in weights().items())


def test_an_update_of_which_one_model_is_refused_steps_no_other_in_fp16(
    tiny_model: str, tmp_path: Path
) -> None:
    """In a loop of one's own, which hears of the error inside the update."""
    trainer, prompts = make(tiny_model, tmp_path, dtype="fp16", **ONE_UPDATE)
    batch = trainer.generate_experience(prompts, step=1).batch
    engine = trainer.engine
    assert engine.critic_learner is not None

    def term(factor: float) -> LossTerm:
        def loss(rows: Rows) -> MicroBatchLoss:
            part = batch.select(rows.host)
            return MicroBatchLoss(engine.actor_logprobs(part, with_entropy=False)[0].sum() * factor)

        return LossTerm(batch.lengths().tolist(), 8.0, loss)

    with Update(trainer.budget) as update:
        with pytest.raises(BadStepError):
            update.learn(engine.critic_learner, [term(torch.inf)])
        update.learn(engine.actor_learner, [term(1.0)])
    assert engine.actor_learner.steps_taken == 0
    assert update.grad_norms == {}
    assert all(p.grad is None for p in engine.actor.parameters())
