"""One case of the memory bench: a few steps of random models over ranks, its peaks by phase."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from bench.harness import in_children
from bench.models import Shape, covering_tokenizer, llama, model_config, prompt_rows, random_ids
from tandem.config.engine import engine_settings
from tandem.config.load import build_config, check_config
from tandem.config.schema import RunConfig
from tandem.engine.forward import rank_micro_batches_of, response_logprobs
from tandem.engine.learner import Learner
from tandem.engine.placement import Placement
from tandem.metrics.timing import Phases
from tandem.models.hf_logging import quiet
from tandem.models.load import new_causal_lm
from tandem.models.scalar import new_scalar_model
from tandem.objectives.losses import sft_loss
from tandem.ops import native
from tandem.parallel.world import World, leave
from tandem.plan.knobs import nested
from tandem.training.make_engine import make_engine
from tandem.training.ppo_trainer import PPOTrainer
from tandem.types import TokenBatch

_TINY = llama(64, 64, 1, 2, 512)


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """Models from a config, knobs by dotted name, ranks, and how much work a step is.

    prompts: per step, over all ranks. prompt, new: tokens of each prompt and answer.
    micro_batch_tokens: per rank; `steps` steps are made, so that optimizer states are there.
    """

    shape: Shape
    step: Literal["sft", "ppo"] = "ppo"
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
    def model_config(self) -> PreTrainedConfig:
        """Of actor and critic; the tokenizer is the embedded data set's."""
        eos = _tokenizer(self.shape["vocab_size"]).eos_token_id
        return model_config(self.shape, self.prompt + self.new, eos=eos)


@dataclass(frozen=True)
class Measured:
    """Peaks of one rank in bytes by phase, over what it held before any model; step seconds."""

    peaks: dict[str, int]
    seconds: float


@cache
def _tokenizer(vocabulary: int) -> PreTrainedTokenizerBase:
    return covering_tokenizer(vocabulary)


def save_models(case: MemoryCase, folder: Path) -> None:
    """Write a case's actor and reward model, random weights, for its ranks to load."""
    for one, where in ((case, folder), (replace(case, shape=_TINY), folder / "tiny")):
        for name, make in (("actor", new_causal_lm), ("reward", new_scalar_model)):
            with quiet():
                make(one.model_config, 1).save_pretrained(where / name)
                _tokenizer(one.shape["vocab_size"]).save_pretrained(where / name)


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
    try:
        with tempfile.TemporaryDirectory() as folder:
            return in_children(a_rank, [(case, i, models, folder) for i in range(case.ranks)])
    finally:
        if before is None:
            del os.environ["MALLOC_MMAP_THRESHOLD_"]
        else:
            os.environ["MALLOC_MMAP_THRESHOLD_"] = before


def a_rank(case: MemoryCase, rank: int, models: Path, folder: str) -> Measured:
    """The peaks of one rank, in this process; `folder` is where the ranks meet."""
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
    # What libraries load on first use is no model's memory: a tiny model goes first.
    _steps(replace(case, shape=_TINY, steps=1), models / "tiny", world)
    gc.collect()
    found = _steps(case, models, world)
    leave()
    return found


def _steps(case: MemoryCase, models: Path, world: World) -> Measured:
    phases, before = Phases(), resident_bytes(world.device)
    with phases("save"):  # any phase's name serves to take the peak of loading
        step = (_ppo if case.step == "ppo" else _sft)(case, models, world, phases)
    start = time.perf_counter()
    for number in range(1, case.steps + 1):
        step(number)
    seconds = (time.perf_counter() - start) / case.steps
    found = {
        name.partition("/")[2]: int(value) - before
        for name, value in phases.metrics().items()
        if name.startswith("peak_memory_bytes/")
    }
    return Measured({"load": found.pop("save"), **found}, seconds)


def _ppo(case: MemoryCase, models: Path, world: World, phases: Phases) -> Any:
    config = case.config
    engine = make_engine(
        actor=str(models / "actor"),
        reward_model=str(models / "reward"),
        config=config,
        world=world,
    )
    trainer = PPOTrainer(engine, config, num_steps=case.steps, phases=phases)
    vocabulary = min(400, case.shape["vocab_size"])
    prompts = prompt_rows(random_ids([case.prompt] * case.prompts, vocabulary, seed=1))

    def step(number: int) -> None:
        made = trainer.generate_experience(prompts, step=number, begins_update=True)
        trainer.train_rlhf(made, step=number)

    return step


def _sft(case: MemoryCase, models: Path, world: World, phases: Phases) -> Any:
    config = case.config
    model = Placement(engine_settings(config), world).policy(
        str(models / "actor"), trained=True, seed=config.seed
    )
    learner = Learner("sft", model, config.sft, case.steps)
    ids = torch.randint(5, 400, (case.prompts, case.prompt + case.new), device=world.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    answers = mask.clone()
    answers[:, : case.prompt] = False
    batch = TokenBatch(ids, mask, answers)
    model.train()

    def step(number: int) -> None:
        with phases("train"):
            for rows, part in rank_micro_batches_of(batch, config.micro_batch_tokens, world):
                chosen = batch.select(rows)
                loss = sft_loss(response_logprobs(model, chosen)[0], chosen.response_mask)
                learner.backward(loss, int(answers.sum()), is_last=part.is_last)
                del loss
            learner.step()

    return step


def resident_bytes(device: torch.device) -> int:
    """Bytes held now: of a GPU's allocator, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if sys.platform != "linux":
        raise RuntimeError(f"resident memory must be read on Linux; got {sys.platform}.")
    pages = Path("/proc/self/statm").read_text("ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
