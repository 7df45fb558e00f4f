"""Decoding with CUDA graphs: a step is recorded once per batch size, then replayed.

Batches are padded to a bucket. The twin's forward is one recording, sampling from its logits
another; nothing waits for the host. Weights keep their addresses when an optimizer changes them,
and with Triton the KV memory's address is an input on the device: so recordings outlive the session
and are repeated only if a weight has moved. Without Triton they end with the session's memory. What
cannot be recorded runs in the plain runner.

The tests run all of it on a CPU with stand-ins. None of it has run on a GPU yet.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.generation.batch_state import Part
from tandem.generation.gpu_graphs import CudaRecorder, DecodeStep, Recorder, bucket_of, width_of
from tandem.generation.runner import TwinRunner
from tandem.generation.sampler import Draw, Sampler
from tandem.models.gpu_blocks import GatheredTogether, join_projections
from tandem.models.lora import adapter_switches
from tandem.ops import gpu
from tandem.ops.attention_context import KVMemory, attending


class GraphRunner(TwinRunner):
    """Any model with a twin, decoding in padded batches."""

    def __init__(self, model: PreTrainedModel, memory: KVMemory) -> None:
        """Steps are recorded when they first occur, unless an earlier session has done so.

        Args:
            memory: from `new_memory`; padding rows write to its last block and slot.
        """
        super().__init__(model, memory)
        kept = _kept.get(model)
        if kept is None or kept.twin is not self._twin:
            kept = _kept[model] = _Kept(self._twin)
        self._kept = kept
        self._kept.enter(model)
        # Also if a session is dropped without a close.
        self._leave = finalize(self, self._kept.leave, memory)
        self._leave.atexit = False
        self._step: DecodeStep | None = None
        self._logits_now: Tensor | None = None
        self._part: Part | None = None
        self._sampler: Sampler | None = None

    def decode(
        self, token_ids: Tensor, positions: Tensor, tables: Tensor, states: Tensor | None = None
    ) -> Tensor:
        """As `Runner` says."""
        kept, n = self._kept, len(token_ids)
        if "forward" in kept.recorder.refused:
            self._step = None
            return super().decode(token_ids, positions, tables, states)
        memory = kept.reached(self._memory)
        self._step = step = kept.step(n, tables.shape[1], memory)
        own = self._memory
        step.load(token_ids, positions, tables, own.num_blocks - 1, states, own.num_slots - 1)
        self._logits_now = step.run(kept.forward_of(step, memory), own)[:n]
        return self._logits_now

    def draw(self, logits: Tensor, part: Part) -> Draw | None:
        """Sample for the rows of a part as `Rows.draw` does, in one replay, or return None.

        It needs the logits that `decode` returned last, and one sampler without penalties for all
        rows.
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
        """Release the memory, and the recordings that depend on it."""
        self._leave()
        self._step = self._logits_now = self._part = self._sampler = None


class _Kept:
    """The recorded steps that all sessions of a model share."""

    def __init__(self, twin: PreTrainedModel) -> None:
        self.twin = twin
        # In the twin's own config. GPT-2 and others compare their input with it at every call, to
        # warn about padding, and make the host wait.
        twin.config.pad_token_id = None
        self.recorder: Recorder = CudaRecorder()
        self._by_address = _finds_by_address(twin.device)
        self._rests_on: tuple[Any, ...] | None = None
        self._steps: dict[tuple[KVMemory, int, int], DecodeStep] = {}
        self._addressed: Any = None
        self._num_sessions = 0
        self._gathered: GatheredTogether | None = None

    def enter(self, model: PreTrainedModel) -> None:
        """A session begins; recordings are dropped if what they depend on has changed."""
        if gpu.available():
            join_projections(model)  # before addresses are compared
            if self._gathered is None:
                self._gathered = GatheredTogether(model)
        self._num_sessions += 1
        rests_on = _fingerprint(model, self.twin)
        if rests_on != self._rests_on:
            self._steps, self._addressed, self._rests_on = {}, None, rests_on
            self.recorder.forget()

    def leave(self, memory: KVMemory) -> None:
        """The session with this memory ends."""
        self._num_sessions -= 1
        if self._gathered is not None and not self._num_sessions:
            self._gathered.undo()
            self._gathered = None
        steps = {key: step for key, step in self._steps.items() if key[0] is not memory}
        had, self._steps = len(self._steps), steps
        if had and not steps:
            self.recorder.forget()
        if self._addressed is not None:
            self._addressed.forget()  # the next session sets its own address

    def reached(self, memory: KVMemory) -> KVMemory:
        """The memory as recorded steps reach it."""
        if not self._by_address or memory.num_slots:  # states have addresses of their own
            return memory
        from tandem.ops.paged_gpu import AddressedMemory  # needs Triton

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


def recorded_so_far(model: PreTrainedModel) -> tuple[int, float]:
    """How many steps and draws have been recorded for a model, and the seconds that took."""
    kept = _kept.get(model)
    recorder: Any = None if kept is None else kept.recorder
    return (0, 0.0) if recorder is None else (recorder.num_recorded, recorder.seconds)


def _finds_by_address(device: torch.device) -> bool:
    """Whether attention takes the KV memory's address as an input: Triton's does."""
    return device.type == "cuda" and gpu.available()


def _fingerprint(model: PreTrainedModel, twin: PreTrainedModel) -> tuple[Any, ...]:
    """What a recorded forward depends on: addresses of tensors, modes and switches of modules."""
    return (
        tuple((t.data_ptr(), t.dtype) for t in [*twin.parameters(), *twin.buffers()]),
        tuple(module.training for module in twin.modules()),
        tuple(map(copy.copy, adapter_switches(model))),
    )
