"""Which runner a model gets."""

from __future__ import annotations

from transformers import PreTrainedModel

from tandem.generation.blocks import free_bytes
from tandem.generation.gpu_runner import GraphRunner
from tandem.generation.native_runner import NativeRunner, runs_natively
from tandem.generation.runner import Runner, TwinRunner
from tandem.ops.attention_context import KVMemory


def make_runner(model: PreTrainedModel, memory: KVMemory, longest: int) -> Runner:
    """The fastest runner that computes this model; no sequence may pass `longest` tokens.

    What a runner computes does not depend on which one it is: the choice follows from the model,
    its device, and from whether memory is short.
    """
    if model.device.type == "cuda":
        return GraphRunner(model, memory)
    if runs_natively(model, free_bytes(model.device)):
        return NativeRunner(model, memory, longest)
    return TwinRunner(model, memory)
