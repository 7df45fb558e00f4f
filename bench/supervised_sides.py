"""SFT and reward-model training of the same rows: Tandem, the plain loop, and TRL where it is."""

from __future__ import annotations

import contextlib
import io
import tempfile
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedModel, PrinterCallback

from bench.harness import Side, Stopwatch
from bench.models import PAD, Shape, copied, model_config, ragged_rows, random_model, reset
from bench.plain_hf_supervised import IGNORED, Settings, Step, train_reward, train_sft
from tandem.config.load import build_config
from tandem.config.optimizer import SupervisedConfig
from tandem.config.schema import RunConfig
from tandem.data.embedded.tokenizer import build_tokenizer
from tandem.data.loader import BatchOrder
from tandem.engine.forward import response_logprobs
from tandem.metrics.records import read_metrics
from tandem.models.hf_logging import quiet
from tandem.models.scalar import sequence_scores
from tandem.objectives.losses import pairwise_loss, sft_loss
from tandem.plan.knobs import nested
from tandem.training.run_folder import Run
from tandem.training.stage_loop import run_stage
from tandem.training.supervised import Objective, SupervisedTrainer, objective_of_pairs
from tandem.types import PairRow, TokenBatch, TokenRow


@dataclass(frozen=True, kw_only=True)
class TrainingWork:
    """A few optimizer steps of one stage over ragged rows (or pairs of them).

    lora_rank: of adapters on every linear layer but the head, over frozen weights (`packed.py`
        alone); 0: all weights are trained.
    """

    stage: Literal["sft", "reward"] = "sft"
    shape: Shape
    num_steps: int = 4
    batch_size: int = 32
    micro_batch_tokens: int = 1536
    learning_rate: float = 1e-4
    dtype: Literal["fp32", "bf16"] = "fp32"
    device: Literal["cpu", "cuda"] = "cpu"
    prompt_tokens: tuple[int, int] = (32, 64)
    max_answer_tokens: int = 128
    lora_rank: int = 0
    seed: int = 1


@dataclass(frozen=True)
class TrainingStart:
    """Where every side starts: weights that nobody changes, and rows in the order of steps."""

    model: PreTrainedModel
    rows: Sequence[Any]
    batches: Sequence[Sequence[Any]]
    num_tokens: int


def training_start(work: TrainingWork) -> TrainingStart:
    """Random weights, and as many rows as the steps read, from the work's seed."""
    config = model_config(work.shape, work.prompt_tokens[1] + work.max_answer_tokens)
    scalar = work.stage == "reward"
    model = random_model(config, scalar=scalar, seed=work.seed, device=work.device)
    num_rows = work.num_steps * work.batch_size
    chosen, rejected = (
        ragged_rows(
            num_rows,
            work.shape["vocab_size"],
            prompt_tokens=work.prompt_tokens,
            max_answer_tokens=work.max_answer_tokens,
            seed=seed,
        )
        for seed in (work.seed, work.seed + 1)
    )
    rows: Sequence[Any] = chosen
    num_tokens = sum(map(len, chosen))
    if scalar:
        rows = [PairRow(*pair) for pair in zip(chosen, rejected, strict=True)]
        num_tokens += sum(map(len, rejected))
    order = BatchOrder(num_rows=num_rows, batch_size=work.batch_size, seed=work.seed, epochs=1)
    batches = [[rows[i] for i in numbers] for _, numbers in order.from_step(0)]
    return TrainingStart(model, rows, batches, num_tokens)


class TrainingSide(Side):
    """Trains a model of its own from the start's weights, again each time."""

    def __init__(self, work: TrainingWork, start: TrainingStart) -> None:
        self.work, self.start, self.watch = work, start, Stopwatch()
        self.model = copied(start.model, work.device)

    def prepare(self) -> None:
        """Back to the start's weights."""
        reset(self.model, self.start.model)

    @abstractmethod
    def run(self, number: int) -> list[Step]:
        """All optimizer steps of the work: what each reported."""


class TandemSide(TrainingSide):
    """`SupervisedTrainer` with the stages' objectives, into a run folder."""

    def prepare(self) -> None:
        """Another model: in bf16 the one of the last round belongs to that round's optimizer."""
        self.model = copied(self.start.model, self.work.device)

    def run(self, number: int) -> list[Step]:
        work = self.work
        with tempfile.TemporaryDirectory() as folder:
            config = run_config(work, folder)
            # It shows a line a step, which would go between the bench's.
            with self.watch("train"), contextlib.redirect_stdout(io.StringIO()):
                run = Run(config, print_line=lambda line: None)
                trainer = SupervisedTrainer(
                    run,
                    work.stage,
                    self.model,
                    stage_config(work, config),
                    self.start.rows,
                    objective(work, self.model),
                    evaluate=dict,
                )
                run_stage(run, work.stage, trainer.job(save=lambda folder: None))
            records = [r for r in read_metrics(folder) if r.step > 0]
        return [Step(r.values["loss"], r.values["grad_norm"]) for r in records]


class PlainSide(TrainingSide):
    """The plain Hugging Face loop."""

    def run(self, number: int) -> list[Step]:
        train = train_sft if self.work.stage == "sft" else train_reward
        with self.watch("train"):
            return train(self.model, self.start.batches, plain_settings(self.work))


class TRLSide(TrainingSide):
    """TRL's SFTTrainer or RewardTrainer: their collators, accumulation and loop.

    The trainer is built before the clock starts. Rows come in the order of the other sides, and
    micro-batches have a fixed number of rows: as many as the others' tokens hold of the longest.
    """

    def run(self, number: int) -> list[Step]:
        with tempfile.TemporaryDirectory() as folder, quiet():
            trainer = self._trainer(folder)
            trainer.remove_callback(PrinterCallback)  # its lines would go between the bench's
            with self.watch("train"):
                trainer.train()
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        return [Step(entry["loss"], entry["grad_norm"]) for entry in history]

    def _trainer(self, folder: str) -> Any:
        # Not installed everywhere; the bench then names the side and why it is absent.
        import trl
        from datasets import Dataset

        work = self.work
        rows = [row for batch in self.start.batches for row in batch]
        tokenizer = build_tokenizer(min(512, work.shape["vocab_size"]))
        arguments = self._arguments(folder, {field.name for field in fields(trl.SFTConfig)})
        if work.stage == "sft":
            return trl.SFTTrainer(
                self.model,
                trl.SFTConfig(**arguments, dataset_kwargs={"skip_prepare_dataset": True}),
                train_dataset=Dataset.from_list([_labelled(row) for row in rows]),
                processing_class=tokenizer,
            )
        pairs = [
            {f"{name}_ids": list(getattr(pair, name).token_ids) for name in ("chosen", "rejected")}
            for pair in rows
        ]
        return trl.RewardTrainer(
            self.model,
            trl.RewardConfig(**arguments),
            train_dataset=Dataset.from_list(pairs),
            processing_class=tokenizer,
        )

    def _arguments(self, folder: str, known: set[str]) -> dict[str, Any]:
        """The work in TRL's knobs, of which those in `known` are there."""
        work, settings = self.work, plain_settings(self.work)
        longest = max(map(len, self.start.rows)) * (1 if work.stage == "sft" else 2)
        fitting = max(1, work.micro_batch_tokens // longest)
        # A step is cut evenly there.
        micro_batch = max(n for n in range(1, fitting + 1) if work.batch_size % n == 0)
        # TRL turns recomputation on, as no other side does; transformers 5.17 calls it otherwise.
        recompute = ("activation_checkpointing", "gradient_checkpointing")
        return {
            next(name for name in recompute if name in known): False,
            "output_dir": folder,
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": work.batch_size // micro_batch,
            "max_steps": work.num_steps,
            "learning_rate": settings.learning_rate,
            "lr_scheduler_type": "constant",
            "adam_beta1": settings.betas[0],
            "adam_beta2": settings.betas[1],
            "max_grad_norm": settings.max_grad_norm,
            "optim": "adamw_torch_fused",
            "bf16": settings.bf16,
            "use_cpu": work.device == "cpu",
            "train_sampling_strategy": "sequential",
            "max_length": None,
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
        }


SIDES = {"tandem": TandemSide, "hf": PlainSide, "trl": TRLSide}


def _labelled(row: TokenRow) -> dict[str, list[int]]:
    pairs = zip(row.token_ids, row.response_mask, strict=True)
    labels = [token if answered else IGNORED for token, answered in pairs]
    return {"input_ids": list(row.token_ids), "labels": labels}


def objective(work: TrainingWork, model: PreTrainedModel) -> Objective[Any]:
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


def run_config(work: TrainingWork, folder: str) -> RunConfig:
    """The work in Tandem's knobs."""
    stage = {
        "learning_rate": work.learning_rate,
        "schedule": "constant",
        "warmup": 0.0,
        "batch_size": work.batch_size,
        "eval_every": 0,
    }
    knobs = {
        "seed": work.seed,
        "device": work.device,
        "dtype": work.dtype,
        "micro_batch_tokens": work.micro_batch_tokens,
        "output_dir": folder,
        "save_every": 0,
        "log.tensorboard": False,
        **{f"{work.stage}.{name}": value for name, value in stage.items()},
    }
    return build_config(nested(knobs), where="bench: ")


def stage_config(work: TrainingWork, config: RunConfig) -> SupervisedConfig:
    """The section of the work's stage."""
    return config.sft if work.stage == "sft" else config.reward


def plain_settings(work: TrainingWork) -> Settings:
    """The work in the plain loop's knobs, read from Tandem's so that they are the same."""
    config = run_config(work, "")
    knobs = stage_config(work, config)
    return Settings(
        micro_batch_tokens=config.micro_batch_tokens,
        learning_rate=knobs.learning_rate,
        betas=knobs.betas,
        max_grad_norm=knobs.max_grad_norm,
        pad_token_id=PAD,
        bf16=work.dtype == "bf16",
    )
