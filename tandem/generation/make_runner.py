"""The choice of a model's runner."""

from __future__ import annotations

from transformers import PreTrainedModel

from tandem.generation.blocks import free_bytes
from tandem.generation.gpu_runner import GraphRunner
from tandem.generation.native_runner import NativeRunner, runs_natively, unpacks
from tandem.generation.runner import Runner, TwinRunner
from tandem.ops.attention_context import KVMemory


def make_runner(model: PreTrainedModel, memory: KVMemory, longest: int) -> Runner:
    """The fastest runner for a model; no sequence may have more than `longest` tokens.

    All runners compute the same numbers. The choice depends on the model, its device and the free
    memory.
    """
    if model.device.type == "cuda":
        return GraphRunner(model, memory)
    free = free_bytes(model.device)
    if runs_natively(model, free):
        return NativeRunner(model, memory, longest, unpacks=unpacks(model, free))
    return TwinRunner(model, memory)
