"""Runs of many kinds, each predicted before it starts: how far the predictions are off.

    python bench/grade_plan.py --work grades --fit          # the runs that constants are fitted on
    python bench/grade_plan.py --work grades                # other runs, that are graded
    python bench/grade_plan.py --work grades --table        # errors of what has run so far
    tandem plan --refit grades/fit/*                        # constants from the first

One case after another, each a command with a folder of its own; a case that has run is not run
again. The machine is measured before the first case. On one thread CPU seconds are predicted and
measured, which other processes disturb less. Memory is the process's resident peak.

Before the table is shown, the runs are predicted again with the formulas and constants of now, from
their configurations, their rows' lengths and the measured machine: what was measured stays.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.models import SHAPES, Shape, covering_tokenizer, llama, model_config
from tandem.config.load import build_config, dump_config
from tandem.config.schema import RunConfig
from tandem.data.dataset import load_data
from tandem.errors import TandemError
from tandem.models.hf_logging import quiet
from tandem.models.load import new_causal_lm
from tandem.models.scalar import new_scalar_model
from tandem.plan.again import predict_again
from tandem.plan.grade import grade_table
from tandem.plan.knobs import nested
from tandem.predict.hardware import as_values, read_hardware
from tandem.predict.machine import MACHINE_FILE, measure_machine
from tandem.predict.record import read_outcomes

OPT = {"model_type": "opt", "dropout": 0.0, "do_layer_norm_before": True}


def _opt(width: int, layers: int, heads: int, vocabulary: int) -> Shape:
    return {**OPT, "vocab_size": vocabulary, "hidden_size": width, "ffn_dim": 4 * width,
            "num_hidden_layers": layers, "num_attention_heads": heads,
            "word_embed_proj_dim": width}  # fmt: skip


MODELS: Mapping[str, Shape] = {
    "stories260K": SHAPES["stories260k"],
    "llama-tiny": llama(48, 128, 3, 4, 512),
    "llama-1m": SHAPES["a"],
    "llama-2m": SHAPES["llama-2.2m"],
    "llama-5m": llama(256, 704, 4, 4, 8192),
    "llama-15m": SHAPES["b"],
    "llama-22m": SHAPES["llama-22m"],
    "llama-v50k": llama(128, 352, 4, 4, 50257),
    "llama-v150k": llama(96, 256, 3, 4, 151936),
    "llama-40m": llama(512, 1408, 8, 8, 32000),
    "llama-135m": llama(576, 1536, 30, 9, 49152, kv_heads=3),
    "opt-1m": _opt(128, 4, 4, 1024),
    "opt-3m": _opt(192, 3, 6, 4096),
    "opt-7m": _opt(256, 6, 8, 8192),
    "opt-16m": _opt(256, 6, 8, 50272),
}


@dataclass(frozen=True, kw_only=True)
class GradeCase:
    """One run of one stage: a model, knobs by dotted name, ranks."""

    model: str
    stage: str
    ranks: int = 1
    knobs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def folder(self) -> str:
        """Its name as a folder's."""
        words = [self.name or "plain", f"{self.ranks}ranks" if self.ranks > 1 else ""]
        return "-".join([self.stage, self.model, *filter(None, words)])


LORA = {"lora.rank": 8}
INT8 = {**LORA, "parallel.frozen_weights": "int8"}
NF4 = {**LORA, "parallel.frozen_weights": "nf4"}
SHARED = {**LORA, "parallel.shared_base": True}
AGAIN = {"gradient_checkpointing": True}
MICRO = {"micro_batch_tokens": 128}
LONG = {"sampling.max_new_tokens": 64, "sampling.min_new_tokens": 64}
OFFLOAD = {"parallel.offload": ["optimizer"]}
FEW = {"micro_batch_tokens": 256, "sft.batch_size": 4, "grpo.prompts_per_step": 1,
       "grpo.minibatch_size": 4, "sampling.samples_per_prompt": 4, "ppo.prompts_per_step": 1,
       "ppo.minibatch_size": 4, "sft.max_steps": 2}  # fmt: skip


def _zero(stage: int) -> dict[str, Any]:
    return {"parallel.actor_zero_stage": stage, "parallel.critic_zero_stage": stage}


def _cases(*rows: tuple[Any, ...]) -> tuple[GradeCase, ...]:
    return tuple(
        GradeCase(stage=row[0], model=row[1], name=row[2] if len(row) > 2 else "",
                  knobs=row[3] if len(row) > 3 else {}, ranks=row[4] if len(row) > 4 else 1)
        for row in rows
    )  # fmt: skip


FIT = _cases(
    ("sft", "llama-1m"), ("sft", "llama-15m"), ("sft", "opt-7m"), ("sft", "llama-v50k"),
    ("sft", "llama-5m", "lora", LORA), ("sft", "llama-2m", "again", AGAIN),
    ("reward", "llama-2m"), ("reward", "opt-7m"), ("dpo", "llama-5m"),
    ("ppo", "llama-1m"), ("ppo", "llama-5m", "long", LONG), ("ppo", "opt-7m"),
    ("ppo", "llama-v50k"), ("ppo", "llama-5m", "lora", LORA), ("grpo", "llama-2m"),
    ("sft", "llama-5m", "nf4", NF4), ("ppo", "llama-15m"), ("ppo", "opt-16m"),
    ("sft", "llama-40m", "few", FEW), ("grpo", "llama-40m", "few", FEW),
    ("sft", "llama-2m", "int8", INT8), ("sft", "llama-1m", "bf16", {"dtype": "bf16"}),
    ("ppo", "llama-2m", "shared", SHARED), ("sft", "llama-5m", "zero3", _zero(3), 2),
    ("ppo", "llama-1m", "zero2", _zero(2), 2), ("sft", "llama-1m", "zero0", _zero(0), 2),
    ("sft", "llama-tiny"), ("ppo", "llama-tiny"), ("grpo", "llama-tiny"),
    ("ppo", "opt-3m"), ("sft", "llama-5m", "bf16", {"dtype": "bf16"}),
    ("ppo", "llama-1m", "lora", LORA), ("kto", "llama-1m"), ("reward", "llama-tiny"),
    ("sft", "llama-5m", "micro", MICRO), ("ppo", "llama-5m", "micro", MICRO),
    ("reward", "opt-3m", "micro", MICRO),
)  # fmt: skip
GRADED = _cases(
    ("sft", "stories260K"), ("ppo", "stories260K"), ("sft", "llama-22m"), ("reward", "llama-5m"),
    ("ppo", "llama-2m"), ("dpo", "opt-1m"), ("grpo", "llama-5m"), ("sft", "llama-v150k"),
    ("sft", "opt-16m"), ("ppo", "opt-1m"), ("sft", "llama-15m", "lora", LORA),
    ("sft", "llama-15m", "int8", INT8), ("sft", "llama-15m", "nf4", NF4),
    ("ppo", "llama-5m", "int8", INT8), ("ppo", "llama-5m", "nf4", NF4),
    ("ppo", "llama-5m", "shared", SHARED), ("sft", "llama-5m", "zero2-2", _zero(2), 2),
    ("ppo", "llama-2m", "zero3", _zero(3), 2), ("reward", "stories260K"),
    ("dpo", "llama-2m", "lora", LORA), ("grpo", "stories260K"), ("kto", "llama-2m"),
    ("sft", "llama-5m", "offload", OFFLOAD), ("ppo", "llama-2m", "lora", LORA),
    ("sft", "llama-5m", "again", AGAIN), ("sft", "opt-7m", "bf16", {"dtype": "bf16"}),
    ("ppo", "llama-v150k"), ("dpo", "llama-15m"), ("sft", "opt-1m", "zero0", _zero(0), 2),
    ("sft", "llama-2m", "zero1", _zero(1), 2), ("sft", "llama-2m", "zero3", _zero(3), 4),
    ("ppo", "opt-1m", "zero0", _zero(0), 2), ("ppo", "llama-2m", "long", LONG),
    ("online-dpo", "llama-2m"), ("reward", "llama-v50k"),
    ("sft", "llama-135m", "few", FEW), ("grpo", "llama-135m", "few", FEW),
    ("ppo", "llama-135m", "shared", {**SHARED, **FEW}),
)  # fmt: skip
_NUM_ROWS = 800
_WITHOUT_ANSWERS = """
from tandem.training import run_stages
run_stages.is_compared = lambda run: True
from tandem.cli import main
raise SystemExit(main())
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases that have not run, then show the errors of all that have."""
    flags = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    flags.add_argument("--work", type=Path, required=True, help="where everything goes")
    flags.add_argument("--fit", action="store_true", help="the cases that constants are fitted on")
    flags.add_argument(
        "--only", nargs="*", default=[], help="cases with one of these in their name"
    )
    flags.add_argument("--most", type=int, default=1000, help="how many new cases to run")
    flags.add_argument("--table", action="store_true", help="run nothing")
    options = flags.parse_args(arguments)
    folder = options.work / ("fit" if options.fit else "graded")
    chosen = FIT if options.fit else GRADED
    if options.only:
        chosen = tuple(c for c in chosen if any(text in c.folder for text in options.only))
    if not options.table:
        run_cases(chosen, options.work, folder, options.most)
    runs = sorted(path for path in folder.glob("*") if path.is_dir())
    machine = read_hardware(machine_file(options.work))
    for run in runs:
        predict_again(run, machine)
    print(grade_table(runs))


def run_cases(cases: Sequence[GradeCase], work: Path, folder: Path, most: int) -> None:
    """Run those that have no result yet, in order."""
    torch.set_num_threads(1)
    machine = machine_file(work)
    for ran, case in enumerate(_without_result(cases, folder)):
        if ran >= most:
            return
        where = folder / case.folder
        try:
            run_case(case, case_config(case, work, where), where, machine)
        except (TandemError, RuntimeError, subprocess.CalledProcessError) as error:
            where.mkdir(parents=True, exist_ok=True)
            (where / "failed.txt").write_text(f"{error}\n", "utf-8")
            print(f"{case.folder}: failed: {error}", flush=True)
        whole = [o for o in read_outcomes(where) if o.phase == "stage"]
        for outcome in whole:
            print(
                f"{case.folder}: memory {outcome.memory_error:+.1%}, "
                f"time {outcome.time_error:+.0%}",
                flush=True,
            )


def _without_result(cases: Sequence[GradeCase], folder: Path) -> Iterator[GradeCase]:
    for case in cases:
        where = folder / case.folder
        if not read_outcomes(where) and not (where / "failed.txt").exists():
            yield case


def machine_file(work: Path) -> Path:
    """The file of this machine's measurement, kept with the results."""
    path = work / "machine.yaml"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        found, busy = measure_machine()
        print(f"measured the machine: {busy:.2f} wall seconds per CPU second", flush=True)
        path.write_text(yaml.safe_dump(as_values(found)), "utf-8")
    os.environ[MACHINE_FILE] = str(path)
    return path


def case_config(case: GradeCase, work: Path, where: Path) -> Any:
    models = _models(case.model, work)
    trains_reward = case.stage == "reward"
    shared = bool(case.knobs.get("parallel.shared_base"))
    values: dict[str, Any] = {
        "actor_model": str(models / "actor"),
        "data": [str(_rows(work))],
        "output_dir": str(where),
        "stages": (["reward"] if shared else []) + [case.stage],
        "device": "cpu",
        "micro_batch_tokens": 1024,
        "save_every": 0,
        "log.tensorboard": False,
        "dataset.heldout": 0.01,
        "sampling.max_new_tokens": 24,
        "sampling.min_new_tokens": 24,
        "reward.normalize_prompts": 0,
        **{f"{s}.max_steps": 3 for s in ("sft", "reward", "dpo", "kto")},
        **{f"{s}.batch_size": 16 for s in ("sft", "reward", "dpo", "kto")},
        **{f"{s}.eval_every": 0 for s in ("sft", "reward", "dpo", "kto", "ppo", "grpo")},
        "ppo.steps": 2,
        "ppo.prompts_per_step": 16,
        "ppo.minibatch_size": 16,
        "grpo.steps": 2,
        "grpo.prompts_per_step": 4,
        "grpo.minibatch_size": 16,
        "ppo.eval_prompts": 2,
        "grpo.eval_prompts": 2,
        "ppo.epochs": 1,
        "sampling.samples_per_prompt": {"grpo": 8, "online-dpo": 2}.get(case.stage, 1),
        **case.knobs,
    }
    if not (trains_reward or shared):  # a shared base: the reward model is trained first
        values["reward_model"] = str(models / "reward")
    return build_config(nested(values), where=f"{case.folder}: ")


def _models(name: str, work: Path) -> Path:
    """Random models of a shape, written once."""
    folder = work / "models" / name
    if (folder / "reward" / "config.json").exists():
        return folder
    tokenizer = covering_tokenizer(MODELS[name]["vocab_size"])
    config = model_config(MODELS[name], 512, eos=tokenizer.eos_token_id)
    for kind, make in (("actor", new_causal_lm), ("reward", new_scalar_model)):
        with quiet():
            make(config, 1).save_pretrained(folder / kind)
            tokenizer.save_pretrained(folder / kind)
    return folder


def _rows(work: Path) -> Path:
    """Some pairs of the built-in data set: to read all of it takes longer than to train."""
    path = work / "rows.jsonl"
    if not path.exists():
        data = load_data(RunConfig().dataset, ("embedded",), (), seed=1, stages=("reward",))
        rows = (
            {"prompt": sample.prompt[-1].content, "chosen": sample.chosen,
             "rejected": sample.rejected}
            for sample in data.pairs[:_NUM_ROWS]
        )  # fmt: skip
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def run_case(case: GradeCase, config: Any, where: Path, machine: Path) -> None:
    """A case as the command that a user gives, but for the answers that a run compares at its
    end."""
    where.parent.mkdir(parents=True, exist_ok=True)
    path = where.with_suffix(".yaml")
    path.write_text(dump_config(config), "utf-8")
    command = ["-c", _WITHOUT_ANSWERS] if case.ranks == 1 else ["-m", "tandem"]
    words = ["train", "--config", str(path), "--num-gpus", str(case.ranks)]
    environment = {**os.environ, MACHINE_FILE: str(machine), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, *command, *words],
        env=environment, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
    )  # fmt: skip


if __name__ == "__main__":
    main()
