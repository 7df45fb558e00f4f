"""Parts of the GPU's bench that are measured nowhere else: first look, largest models, profiles.

Every function runs in a process of its own (`bench/gpu.py`), returns what JSON can hold, and works
with tiny shapes on a CPU.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.generation_sides import GenerationStart, GenerationWork, generation_start
from bench.harness import now, peak_bytes
from bench.models import (
    SHAPES,
    WORDS,
    covering_tokenizer,
    llama,
    model_config,
    prompt_rows,
    random_ids,
    random_model,
    tiny,
)
from bench.ppo_sides import Start, TandemSide, Work
from bench.report import ROOT
from tandem.config.schema import SamplingConfig
from tandem.generation.generator import generate
from tandem.generation.gpu_runner import recorded_so_far
from tandem.ops import attention
from tandem.ops.attention_context import (
    BLOCK_TOKENS,
    AttentionSpec,
    Decode,
    KVMemory,
    LayerShape,
)

LLAMA_13B = llama(5120, 13824, 40, 40, 32000, tied=False)
LLAMA_34B = llama(8192, 22016, 48, 64, 32000, kv_heads=8, tied=False)
OFFLOADED: dict[str, Any] = {
    "parallel.offload": ["optimizer"],
    "parallel.optimizer_states": "8bit",
    "parallel.offload_gradients": False,  # 6 instead of 10 bytes per weight on the host
    "gradient_checkpointing": True,
}
ADAPTED: dict[str, Any] = {
    "lora.rank": 16,
    "parallel.frozen_weights": "nf4",
    "gradient_checkpointing": True,
}
LARGEST: dict[str, tuple[Any, dict[str, Any]]] = {
    "13b full PPO, optimizer on the host": (LLAMA_13B, OFFLOADED),
    "34b LoRA on NF4": (LLAMA_34B, ADAPTED),
}
"""The actor's shape and Tandem's knobs; critic and reward model are OPT-350M, the reference a copy
of the actor (under LoRA the actor without adapters)."""


def gpu_tests(device: str, minutes: float) -> dict[str, Any]:
    """tests/gpu: the last lines of what pytest says, and whether all passed."""
    mode = "on" if device == "cuda" else "dry"
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider", "--tb=short"]
    begin = now()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "TANDEM_TEST_GPU": mode},
            capture_output=True,
            text=True,
            timeout=60 * minutes,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"tests/gpu took more than {minutes:g} minutes"}
    lines = done.stdout.strip().splitlines()
    if done.returncode not in (0, 1) or not lines:  # pytest's codes of tests that ran
        said = [*lines, *done.stderr.strip().splitlines()] or ["nothing was said"]
        return {"failed": f"tests/gpu did not run ({done.returncode}): {said[-1]}"}
    summary = [line for line in lines if line.startswith(("FAILED", "ERROR"))] + lines[-1:]
    return {"passed": done.returncode == 0, "summary": summary, "seconds": now() - begin}


def attention_rates(device: str) -> dict[str, float]:
    """TB/s at which decoding attention reads keys and values, by heads, rows and context."""
    big = device == "cuda"
    cases = [(32, 32, 16, 512), (32, 32, 64, 512), (32, 8, 64, 4096)] if big else [(4, 2, 2, 32)]
    width, rates = (128 if big else 16), {}
    for heads, kv_heads, rows, context in cases:
        blocks = context // BLOCK_TOKENS
        dtype = torch.bfloat16
        shape = LayerShape(kv_heads, width, width)
        memory = KVMemory([shape], rows * blocks, dtype=dtype, device=torch.device(device))
        tables = torch.randperm(rows * blocks, device=device).int().view(rows, blocks)
        positions = torch.full((rows,), context - 1, device=device)
        q, k, v = (
            torch.randn(rows, h, width, device=device, dtype=dtype)
            for h in (heads, kv_heads, kv_heads)
        )
        step = Decode(positions, tables, memory)
        call = _repeated(attention.paged_attention, q, k, v, step, 0, AttentionSpec(width**-0.5))
        num_bytes = 2 * rows * context * kv_heads * width * dtype.itemsize
        rates[f"{heads}/{kv_heads} heads, {rows} rows of {context}"] = num_bytes / call / 1e12
    return rates


def row_invariance(device: str) -> dict[int, float]:
    """Share of a product's numbers that change if a row has other rows beside it, by their count:
    what keeps decoding from the bits of training on a GPU."""
    width, most = (4096, 8192) if device == "cuda" else (64, 64)
    weight = torch.randn(width, width, device=device, dtype=torch.bfloat16) / width**0.5
    rows = torch.randn(most, width, device=device, dtype=torch.bfloat16)
    whole = rows @ weight.t()
    return {
        n: float((whole[:n] != rows[:n] @ weight.t()).float().mean())
        for n in (1, 16, 64)
        if n <= most
    }


def rollouts(work: GenerationWork, count: int) -> list[dict[str, float]]:
    """Seconds of rollouts in a row, weights changed in place between them, and the allocator's
    bytes: the first records, the others must be as fast and reserve no more."""
    start = generation_start(work)
    found = []
    for number in range(count):
        begin = now()
        answer(work, start, number)
        row = {"seconds": now() - begin}
        if work.device == "cuda":
            row["reserved_bytes"] = torch.cuda.memory_reserved()
            row["allocated_bytes"] = torch.cuda.memory_allocated()
            row["recordings"], row["recording_seconds"] = recorded_so_far(start.model)
        found.append(row)
        with torch.no_grad():
            for parameter in start.model.parameters():
                parameter.mul_(0.9999)
    return found


def answer(work: GenerationWork, start: GenerationStart, step: int) -> None:
    """One rollout of Tandem's."""
    knobs = SamplingConfig(max_new_tokens=work.max_new_tokens)
    with torch.no_grad():
        generate(
            start.model, start.prompts, knobs, start.stops, seed=1, step=step,
            batch_size=work.num_prompts,
        )  # fmt: skip


def largest_work(name: str, *, is_tiny: bool, device: str) -> Work:
    """The PPO step of one of `LARGEST`: 32 prompts of 256 tokens and 256 new ones."""
    shape, knobs = LARGEST[name]
    work = Work(
        shape=shape,
        critic_shape=SHAPES["opt-350m"],
        num_prompts=32,
        prompt_tokens=(256,),
        max_new_tokens=256,
        minibatch_size=32,
        micro_batch_tokens=4096,
        dtype="bf16",
        device="cuda" if device == "cuda" else "cpu",
        knobs=knobs,
    )
    if not is_tiny:
        return work
    small: dict[str, Any] = {"shape": tiny(shape), "critic_shape": tiny(SHAPES["opt-350m"])}
    few: dict[str, Any] = {"num_prompts": 2, "minibatch_size": 2, "prompt_tokens": (8,)}
    return replace(work, **small, **few, max_new_tokens=8, dtype="fp32")


def largest(work: Work) -> dict[str, Any]:
    """One PPO step after one unmeasured, on models built on the device: nothing is on a disk, and
    the host never holds whole weights."""
    side = TandemSide(work, on_device(work), copies=False)
    side.run(0)
    side.watch.take()
    begin = now()
    side.run(1)
    return {
        "step_seconds": now() - begin,
        "phases": {name: cost.wall for name, cost in side.watch.take().items()},
        "actor_parameters": side.engine.actor.num_parameters(),
        "peak_bytes": peak_bytes(work.device),
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def on_device(work: Work) -> Start:
    """As `ppo_sides.start`, with random weights made where and as they compute."""
    tokenizer = covering_tokenizer(work.shape["vocab_size"])
    positions = max(work.prompt_tokens) + work.max_new_tokens
    actor, reward_model = (
        random_model(
            model_config(shape, positions, eos=tokenizer.eos_token_id),
            scalar=scalar,
            seed=work.seed + scalar,
            dtype=work.dtype,
            device=work.device,
        )
        for shape, scalar in ((work.shape, False), (work.critic_shape or work.shape, True))
    )
    lengths = [work.prompt_tokens[i % len(work.prompt_tokens)] for i in range(work.num_prompts)]
    prompts = random_ids(lengths, min(WORDS, len(tokenizer)), work.seed)
    return Start(actor, reward_model, tokenizer, prompt_rows(prompts))


def profile_decode(work: GenerationWork) -> list[dict[str, Any]]:
    """The operations of a rollout's decode steps, dearest first, per step."""
    start = generation_start(work)
    answer(work, start, 0)
    rows = _profiled(lambda: answer(work, start, 1))
    return _per(rows, work.max_new_tokens - 1)


def profile_step(work: Work) -> list[dict[str, Any]]:
    """The operations of one PPO update (forward, backward, optimizer), dearest first."""
    side = TandemSide(work, on_device(work), copies=False)
    side.run(0)
    made = side.make()
    return _per(_profiled(lambda: side.trainer.train_rlhf(made, step=1)), 1)


def _profiled(work: Callable[[], object]) -> list[tuple[str, int, float]]:
    """Name, count and microseconds of each operation, on the GPU where there is one."""
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    # torch 2.11 warns of events that another cycle would clear; there is one cycle.
    with profile(activities=[activity], acc_events=True) as found:
        work()
        now()
    return [
        (
            event.key,
            event.count,
            event.self_device_time_total if cuda else event.self_cpu_time_total,
        )
        for event in found.key_averages()
    ]


def _per(rows: list[tuple[str, int, float]], steps: int) -> list[dict[str, Any]]:
    total = sum(time for *_, time in rows) or 1.0
    dearest = sorted(rows, key=lambda row: -row[2])[:25]
    table = [
        {"name": name[:90], "calls": count / steps, "us": time / steps, "share": time / total}
        for name, count, time in dearest
    ]
    others = {"name": "all", "calls": sum(n for _, n, _ in rows) / steps, "us": total / steps}
    return [*table, {**others, "share": 1.0}]


def _repeated(function: Callable[..., Tensor], *arguments: Any, count: int = 20) -> float:
    """Median seconds of a call."""
    function(*arguments)
    seconds = []
    for _ in range(count):
        begin = now()
        function(*arguments)
        seconds.append(now() - begin)
    return statistics.median(seconds)
