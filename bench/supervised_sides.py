"""SFT and reward-model training of the same rows: Tandem, the plain loop, and TRL where it is."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from bench.harness import Cost, Stopwatch
from bench.plain_hf_supervised import Settings, Step, train_reward, train_sft
from bench.ragged import PAD, llama_config, ragged_rows
from tandem.config.schema import LogConfig, RewardConfig, RunConfig, SFTConfig, SupervisedConfig
from tandem.data.loader import BatchOrder
from tandem.engine.forward import response_logprobs
from tandem.metrics.log import read_metrics
from tandem.models.scalar import sequence_scores
from tandem.objectives.losses import pairwise_loss, sft_loss
from tandem.training.loop import run_stage
from tandem.training.run import Run
from tandem.training.supervised import Objective, SupervisedTrainer, objective_of_pairs
from tandem.types import PairRow, TokenBatch, TokenRow

Stage = Literal["sft", "reward"]


@dataclass(frozen=True, kw_only=True)
class SupervisedWork:
    """A few optimizer steps of one stage over ragged rows (or pairs of them)."""

    stage: Stage
    shape: Mapping[str, Any]
    num_steps: int = 4
    batch_size: int = 32
    micro_batch_tokens: int = 1536
    learning_rate: float = 1e-4
    dtype: Literal["fp32", "bf16"] = "fp32"
    device: Literal["cpu", "cuda"] = "cpu"
    prompt_tokens: tuple[int, int] = (32, 64)
    max_answer_tokens: int = 128
    seed: int = 1


@dataclass(frozen=True)
class SupervisedStart:
    """Where every side starts: weights that nobody changes, and rows in the order of steps."""

    model: PreTrainedModel
    rows: Sequence[Any]
    batches: Sequence[Sequence[Any]]
    num_tokens: int


def supervised_start(work: SupervisedWork) -> SupervisedStart:
    """Random weights, and as many rows as the steps read, from the work's seed."""
    torch.manual_seed(work.seed)
    is_sft = work.stage == "sft"
    config = llama_config(work.shape, **({} if is_sft else {"num_labels": 1}))
    model = (LlamaForCausalLM if is_sft else LlamaForSequenceClassification)(config)
    nn.Module.to(model, work.device)
    num_rows = work.num_steps * work.batch_size
    rows: Sequence[Any] = _rows(work, num_rows, work.seed)
    num_tokens = sum(map(len, rows))
    if not is_sft:
        rejected = _rows(work, num_rows, work.seed + 1)
        num_tokens += sum(map(len, rejected))
        rows = [PairRow(*pair) for pair in zip(rows, rejected, strict=True)]
    order = BatchOrder(num_rows=num_rows, batch_size=work.batch_size, seed=work.seed, epochs=1)
    batches = [[rows[i] for i in chosen] for _, chosen in order.from_step(0)]
    return SupervisedStart(model, rows, batches, num_tokens)


def _rows(work: SupervisedWork, num_rows: int, seed: int) -> list[TokenRow]:
    return ragged_rows(
        num_rows,
        work.shape["vocab_size"],
        prompt_tokens=work.prompt_tokens,
        max_answer_tokens=work.max_answer_tokens,
        seed=seed,
    )


class Side(ABC):
    """Trains a model of its own from the start's weights, again each time."""

    def __init__(self, work: SupervisedWork, start: SupervisedStart) -> None:
        self.work, self.start = work, start
        self.model = copy.deepcopy(start.model)

    def step(self) -> tuple[list[Step], dict[str, Cost]]:
        """All optimizer steps of the work: what each reported, and what they cost together."""
        with torch.no_grad():
            pairs = zip(self.model.parameters(), self.start.model.parameters(), strict=True)
            for parameter, value in pairs:
                parameter.copy_(value)
        watch = Stopwatch()
        return self._train(watch), watch.take()

    @abstractmethod
    def _train(self, watch: Stopwatch) -> list[Step]:
        """All optimizer steps, each timed by `watch`."""


class TandemSide(Side):
    """`SupervisedTrainer` with the stages' objectives, into a run folder."""

    def _train(self, watch: Stopwatch) -> list[Step]:
        work = self.work
        with tempfile.TemporaryDirectory() as folder:
            config = run_config(work, folder)
            settings: SupervisedConfig = config.sft if work.stage == "sft" else config.reward
            # It shows a line a step, which would go between the bench's.
            with watch("train"), contextlib.redirect_stdout(io.StringIO()):
                run = Run(config, say=lambda line: None)
                learned = objective(work, self.model)
                rows = self.start.rows
                trainer = SupervisedTrainer(
                    run, work.stage, self.model, settings, rows, learned, evaluate=dict
                )
                run_stage(run, work.stage, trainer.job(save=lambda folder: None))
            records = [r for r in read_metrics(folder) if r.step > 0]
        return [Step(r.values["loss"], r.values["grad_norm"]) for r in records]


class PlainSide(Side):
    """The plain Hugging Face loop."""

    def _train(self, watch: Stopwatch) -> list[Step]:
        train = train_sft if self.work.stage == "sft" else train_reward
        with watch("train"):
            return train(self.model, self.start.batches, plain_settings(self.work))


def objective(work: SupervisedWork, model: PreTrainedModel) -> Objective[Any]:
    """What SFT and the reward model learn."""

    def language(part: Sequence[TokenRow]) -> tuple[Tensor, dict[str, Tensor]]:
        batch = TokenBatch.from_rows(part, PAD).to(work.device)
        logprobs, _ = response_logprobs(model, batch)
        return sft_loss(logprobs, batch.response_mask), {}

    def preference(part: Sequence[PairRow]) -> tuple[Tensor, dict[str, Tensor]]:
        both = [pair.chosen for pair in part] + [pair.rejected for pair in part]
        batch = TokenBatch.from_rows(both, PAD).to(work.device)
        chosen, rejected = sequence_scores(model, batch).chunk(2)
        result = pairwise_loss(chosen, rejected)
        return result.loss, {"accuracy": result.accuracy, "margin": result.margin}

    if work.stage == "sft":
        return Objective(
            units=lambda row: sum(row.response_mask), sequences=lambda row: [row], loss=language
        )
    return objective_of_pairs(preference)


def run_config(work: SupervisedWork, folder: str) -> RunConfig:
    """The work in Tandem's knobs."""
    knobs: dict[str, Any] = {
        "learning_rate": work.learning_rate,
        "schedule": "constant",
        "warmup": 0.0,
        "batch_size": work.batch_size,
        "eval_every": 0,
    }
    return RunConfig(
        seed=work.seed,
        device=work.device,
        dtype=work.dtype,
        micro_batch_tokens=work.micro_batch_tokens,
        output_dir=folder,
        save_every=0,
        sft=SFTConfig(**knobs),
        reward=RewardConfig(**knobs),
        log=LogConfig(tensorboard=False),
    )


def plain_settings(work: SupervisedWork) -> Settings:
    """The work in the plain loop's knobs, read from Tandem's so that they are the same."""
    config = run_config(work, "")
    knobs: SupervisedConfig = config.sft if work.stage == "sft" else config.reward
    return Settings(
        micro_batch_tokens=config.micro_batch_tokens,
        learning_rate=knobs.learning_rate,
        betas=knobs.betas,
        max_grad_norm=knobs.max_grad_norm,
        pad_token_id=PAD,
        bf16=work.dtype == "bf16",
    )
