"""CPU seconds until a policy has learned: GRPO, RLOO and PPO by Tandem, a plain loop and TRL.

    python bench/learning.py --seeds 1 2 3 --json learning.json

The task is one that any policy gradient learns: tokens from the lower half of the vocabulary. An
answer's score is its share of them, 0.5 at the start; a side is done when a step's 64 answers have
0.75 in the mean. bench/README.md says what is the same on all sides.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.models import SHAPES, copied, model_config, prompt_rows, random_ids, random_model, tiny
from bench.plain_hf_ppo import Experience, PlainPPO, Sequences, Settings
from bench.report import Report, count, parser
from tandem.config.load import build_config
from tandem.config.schema import GRPOConfig, PPOConfig, RunConfig
from tandem.data.embedded.tokenizer import build_tokenizer
from tandem.engine.hybrid import RLHFEngine
from tandem.models.scalar import start_new_head
from tandem.plan.knobs import nested
from tandem.training.make_engine import make_engine
from tandem.training.ppo_trainer import PPOTrainer
from tandem.types import PromptRow, Rollout

TARGET = 0.75
BUILT = -1.0
"""What a side yields once its models and optimizers are there: its costs count from then on."""
GROUP = 8
"""Answers per prompt, where an algorithm compares them."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be learned, the same for all sides: 64 answers a step, none of which may end."""

    seed: int
    is_tiny: bool = False
    num_answers: int = 64
    prompt_tokens: int = 32
    learning_rate: float = 1e-3
    max_steps: int = 120

    @property
    def new_tokens(self) -> int:
        """Of each answer."""
        return 8 if self.is_tiny else 64

    def model(self) -> tuple[PreTrainedModel, Any]:
        """Random weights of shape a, and the tokenizer whose EOS no answer may draw."""
        tokenizer = build_tokenizer(320 if self.is_tiny else 512)
        shape = tiny(SHAPES["a"]) if self.is_tiny else SHAPES["a"]
        positions = 2 * self.prompt_tokens + self.new_tokens
        config = model_config(shape, positions, eos=tokenizer.eos_token_id)
        return random_model(config, seed=self.seed), tokenizer

    def prompts(self, step: int, num: int, vocabulary: int) -> tuple[PromptRow, ...]:
        """A step's prompts, of random ids."""
        ids = random_ids([self.prompt_tokens] * num, vocabulary, 1000 * self.seed + step)
        return prompt_rows(ids)


def lower_half(token_ids: Tensor, mask: Tensor, vocabulary: int) -> Tensor:
    """(B,) the share of each answer's tokens in the lower half of the vocabulary."""
    return ((token_ids < vocabulary // 2) & mask).sum(1) / mask.sum(1)


def _critic(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Random weights, and a new head as runs of Tandem give their critics."""
    critic = random_model(model.config, scalar=True, seed=seed)
    start_new_head(critic, seed, zeros=True)
    return critic


class _Kept:
    """Answers as the engine does, and remembers the last ones: a reward function sees texts."""

    last: Rollout

    def __init__(self, engine: RLHFEngine) -> None:
        self._engine = engine

    def collect(
        self, prompts: Sequence[PromptRow], *, step: int, numbers: Sequence[int] | None = None
    ) -> Rollout:
        self.last = self._engine.rollout(prompts, step=step, numbers=numbers)
        return self.last


def tandem(task: Task, algorithm: str, dtype: str = "fp32", **knobs: Any) -> Iterator[float]:
    """Mean score of each step's answers, by one of Tandem's algorithms.

    Args:
        algorithm: ppo, or a preset of grpo.
        dtype: what weights compute in.
        knobs: of its section.
    """
    model, tokenizer = task.model()
    stage = "ppo" if algorithm == "ppo" else "grpo"
    samples = 1 if algorithm in ("ppo", "reinforce++") else GROUP
    own = {} if algorithm == "ppo" else {"algorithm": algorithm}
    section = {
        "prompts_per_step": task.num_answers // samples,
        "actor": {"learning_rate": task.learning_rate, "schedule": "constant", "warmup": 0.0},
        "missing_eos_penalty": 0.0,
    }
    if stage == "grpo":  # as many updates of a rollout as by default
        defaults = GRPOConfig()
        answers = defaults.prompts_per_step * GROUP
        section["minibatch_size"] = defaults.minibatch_size * task.num_answers // answers
    else:
        section["critic"] = {"learning_rate": task.learning_rate, "schedule": "constant"}
    config: RunConfig = build_config(
        nested(
            {
                "stages": [stage],
                "seed": task.seed,
                "device": "cpu",
                "dtype": dtype,
                "micro_batch_tokens": 1536,
                stage: section | own | knobs,
                "sampling.samples_per_prompt": samples,
                "sampling.max_new_tokens": task.new_tokens,
                "sampling.min_new_tokens": task.new_tokens,
            }
        )
    )
    rl = getattr(config, stage)
    engine = make_engine(
        config,
        model,
        critic=_critic(model, task.seed) if rl.has_critic else None,
        tokenizer=tokenizer,
        has_critic=rl.has_critic,
        has_reference=rl.has_reference,
    )
    source, vocabulary = _Kept(engine), model.config.vocab_size

    def score(prompts: list[str], completions: list[str], **columns: object) -> list[float | None]:
        batch = source.last.batch
        return [*lower_half(batch.token_ids, batch.response_mask, vocabulary).tolist()]

    score.in_process = True  # type: ignore[attr-defined]  # it sees the rollout, not its answers
    trainer = PPOTrainer(engine, config, source=source, reward_function=score)
    yield BUILT
    for step in range(1, task.max_steps + 1):
        prompts = task.prompts(step, task.num_answers // samples, len(tokenizer))
        made = trainer.generate_experience(prompts, step=step)
        yield float(made.metrics["reward"])
        trainer.train_rlhf(made, step=step)


class _PlainOnTokens(PlainPPO):
    """The plain loop with the task's score in place of the reward model's."""

    def _score_part(self, part: Sequences) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        vocabulary = self.actor.config.vocab_size
        scores = lower_half(part.token_ids, part.response_mask, vocabulary)
        return (
            self._logprobs(self.actor, part),
            self._logprobs(self.reference, part),
            self._values(part),
            scores,
        )


def plain_ppo(task: Task, *, epochs: int, minibatch_size: int, lam: float) -> Iterator[float]:
    """The same of the plain loop's PPO, with Tandem's defaults for every other knob that both
    have."""
    model, tokenizer = task.model()
    torch.manual_seed(task.seed)
    ppo = PPOConfig()
    critic = random_model(model.config, scalar=True, seed=task.seed)
    loop = _PlainOnTokens(
        model,
        critic,
        copied(critic, "cpu"),  # scores nothing here
        Settings(
            max_new_tokens=task.new_tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            micro_batch_tokens=1536,
            minibatch_size=minibatch_size,
            epochs=epochs,
            actor_learning_rate=task.learning_rate,
            critic_learning_rate=task.learning_rate,
            betas=ppo.actor.betas,
            max_grad_norm=ppo.actor.max_grad_norm,
            kl_coef=KL_COEF,
            reward_clip=ppo.reward_clip,
            clip_ratio=ppo.clip_ratio,
            value_clip=ppo.value_clip,
            gamma=ppo.gamma,
            lam=lam,
        ),
    )
    yield BUILT
    never = torch.full((task.num_answers,), task.new_tokens + 1)
    for step in range(1, task.max_steps + 1):
        rows = task.prompts(step, task.num_answers, len(tokenizer))
        made = loop.generate([row.token_ids for row in rows], never)
        experience: Experience = loop.score(made)
        yield float(experience.scores.mean())
        loop.train(experience)


def trl_grpo(task: Task) -> Iterator[float]:
    """The same of TRL's GRPOTrainer, with its own defaults; needs `pip install trl`."""
    import trl
    from datasets import Dataset

    model, tokenizer = task.model()
    tokenizer.chat_template = None
    found: list[float] = []
    vocabulary = model.config.vocab_size

    def score(completion_ids: list[list[int]], **columns: object) -> list[float]:
        scores = [sum(i < vocabulary // 2 for i in ids) / len(ids) for ids in completion_ids]
        found.append(sum(scores) / len(scores))
        if found[-1] >= TARGET:
            trainer.control.should_training_stop = True
            raise StopIteration
        return scores

    texts = [
        tokenizer.decode(row.token_ids)
        for step in range(1, task.max_steps + 1)
        for row in task.prompts(step, task.num_answers // GROUP, len(tokenizer))
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=task.num_answers,
            num_generations=GROUP,
            max_completion_length=task.new_tokens,
            generation_kwargs={"min_new_tokens": task.new_tokens},
            learning_rate=task.learning_rate,
            lr_scheduler_type="constant",
            max_steps=task.max_steps,
            seed=task.seed,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        )
        trainer = trl.GRPOTrainer(
            model=model,
            args=arguments,
            processing_class=tokenizer,
            reward_funcs=score,
            train_dataset=Dataset.from_dict({"prompt": texts}),
        )
        yield BUILT
        try:
            trainer.train()
        except (StopIteration, RuntimeError):
            if not found or found[-1] < TARGET:
                raise
    yield from found


KL_COEF = 0.0
"""The task is worth 0.5 at most; with a penalty of 0.05 per nat on 64 tokens the best policy has a
share of 0.58, where log(p / (1 - p)) = 1 / (0.05 * 64), and no side would ever reach the target."""

USUAL: Mapping[str, Any] = {"epochs": 2, "minibatch_size": 32, "lam": 0.95}
"""The plain loop's recipe: several passes in large minibatches, and the lambda of PPO's paper."""
OURS: Mapping[str, Any] = {"epochs": 1, "minibatch_size": 8, "lam": 1.0}
"""What Tandem has in their place; 8 is an eighth of a rollout."""

Side = Callable[[Task], Iterator[float]]
SIDES: dict[str, Side] = {
    "tandem grpo": lambda task: tandem(task, "grpo"),
    "tandem rloo": lambda task: tandem(task, "rloo", kl="none", kl_coef=0.0),
    "tandem ppo": lambda task: tandem(task, "ppo", kl_coef=KL_COEF),
    "tandem ppo, usual knobs": lambda task: tandem(task, "ppo", kl_coef=KL_COEF, **USUAL),
    "tandem grpo, bf16": lambda task: tandem(task, "grpo", "bf16"),
    "tandem ppo, bf16": lambda task: tandem(task, "ppo", "bf16", kl_coef=KL_COEF),
    "plain ppo": lambda task: plain_ppo(task, **USUAL),
    "plain ppo, our knobs": lambda task: plain_ppo(task, **OURS),
    "trl grpo": trl_grpo,
}


def learned(side: Side, task: Task) -> dict[str, Any]:
    """CPU seconds from the first answer to the step that reached the target, and the curve.

    Returns:
        cpu_seconds, wall_seconds, steps, answers (None where it was not reached), curve.
    """
    curve: list[float] = []
    cpu, wall = time.process_time(), time.perf_counter()
    for reward in side(task):
        if reward == BUILT:
            cpu, wall = time.process_time(), time.perf_counter()
            continue
        curve.append(reward)
        if reward >= TARGET:
            break
    reached = bool(curve) and curve[-1] >= TARGET
    return {
        "cpu_seconds": time.process_time() - cpu,
        "wall_seconds": time.perf_counter() - wall,
        "steps": len(curve) if reached else None,
        "answers": len(curve) * task.num_answers if reached else None,
        "curve": curve,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and show; returns what --json writes."""
    flags = parser(__doc__, "threads")
    flags.add_argument("--seeds", type=count, nargs="+", default=[1, 2, 3], help="1 2 3")
    flags.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    flags.add_argument("--learning-rate", type=float, default=1e-3, help="of all sides (1e-3)")
    flags.add_argument("--max-steps", type=count, default=120, help="of one run at most (120)")
    options = flags.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    report = Report(options)
    found: dict[str, list[dict[str, Any]]] = {}
    sides = list(options.sides)
    for seed in options.seeds:
        for name in list(sides):
            task = Task(
                seed=seed,
                is_tiny=options.tiny,
                learning_rate=options.learning_rate,
                max_steps=options.max_steps,
            )
            try:
                result = learned(SIDES[name], task)
            except ImportError as error:
                report.print_line(f"{name}: left out ({error})")
                sides.remove(name)
                continue
            report.print_line(
                f"{name}, seed {seed}: {len(result['curve'])} steps to {result['curve'][-1]:.2f}, "
                f"{result['cpu_seconds']:.1f} CPU s"
            )
            found.setdefault(name, []).append(result)
            report.result["sides"] = found
    report.console.print(_table(found, options.seeds))
    return report.end()


def _table(found: dict[str, list[dict[str, Any]]], seeds: Sequence[int]) -> Table:
    table = Table("side", "answers to 0.75", "CPU s", "CPU ms per answer", title=f"seeds {seeds}")
    for name, runs in found.items():
        done = [run for run in runs if run["answers"]]
        if len(done) < len(runs):
            table.add_row(name, f"reached by {len(done)} of {len(runs)}", "", "")
            continue
        answers = statistics.median(run["answers"] for run in done)
        seconds = statistics.median(run["cpu_seconds"] for run in done)
        each = statistics.median(1000 * run["cpu_seconds"] / run["answers"] for run in done)
        table.add_row(name, f"{answers:.0f}", f"{seconds:.1f}", f"{each:.1f}")
    return table


if __name__ == "__main__":
    main()
