"""One rank of bench/comm.py: both sides' training steps and PPO steps, alternating.

Started by bench/comm.py inside a node, with the launcher's environment; writes what it saw.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.comm_network import sent_bytes
from bench.harness import Stopwatch
from bench.sides import run_config
from bench.traffic import Traffic, counting_traffic
from bench.work import Work, start
from tandem.config.schema import OptimizerConfig, ParallelConfig, RunConfig, num_updates
from tandem.engine.forward import deal_batch, response_logprobs
from tandem.engine.hybrid import RLHFEngine
from tandem.engine.loading import place_policy
from tandem.engine.optimizer import Trainee
from tandem.parallel.world import World, join, leave
from tandem.training.ppo_trainer import PPOTrainer
from tandem.types import Source, TokenBatch, TokenRow

_ZERO3 = ParallelConfig(actor_zero_stage=3, critic_zero_stage=3)
_ZEROPP = replace(_ZERO3, zero_quantized_weights=True, zero_quantized_gradients=True, zero_hpz=True)
SIDES: Mapping[str, ParallelConfig] = {
    "zero-3": _ZERO3,
    "qwz": replace(_ZERO3, zero_quantized_weights=True),
    "hpz": replace(_ZERO3, zero_hpz=True),
    "qgz": replace(_ZERO3, zero_quantized_gradients=True),
    "zero++": _ZEROPP,
    "zero++-int4": replace(_ZEROPP, zero_gradient_bits=4),
}


@dataclass(frozen=True, kw_only=True)
class CommWork:
    """What both sides do. rows, row_tokens: of a training step, over all ranks. The rest: of a PPO
    step, as `bench.work.Work` says."""

    shape: Mapping[str, Any]
    sides: tuple[str, ...]
    train_rounds: int
    ppo_rounds: int
    rows: int
    row_tokens: int
    num_prompts: int
    prompt_tokens: int
    max_new_tokens: int
    interface: str
    dtype: str = "fp32"
    seed: int = 1


class TrainSide:
    """Supervised steps of the actor alone, over a few batches that come again and again."""

    def __init__(self, work: CommWork, parallel: ParallelConfig, world: World) -> None:
        self.work, self.world = work, world
        config = RunConfig(parallel=parallel, dtype=work.dtype, device="cpu")  # type: ignore[arg-type]
        torch.manual_seed(work.seed)
        model = LlamaForCausalLM(LlamaConfig(**work.shape, max_position_embeddings=512))
        self.model = place_policy(model, config, world, trained=True)
        settings = OptimizerConfig(learning_rate=1e-3, schedule="constant", warmup=0.0)
        self.trainee = Trainee("actor", self.model, settings, num_steps=1000)

    def step(self, number: int) -> dict[str, float]:
        batch = _rows(self.work, number % 2)
        count, total = batch.num_response_tokens, 0.0
        for rows, part in deal_batch(batch, 10**9, self.world):
            loss = -response_logprobs(self.model, batch.select(rows))[0].sum()
            self.trainee.backward(loss, count, weight=part.weight, is_last=part.is_last)
            total += part.weight * float(loss.detach())
        self.trainee.step()
        return {"loss": self.world.sums({"loss": total})["loss"] / count}


class PPOSide:
    """One PPO step after another from the same prompts: generate, score, train."""

    def __init__(self, work: CommWork, parallel: ParallelConfig, world: World) -> None:
        ppo_work = Work(
            shape=work.shape,
            num_prompts=work.num_prompts,
            prompt_tokens=(work.prompt_tokens,),
            max_new_tokens=work.max_new_tokens,
            minibatch_size=work.num_prompts // 2,
            micro_batch_tokens=10**9,
            actor_learning_rate=1e-5,
            critic_learning_rate=1e-4,
            seed=work.seed,
        )
        begin = start(ppo_work)
        config = replace(run_config(ppo_work), parallel=parallel, dtype=work.dtype)  # type: ignore[arg-type]
        engine = RLHFEngine(
            actor=copy.deepcopy(begin.actor),
            reward_model=copy.deepcopy(begin.reward_model),
            config=config,
            tokenizer=begin.tokenizer,
            reward_tokenizer=begin.tokenizer,
            num_updates=num_updates(config, 1_000_000),
            world=world,
        )
        self.watch = Stopwatch()
        self.prompts = begin.prompts
        self.trainer = PPOTrainer(engine, config, phases=self.watch)

    def step(self, number: int) -> dict[str, float]:
        self.watch.take()
        experience = self.trainer.generate_experience(self.prompts, step=number + 1)
        metrics = self.trainer.train_rlhf(experience, step=number + 1)
        seconds = {f"{phase}_seconds": cost.wall for phase, cost in self.watch.take().items()}
        numbers = {name: metrics[name] for name in ("policy_loss", "value_loss")}
        return {**numbers, **seconds}


def _rows(work: CommWork, seed: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = work.shape["vocab_size"]
    mask = (False, *(True for _ in range(work.row_tokens - 1)))
    return TokenBatch.from_rows(
        [
            TokenRow(
                tuple(torch.randint(vocabulary, (work.row_tokens,), generator=generator).tolist()),
                mask,
                Source("bench", "bench", i + 1),
            )
            for i in range(work.rows)
        ],
        0,
    )


def link_megabits(world: World, interface: str, megabytes: int = 16) -> float:
    """What the link carries one way, measured: node 0's ranks send, node 1's receive."""
    data = torch.zeros(megabytes * 2**20, dtype=torch.uint8)
    world.wait()
    begin, before = time.perf_counter(), sent_bytes(interface)
    if world.rank == 0:
        dist.send(data, world.ranks_per_node)
    elif world.rank == world.ranks_per_node:
        dist.recv(data, 0)
    world.wait()
    seconds = time.perf_counter() - begin
    return (sent_bytes(interface) - before) * 8 / 1e6 / seconds


def measured(
    sides: Mapping[str, TrainSide | PPOSide], rounds: int, world: World, interface: str
) -> dict[str, Any]:
    """Seconds, bytes on the link and numbers of `rounds` steps of each side, and the least bytes
    that its collectives can send between nodes. Two steps of each go before, unmeasured: what is
    done once happens in the first, the collectives of the second are counted."""
    found: dict[str, Any] = {name: {"rounds": []} for name in sides}
    for name, side in sides.items():
        side.step(0)
        with counting_traffic(world.ranks_per_node) as traffic:
            side.step(1)
        found[name]["counted"] = _counted(traffic)
    order = list(sides)
    for number in range(2, rounds + 2):
        for name in order:
            found[name]["rounds"].append(_timed(sides[name].step, number, world, interface))
        order.reverse()
    return found


def _timed(
    step: Callable[[int], dict[str, float]], number: int, world: World, interface: str
) -> dict[str, float]:
    world.wait()
    begin, before = time.perf_counter(), sent_bytes(interface)
    numbers = step(number)
    world.wait()
    return {
        "seconds": time.perf_counter() - begin,
        "node_sent_bytes": sent_bytes(interface) - before,
        **numbers,
    }


def _counted(traffic: Traffic) -> dict[str, dict[str, int]]:
    kinds = dict.fromkeys(record.kind for record in traffic.records)
    totals = {kind: traffic.total(kind) for kind in kinds}
    return {
        kind: {
            "count": total.count,
            "sent_bytes": total.sent_bytes,
            "inter_node_bytes": total.inter_node_bytes,
        }
        for kind, total in totals.items()
    }


def main(folder: Path) -> None:
    """Do the work that the folder describes, and write this rank's figures there."""
    torch.set_num_threads(1)
    given = json.loads((folder / "work.json").read_text(encoding="utf-8"))
    work = CommWork(**{**given, "sides": tuple(given["sides"])})
    world = join(torch.device("cpu"))
    result: dict[str, Any] = {"link_megabits": link_megabits(world, work.interface)}
    for name, kind, rounds in (
        ("train", TrainSide, work.train_rounds),
        ("ppo", PPOSide, work.ppo_rounds),
    ):
        if rounds:
            sides = {side: kind(work, SIDES[side], world) for side in work.sides}
            result[name] = measured(sides, rounds, world, work.interface)
    aside = folder / f".rank-{world.rank}"
    aside.write_text(json.dumps(result), encoding="utf-8")
    aside.rename(folder / f"rank-{world.rank}.json")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
