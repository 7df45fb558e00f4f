"""Forward and backward over ragged rows: Tandem's packed forward beside Hugging Face's padded one.

    python bench/packed.py --shapes llama-22m --rounds 7 --json packed.json
    python bench/packed.py --shapes qwen2.5-0.5b --lora-rank 16 --dtype bf16

bench/README.md says what is the same on both sides and how to read the table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# The benches are no part of the installed package: they are run from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.models import DTYPES, HYBRIDS, PAD, SHAPES
from bench.plain_hf_supervised import Step, language_loss, row_chunks
from bench.report import Report, count, parser
from bench.supervised import LLAMAS, measure_row, show, tried
from bench.supervised_sides import TrainingSide, TrainingStart, TrainingWork, plain_settings
from tandem.config.lora import LoraConfig
from tandem.engine.forward import rank_micro_batches_of, response_logprobs
from tandem.models.lora import add_lora
from tandem.objectives.losses import sft_loss
from tandem.parallel.world import World
from tandem.types import TokenBatch

AGREEMENT = {"fp32": 1e-5, "bf16": 3e-2}
"""How far the two gradients may be apart, relative to the padded one's size."""

NUM_ROWS = {"llama-2.2m": 64, "llama-22m": 32, "smollm2": 16, "qwen2.5-0.5b": 8}
NUM_ROWS |= dict.fromkeys(HYBRIDS, 16)


class GradientSide(TrainingSide):
    """One gradient of the answers' mean cross-entropy, into a model without one."""

    def prepare(self) -> None:
        """The weights never change."""
        self.model.zero_grad(set_to_none=True)

    def run(self, number: int) -> list[Step]:
        """The loss and the gradient's size."""
        (rows,) = self.start.batches
        batch = TokenBatch.from_rows(rows, PAD).to(self.work.device)
        total = torch.zeros((), device=self.work.device)
        with self.watch("train"):
            for loss in self.losses(batch):
                loss = loss / batch.num_response_tokens
                loss.backward()
                total += loss.detach()
        return [Step(float(total), float(nn.utils.get_total_norm(gradients(self.model))))]

    def losses(self, batch: TokenBatch) -> Iterator[Tensor]:
        """The sums of the micro-batches' cross-entropies; `batch` holds the rows of the start."""
        raise NotImplementedError


class TandemGradient(GradientSide):
    """By `response_logprobs`, in weights of the compute type, adapters among them."""

    def __init__(self, work: TrainingWork, start: TrainingStart) -> None:
        super().__init__(work, start)
        if work.lora_rank:
            add_lora(self.model, LoraConfig(rank=work.lora_rank), work.seed)
            draw(self.model, work.seed)
        nn.Module.to(self.model, DTYPES[work.dtype])

    def losses(self, batch: TokenBatch) -> Iterator[Tensor]:
        for rows, _ in rank_micro_batches_of(batch, self.work.micro_batch_tokens, World()):
            part = batch.select(rows)
            yield sft_loss(response_logprobs(self.model, part)[0], part.response_mask)


class PlainGradient(GradientSide):
    """By the model's own padded forward and cross-entropy, with PEFT's adapters.

    In bf16 it runs by autocast; below adapters the frozen weights are stored in bf16 too.
    """

    def __init__(self, work: TrainingWork, start: TrainingStart) -> None:
        super().__init__(work, start)
        if work.lora_rank:
            nn.Module.to(self.model, DTYPES[work.dtype])
            rank = work.lora_rank
            adapters = peft.LoraConfig(
                r=rank, lora_alpha=int(LoraConfig(rank=rank).alpha), target_modules="all-linear"
            )
            peft.inject_adapter_in_model(adapters, self.model)
            draw(self.model, work.seed)

    def losses(self, batch: TokenBatch) -> Iterator[Tensor]:
        settings = plain_settings(self.work)
        for rows in row_chunks(self.start.batches[0], self.work.micro_batch_tokens):
            yield language_loss(self.model, rows, settings)


SIDES = {"tandem": TandemGradient, "hf": PlainGradient}


@torch.no_grad()
def draw(model: PreTrainedModel, seed: int) -> None:
    """Give what is trained small numbers, the same in either kind of adapters: none stays 0."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            start = 0.02 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(start.to(parameter.device))


def gradients(model: PreTrainedModel) -> list[Tensor]:
    """Of every weight that is trained.

    Raises:
        RuntimeError: one has none.
    """
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        if parameter.grad is None:
            raise RuntimeError(f"every weight must have a gradient; got none for {name}.")
    return [p.grad for p in trained.values() if p.grad is not None]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Check, measure, show; returns what --json writes."""
    options = _options(arguments)
    report = Report(options)
    rows = report.result["rows"] = {}
    for name in options.shapes:
        work = TrainingWork(
            shape=SHAPES[name],
            num_steps=1,
            batch_size=options.sequences or NUM_ROWS[name],
            dtype=options.dtype,
            device=options.device,
            lora_rank=options.lora_rank,
        )
        work = tried(work, options)
        row = rows[name] = measure_row(work, options, SIDES, gradients, AGREEMENT[work.dtype])
        title = f"{name}: forward and backward, {work.batch_size} rows, {work.dtype}"
        show(report, title + f", adapters of rank {work.lora_rank}" * bool(work.lora_rank), row)
    return report.end()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    flags = parser(__doc__, "rounds threads dtype device micro-batch-tokens default-allocator")
    add = flags.add_argument
    add("--shapes", nargs="+", choices=NUM_ROWS, default=list(LLAMAS))
    add("--sequences", type=count, help=f"rows; by default {NUM_ROWS}")
    add("--lora-rank", type=int, default=0, help="of adapters, which alone are trained; none")
    return flags.parse_args(arguments)


if __name__ == "__main__":
    main()
