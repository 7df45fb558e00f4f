"""Sessions on a CPU that decode as on a GPU, for the tests of `gpu_runner`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.config.lora import LoraConfig
from tandem.config.schema import SamplingConfig
from tandem.generation import gpu_runner, session
from tandem.generation.batch_state import Part, Rows
from tandem.generation.generator import generate
from tandem.generation.gpu_graphs import CudaRecorder
from tandem.generation.gpu_runner import GraphRunner
from tandem.generation.sampler import Draw
from tandem.generation.stops import Stops
from tandem.models.lora import add_lora, lora_parameters
from tandem.ops import paged_gpu
from tandem.ops.attention_context import KVMemory
from tandem.types import PromptRow, Rollout, Source
from tests.generation.rollouts import new_wide

STOPS = Stops((2,), 0, lambda ids: " ".join(map(str, ids)))


def adapted() -> PreTrainedModel:
    model = new_wide()
    add_lora(model, LoraConfig(rank=2), seed=0)
    with torch.no_grad():
        for parameter in lora_parameters(model):
            parameter += 0.2
    return model


def prompts(*lengths: int) -> list[PromptRow]:
    generator = torch.Generator().manual_seed(5)
    return [
        PromptRow(
            tuple(torch.randint(4, 99, (n,), generator=generator).tolist()),
            (),
            {},
            Source("test", "test", i + 1),
        )
        for i, n in enumerate(lengths)
    ]


def rollout_of(model: PreTrainedModel, **how: Any) -> Rollout:
    knobs = {"max_new_tokens": 30, "samples_per_prompt": 2, **how.pop("sampling", {})}
    rows = prompts(5, 33, 16, 1, 48, 20, 7)
    return generate(model, rows, SamplingConfig(**knobs), STOPS, seed=3, step=1, **how)


class Seen:
    """What sessions did since `in_buckets`."""

    def __init__(self) -> None:
        self.runners: list[GraphRunner] = []
        self.recorded: list[tuple[Any, Any]] = []
        self.drawn = 0

    def forwards(self) -> int:
        return sum(kind == "forward" for kind, _ in self.recorded)

    def refused(self) -> dict[Any, str]:
        return self.runners[-1]._kept.recorder.refused


def in_buckets(patch: pytest.MonkeyPatch, *, late: bool = False) -> Seen:
    """From now on sessions decode and draw by GraphRunner; if late, reading tokens a step late."""
    seen = Seen()

    def make(model: PreTrainedModel, memory: KVMemory, longest: int) -> GraphRunner:
        seen.runners.append(GraphRunner(model, memory))
        return seen.runners[-1]

    by_rows, by_runner = Rows.draw, GraphRunner.draw
    recorded, whole = CudaRecorder.recorded, session.Session.__init__

    def drawing(rows: Rows, logits: Tensor, part: Part, allowed: Tensor | None = None) -> Draw:
        drawn = seen.runners[-1].draw(logits, part) if allowed is None else None
        return by_rows(rows, logits, part, allowed) if drawn is None else drawn

    def counted_draw(runner: GraphRunner, logits: Tensor, part: Part) -> Draw | None:
        drawn = by_runner(runner, logits, part)
        seen.drawn += drawn is not None
        return drawn

    def counted(recorder: CudaRecorder, function: Any, kind: Any, size: Any) -> Any:
        seen.recorded.append((kind, size))
        return recorded(recorder, function, kind, size)

    patch.setattr(session, "make_runner", make)
    patch.setattr(Rows, "draw", drawing)
    patch.setattr(GraphRunner, "draw", counted_draw)
    patch.setattr(CudaRecorder, "recorded", counted)
    patch.setattr(session.Session, "__init__", lambda *a, **kw: whole(*a, **{**kw, "late": late}))
    return seen


class Addressed(paged_gpu.AddressedMemory):
    """AddressedMemory itself, but for layers that are those of what it points at: a CPU's attention
    knows no addresses."""

    def point_at(self, memory: KVMemory) -> None:
        super().point_at(memory)
        self.layers = memory.layers

    def forget(self) -> None:
        super().forget()
        self.layers = []


def found_by_address(patch: pytest.MonkeyPatch) -> None:
    """From now on KV memory is found as Triton finds it: recordings outlive their sessions."""
    patch.setattr(paged_gpu, "AddressedMemory", Addressed)
    patch.setattr(gpu_runner, "_finds_by_address", lambda device: True)


class Calls:
    """A recorder that calls the functions instead."""

    def __init__(self) -> None:
        self.refused: dict[Any, str] = {}
        self.num_forwards = 0

    def recorded(self, function: Callable[[], Any], kind: Any, size: Any) -> Callable[[], Any]:
        self.num_forwards += kind == "forward"
        return function

    def forget(self) -> None:
        pass


def decoded(runner: Any, memory: KVMemory, first: int = 5) -> Tensor:
    """Logits of three steps of three rows, in blocks 2, 1 and 0."""
    tables = torch.tensor([[2], [1], [0]], dtype=torch.int32)
    with torch.no_grad():
        runner.prefill(torch.arange(4, 4 + 9 + 4 + 1), [9, 4, 1], tables)
        positions, steps = torch.tensor([9, 4, 1]), []
        for token in range(first, first + 3):
            ids = torch.tensor([token, token + 1, token + 2])
            steps.append(runner.decode(ids, positions, tables).clone())
            positions = positions + 1
    return torch.stack(steps)
