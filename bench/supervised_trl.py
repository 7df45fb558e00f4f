"""The same training by TRL's trainers. Imported only where TRL is installed."""

from __future__ import annotations

import tempfile
from dataclasses import fields
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from bench.harness import Stopwatch
from bench.plain_hf_supervised import IGNORED, Step
from bench.supervised_sides import Side, plain_settings
from tandem.data.embedded.tokenizer import build_tokenizer
from tandem.models.quiet import quiet
from tandem.types import TokenRow


class TRLSide(Side):
    """SFTTrainer or RewardTrainer: their collators, accumulation and loop.

    The trainer is built before the clock starts. Rows come in the order of the other sides, and
    micro-batches have a fixed number of rows: as many as the others' tokens hold of the longest.
    """

    def _train(self, watch: Stopwatch) -> list[Step]:
        with tempfile.TemporaryDirectory() as folder, quiet():
            trainer = self._trainer(folder)
            with watch("train"):
                trainer.train()
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        return [Step(entry["loss"], entry["grad_norm"]) for entry in history]

    def _trainer(self, folder: str) -> Any:
        settings, work = plain_settings(self.work), self.work
        rows = [row for batch in self.start.batches for row in batch]
        longest = max(map(len, rows)) * (1 if work.stage == "sft" else 2)
        fitting = max(1, work.micro_batch_tokens // longest)
        # A step is cut evenly there.
        micro_batch = max(n for n in range(1, fitting + 1) if work.batch_size % n == 0)
        arguments: dict[str, Any] = {
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
        # TRL turns recomputation on, as no other side does; transformers 5.17 calls it otherwise.
        names = {field.name for field in fields(SFTConfig)}
        for name in ("activation_checkpointing", "gradient_checkpointing"):
            if name in names:
                arguments[name] = False
                break
        tokenizer = build_tokenizer(min(512, work.shape["vocab_size"]))
        if work.stage == "sft":
            trainer: Any = SFTTrainer(
                self.model,
                SFTConfig(**arguments, dataset_kwargs={"skip_prepare_dataset": True}),
                train_dataset=Dataset.from_list([_labelled(row) for row in rows]),
                processing_class=tokenizer,
            )
        else:
            pairs = [
                {
                    "chosen_ids": list(pair.chosen.token_ids),
                    "rejected_ids": list(pair.rejected.token_ids),
                }
                for pair in rows
            ]
            trainer = RewardTrainer(
                self.model,
                RewardConfig(**arguments),
                train_dataset=Dataset.from_list(pairs),
                processing_class=tokenizer,
            )
        trainer.remove_callback(PrinterCallback)  # its lines would go between the bench's
        return trainer


def _labelled(row: TokenRow) -> dict[str, list[int]]:
    labels = [
        token if said else IGNORED
        for token, said in zip(row.token_ids, row.response_mask, strict=True)
    ]
    return {"input_ids": list(row.token_ids), "labels": labels}
