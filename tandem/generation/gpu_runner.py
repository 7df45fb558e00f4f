"""Decoding in CUDA graphs: a step is replayed as it was recorded, once per size of batch.

Batches are filled up to a bucket. The twin's forward is one recording, drawing the tokens from its
logits another; nothing waits for the host. Weights stay where they are when an optimizer changes
them, and where Triton is, KV memory is found by its address on the device: so recordings outlive
the session and are made anew only where a weight has moved; without Triton they go with the
session's memory. What cannot be recorded runs through the plain runner.

The tests run all of it on a CPU, where stand-ins record and replay; on a GPU none has run yet.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.generation.batch_state import Part
from tandem.generation.gpu_graphs import CudaRecorder, DecodeStep, Recorder, bucket_of, width_of
from tandem.generation.runner import TwinRunner
from tandem.generation.sampler import Draw, Sampler
from tandem.models.lora import lora_layers
from tandem.ops.attention_context import KVMemory, attending


class GraphRunner(TwinRunner):
    """Any model that has a twin, decoding in buckets."""

    def __init__(self, model: PreTrainedModel, memory: KVMemory) -> None:
        """Steps are recorded when they first occur, unless an earlier session has done so.

        Args:
            memory: from `new_memory`; its last block takes what rows write that fill up a batch.
        """
        super().__init__(model, memory)
        kept = _kept.get(model)
        if kept is None or kept.twin is not self._twin:
            kept = _kept[model] = _Kept(self._twin)
        self._kept = kept
        self._kept.enter(model)
        # Also when a session is dropped without a close.
        self._leave = finalize(self, self._kept.leave, memory)
        self._leave.atexit = False
        self._step: DecodeStep | None = None
        self._logits_now: Tensor | None = None
        self._part: Part | None = None
        self._sampler: Sampler | None = None

    def decode(self, token_ids: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        """As `Runner` says."""
        kept, n = self._kept, len(token_ids)
        if "forward" in kept.recorder.refused:
            self._step = None
            return super().decode(token_ids, positions, tables)
        memory = kept.reached(self._memory)
        self._step = step = kept.step(n, tables.shape[1], memory)
        step.load(token_ids, positions, tables, self._memory.num_blocks - 1)
        self._logits_now = step.run(kept.forward_of(step, memory))[:n]
        return self._logits_now

    def draw(self, logits: Tensor, part: Part) -> Draw | None:
        """Draw for the rows of a part as `Rows.draw` does, in one replay; None where it cannot.

        It can where `logits` are what `decode` returned last and the rows have one sampler that
        counts no tokens.
        """
        if self._step is None or logits is not self._logits_now:
            return None
        if part is not self._part:
            samplers = {request.sampler for request in part.requests}
            only = samplers.pop() if len(samplers) == 1 else None
            self._part, self._sampler = part, None if only is None or only.penalizes else only
        if self._sampler is None:
            return None
        return self._step.draw(self._sampler, part)

    def close(self) -> None:
        """Let go of the memory, and of what was recorded over it alone."""
        self._leave()
        self._step = self._logits_now = self._part = self._sampler = None


class _Kept:
    """What a model's sessions share, one after the other or side by side: recorded steps."""

    def __init__(self, twin: PreTrainedModel) -> None:
        self.twin = twin
        # The twin's own copy. GPT-2 and others compare their input with it at every call, for a
        # warning about padding, and make the host wait.
        twin.config.pad_token_id = None
        self.recorder: Recorder = CudaRecorder()
        self._by_address = _finds_by_address(twin.device)
        self._rests_on: tuple[Any, ...] | None = None
        self._steps: dict[tuple[KVMemory, int, int], DecodeStep] = {}
        self._addressed: Any = None

    def enter(self, model: PreTrainedModel) -> None:
        """A session begins; what was recorded is forgotten if it rests on what is no more."""
        rests_on = _fingerprint(model, self.twin)
        if rests_on != self._rests_on:
            self._steps, self._addressed, self._rests_on = {}, None, rests_on
            self.recorder.forget()

    def leave(self, memory: KVMemory) -> None:
        """The session over this memory ends."""
        self._steps = {key: step for key, step in self._steps.items() if key[0] is not memory}
        if self._addressed is not None:
            self._addressed.forget()  # another session points it at its own

    def reached(self, memory: KVMemory) -> KVMemory:
        """The memory as steps are recorded over it."""
        if not self._by_address:
            return memory
        from tandem.ops.paged_gpu import AddressedMemory  # imports Triton, there with a GPU only

        if self._addressed is None:
            self._addressed = AddressedMemory(memory)
        self._addressed.point_at(memory)
        return self._addressed

    def step(self, rows: int, table_width: int, memory: KVMemory) -> DecodeStep:
        """The step for this many rows and blocks."""
        size = bucket_of(rows), width_of(table_width)
        if (memory, *size) not in self._steps:
            self._steps[memory, *size] = DecodeStep(*size, self.twin.device, self.recorder)
        return self._steps[memory, *size]

    def forward_of(self, step: DecodeStep, memory: KVMemory) -> Callable[[], Tensor]:
        """Logits (rows, V) of a step."""

        @torch.no_grad()
        def forward() -> Tensor:
            with attending(step.decode(memory)):
                output = self.twin(
                    input_ids=step.token_ids[None],
                    position_ids=step.positions[None],
                    use_cache=False,
                )
            logits: Tensor = output.logits[0]
            return logits

        return forward


_kept: WeakKeyDictionary[PreTrainedModel, _Kept] = WeakKeyDictionary()


def _finds_by_address(device: torch.device) -> bool:
    """Whether attention finds KV memory by its address: in Triton it does."""
    return device.type == "cuda" and find_spec("triton") is not None


def _fingerprint(model: PreTrainedModel, twin: PreTrainedModel) -> tuple[Any, ...]:
    """What a recorded forward rests on: where the tensors are, and what steers the modules."""
    return (
        tuple((t.data_ptr(), t.dtype) for t in [*twin.parameters(), *twin.buffers()]),
        tuple(module.training for module in twin.modules()),
        tuple(copy.copy(layer.switch) for _, layer in lora_layers(model)),
    )
