"""One case of the memory bench: a few steps of random models over ranks, its peaks by phase."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import LlamaConfig, PreTrainedTokenizerBase

from tandem.config.load import build_config, check_config
from tandem.config.schema import RunConfig
from tandem.data.embedded.tokenizer import build_tokenizer
from tandem.engine.forward import deal_batch, response_logprobs
from tandem.engine.hybrid import RLHFEngine
from tandem.engine.loading import place_policy
from tandem.engine.optimizer import Trainee
from tandem.metrics.timing import Phases
from tandem.models.load import new_causal_lm
from tandem.models.quiet import quiet
from tandem.models.scalar import new_scalar_model
from tandem.objectives.losses import sft_loss
from tandem.ops import native
from tandem.parallel.world import World, leave
from tandem.plan.knobs import nested
from tandem.training.ppo_trainer import PPOTrainer
from tandem.types import Message, PromptRow, Source, TokenBatch

Step = Literal["sft", "ppo"]

_TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """Models from a config, knobs by dotted name, ranks, and how much work a step is.

    prompts: per step, over all ranks. prompt, new: tokens of each prompt and answer.
    micro_batch_tokens: per rank; `steps` steps are made, so that optimizer states are there.
    """

    shape: Mapping[str, Any]
    step: Step = "ppo"
    ranks: int = 1
    knobs: Mapping[str, Any] = field(default_factory=dict)
    prompts: int = 16
    prompt: int = 32
    new: int = 32
    micro_batch_tokens: int = 256
    steps: int = 2
    threads: int = 1

    @property
    def config(self) -> RunConfig:
        """The run's knobs; every answer is as long as it may be."""
        values = {
            "device": "cpu",
            "micro_batch_tokens": self.micro_batch_tokens,
            "generation_batch_size": self.prompts,
            "sampling.max_new_tokens": self.new,
            "sampling.min_new_tokens": self.new,
            "ppo.prompts_per_step": self.prompts,
            "ppo.minibatch_size": self.prompts,
            "ppo.epochs": 1,
            "ppo.steps": self.steps,
            **self.knobs,
        }
        config = build_config(nested(values), where="memory bench: ")
        check_config(config)
        return config

    @property
    def model_config(self) -> LlamaConfig:
        """Of actor and critic; the tokenizer is the embedded data set's."""
        tokenizer = _tokenizer(self.shape["vocab_size"])
        return LlamaConfig(
            **self.shape,
            max_position_embeddings=self.prompt + self.new,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )


@dataclass(frozen=True)
class Measured:
    """Peaks of one rank in bytes by phase, over what it held before any model; step seconds."""

    peaks: dict[str, int]
    seconds: float


@cache
def _tokenizer(vocabulary: int) -> PreTrainedTokenizerBase:
    return build_tokenizer(min(512, vocabulary))


def save_models(case: MemoryCase, folder: Path) -> None:
    """Write a case's actor and reward model, random weights, for its ranks to load."""
    for one, where in ((case, folder), (replace(case, shape=_TINY), folder / "tiny")):
        tokenizer = _tokenizer(one.shape["vocab_size"])
        for name, make in (("actor", new_causal_lm), ("reward", new_scalar_model)):
            if not (where / name).exists():
                with quiet():
                    make(one.model_config, 1).save_pretrained(where / name)
                    tokenizer.save_pretrained(where / name)


def measure(case: MemoryCase, models: Path) -> list[Measured]:
    """Run a case in processes of its own, one per rank.

    Args:
        models: where `save_models` wrote.
    Raises:
        RuntimeError: a rank failed; its traceback is on stderr.
    """
    # Every tensor is a mapping of its own, given back when freed: resident is what tensors hold.
    before = os.environ.get("MALLOC_MMAP_THRESHOLD_")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    context = multiprocessing.get_context("spawn")
    try:
        with tempfile.TemporaryDirectory() as folder:
            ends = [context.Pipe(duplex=False) for _ in range(case.ranks)]
            children = [
                context.Process(target=_rank, args=(case, rank, models, folder, sender))
                for rank, (_, sender) in enumerate(ends)
            ]
            for child in children:
                child.start()
            for _, sender in ends:
                sender.close()
            return [_received(receiver, children) for receiver, _ in ends]
    finally:
        if before is None:
            del os.environ["MALLOC_MMAP_THRESHOLD_"]
        else:
            os.environ["MALLOC_MMAP_THRESHOLD_"] = before


def _received(receiver: Connection, children: list[Any]) -> Measured:
    try:
        result: Measured = receiver.recv()
    except EOFError:
        for child in children:
            child.kill()
            child.join()
        codes = [child.exitcode for child in children]
        raise RuntimeError(
            f"every rank must answer; got exit codes {codes}. See the traceback above; -9 where "
            "nothing is said means too little memory."
        ) from None
    return result


def _rank(case: MemoryCase, rank: int, models: Path, folder: str, sender: Connection) -> None:
    torch.set_num_threads(case.threads)
    device = torch.device("cuda", rank) if case.config.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if case.ranks > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = f"file://{folder}/store"
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=case.ranks)
    world = World(rank, case.ranks, case.ranks, device)
    native.available()  # built and loaded before anything is measured
    run = _ppo if case.step == "ppo" else _sft
    # What libraries load on first use is no model's memory: a tiny model goes first.
    run(replace(case, shape=_TINY, steps=1), models / "tiny", world)
    gc.collect()
    sender.send(run(case, models, world))
    leave()


def _ppo(case: MemoryCase, models: Path, world: World) -> Measured:
    config, phases = case.config, Phases()
    before = resident_bytes(world.device)
    with phases("save"):  # any phase's name serves to take the peak of loading
        engine = RLHFEngine(
            actor=str(models / "actor"),
            reward_model=str(models / "reward"),
            config=config,
            world=world,
        )
    trainer = PPOTrainer(engine, config, num_steps=case.steps, phases=phases)
    prompts = _prompts(case)
    start = time.perf_counter()
    for step in range(1, case.steps + 1):
        experience = trainer.generate_experience(prompts, step=step)
        trainer.train_rlhf(experience, step=step)
        del experience
    return _peaks(phases, before, (time.perf_counter() - start) / case.steps)


def _sft(case: MemoryCase, models: Path, world: World) -> Measured:
    config, phases = case.config, Phases()
    before = resident_bytes(world.device)
    with phases("save"):
        model = place_policy(str(models / "actor"), config, world, trained=True, seed=config.seed)
        trainee = Trainee("sft", model, config.sft, case.steps)
    ids = torch.randint(5, 400, (case.prompts, case.prompt + case.new), device=world.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    answers = mask.clone()
    answers[:, : case.prompt] = False
    batch = TokenBatch(ids, mask, answers)
    model.train()
    start = time.perf_counter()
    for _ in range(case.steps):
        with phases("train"):
            for rows, part in deal_batch(batch, config.micro_batch_tokens, world):
                chosen = batch.select(rows)
                logprobs = response_logprobs(model, chosen)[0]
                loss = sft_loss(logprobs, chosen.response_mask)
                trainee.backward(loss, int(answers.sum()), is_last=part.is_last)
                del loss, logprobs
            trainee.step()
    return _peaks(phases, before, (time.perf_counter() - start) / case.steps)


def _peaks(phases: Phases, before: int, seconds: float) -> Measured:
    found = {
        name.partition("/")[2]: int(value) - before
        for name, value in phases.metrics().items()
        if name.startswith("peak_memory_bytes/")
    }
    found["load"] = found.pop("save")
    return Measured(found, seconds)


def resident_bytes(device: torch.device) -> int:
    """Bytes held now: of a GPU's allocator, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if sys.platform != "linux":
        raise RuntimeError(f"resident memory must be read on Linux; got {sys.platform}.")
    pages = Path("/proc/self/statm").read_text("ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _prompts(case: MemoryCase) -> list[PromptRow]:
    generator = torch.Generator().manual_seed(1)
    vocabulary = min(400, case.shape["vocab_size"])
    rows = torch.randint(5, vocabulary, (case.prompts, case.prompt), generator=generator)
    message = (Message("user", "?"),)
    return [
        PromptRow(tuple(row), message, {}, Source("bench", "bench", i + 1))
        for i, row in enumerate(rows.tolist())
    ]
