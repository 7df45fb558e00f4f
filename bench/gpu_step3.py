"""One PPO step of OPT on a GPU: an actor of 1.3B and a critic of 350M, in pairs per second.

Each side runs in a process of its own, for two do not fit beside each other. `bench/gpu.py` runs
this and shows it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from bench.same import require_same_work
from bench.sides import PlainSide, TandemSide
from bench.work import Start, Work
from tandem.data.embedded.tokenizer import build_tokenizer
from tandem.engine.hybrid import RLHFEngine
from tandem.generation.blocks import blocks_for
from tandem.generation.runner import new_memory
from tandem.generation.runners import make_runner
from tandem.ops.steps import BLOCK_TOKENS
from tandem.types import Message, PromptRow, Source

OPT_350M: Mapping[str, Any] = {
    "model_type": "opt",
    "vocab_size": 50272,
    "hidden_size": 1024,
    "ffn_dim": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "word_embed_proj_dim": 512,
    "do_layer_norm_before": False,
}


def opt_start(work: Work, critic_shape: Mapping[str, Any]) -> Start:
    """Random weights on the CPU and prompts of random ids, from the work's seed.

    Args:
        work: its `shape` is the actor's, a Hugging Face config with its `model_type`.
        critic_shape: the same for critic and reward model.
    """
    tokenizer = build_tokenizer(min(512, work.shape["vocab_size"]))

    def config(shape: Mapping[str, Any], **more: Any) -> Any:
        settings = dict(shape)
        return AutoConfig.for_model(
            settings.pop("model_type"),
            **settings,
            **more,
            max_position_embeddings=max(work.prompt_tokens) + work.max_new_tokens,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dropout=0.0,
        )

    torch.manual_seed(work.seed)
    actor = AutoModelForCausalLM.from_config(config(work.shape)).eval()
    reward_model = AutoModelForSequenceClassification.from_config(
        config(critic_shape, num_labels=1)
    ).eval()
    size = work.num_prompts, work.prompt_tokens[0]
    rows = torch.randint(5, len(tokenizer), size, device="cpu")
    prompts = tuple(
        PromptRow(tuple(ids), (Message("user", "?"),), {}, Source("bench", "bench", i + 1))
        for i, ids in enumerate(rows.tolist())
    )
    return Start(actor, reward_model, tokenizer, prompts)


def measured(side: str, work: Work, critic_shape: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Costs of `rounds` forced steps of one side, after one unmeasured; Tandem's switches too.

    Raises:
        RuntimeError: a step did other work than was asked for.
    """
    begin = opt_start(work, critic_shape)
    never_ends = (work.max_new_tokens + 1,) * work.num_prompts
    built = TandemSide(work, begin) if side == "tandem" else PlainSide(work, begin, never_ends)
    built.step()
    costs = []
    for _ in range(rounds):
        done, cost = built.step()
        require_same_work(work, done, done)
        costs.append({phase: asdict(one) for phase, one in cost.items()})
    seconds = statistics.median(one["total"]["wall"] for one in costs)
    result: dict[str, Any] = {
        "rounds": costs,
        "step_seconds": seconds,
        "pairs_per_second": work.num_prompts / seconds,
    }
    if work.device == "cuda":
        result["peak_bytes"] = torch.cuda.max_memory_allocated()
    if isinstance(built, TandemSide):
        switches = [switch(built.engine, work) for _ in range(4)][1:]
        result["switch"] = {
            name: statistics.median(one[name] for one in switches) for name in switches[0]
        }
        result["switch"]["share_of_step"] = result["switch"]["seconds"] / seconds
    return result


def switch(engine: RLHFEngine, work: Work) -> dict[str, float]:
    """Seconds that going over to generation and back takes, at one size of batch.

    That is: memory for all answers, weights in the compute type, what a first decode step takes
    longer than the next one (recording), and giving all back. A rollout whose answers end one by
    one records a few more, smaller batches.
    """
    width = blocks_for(max(work.prompt_tokens) + work.max_new_tokens)
    rows = work.num_prompts
    times = [_now(work)]
    with engine.generating() as actor:
        memory = new_memory(actor, rows * width)
        runner = make_runner(actor, memory, width * BLOCK_TOKENS)
        token_ids = torch.zeros(rows, dtype=torch.long, device=actor.device)
        tables = torch.arange(rows * width, dtype=torch.int32, device=actor.device)
        for _ in range(2):
            runner.decode(token_ids, token_ids, tables.view(rows, width))
            times.append(_now(work))
        runner.close()
        memory.layers.clear()
    times.append(_now(work))
    first, second, back = (b - a for a, b in pairwise(times))
    return {"seconds": max(0.0, first - second) + back, "decode_step_seconds": second}


def _now(work: Work) -> float:
    if work.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
