"""One rank of bench/comm.py: the sides' training steps and PPO steps, alternating.

Started by bench/comm.py inside a node, with the launcher's environment; writes what it saw.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.comm_network import sent_bytes
from bench.harness import Side, Stopwatch, measure, now, once, ready
from bench.models import Shape, model_config, random_model, token_row
from bench.ppo_sides import TandemSide, Work, start
from bench.traffic import counting_traffic
from tandem.config.engine import engine_settings
from tandem.config.load import build_config
from tandem.config.optimizer import OptimizerConfig
from tandem.engine.forward import rank_micro_batches_of, response_logprobs
from tandem.engine.learner import Learner
from tandem.engine.placement import Placement
from tandem.parallel.world import World, join, leave
from tandem.plan.knobs import nested
from tandem.types import TokenBatch

_ZERO3 = {"parallel.actor_zero_stage": 3, "parallel.critic_zero_stage": 3}
_QWZ = {"parallel.zero_quantized_weights": True}
_QGZ = {"parallel.zero_quantized_gradients": True}
_HPZ = {"parallel.zero_hpz": True}
SIDES: Mapping[str, Mapping[str, Any]] = {
    "zero-3": _ZERO3,
    "qwz": _ZERO3 | _QWZ,
    "hpz": _ZERO3 | _HPZ,
    "qgz": _ZERO3 | _QGZ,
    "zero++": _ZERO3 | _QWZ | _QGZ | _HPZ,
    "zero++-int4": _ZERO3 | _QWZ | _QGZ | _HPZ | {"parallel.zero_gradient_bits": 4},
}
"""Tandem's knobs of each side."""


@dataclass(frozen=True, kw_only=True)
class CommWork:
    """What all sides do. rows, row_tokens: of a training step, over all ranks. The rest: of a PPO
    step, as `bench.ppo_sides.Work` says."""

    shape: Shape
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


class TrainSide(Side):
    """Supervised steps of the actor alone, over a few batches that come again and again."""

    def __init__(self, work: CommWork, knobs: Mapping[str, Any], world: World) -> None:
        self.work, self.world, self.watch = work, world, Stopwatch()
        given = {**knobs, "dtype": work.dtype, "device": "cpu"}
        config = build_config(nested(given), where="bench: ")
        model = random_model(model_config(work.shape, 512), seed=work.seed)
        self.model = Placement(engine_settings(config), world).policy(model, trained=True)
        settings = OptimizerConfig(learning_rate=1e-3, schedule="constant", warmup=0.0)
        self.learner = Learner("actor", self.model, settings, num_steps=1000)

    def run(self, number: int) -> dict[str, float]:
        """The step's loss."""
        vocabulary, answer = self.work.shape["vocab_size"], self.work.row_tokens - 1
        generator = torch.Generator().manual_seed(number % 2)
        rows = [token_row(1, answer, vocabulary, generator) for _ in range(self.work.rows)]
        batch = TokenBatch.from_rows(rows, 0)
        count, total = batch.num_response_tokens, 0.0
        with self.watch("train"):
            for numbers, part in rank_micro_batches_of(batch, 10**9, self.world):
                loss = -response_logprobs(self.model, batch.select(numbers))[0].sum()
                self.learner.backward(loss, count, weight=part.weight, is_last=part.is_last)
                total += part.weight * float(loss.detach())
            self.learner.step()
        return {"loss": self.world.all_reduce_sum({"loss": total})["loss"] / count}


class PPOSide(TandemSide):
    """One PPO step after another from the same prompts: generate, score, train."""

    def __init__(self, work: CommWork, knobs: Mapping[str, Any], world: World) -> None:
        ppo = Work(
            shape=work.shape,
            num_prompts=work.num_prompts,
            prompt_tokens=(work.prompt_tokens,),
            max_new_tokens=work.max_new_tokens,
            minibatch_size=work.num_prompts // 2,
            micro_batch_tokens=10**9,
            actor_learning_rate=1e-5,
            critic_learning_rate=1e-4,
            dtype=work.dtype,  # type: ignore[arg-type]
            seed=work.seed,
            knobs=knobs,
        )
        super().__init__(ppo, start(ppo), world=world)

    def prepare(self) -> None:
        """Rounds go on from each other; nothing is put back."""

    def run(self, number: int) -> Any:
        """The step's losses."""
        metrics = self.trainer.train_rlhf(self.make(number + 1), step=number + 1)
        return {name: metrics[name] for name in ("policy_loss", "value_loss")}


class OnLink(Side):
    """A side whose rounds all ranks begin and end together, and what its node sends meanwhile."""

    def __init__(self, make: Callable[[], Side], world: World, interface: str) -> None:
        self.side, self.world, self.interface = make(), world, interface
        self.watch = self.side.watch

    def prepare(self) -> None:
        """As the side does."""
        self.side.prepare()

    def run(self, number: int) -> dict[str, float]:
        """Seconds, bytes on the link, and the side's own numbers."""
        self.world.barrier()
        begin, before = now(), sent_bytes(self.interface)
        numbers = self.side.run(number)
        self.world.barrier()
        sent = sent_bytes(self.interface) - before
        return {"seconds": now() - begin, "node_sent_bytes": sent, **numbers}


def link_megabits(world: World, interface: str, megabytes: int = 16) -> float:
    """What the link carries one way, measured: node 0's ranks send, node 1's receive."""
    data = torch.zeros(megabytes * 2**20, dtype=torch.uint8)
    world.barrier()
    begin, before = now(), sent_bytes(interface)
    if world.rank == 0:
        dist.send(data, world.ranks_per_node)
    elif world.rank == world.ranks_per_node:
        dist.recv(data, 0)
    world.barrier()
    return (sent_bytes(interface) - before) * 8 / 1e6 / (now() - begin)


def measured(kind: Any, work: CommWork, rounds: int, world: World) -> dict[str, Any]:
    """Seconds, bytes on the link and numbers of `rounds` steps of each side, and the least bytes
    that its collectives can send between nodes. Two steps of each go before, unmeasured: what is
    done once happens in the first, the collectives of the second are counted."""
    makers = {
        name: partial(OnLink, partial(kind, work, SIDES[name], world), world, work.interface)
        for name in work.sides
    }
    sides = ready(makers, required=work.sides).sides
    found: dict[str, Any] = {}
    for name, side in sides.items():
        with counting_traffic(world.ranks_per_node) as traffic:
            once(side, 1)
        kinds = dict.fromkeys(record.kind for record in traffic.records)
        found[name] = {"counted": {kind: asdict(traffic.total(kind)) for kind in kinds}}
    done, costs = measure(sides, rounds)
    for name in sides:
        found[name]["rounds"] = [
            {**numbers, **{f"{phase}_seconds": cost.wall for phase, cost in one.items()}}
            for numbers, one in zip(done[name], costs[name], strict=True)
        ]
    return found


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
            result[name] = measured(kind, work, rounds, world)
    aside = folder / f".rank-{world.rank}"
    aside.write_text(json.dumps(result), encoding="utf-8")
    aside.rename(folder / f"rank-{world.rank}.json")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
